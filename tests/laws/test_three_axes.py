"""Law 2 for pipeline stages, experts, data and tensor-parallel matrices in one model: each stage has an optimizer
of its own, over its ranks.

A schedule drives the stages from outside, in 1F1B order (Narayanan et al. 2019, section 3.2), and one process has all
layers and all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import WIDTH, Enter, Experts, Leave, Pair, states, weight, whole
from tests.profiles import deep_example
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import Communicator, Handle
from zoo.layout import declare_first, declare_split, declare_tied
from zoo.zero import ZeroOptimizer

NUM_LAYERS = 4
AXES = ("pipe", "expert", "data", "tensor")


@dataclass(frozen=True)
class Case:
    pipe: int = 2
    expert: int = 2
    data: int = 2
    stage: int = 3
    experts_at: int = 2  # which layer
    tensor: int = 1
    pair_at: int = -1  # which layer has matrices that are cut along the tensor axis
    per_rank: int = 1
    num_micro: int = 3
    reduces_each: bool = False
    max_bytes: int | None = None
    clip_norm: float = 0.0
    bucket_size: int = 1
    check: bool = False
    tied: tuple[int, ...] = ()
    """Layers that have one matrix in common."""
    tied_parts: bool = False
    """They have another one in common too, which is cut along the tensor axis."""
    seed: int = 0

    @property
    def replicas(self) -> int:
        return self.expert * self.data

    @property
    def world(self) -> int:
        return self.pipe * self.replicas * self.tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    meshes = [  # pipe, expert, data, tensor
        (1, 2, 2, 1),
        (2, 1, 2, 1),
        (2, 2, 1, 1),
        (2, 2, 2, 1),
        (4, 2, 1, 1),
        (4, 1, 1, 1),
        (2, 1, 1, 2),
        (2, 2, 1, 2),
    ]
    pipe, expert, data, tensor = draw(st.sampled_from(meshes))
    experts_at, pair_at, *_ = draw(st.permutations(range(NUM_LAYERS)))
    return Case(
        pipe=pipe, expert=expert, data=data, tensor=tensor, stage=draw(st.integers(0, 3)),
        experts_at=experts_at, pair_at=pair_at, per_rank=draw(st.integers(1, 2)),
        num_micro=draw(st.integers(1, 4)), reduces_each=draw(st.booleans()),
        max_bytes=draw(st.sampled_from([None, 0, 10**6])), clip_norm=draw(st.sampled_from([0.0, 0.01])),
        bucket_size=draw(st.sampled_from([1, 10**6])), check=draw(st.booleans()), seed=draw(st.integers(0, 20)),
        tied=draw(st.sampled_from([(), (0, 3), (1, 2), (0, 1, 3)])), tied_parts=draw(st.booleans()),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.linear.weight.data = weight(f"block {number}", WIDTH, WIDTH)
        self.linear.bias.data = weight(f"block bias {number}", WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Layers(nn.Module):
    """Layers ``first`` to ``first + num - 1`` of the model; one of all of them has the experts, one may be a pair."""

    def __init__(
        self, case: Case, first: int, num: int, expert: Communicator | None, tensor: Communicator | None = None
    ) -> None:
        super().__init__()

        def layer(number: int) -> nn.Module:
            if number == case.experts_at:
                return Experts(case.expert * case.per_rank, expert)
            return Pair(tensor) if number == case.pair_at else Block(number)

        self.layers = nn.ModuleList(map(layer, range(first, first + num)))
        declare_first(self.layers, first)
        self.first, self.tied = first, case.tied
        if set(case.tied) & set(range(first, first + num)):
            self.table = nn.Parameter(weight("table", WIDTH, WIDTH))
            self.shift = nn.Parameter(weight("shift", 1))
            for parameter in (self.table, self.shift):
                declare_tied(parameter, "table")
            if case.tied_parts:
                self._add_parts(tensor)

    def _add_parts(self, tensor: Communicator | None) -> None:
        self.tensor = tensor
        size, rank = (1, 0) if tensor is None else (tensor.size, tensor.rank)
        mine = slice(rank * 6 // size, (rank + 1) * 6 // size)
        self.parts = nn.Parameter(weight("parts", 6, WIDTH)[mine].clone())
        if tensor is not None:
            declare_split(self.parts, ["tensor"], shape=(6, WIDTH), offsets=(mine.start, 0))
        declare_tied(self.parts, "parts")

    def _of_parts(self, x: torch.Tensor) -> torch.Tensor:
        if self.tensor is None:
            return torch.tanh(x @ self.parts.T) @ self.parts
        inner: torch.Tensor = Enter.apply(x, self.tensor)
        out: torch.Tensor = Leave.apply(torch.tanh(inner @ self.parts.T) @ self.parts, self.tensor)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers, self.first):
            if number in self.tied and hasattr(self, "parts"):
                x = x + self._of_parts(x)
            if number in self.tied:
                x = x + torch.tanh(x @ (self.table if number % 2 else self.table.T)) * self.shift
            x = layer(x)
        return x


def tokens(case: Case, replica: int, micro: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    return torch.randn(case.expert * case.per_rank, 2, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(case: Case, out: torch.Tensor) -> torch.Tensor:
    return out.square().mean() / case.num_micro


class Pipeline:
    """One stage on one rank: its layers, its optimizer, and its neighbours."""

    def __init__(self, case: Case, rank: int, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.case, self.dtype = case, dtype
        mesh = init_device_mesh("cpu", tuple(getattr(case, axis) for axis in AXES), mesh_dim_names=AXES)
        expert, tensor = Communicator.of_axes(mesh, ["expert"]), Communicator.of_axes(mesh, ["tensor"])
        self.ahead = Communicator.of_axes(mesh, ["pipe"])
        # On nccl the messages of one communicator run in their order: each direction has one of its own.
        self.back = self.ahead.duplicate("back")
        self.stage, self.replica = rank // (case.replicas * case.tensor), rank // case.tensor % case.replicas
        num = NUM_LAYERS // case.pipe
        several = [comm if comm.size > 1 else None for comm in (expert, tensor)]
        self.model = Layers(case, self.stage * num, num, *several).to(dtype)
        if "optimizer" not in options:
            options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, **options}
        self.optimizer = ZeroOptimizer(
            self.model, stage=case.stage, mesh=mesh, data_axes=("expert", "data"), layer_axes=("pipe",),
            clip_norm=case.clip_norm, reduce_bucket_size=case.bucket_size, param_persistence_threshold=0,
            check=case.check, **options,
        )  # fmt: skip
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.sent: list[tuple[Handle, torch.Tensor]] = []
        self.losses: dict[int, float] = {}
        """Of the last step, by micro-batch, in the last stage."""

    def tokens(self, micro: int, step: int) -> torch.Tensor:
        return tokens(self.case, self.replica, micro, step).to(self.dtype)

    def _send(self, comm: Communicator, tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.detach().contiguous()
        self.sent.append((comm.send(tensor, to), tensor))

    def _like_tokens(self) -> torch.Tensor:
        return torch.empty_like(self.tokens(0, 0))

    def forward(self, window: Any, micro: int, step: int) -> None:
        x = self.tokens(micro, step)
        if self.stage:
            x = self._like_tokens()
            self.ahead.recv(x, self.stage - 1).wait()
            x.requires_grad_()
        self.inputs[micro] = x
        with window.forward(micro):
            out = self.model(x)
            self.outputs[micro] = loss_of(self.case, out) if self.stage == self.case.pipe - 1 else out
        if self.stage == self.case.pipe - 1:
            self.losses[micro] = float(self.outputs[micro].detach())
        if self.stage < self.case.pipe - 1:
            self._send(self.ahead, out, self.stage + 1)

    def backward(self, window: Any, micro: int) -> None:
        gradient = None
        if self.stage < self.case.pipe - 1:
            gradient = self._like_tokens()
            self.back.recv(gradient, self.stage + 1).wait()
        last = micro == self.case.num_micro - 1
        with window.backward(micro, reduce=self.case.reduces_each or last):
            self.outputs.pop(micro).backward(gradient)
        x = self.inputs.pop(micro)
        if self.stage:
            assert x.grad is not None
            self._send(self.back, x.grad, self.stage - 1)

    def step(self, step: int) -> None:
        num, ahead = self.case.num_micro, min(self.case.pipe - 1 - self.stage, self.case.num_micro)
        with self.optimizer.sharded.window(max_bytes=self.case.max_bytes) as window:
            for micro in range(ahead):
                self.forward(window, micro, step)
            for micro in range(num):
                if micro + ahead < num:
                    self.forward(window, micro + ahead, step)
                self.backward(window, micro)
        for handle, _ in self.sent:
            handle.wait()
        self.sent.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


def reference(case: Case, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process with all layers, and the tokens of all replicas."""
    model = Layers(case, 0, NUM_LAYERS, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(steps):
        for replica in range(case.replicas):
            for micro in range(case.num_micro):
                (loss_of(case, model(tokens(case, replica, micro, step))) / case.replicas).backward()
        if case.clip_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


@pytest.mark.dear
@given(case=cases())
@example(case=Case(stage=3, clip_norm=0.01))
@deep_example(case=Case(stage=1, clip_norm=0.01, experts_at=0))
@example(case=Case(stage=3, clip_norm=0.01, tied=(0, 3)))
@deep_example(case=Case(pipe=4, expert=2, data=1, stage=2, clip_norm=0.01, tied=(0, 1, 3), reduces_each=True))
@deep_example(case=Case(stage=0, expert=1, tied=(0, 3)))
@deep_example(case=Case(stage=3, expert=1, tensor=2, tied=(0, 3), tied_parts=True, clip_norm=0.01))
@example(case=Case(pipe=4, expert=1, data=1, tensor=2, stage=1, tied=(0, 1, 3), tied_parts=True, reduces_each=True))
@example(case=Case(data=1, tensor=2, pair_at=1, clip_norm=0.01, tied=(0, 3)))
def test_pipe_expert_and_data_in_one_model_equal_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank)
        norms = []
        for step in range(3):
            pipeline.step(step)
            norms.append(pipeline.optimizer.grad_norm)
        return states(pipeline.optimizer), norms

    ranks = sim.run(case.world, fn, seed=case.seed)
    expected, norms = reference(case, 3)
    if case.clip_norm:
        assert all(found == ranks[0][1] for _, found in ranks), "ranks clipped by different factors"
        assert ranks[0][1] == pytest.approx(norms, rel=1e-10)
    got = whole([found for found, _ in ranks])
    assert {name for name, role in got if role == "parameter"} == set(expected)
    for name, value in expected.items():
        # fp64; sums over ranks and micro-batches have another order than in one process.
        torch.testing.assert_close(
            got[name, "parameter"], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "options",
    [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2, "mics_hierarchical_params_gather": True}],
    ids=str,
)
def test_groups_within_the_ranks_of_a_stage_equal_one_process(options: dict[str, Any]) -> None:
    case = Case(clip_norm=0.01, tied=(0, 3))

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, ranks_per_node=2, **options)
        for step in range(3):
            pipeline.step(step)
        return states(pipeline.optimizer), pipeline.optimizer.grad_norm

    ranks = sim.run(case.world, fn)
    assert len({norm for _, norm in ranks}) == 1
    got, (expected, _) = whole([found for found, _ in ranks]), reference(case, 3)
    for name, value in expected.items():
        torch.testing.assert_close(got[name, "parameter"], value, rtol=1e-10, atol=1e-10)


