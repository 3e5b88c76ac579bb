"""The training engine: a model, a configuration, and what the configuration asks the registry for.

* :func:`initialize`: configuration and model in, engine, optimizer, data loader and schedule out.
* :class:`Engine`: forward, backward, step, accumulation, checkpoints.
* :class:`ShardedLoader`: every rank its own part of a data set, in a fixed order, from any position;
  :class:`RepeatingLoader`: any loader, again and again.
* :func:`add_config_arguments`: for a script's command line.

The engine stands on most of zoo. What is named here is imported when it is first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
