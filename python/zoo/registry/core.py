"""The core's own components: one line each, and nothing is imported until a name is asked for.

A subpackage of the core adds its lines here. A package outside the core declares the same thing as entry points of the
group ``zoo.components`` (see README.md).
"""

from __future__ import annotations

__all__ = ["CORE"]

CORE: dict[str, dict[str, str]] = {
    "config_section": {
        "aio": "zoo.io.config:AioConfig",
        "train": "zoo.train.config:TrainConfig",
        "zero_optimization": "zoo.zero.config:ZeroConfig",
    },
    "engine_part": {},
    "lr_schedule": {
        "LRRangeTest": "zoo.lr_schedules:LRRangeTest",
        "OneCycle": "zoo.lr_schedules:OneCycle",
        "WarmupCosineLR": "zoo.lr_schedules:WarmupCosineLR",
        "WarmupDecayLR": "zoo.lr_schedules:WarmupDecayLR",
        "WarmupLR": "zoo.lr_schedules:WarmupLR",
    },
    "optimizer": {
        "Adagrad": "zoo.optim:Adagrad",
        "Adam": "zoo.optim:Adam",
        "AdamW": "zoo.optim:AdamW",
        "Lamb": "zoo.optim:Lamb",
        "Lion": "zoo.optim:Lion",
        "Muon": "zoo.optim:Muon",
        "RMSprop": "torch.optim:RMSprop",
        "SGD": "zoo.optim:SGD",
    },
    "parameter_gatherer": {
        "zero": "zoo.zero.state.gathered:GatheredParameters",
    },
    "runner": {
        "plain": "zoo.engine.plain:PlainRunner",
    },
    "sink": {},
    "task": {
        "byte_lm": "zoo.examples.byte_lm:ByteTask",
    },
}
"""kind → name → ``"module:attribute"``."""
