"""The four stages by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.zero.optimizer import ZeroOptimizer


class Stage0Optimizer(ZeroOptimizer):
    """Plain data parallelism: nothing is split, gradients are all-reduced. See :class:`ZeroOptimizer`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, stage=0, **options)


class Stage1Optimizer(ZeroOptimizer):
    """Optimizer states are split over the ranks (P_os). See :class:`ZeroOptimizer`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, stage=1, **options)


class Stage2Optimizer(ZeroOptimizer):
    """Optimizer states and gradients are split over the ranks (P_os+g). See :class:`ZeroOptimizer`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, stage=2, **options)


class Stage3Optimizer(ZeroOptimizer):
    """Optimizer states, gradients and parameters are split over the ranks (P_os+g+p). See :class:`ZeroOptimizer`."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, stage=3, **options)
