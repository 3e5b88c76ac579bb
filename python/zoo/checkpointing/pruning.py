"""Old checkpoints are removed, the newest stay."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from zoo.checkpointing.names import MANIFEST, is_rank_file, latest_tag


def prune(directory: str | os.PathLike[str], keep: int) -> list[str]:
    """Remove all but the ``keep`` newest checkpoints of a directory; on one rank, while nobody saves or loads there.

    Newest by the time at which their manifests were written; the one that ``latest`` names always stays. A manifest
    goes first: whatever ends this in the middle, what is left of a checkpoint is not taken for one.

    Returns:
        The tags of those that are gone.

    Raises:
        ValueError: ``keep`` < 1.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}); at least the latest checkpoint is kept.")
    root = Path(directory)
    found = [p.parent for p in root.glob(f"*/{MANIFEST}") if not p.parent.name.startswith(".")]
    found.sort(key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))
    latest = latest_tag(root)
    old = [path for path in found[:-keep] if path.name != latest]
    for path in old:
        (path / MANIFEST).unlink()
    for path in [*old, *filter(_is_rest, root.iterdir())]:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    return [path.name for path in old]


def _is_rest(path: Path) -> bool:
    """What an earlier call has left that ended in the middle: files of ranks and nothing else."""
    if not path.is_dir() or path.name.startswith("."):
        return False
    names = [item.name for item in path.iterdir()]
    return bool(names) and all(map(is_rank_file, names))
