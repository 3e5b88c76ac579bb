"""The names of DeepSpeed that are there, as tables: module path → name → home.

One file for each part of the surface; ``TABLE`` is all of them together.
"""

from __future__ import annotations

from zoo.deepspeed.modules import Table
from zoo.deepspeed.surface import (
    absent,
    compression,
    configuration,
    constants,
    model_parallel,
    ops,
    pipelines,
    root,
    utilities,
    zero,
)

__all__ = ["TABLE"]


def _joined(*tables: Table) -> dict[str, object]:
    found: dict[str, object] = {}
    for table in tables:
        for path, names in table.items():
            if path not in found:
                found[path] = names if isinstance(names, str) else dict(names)
                continue
            before = found[path]
            if isinstance(before, str) or isinstance(names, str) or set(before) & set(names):  # type: ignore[call-overload]
                raise ValueError(f"two tables name {path!r} differently; keep each name in one of them.")
            before.update(names)  # type: ignore[attr-defined]
    return found


TABLE: Table = _joined(  # type: ignore[assignment]
    root.TABLE, absent.TABLE, compression.TABLE, configuration.TABLE, constants.TABLE,
    model_parallel.TABLE, ops.TABLE, pipelines.TABLE, utilities.TABLE,
    zero.TABLE,
)  # fmt: skip