def test_groups_that_do_not_fit_the_experts_of_one_stage_are_refused_in_all() -> None:
    case = Case(data=3, stage=3)

    def fn(rank: int) -> None:
        words = r"mics_shard_size=2 makes groups of which 1 or 2 ranks have .* of 'layers\.0\.experts\.0\.weight'"
        with pytest.raises(ValueError, match=words):
            Pipeline(case, rank, mics_shard_size=2)

    sim.run(case.world, fn)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_is_not_finite_in_one_stage_skips_the_step_in_all(stage: int) -> None:
    case = Case(stage=stage, clip_norm=1.0, expert=1, num_micro=1)

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, loss_scale=1.0)
        before = [(*key, values) for *key, values in states(pipeline.optimizer)]
        with pipeline.optimizer.no_sync():
            loss = pipeline.model(tokens(case, pipeline.replica, 0, 0)).square().mean()
            pipeline.optimizer.backward(loss * (float("inf") if rank == case.world - 1 else 1.0))
        pipeline.optimizer.step()
        same = all(torch.equal(a[-1], b[-1]) for a, b in zip(before, states(pipeline.optimizer), strict=True))
        return pipeline.optimizer.skipped, same

    assert sim.run(case.world, fn) == [(True, True)] * case.world


def test_a_stage_without_gradients_steps_with_zeros_where_another_has_some() -> None:
    case = Case(expert=1, clip_norm=1.0)

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, momentum=0.0, weight_decay=0.5)
        if pipeline.stage == 0:
            pipeline.model(tokens(case, pipeline.replica, 0, 0)).square().mean().backward()
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
        pipeline.optimizer.step()  # none has any: nothing happens
        return states(pipeline.optimizer), pipeline.optimizer.grad_norm

    ranks = sim.run(case.world, fn)
    assert len({norm for _, norm in ranks}) == 1
    got = whole([found for found, _ in ranks])
    torch.testing.assert_close(got["layers.3.linear.bias", "parameter"], weight("block bias 3", WIDTH) * 0.95)


