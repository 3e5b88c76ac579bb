"""The public names of :mod:`zoo.shard`, which are names of ``zoo.zero`` too."""

from typing import Any


def __getattr__(name: str) -> Any:
    import zoo.shard

    return getattr(zoo.shard, name)
