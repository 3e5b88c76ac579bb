"""``deepspeed.ops`` and ``deepspeed.runtime``: optimizers, loss scalers, schedules."""
