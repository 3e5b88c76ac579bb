"""Which layouts of a job fit, and which of them is the fastest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from zoo.cost.hardware import Hardware
from zoo.cost.memory import Memory, memory_of
from zoo.cost.software import LEAN, Software
from zoo.cost.step import Layout, StepTime, step_time
from zoo.cost.transformer import Recompute, Transformer

__all__ = ["Forecasted", "forecast_layout", "layouts", "nearest"]

MARGIN = 0.06
"""Of a device's memory: what its driver, its libraries and the allocator's gaps take."""


@dataclass(frozen=True, kw_only=True)
class Forecasted:
    """A layout with what it holds and how long it takes."""

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool

    def differs(self, other: Layout) -> list[str]:
        """What another layout has otherwise, as words."""
        names = ("tensor", "data", "pipeline", "chunks", "micro_batch", "stage", "recompute", "sequence_parallel")
        return [
            f"{n}={getattr(self.layout, n)}" for n in names if getattr(self.layout, n) != getattr(other, n)
        ]  # fmt: skip


def forecast_layout(
    model: Transformer, layout: Layout, hardware: Hardware, software: Software = LEAN
) -> Forecasted:  # fmt: skip
    """Memory and time of one layout. It fits if a device has room for it and a margin of 6 %."""
    memory = memory_of(model, layout)
    fits = memory.total <= (1 - MARGIN) * hardware.device.memory_bytes
    return Forecasted(
        layout=layout, memory=memory, time=step_time(model, layout, hardware, software), fits=fits
    )  # fmt: skip


def layouts(
    model: Transformer, hardware: Hardware, *, ranks: int, global_batch: int, software: Software = LEAN
) -> list[Forecasted]:
    """Every layout of these ranks that the model can have: those that fit first, each part the fastest first.

    Tensor degrees go up to a node's ranks; stages 2 and 3 of ZeRO go without a pipeline, which holds gradients of
    several micro-batches; micro-batches are powers of two up to 64.

    Raises:
        ValueError: no layout is possible: the batch is smaller than the ranks of data.
    """
    found = [
        forecast_layout(model, layout, hardware, software)
        for layout in _possible(model, hardware, ranks, global_batch)
    ]  # fmt: skip
    if not found:
        raise ValueError(
            f"a batch of {global_batch} cannot be spread over {ranks} ranks of this model in any way: it is to be a "
            "multiple of the ranks of the data axis."
        )
    return sorted(found, key=lambda f: (not f.fits, f.time.step_s if f.fits else f.memory.total))


def nearest(wanted: Layout, known: list[Forecasted], count: int = 3) -> list[Forecasted]:
    """Of layouts that fit, those that differ from a wanted one in the fewest numbers; the faster first."""
    fitting = [f for f in known if f.fits]
    return sorted(fitting, key=lambda f: (len(f.differs(wanted)), f.time.step_s))[:count]


def _possible(model: Transformer, hardware: Hardware, ranks: int, global_batch: int) -> Iterator[Layout]:
    modes: list[Recompute] = ["none", "full"] if model.attention == "flash" else ["none", "selective", "full"]
    of_node = min(ranks, hardware.ranks_per_node)
    for tensor in _divisors(math.gcd(of_node, ranks, model.heads, model.inner)):
        for pipeline in _divisors(math.gcd(ranks // tensor, model.layers)):
            data = ranks // tensor // pipeline
            if global_batch % data:
                continue
            stages = [0] if data == 1 else [0, 1] if pipeline > 1 else [0, 1, 2, 3]
            for micro_batch in (1, 2, 4, 8, 16, 32, 64):
                if global_batch % (data * micro_batch):
                    break
                plain = Layout(
                    global_batch=global_batch, micro_batch=micro_batch, tensor=tensor, data=data, pipeline=pipeline,
                    sequence_parallel=tensor > 1,
                )  # fmt: skip
                for stage in stages:
                    for recompute in modes:
                        yield dataclasses.replace(plain, stage=stage, recompute=recompute)


def _divisors(number: int) -> list[int]:
    """Rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
