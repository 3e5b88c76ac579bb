"""The training engine: a model, a configuration, and what the configuration asks the registry for.

* :func:`initialize`: configuration and model in, engine, optimizer, data loader and schedule out.
* :class:`Engine`: forward, backward, step, accumulation, checkpoints.
* :class:`ShardedLoader`: every rank its own part of a data set, in a fixed order, from any position;
  :class:`RepeatingLoader`: any loader, again and again.
"""

from zoo.engine.engine import Engine
from zoo.engine.initialize import initialize
from zoo.engine.loader import RepeatingLoader, ShardedLoader, shuffled

__all__ = ["Engine", "RepeatingLoader", "ShardedLoader", "initialize", "shuffled"]
