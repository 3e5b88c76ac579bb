"""``deepspeed.sequence`` and ``deepspeed.runtime.sequence_parallel``."""
