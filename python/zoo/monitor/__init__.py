"""Where the records of steps go: sinks, one file each, and the thread that feeds them.

* :class:`Feed`: gives each record to each sink, from a thread of its own.
"""

from zoo.monitor.feed import Feed

__all__ = ["Feed"]
