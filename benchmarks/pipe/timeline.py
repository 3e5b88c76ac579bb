"""What the simulation predicts, and what was measured: the model on 2 ranks, and layers that sleep on 4 to 8.

Costs of the model are those of every other batch; the batches between are compared with what is predicted from them.
Those of layers that sleep are known: nothing is fitted there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.pipe.contenders import zoo_engine
from benchmarks.pipe.model import Batch, Shape
from torch import nn

from zoo.cost.stages import StageCosts
from zoo.pipe import Table, build
from zoo.pipe.schedules.table import Computation, Kind
from zoo.pipe.simulate import Simulation, Span, simulate

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
SLEEP_S: Mapping[str, float] = {"F": 0.06, "I": 0.08, "W": 0.05}
"""Of all layers of a rank and one micro-batch; of several stages of a rank each has its share."""
WIDTH = 8
Ranks = Sequence[Mapping[str, Any]]


def measure(shape: Shape, schedule: str, rounds: int) -> dict[str, Any]:
    """When each computation of each batch began and ended on this rank, by the clock of the machine."""
    return _batches(zoo_engine(shape, schedule), shape.data, rounds)


def _batches(engine: Any, data: Callable[[int], list[Batch]], rounds: int) -> dict[str, Any]:
    for number in range(2):
        engine.train_batch(iter(data(number)))
    engine.time_computations()
    found = []
    for number in range(rounds):
        dist.barrier()
        engine.train_batch(iter(data(2 + number)))
        began = engine.timeline_began_s
        found.append([[str(e.computation), began + e.start_s, began + e.end_s] for e in engine.timeline])
    return {"batches": found}


class _Sleeps(torch.autograd.Function):
    """x, after some time; and the same backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        if forward_s:  # a sleep of 0 s gives the core away
            time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Sleeping(nn.Module):
    """x W; its forward, and its gradients of input and weight, sleep for their time."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.seconds = forward_s, input_s, weight_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) → (B, 8)."""
        forward_s, input_s, weight_s = self.seconds
        # The time of the input's gradient is after the product, where the first stage has it too.
        weight = _Sleeps.apply(self.weight, 0.0, weight_s)
        found: torch.Tensor = _Sleeps.apply(x @ weight, forward_s, input_s)
        return found


def sleep_costs(table: Table) -> StageCosts:
    """Those of the layers that :func:`measure_sleeps` runs."""
    share = table.num_ranks / table.num_stages
    forward_s, input_s, weight_s = (SLEEP_S[kind] * share for kind in "FIW")
    others = table.num_stages - 1
    # Nothing leads to an input of the first stage, and the runtime has all gradients of its weights at once.
    return StageCosts(
        forward_s=forward_s, input_s=[input_s + weight_s, *[input_s] * others], weight_s=[0.0, *[weight_s] * others]
    )


def measure_sleeps(schedule: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """As :func:`measure`, one layer a stage."""
    import zoo.engine
    from zoo.pipe.module import PipelineModule
    from zoo.pipe.specs import LayerSpec

    table = build(schedule, dist.get_world_size(), micro_batches)
    share = table.num_ranks / table.num_stages
    spec = LayerSpec(Sleeping, *(SLEEP_S[kind] * share for kind in "FIW"))
    model = PipelineModule(
        [spec] * table.num_stages, num_stages=table.num_ranks, schedule=schedule, loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches}
    engine = zoo.engine.initialize(config, model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))[0]
    x = torch.ones(2, WIDTH)
    return _batches(engine, lambda number: [(x, x)] * micro_batches, rounds)


def spans_of(ranks: Ranks, number: int) -> list[Span]:
    """Of one batch, by the clock of the machine."""
    return [
        Span(rank, Computation.parse(text), start, end)
        for rank, found in enumerate(ranks) for text, start, end in found["batches"][number]
    ]  # fmt: skip


def makespan(spans: Sequence[Span]) -> float:
    """From the first beginning to the last end."""
    return max(s.end_s for s in spans) - min(s.start_s for s in spans)


def measured_costs(ranks: Ranks, table: Table, numbers: Sequence[int]) -> StageCosts:
    """Of each kind and stage: the mean over the micro-batches of a batch, and of that the median over batches."""
    seconds: dict[tuple[Kind, int], list[list[float]]] = {}
    for number in numbers:
        here: dict[tuple[Kind, int], list[float]] = {}
        for span in spans_of(ranks, number):
            key = span.computation.kind, span.computation.stage
            here.setdefault(key, []).append(span.end_s - span.start_s)
        for key, values in here.items():
            seconds.setdefault(key, []).append(values)

    def of(kind: Kind) -> list[float]:
        found = [seconds.get((kind, stage), []) for stage in range(table.num_stages)]
        return [statistics.median(map(statistics.fmean, values)) if values else 0.0 for values in found]

    backward = of(Kind.BACKWARD) if any(kind is Kind.BACKWARD for kind, _ in seconds) else None
    return StageCosts(
        forward_s=of(Kind.FORWARD), input_s=of(Kind.INPUT), weight_s=of(Kind.WEIGHT), backward_s=backward
    )  # fmt: skip


def compare(record: Mapping[str, Any]) -> tuple[Simulation, list[float], list[Span]]:
    """The prediction, measured ÷ predicted makespan of each batch that is compared, and the middle one's spans."""
    ranks = record["ranks"]
    table = build(record["schedule"], len(ranks), record["micro_batches"])
    every = range(len(ranks[0]["batches"]))
    sleeps = record["section"] == "sleeps"
    costs = sleep_costs(table) if sleeps else measured_costs(ranks, table, every[::2])
    predicted = simulate(table, costs)
    compared = sorted((spans_of(ranks, n) for n in (every if sleeps else every[1::2])), key=makespan)
    ratios = [makespan(spans) / predicted.makespan_s for spans in compared]
    return predicted, ratios, compared[len(compared) // 2]


def own_ratios(record: Mapping[str, Any]) -> list[float]:
    """Measured ÷ simulated makespan of each batch, under the mean costs of the same batch."""
    ranks = record["ranks"]
    table = build(record["schedule"], len(ranks), record["micro_batches"])
    return [
        makespan(spans_of(ranks, n)) / simulate(table, measured_costs(ranks, table, [n])).makespan_s
        for n in range(len(ranks[0]["batches"]))
    ]
