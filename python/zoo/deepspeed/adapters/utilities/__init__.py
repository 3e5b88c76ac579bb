"""``deepspeed.utils`` and small things beside it: loggers, timers, monitors, builders of operations, the launcher."""
