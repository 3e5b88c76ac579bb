"""Compressed models beside those of other libraries."""
