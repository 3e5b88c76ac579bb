"""Compressed communication beside what it replaces."""
