"""``deepspeed.moe``."""
