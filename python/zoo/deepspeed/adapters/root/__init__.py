"""``deepspeed.initialize`` and what it returns: engine, optimizer, data loader."""
