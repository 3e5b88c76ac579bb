"""Techniques, one a file."""
