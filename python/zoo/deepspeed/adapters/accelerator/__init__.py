"""``deepspeed.accelerator``."""