def test_a_stage_without_gradients_of_what_another_has_too() -> None:
    case = Case(expert=1, tied=(0, 3), stage=2)

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank, momentum=0.0)
        if pipeline.stage == 0:
            pipeline.model(tokens(case, pipeline.replica, 0, 0)).square().mean().backward()
        pipeline.optimizer.step()
        return states(pipeline.optimizer), pipeline.optimizer.consolidated_parameters()["table"]

    ranks = sim.run(case.world, fn)
    assert not torch.equal(ranks[0][1], weight("table", WIDTH, WIDTH))
    assert all(torch.equal(value, ranks[0][1]) for _, value in ranks)


def test_what_several_stages_have_is_never_updated_in_backward() -> None:
    case = Case(expert=1, tied=(0, 3))

    def fn(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="several pipeline stages have"):
            Pipeline(case, rank, update_in_backward=True)

    sim.run(case.world, fn)


def test_clip_grad_norm_is_over_all_stages_too() -> None:
    case = Case(expert=1)

    def fn(rank: int) -> Any:
        pipeline = Pipeline(case, rank)
        pipeline.model(tokens(case, pipeline.replica, 0, 0)).square().mean().backward()
        optimizer = pipeline.optimizer
        return optimizer.clip_grad_norm_(0.01), optimizer.clip_grad_norm_(0.01)

    found = sim.run(case.world, fn)
    assert len(set(found)) == 1
    before, after = found[0]
    assert before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)  # the 1e-6 that clipping adds to the norm


