"""Benchmarks of generation."""
