"""The public names of :mod:`zoo.shard` and :mod:`zoo.cost` which are names of ``zoo.zero`` too."""

from typing import Any


def __getattr__(name: str) -> Any:
    import zoo.cost
    import zoo.shard

    return getattr(zoo.shard if name in zoo.shard.__all__ else zoo.cost, name)
