"""``deepspeed.init_inference``: a model cut, packed and injected for generating, behind DeepSpeed's engine."""
