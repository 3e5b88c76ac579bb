"""Layers of zoo.nn beside their peers."""
