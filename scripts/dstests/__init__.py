"""DeepSpeed's own unit tests, run on ``zoo.deepspeed``: see ``__main__.py``."""
