"""Where the records of steps go: sinks, one file each, and the thread that feeds them.

* :class:`Feed`: gives each record to each sink, from a thread of its own.
* :func:`events`: the names under which monitors show a record's numbers.
* :class:`MonitorSection`: base class for the configuration section of a sink.

The sinks are in :mod:`zoo.monitor.tensorboard`, ``wandb``, ``comet``, ``csv_monitor`` and ``jsonl_monitor``; each
imports the package that it is made for when it is built.

What is named here is imported when it is first asked for; ``__init__.pyi`` says from where.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
