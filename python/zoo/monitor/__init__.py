"""Where the records of steps go: sinks, one file each, and the thread that feeds them.

* :class:`Feed`: gives each record to each sink, from a thread of its own.
* :func:`events`: the names under which monitors show a record's numbers.
* :class:`MonitorSection`: base class for the configuration section of a sink.

The sinks are in :mod:`zoo.monitor.tensorboard`, ``wandb``, ``comet``, ``csv_monitor`` and ``jsonl_monitor``; each
imports the package that it is made for when it is built.
"""

from zoo.monitor.events import events
from zoo.monitor.feed import Feed
from zoo.monitor.section import FolderSection, MonitorSection

__all__ = ["Feed", "FolderSection", "MonitorSection", "events"]
