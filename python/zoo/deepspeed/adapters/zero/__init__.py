"""``deepspeed.zero``: contexts, parameters and layers; host memory."""
