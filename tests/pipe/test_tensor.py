"""Pipe × data × tensor: matrices that are cut along the tensor axis, in the stages of a pipeline, at every ZeRO stage.

Norms count parts of a matrix once each and what all tensor ranks have once; losses, norms and parameters equal those of
one process, with different data on every data-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import Enter, Leave
from tests.profiles import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zoo.engine
from zoo import sim
from zoo.comm import Communicator
from zoo.layout import declare_split
from zoo.pipe import LayerSpec, PipelineModule

WIDTH, HIDDEN, NUM_LAYERS = 4, 6, 8


@dataclass(frozen=True)
class Case:
    schedule: str = "1f1b"
    pipe: int = 2
    data: int = 1
    tensor: int = 2
    order: tuple[str, ...] = ("pipe", "data", "tensor")
    stage: int = 0
    num_micro: int = 3
    clip: float = 0.0
    checkpoint_every: int = 0


def drawn(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4


class Perceptron(nn.Module):
    """x + B tanh(A x) + b: the rows of A and the columns of B are cut along the tensor axis. ``comm``: None without."""

    def __init__(self, number: int, comm: Communicator | None) -> None:
        super().__init__()
        self.comm = comm
        size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        mine = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
        self.rows = nn.Parameter(drawn(f"rows {number}", HIDDEN, WIDTH)[mine].clone())
        self.columns = nn.Parameter(drawn(f"columns {number}", WIDTH, HIDDEN)[:, mine].clone())
        self.bias = nn.Parameter(drawn(f"bias {number}", WIDTH))
        if comm is None:
            return
        declare_split(self.rows, ["tensor"], shape=(HIDDEN, WIDTH), offsets=(mine.start, 0))
        declare_split(self.columns, ["tensor"], shape=(WIDTH, HIDDEN), offsets=(0, mine.start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x if self.comm is None else Enter.apply(x, self.comm)
        out = torch.tanh(given @ self.rows.T) @ self.columns.T
        if self.comm is not None:
            out = Leave.apply(out, self.comm)
        return x + out + self.bias


def batch(step: int, micro: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + replica), dtype=torch.float64
    )
    return x, x.roll(1, 0)


def train(case: Case, replicas: list[int]) -> Any:
    mesh = comm = None
    if case.pipe * case.data * case.tensor > 1:
        mesh = init_device_mesh("cpu", tuple(getattr(case, axis) for axis in case.order), mesh_dim_names=case.order)
        comm = Communicator.of_axes(mesh, ["tensor"]) if case.tensor > 1 else None
    model = PipelineModule(
        [LayerSpec(Perceptron, n, comm) for n in range(NUM_LAYERS)], schedule=case.schedule,
        loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=case.checkpoint_every,
        **({"num_stages": 1} if mesh is None else {"mesh": mesh}),
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": case.num_micro * max(1, len(replicas)),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30},
    }  # fmt: skip
    engine, *_ = zoo.engine.initialize(config, model, mesh=mesh)
    losses, norms = [], []
    for step in range(2):
        places = replicas or [engine.batch_rank]
        data = [batch(step, m, replica) for replica in places for m in range(case.num_micro)]
        losses.append(float(engine.train_batch(iter(data))))
        norms.append(float(engine.get_global_grad_norm()))
    found = engine.optimizer.consolidated_parameters()
    engine.destroy()
    return losses, norms, found


def check(case: Case) -> None:
    replicas = list(range(case.data))
    alone = replace(case, schedule="1f1b", pipe=1, data=1, tensor=1, stage=0)
    losses, norms, expected = train(alone, replicas)
    names: set[str] = set()
    for rank, found in enumerate(sim.run(case.pipe * case.data * case.tensor, lambda _: train(case, []), seed=0)):
        assert found[0] == pytest.approx(losses, rel=1e-10), rank
        assert found[1] == pytest.approx(norms, rel=1e-10), rank
        for name, value in found[2].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
        names |= found[2].keys()
    assert names == set(expected)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pipe, data, tensor = draw(st.sampled_from([(2, 1, 2), (2, 2, 2), (4, 1, 2), (2, 1, 3)]))
    schedules = ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v"]
    schedule = draw(st.sampled_from(schedules))
    return Case(
        schedule=schedule, pipe=pipe, data=data, tensor=tensor,
        order=tuple(draw(st.permutations(("pipe", "data", "tensor")))), stage=draw(st.integers(0, 3)),
        num_micro=pipe * draw(st.integers(1, 2)), clip=draw(st.sampled_from([0.0, 0.05])),
        checkpoint_every=draw(st.sampled_from([0, 1])) if not schedule.startswith("zb") else 0,
    )  # fmt: skip


@pytest.mark.dear
@examples(times=1, quick=0.67)
@given(case=cases())
@example(case=Case(data=2, stage=3, num_micro=4, clip=0.05))
def test_matrices_cut_along_the_tensor_axis_train_as_whole_ones(case: Case) -> None:
    check(case)
