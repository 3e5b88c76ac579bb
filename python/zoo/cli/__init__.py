"""The ``zoo`` command: ``main`` runs it."""

from zoo.cli.app import app, main

__all__ = ["app", "main"]
