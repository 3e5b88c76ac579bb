"""Where a checkpoint is."""

from __future__ import annotations

import os

from zoo import checkpointing


def check_place(directory: object, tag: object = None) -> None:
    """Raise CheckpointError unless it is a path that is not empty; and a tag is a name."""
    if not isinstance(directory, (str, os.PathLike)):
        raise checkpointing.CheckpointError(
            f"the directory {directory!r} is a {type(directory).__name__}; it is a path"
        )
    if not os.fspath(directory):
        raise checkpointing.CheckpointError(f"{directory!r} names no folder; '.' is the current one.")
    if tag is not None and not isinstance(tag, str):
        raise checkpointing.CheckpointError(
            f"the tag {tag!r} is a {type(tag).__name__}; it is the name of a checkpoint"
        )


def joined(directory: str | os.PathLike[str], tag: str) -> str:
    """The place of a checkpoint, a URL where the directory is one."""
    text = os.fspath(directory)
    return f"{text.rstrip('/')}/{tag}" if "://" in text else os.path.join(os.path.abspath(text), tag)


def check_asked(asked: list[dict[str, bool]]) -> None:
    """Raise CheckpointError, on all ranks, where they ask for different saves: parts of a parameter would be missing,
    or some would wait for others."""
    for name, first in asked[0].items():
        others = [str(rank) for rank, there in enumerate(asked) if there[name] != first]
        if others:
            raise checkpointing.CheckpointError(
                f"save_checkpoint() got {name}={first} on rank 0 and {name}={not first} on rank"
                f"{'s' * (len(others) > 1)} {', '.join(others)}: all ranks save alike, give one value on all of them.",
                everywhere=True,
            )
