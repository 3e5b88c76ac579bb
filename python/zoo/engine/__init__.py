"""The training engine: a model, a configuration, and what the configuration asks the registry for.

* :func:`initialize`: configuration and model in, engine, optimizer, data loader and schedule out.
* :class:`Engine`: forward, backward, step, accumulation, checkpoints.
* :class:`ShardedLoader`: every rank its own part of a data set, in a fixed order, from any position;
  :class:`RepeatingLoader`: any loader, again and again.
* :func:`add_config_arguments`: for a script's command line.

The engine stands on most of zoo. What is named here is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.engine.arguments import add_config_arguments
    from zoo.engine.engine import Engine
    from zoo.engine.entry import initialize
    from zoo.engine.loader import RepeatingLoader, ShardedLoader
    from zoo.parts import shuffled

_HOMES = {
    "Engine": "engine",
    "RepeatingLoader": "loader",
    "ShardedLoader": "loader",
    "add_config_arguments": "arguments",
    "initialize": "entry",
    "shuffled": "loader",
}

__all__ = ["Engine", "RepeatingLoader", "ShardedLoader", "add_config_arguments", "initialize", "shuffled"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
