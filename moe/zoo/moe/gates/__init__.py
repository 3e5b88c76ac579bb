"""Gates, one a file: which experts a token goes to."""
