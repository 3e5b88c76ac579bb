"""The four stages by name."""

from __future__ import annotations

from zoo.zero.optimizer import ZeroOptimizer


class Stage0Optimizer(ZeroOptimizer):
    """Plain data parallelism: nothing is split, gradients are all-reduced. See :class:`ZeroOptimizer`."""

    _stage = 0


class Stage1Optimizer(ZeroOptimizer):
    """Optimizer states are split over the ranks (P_os). See :class:`ZeroOptimizer`."""

    _stage = 1


class Stage2Optimizer(ZeroOptimizer):
    """Optimizer states and gradients are split over the ranks (P_os+g). See :class:`ZeroOptimizer`."""

    _stage = 2


class Stage3Optimizer(ZeroOptimizer):
    """Optimizer states, gradients and parameters are split over the ranks (P_os+g+p). See :class:`ZeroOptimizer`."""

    _stage = 3
