"""Manifests that a test has changed, and that agree with themselves: damage is found before anything else would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.checkpointing.format.manifest import SUM, sum_of


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of the checkpoint in ``path``, and its own checksum, as a careless tool would."""
    file = path / "manifest.json"
    document: dict[str, Any] = json.loads(file.read_text())
    change(document)
    if SUM in document:
        document[SUM] = sum_of(document)
    file.write_text(json.dumps(document))
