"""Experts, one kind a file: what runs on rows that are sorted by expert."""
