"""``deepspeed.ops.transformer``: a transformer layer and what it is told."""
