"""Where training state lives beside the device: host memory and NVMe.

Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 5.
"""

from zoo.zero.offload.config import OffloadOptimizerConfig, OffloadParamConfig
from zoo.zero.offload.errors import OffloadError
from zoo.zero.offload.scratch import Scratch, Shelf
from zoo.zero.offload.tiers import Tier, plan_tiers

__all__ = [
    "OffloadError",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "Scratch",
    "Shelf",
    "Tier",
    "plan_tiers",
]
