"""The tuner's choice beside the best of the whole grid."""