def test_the_forecast_knows_what_goes_between_stages() -> None:
    case = Case(expert=1, clip_norm=1.0, stage=1)

    def fn(rank: int) -> None:
        pipeline = Pipeline(case, rank)
        expected, log = pipeline.optimizer.forecast(), pipeline.optimizer.comm.log
        log.reset()
        pipeline.model(tokens(case, pipeline.replica, 0, 0)).square().mean().backward()
        pipeline.optimizer.step()
        assert {op: row.wire_bytes for op, row in log.ops.items() if row.wire_bytes} == expected.wire_bytes
        assert expected.wire_bytes["all_reduce"] == 4

    sim.run(case.world, fn)


def test_what_layer_axes_cannot_be_is_said() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "expert"))
        model = Layers(Case(experts_at=0), 0, 2, Communicator.of_axes(mesh, ["expert"]))
        with pytest.raises(ValueError, match=r"layer_axes=\('pipe',\) without a mesh"):
            ZeroOptimizer(model, stage=2, lr=0.1, layer_axes=("pipe",))
        with pytest.raises(ValueError, match=r"data_axes=\('data',\) without a mesh"):
            ZeroOptimizer(model, stage=2, lr=0.1, data_axes=("data",))
        with pytest.raises(ValueError, match=r"layer_axes=\('stages',\) with data_axes=\('expert',\)"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("expert",), layer_axes=("stages",))
        with pytest.raises(ValueError, match=r"layer_axes=\('expert',\).*no data axes"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("expert",), layer_axes=("expert",))
        with pytest.raises(ValueError, match=r"a part along 'expert'.*besides the layer_axes \('expert',\)"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("pipe",), layer_axes=("expert",))

    sim.run(4, fn)


def test_what_several_stages_have_is_no_part_along_a_data_axis() -> None:
    case = Case(expert=2, data=1)

    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 1, 1), mesh_dim_names=AXES)
        model = nn.Linear(WIDTH, WIDTH).double()
        if rank < 2:  # the first stage alone has it, and both are told
            declare_split(model.weight, ["expert"], shape=(2 * WIDTH, WIDTH), offsets=(WIDTH * (rank % 2), 0))
            declare_tied(model.weight, "table")
        with pytest.raises(ValueError, match="tied to other layers as 'table' and a part along 'expert'"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("expert", "data"), layer_axes=("pipe",))

    sim.run(case.world, fn)
