"""Simulated ranks whose computations take as long as they would on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zoo import sim
from zoo.cost import pass_s, product_s
from zoo.cost.hardware import Device
from zoo.cost.operators import Work
from zoo.profiling.counter import OperatorCounter
from zoo.profiling.formulas.call import Call
from zoo.profiling.formulas.table import ASKS, COMMUNICATES

__all__ = ["costing"]

_MATRICES = {
    "aten::mm": ("self", "mat2"), "aten::addmm": ("mat1", "mat2"), "aten::_addmm_activation": ("mat1", "mat2"),
    "aten::bmm": ("self", "mat2"), "aten::baddbmm": ("batch1", "batch2"),
}  # fmt: skip
"""Plain products of two matrices: what device files have rates of by size."""


@contextmanager
def costing(
    device: Device, *, dtype: str = "bf16", name: Callable[[], str] | None = None
) -> Iterator[Mapping[str, int]]:  # fmt: skip
    """Within the context, what this simulated rank computes takes as long as on a device (:func:`zoo.sim.compute`).

    A product of two matrices takes what :func:`zoo.cost.product_s` says. Every other operator takes the longer of its
    FLOPs (2 · multiply-accumulates, :mod:`zoo.cost.operators`) at the rate that large products reach and of its bytes
    at the rate of memory (Williams, Waterman and Patterson 2009, "Roofline"). An operator has ``device.launch_s`` on
    top; what only looks at a tensor's memory anew, or communicates, costs nothing. Backward within the context counts
    as well, and what it computes again.

    Args:
        dtype: that products are computed in there. name: of what is computed now.

    Yields:
        how often an operator ran that has no formula, by name: of those the bytes alone have counted.
    """
    mode: Any = _Costing(device, dtype, name)
    with mode:
        yield mode.not_counted


class _Costing(OperatorCounter):  # type: ignore[no-untyped-call]
    def __init__(self, device: Device, dtype: str, name: Callable[[], str] | None) -> None:
        super().__init__(self._add, lambda: None)
        self._device, self._dtype, self._name = device, dtype, name
        self._rate = device.peak(dtype) * device.reached

    def _count(self, found: Any, call: Call) -> None:
        if call.name.partition("::")[0] in COMMUNICATES | ASKS:
            return
        operands = _MATRICES.get(call.name.removesuffix("_"))
        if operands is None:
            super()._count(found, call)
            return
        a, b = (call[one] for one in operands)
        *batch, m, k = (int(n) for n in a.shape)
        self._tell(
            product_s(
                self._device, m, int(b.shape[-1]), k, batch=batch[0] if batch else 1, dtype=self._dtype,
                itemsize=a.element_size(),
            )
        )  # fmt: skip

    def _add(self, name: str, work: Work, again: Work, moved: tuple[int, int], computed: bool) -> None:
        self._tell(max((work + again).flops / self._rate, pass_s(self._device, sum(moved))))

    def _tell(self, seconds: float) -> None:
        if seconds:
            sim.compute(seconds + self._device.launch_s, self._name() if self._name is not None else "")
