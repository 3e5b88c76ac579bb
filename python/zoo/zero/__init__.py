"""ZeRO: training state split over the data-parallel ranks, in the PyTorch way of training.

``Stage1Optimizer``, ``Stage2Optimizer`` and ``Stage3Optimizer`` are one implementation (:class:`ZeroOptimizer`) with
three placements; stage 0, plain data parallelism, is the fourth.
"""

from zoo.zero.config import ZeroConfig
from zoo.zero.forecast import Forecast
from zoo.zero.guard import PartitionedAccessError
from zoo.zero.init import Init, InitReport
from zoo.zero.optimizer import Stage0Optimizer, Stage1Optimizer, Stage2Optimizer, Stage3Optimizer, ZeroOptimizer
from zoo.zero.scaler import LossScaler
from zoo.zero.state import StateSlice

__all__ = [
    "Forecast",
    "Init",
    "InitReport",
    "LossScaler",
    "PartitionedAccessError",
    "Stage0Optimizer",
    "Stage1Optimizer",
    "Stage2Optimizer",
    "Stage3Optimizer",
    "StateSlice",
    "ZeroConfig",
    "ZeroOptimizer",
]
