"""``deepspeed.pipe``."""
