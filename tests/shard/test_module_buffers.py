"""Buffers of the model by setting: what plain torch computes in one process with a replica for each rank, and DDP."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.layout import declare_split
from zoo.zero import ShardedModel, ZeroConfig, ZeroOptimizer

WIDTH = 4


@dataclass(frozen=True)
class Case:
    world: int = 2
    stage: int = 3
    mode: str = "broadcast"
    num_micro: int = 1
    drive: str = "hooks"  # hooks, no_sync, window
    bucket_size: int = 1
    whole: bool = False  # the model is one unit
    early: bool = False
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        world=draw(st.integers(1, 4)), stage=draw(st.integers(0, 3)),
        mode=draw(st.sampled_from(["own", "broadcast", "average"])), num_micro=draw(st.integers(1, 3)),
        drive=draw(st.sampled_from(["hooks", "no_sync", "window"])), bucket_size=draw(st.sampled_from([1, 10**6])),
        whole=draw(st.booleans()), early=draw(st.booleans()), seed=draw(st.integers(0, 20)),
    )  # fmt: skip


class Centre(nn.Module):
    """Its buffers count for what it computes: a mean that is learned, how often it ran, and others of many dtypes."""

    mean: torch.Tensor
    coarse: torch.Tensor
    runs: torch.Tensor
    signs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("signs", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x - self.mean) * self.scale + self.coarse.sum().float()
        with torch.no_grad():
            self.mean = 0.7 * self.mean + 0.3 * x.mean(0)  # another tensor
            self.coarse += x.mean().to(torch.bfloat16)
            self.runs += 1 + (x[0, 0] > 0)
            self.signs.copy_(self.mean > 0)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.centre = Centre()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.centre(torch.tanh(self.norm(self.first(x)))))
        return out


def make(rank: int = 0) -> Model:
    torch.manual_seed(5)
    model = Model()
    model.centre.mean.fill_(float(rank))
    model.centre.runs.fill_(10 * rank)
    return model


def data(rank: int, micro: int, step: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)) + rank


def reference(case: Case, steps: int) -> list[dict[str, torch.Tensor]]:
    """A replica for each rank, whose gradients are averaged, and then its buffers by hand. Parameters and buffers."""
    replicas = [make(rank) for rank in range(case.world)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.1) for r in replicas]

    def settle(mode: str) -> None:
        named = [dict(r.named_buffers()) for r in replicas]
        for name in named[0] if mode != "own" else ():
            values = [b[name] for b in named]
            if mode == "average" and not values[0].is_floating_point():
                continue
            found = values[0].clone()
            if mode == "average":
                found = (torch.stack([v.float() for v in values]).sum(0) / case.world).to(found.dtype)
            for value in values:
                value.copy_(found)

    settle("own" if case.mode == "own" else "broadcast")
    for step in range(steps):
        for rank, replica in enumerate(replicas):
            for micro in range(case.num_micro):
                (replica(data(rank, micro, step)).square().mean() / case.num_micro).backward()
        for same in zip(*(r.parameters() for r in replicas), strict=True):
            mean = torch.stack([p.grad for p in same if p.grad is not None]).sum(0) / case.world
            for parameter in same:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        settle(case.mode)
    return [{n: t.detach() for n, t in [*r.named_parameters(), *r.named_buffers()]} for r in replicas]


def train(model: Model, optimizer: ZeroOptimizer, case: Case, rank: int, step: int) -> None:
    with contextlib.ExitStack() as stack:
        window = stack.enter_context(optimizer.sharded.window()) if case.drive == "window" else None
        losses = []
        for micro in range(case.num_micro):
            if window is not None:
                with window.forward(micro):
                    losses.append(model(data(rank, micro, step)).square().mean() / case.num_micro)
                continue
            last = micro == case.num_micro - 1
            more = case.early or case.drive == "no_sync"
            with contextlib.nullcontext() if last or not more else optimizer.no_sync():
                (model(data(rank, micro, step)).square().mean() / case.num_micro).backward()
        for micro, loss in enumerate(losses):
            assert window is not None
            with window.backward(micro, reduce=micro == case.num_micro - 1):
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.dear
@given(case=cases())
@example(case=Case(mode="broadcast", num_micro=2, drive="window"))
@example(case=Case(mode="average", num_micro=2, drive="window"))
def test_buffers_are_as_computed_by_hand(case: Case) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        model = make(rank)
        optimizer = ZeroOptimizer(
            model, stage=case.stage, optimizer=torch.optim.SGD, lr=0.1, buffers=case.mode,  # type: ignore[arg-type]
            reduce_bucket_size=case.bucket_size, param_persistence_threshold=0, update_in_backward=case.early,
            units=[] if case.whole else None,
        )  # fmt: skip
        for step in range(3):
            train(model, optimizer, case, rank, step)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        return optimizer.consolidated_parameters() | buffers

    got, expected = sim.run(case.world, fn, seed=case.seed), reference(case, 3)
    for found, wanted in zip(got, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            # fp32; sums over ranks and within fused operations have another order.
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    if case.mode == "broadcast":
        assert all(torch.equal(found[name], got[0][name]) for found in got for name in found)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_broadcast_is_what_ddp_does(stage: int) -> None:
    def ddp(rank: int) -> Any:
        net = nn.parallel.DistributedDataParallel(make(rank))  # which broadcasts buffers
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            loss = net(data(rank, 0, step)).square().mean()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
        losses.append(net(data(rank, 0, 9)).square().mean().detach())
        return losses

    def zero(rank: int) -> Any:
        model = make(rank)
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, buffers="broadcast")
        losses = []
        for step in range(3):
            loss = model(data(rank, 0, step)).square().mean()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(model(data(rank, 0, 9)).square().mean())
        return losses

    for found, wanted in zip(sim.run(3, zero), sim.run(3, ddp), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_one_message_for_each_dtype_and_the_forecast_knows_them(mode: Any) -> None:
    def fn(rank: int) -> None:
        model = make(rank)
        optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=0.1, buffers=mode)
        model(data(rank, 0, 0)).square().mean().backward()
        log, expected = optimizer.comm.log, optimizer.forecast()
        op = "broadcast" if mode == "broadcast" else "all_reduce"
        log.reset()
        optimizer.step()
        assert log.ops[op].count == (4 if mode == "broadcast" else 2)  # fp32, bf16, int64, bool
        assert log.ops[op].wire_bytes == expected.wire_bytes[op]

    sim.run(2, fn)


def test_a_skipped_step_and_one_without_gradients_bring_them_together_too() -> None:
    def fn(rank: int) -> None:
        model = make(rank)
        optimizer = ZeroOptimizer(model, stage=3, lr=0.1, buffers="average", clip_norm=1.0)
        (model(data(rank, 0, 0)).square().mean() * float("inf")).backward()
        optimizer.step()
        assert optimizer.skipped
        first = model.norm.running_mean.clone()  # type: ignore[union-attr]
        optimizer.zero_grad()
        with torch.no_grad():
            model(data(rank, 1, 0))
        optimizer.step()
        for value in (first, model.norm.running_mean):
            assert value is not None
            all_of_them = torch.empty(2 * WIDTH)
            optimizer.comm.all_gather(all_of_them, value.clone()).wait()
            assert torch.equal(all_of_them[:WIDTH], all_of_them[WIDTH:])

    sim.run(2, fn)


def test_a_rank_that_runs_nothing_takes_part() -> None:
    def fn(rank: int) -> torch.Tensor:
        model = make(rank)
        optimizer = ZeroOptimizer(model, stage=3, lr=0.1, buffers="average", divergent=True)
        if rank:
            model(data(rank, 0, 0)).square().mean().backward()
        optimizer.step()
        return model.centre.mean

    found = sim.run(2, fn)
    assert torch.equal(found[0], found[1])
    assert bool((found[0] != 0).any())


class Expert(nn.Module):
    def __init__(self, number: int, declares: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("tokens", torch.full((2,), float(number)))
        for parameter in self.parameters():
            declare_split(parameter, ["expert"])
        if declares:
            declare_split(self.tokens, ["expert"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_the_buffers_of_an_expert_are_those_of_its_own_ranks(mode: Any) -> None:
    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Expert(10 + rank, declares=True))
        optimizer = ZeroOptimizer(model, stage=1, lr=0.1, mesh=mesh, data_axes=("data", "expert"), buffers=mode)
        model[1].norm.running_mean.fill_(float(rank))  # type: ignore[union-attr, operator]
        optimizer.step()
        return model[1].tokens[0], model[1].norm.running_mean[0]  # type: ignore[union-attr, index, return-value]

    found = [(float(a), float(b)) for a, b in sim.run(4, fn)]
    means = [0, 1, 0, 1] if mode == "broadcast" else [1, 2, 1, 2]
    assert found == [(10 + rank % 2, means[rank]) for rank in range(4)]


def test_what_cannot_be_is_said() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        with pytest.raises(ValueError, match="buffers"):
            ZeroOptimizer(make(), stage=1, lr=0.1, buffers="rank 0")  # type: ignore[arg-type]
        model = Expert(0, declares=False)
        declare_split(model.linear.weight, ["data"])
        model.linear.register_buffer("odd", torch.zeros(rank + 1))
        axes = {"mesh": mesh, "data_axes": ("data", "expert")}
        with pytest.raises(ValueError, match=r"buffer 'linear\.odd'.*declare_split\(buffer"):
            ZeroOptimizer(model, stage=1, lr=0.1, buffers="average", **axes)
        model = make()
        model.register_buffer("odd", torch.zeros(rank + 1))
        with pytest.raises(ValueError, match="buffers of the model"):
            ZeroOptimizer(model, stage=1, lr=0.1, buffers="average")
        assert type(model.first.weight) is nn.Parameter
        assert not any(m._forward_pre_hooks for m in model.modules())

    sim.run(4, fn)


def test_forward_only_begins_with_the_buffers_of_rank_0() -> None:
    def fn(rank: int) -> None:
        model = make(rank)
        sharded = ShardedModel(model, config=ZeroConfig(stage=3, buffers="broadcast"), trains=False)
        assert bool((model.centre.mean == 0).all())
        model.centre.mean.fill_(float(rank + 1))
        sharded.sync_buffers()
        assert bool((model.centre.mean == 1).all())

    sim.run(2, fn)
