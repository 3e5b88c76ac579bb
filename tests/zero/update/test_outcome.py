"""Steps that do not wait for what they came to: the same bits, and nothing looks at the device before it must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.zero.blocks import Blocks
from tests.zero.late import Late, LookedAtError, counted_reads, nothing_is_read
from torch import nn

from zoo import optim, sim
from zoo.zero import LossScaler, NonFiniteGradientsError, ZeroOptimizer
from zoo.zero import safe_get_full_grad as full_grad
from zoo.zero.update.alike import Outcome
from zoo.zero.update.clipping import Clipping
from zoo.zero.update.expected import ExpectedStates

OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 15)
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adam, amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"fused": True}),
    "SGD, momentum": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"fused": True}),
    "zoo.AdamW, capturable": (optim.AdamW, {"capturable": True}),
    "zoo.SGD, capturable": (optim.SGD, {"capturable": True, "momentum": 0.9}),
}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, not fused": (torch.optim.AdamW, {}),
    "zoo.AdamW": (optim.AdamW, {}),
}


@dataclass(frozen=True)
class Step:
    overflows: bool = False  # on one rank, where that is found
    micro_batches: int = 1
    clears: bool = True
    asks: bool = False
    tallies: bool = True
    momentum: float | None = None


@dataclass(frozen=True)
class Run:
    stage: int
    world: int
    optimizer: str
    clip: float
    scale: float | str | None
    dtype: torch.dtype
    pieces: int
    steps: tuple[Step, ...]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    clip, scale = draw(st.sampled_from([0.0, 0.05, 1e9, math.inf])), draw(st.sampled_from([None, 64.0, "dynamic"]))
    step = st.builds(
        Step, overflows=st.integers(0, 3).map(lambda n: n == 0 and (clip > 0 or scale is not None)),
        micro_batches=st.integers(1, 2), clears=st.sampled_from([True, True, False]), asks=st.booleans(),
        tallies=st.booleans(), momentum=st.sampled_from([None, None, 0.0, 0.5]),
    )  # fmt: skip
    return Run(
        draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([*FUSED, *FUSED, *OTHERS])), clip, scale,
        draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), draw(st.sampled_from([20, 10**9])),
        tuple(draw(st.lists(step, min_size=1, max_size=5))),
    )  # fmt: skip


def batch(rank: int, step: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, 4, generator=dice, dtype=torch.float64).to(dtype)


def bits(value: Any) -> Any:
    """For ``==``: NaN is NaN, and zeros have signs."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def told(optimizer: ZeroOptimizer) -> list[Any]:
    return [
        optimizer.grad_norm, optimizer.skipped, optimizer.num_skipped, list(optimizer.tallied), optimizer.loss_scale,
    ]  # fmt: skip


def train(cls: type[ZeroOptimizer], run: Run, rank: int) -> list[Any]:
    model: nn.Module = Blocks().to(run.dtype)
    kind, options = {**FUSED, **OTHERS}[run.optimizer]
    scaler = LossScaler(scale=16.0, window=2, hysteresis=1) if run.scale == "dynamic" else run.scale
    groups: Any = [{"params": [p for p in model.parameters() if (p.dim() > 1) is matrix]} for matrix in (True, False)]
    optimizer = cls(
        model, stage=run.stage, optimizer=kind, params=groups, lr=0.01, clip_norm=run.clip, loss_scale=scaler,
        param_persistence_threshold=0, reduce_bucket_size=40, sub_group_size=run.pieces, optimizer_options=options,
    )  # fmt: skip
    found: list[Any] = []
    for number, step in enumerate(run.steps):
        if step.momentum is not None and "momentum" in options:
            optimizer.param_groups[0]["momentum"] = step.momentum
        for micro in range(step.micro_batches):
            x = batch(rank, number, micro, run.dtype)
            loss = model(x).square().mean() / step.micro_batches
            loss = loss * math.inf if step.overflows and rank == run.world - 1 else loss
            optimizer.backward(loss)
        optimizer.step(tally=torch.tensor([1.5 * number, rank]) if step.tallies else None)
        if step.clears:
            optimizer.zero_grad()
        elif not step.overflows:
            found.append(bits(full_grad(model.first.weight)))  # type: ignore[arg-type]
        if step.asks:
            found.append([optimizer.param_groups[0]["lr"], *map(repr, told(optimizer))])
    found += [*map(repr, told(optimizer)), bits(optimizer.state_dict()), bits(optimizer.consolidated_parameters())]
    return found


KEPT = Run(
    stage=0, world=1, optimizer="AdamW", clip=0.05, scale=None, dtype=torch.bfloat16, pieces=20, steps=tuple(
        Step(overflows=False, micro_batches=1, clears=clears, asks=False, tallies=False, momentum=None)
        for clears in (True, False)
    ),
)  # fmt: skip


@given(runs())
@example(KEPT)  # what is added to was clipped in 16 bits
def test_a_step_that_is_not_waited_for_has_the_same_bits(run: Run) -> None:
    waiting = sim.run(run.world, lambda rank: train(ZeroOptimizer, run, rank))
    late = sim.run(run.world, lambda rank: train(Late, run, rank))
    for expected, found in zip(waiting, late, strict=True):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert one == other


def one(optimizer: ZeroOptimizer, model: nn.Module, factor: float = 1.0) -> None:
    optimizer.backward(model(batch(0, 0, 0, torch.float32)).square().mean() * factor)
    optimizer.step(tally=torch.ones(1))
    optimizer.zero_grad()


def build(cls: type[ZeroOptimizer] = Late, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    model = Blocks()
    return model, cls(model, **{"stage": 2, "optimizer": kind, "lr": 0.01, "clip_norm": 0.1, **options})


@pytest.mark.parametrize(
    ("options", "late"),
    [
        ({"fused": True}, True),
        ({"fused": True, "loss_scale": "dynamic"}, True),
        ({"fused": True, "clip_norm": 0.0}, True),
        ({"kind": optim.AdamW, "clip_norm": 0.0}, True),
        ({"clip_norm": 0.0}, True),
        ({"fused": True, "nonfinite_gradients": "error"}, False),
        ({"fused": True, "nonfinite_gradients": "use"}, True),
        ({"kind": optim.AdamW}, False),
        ({"kind": optim.AdamW, "capturable": True}, True),
        ({"kind": optim.Lion, "capturable": True, "loss_scale": "dynamic"}, True),
        ({}, False),
        ({"cls": ZeroOptimizer, "fused": True}, False),
    ],
)
def test_who_waits(options: dict[str, Any], late: bool) -> None:
    model, optimizer = build(**options)
    measures = options.get("clip_norm") != 0.0
    one(optimizer, model)
    assert (optimizer.outcome is not None) is (late and not measures)  # the first step makes states
    one(optimizer, model)
    assert (optimizer.outcome is not None) is late
    assert optimizer.tallied == [1.0]
    assert optimizer.outcome is None
    optimizer.read_outcome()  # a second time is nothing
    one(optimizer, model, math.nan) if late else None
    assert (optimizer.outcome is not None) is late


def test_states_on_nvme_wait(tmp_path: Any) -> None:
    model, optimizer = build(fused=True, offload_optimizer={"device": "nvme", "nvme_path": str(tmp_path)})
    for _ in range(3):
        one(optimizer, model)
        assert optimizer.outcome is None
        assert optimizer.tallied == [1.0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_no_state_is_made_by_a_step_that_is_skipped(kind: Any) -> None:
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer = build(kind=kind, fused=True, **more)
    one(optimizer, model, math.inf)
    assert optimizer.num_skipped == 1
    assert not optimizer.inner.state
    one(optimizer, model)
    one(optimizer, model)
    before = bits(optimizer.state_dict())
    one(optimizer, model, math.inf)
    assert optimizer.outcome is not None
    assert bits(optimizer.state_dict()) == before
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    one(optimizer, model)
    assert optimizer.outcome is None  # what was loaded may lack states


def test_options_that_make_states_are_waited_for() -> None:
    model, optimizer = build(kind=torch.optim.SGD, fused=True, momentum=0.0)
    for _ in range(2):
        one(optimizer, model)
    assert optimizer.outcome is not None
    optimizer.param_groups[0]["momentum"] = 0.9
    one(optimizer, model, math.inf)
    assert optimizer.outcome is None
    one(optimizer, model)
    one(optimizer, model)
    assert optimizer.outcome is not None
    optimizer.param_groups[0]["fused"] = False
    for factor in (1.0, 1.0, math.inf, 1.0):
        one(optimizer, model, factor)
        assert optimizer.outcome is None
    assert optimizer.num_skipped == 2


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("asks", [True, False])
def test_kept_gradients_get_the_scale_of_the_next_backward(stage: int, asks: bool) -> None:
    def fn(rank: int, cls: type[ZeroOptimizer]) -> Any:
        scaler = LossScaler(scale=4.0, window=1)  # doubles with each step
        model, optimizer = build(cls, stage=stage, fused=True, loss_scale=scaler, param_persistence_threshold=0)
        one(optimizer, model)
        found = []
        for step in range(3):
            optimizer.backward(model(batch(rank, step, 0, torch.float32)).square().mean())
            optimizer.step()
            assert (optimizer.outcome is not None) is (cls is Late)
            if asks:
                found.append(full_grad(model.first.weight))
        assert optimizer.loss_scale == 64.0
        return bits([*found, optimizer.consolidated_parameters()])

    assert sim.run(2, lambda rank: fn(rank, Late)) == sim.run(2, lambda rank: fn(rank, ZeroOptimizer))


class Careless(torch.optim.AdamW):
    """Does something of its own in each step, skipped or not."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def test_what_only_says_that_it_takes_found_inf_is_found_out() -> None:
    def tried(kind: Any, **options: Any) -> bool:
        return ExpectedStates(kind, [{}, {}], options, unsplit=False, objects=False).takes_found_inf()

    # torch 2.11's fused Adagrad says so on the CPU, and moves its parameters all the same.
    takes = {name: tried(kind, **{"lr": 0.1, **options}) for name, (kind, options) in FUSED.items()}
    assert all(took for name, took in takes.items() if name != "Adagrad" or not OLD)
    assert not tried(torch.optim.AdamW, lr=0.1)
    assert not tried(torch.optim.AdamW, lr=0.1, foreach=True)
    assert not tried(Careless, lr=0.1, fused=True)
    assert not tried(optim.AdamW, lr=0.1)
    model, optimizer = build(kind=Careless, fused=True)
    for _ in range(3):
        one(optimizer, model)
        assert optimizer.outcome is None
    assert optimizer.inner.calls == 3


@examples(times=8)
@given(
    st.floats(1e-300, 1e300), st.floats(1e-8, 1e8), st.floats(1e-3, 1e6), st.lists(st.floats(-1e6, 1e6), min_size=3),
    st.sampled_from([torch.float32, torch.float64]), st.booleans(),
)  # fmt: skip
def test_factors_on_the_device_have_the_bits_of_the_hosts(
    power: float, max_norm: float, scale: float, values: list[float], dtype: torch.dtype, kept: bool
) -> None:
    clipping = Clipping(max_norm, LossScaler(scale=scale, min_scale=1e-9), "skip")
    norm = torch.tensor(power, dtype=torch.float64)
    host = clipping.factors(power, clipping.unscale)
    device = clipping.factors_on_device(norm)
    assert bits(torch.tensor(host.clip, dtype=torch.float64)) == bits(device.clip)
    given = torch.tensor(values, dtype=dtype)
    ours, theirs = given.clone(), given.clone()
    paid: list[bool] = []
    living: Any = SimpleNamespace(paid=lambda: paid.append(True)) if kept else None
    assert bits(device.apply(ours, kept=living)) == bits(host.apply(theirs, kept=living))
    assert len(paid) == (0 if living is None else sum(not factors.neutral for factors in (device, host)))
    assert bits(ours) == bits(theirs)  # what is kept
    assert float(device.found_inf) == 0.0  # type: ignore[arg-type]
    bad = clipping.factors_on_device(norm * math.inf)
    assert float(bad.found_inf) == 1.0  # type: ignore[arg-type]
    assert bits(bad.clip) == bits(torch.tensor(1.0, dtype=torch.float64))


def test_an_outcome_is_its_numbers() -> None:
    norm, sums = torch.tensor(0.1, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert Outcome(norm, sums).read() == (0.1, [1.0, 2.0])
    assert Outcome(norm, None).read() == (0.1, [])
    assert Outcome(None, sums).read() == (None, [1.0, 2.0])


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"loss_scale": "dynamic"}, {"clip_norm": 0.0}, {"clip_norm": math.inf}])
def test_nothing_is_read_in_a_step(
    stage: int, world: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    reads = counted_reads(monkeypatch)

    def fn(rank: int) -> None:
        model, optimizer = build(stage=stage, fused=True, param_persistence_threshold=0, **options)
        one(optimizer, model)
        for _ in range(3):
            before = sum(outcome is optimizer.outcome for outcome in reads)
            with nothing_is_read():
                one(optimizer, model)
            assert before == 0
            assert sum(outcome is optimizer.outcome for outcome in reads) == 0

    sim.run(world, fn)
    assert len(reads) == 3 * world  # each in the step after, and none of the last


@pytest.mark.parametrize("look", ["tolist", "item", "numpy", "nonzero", "__bool__", "__float__", "unique"])
def test_what_looks_is_caught(look: str) -> None:
    with pytest.raises(LookedAtError), nothing_is_read():
        getattr(torch.ones(1), look)()


@pytest.mark.parametrize("options", [{"cls": ZeroOptimizer, "fused": True}, {"kind": optim.AdamW}, {}])
def test_a_step_that_waits_looks(options: dict[str, Any]) -> None:
    model, optimizer = build(**options)
    one(optimizer, model)
    with pytest.raises(LookedAtError), nothing_is_read():
        one(optimizer, model)


def test_to_read_starts_no_collective() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(fused=True, check=True)
        for step in range(3):
            one(optimizer, model)
            table = optimizer.comm.log.table()
            if rank == 0 or step == 2:  # others never ask
                assert optimizer.grad_norm
                assert optimizer.tallied == [2.0]
            assert optimizer.comm.log.table() == table

    sim.run(2, fn)


def test_an_update_that_fails_leaves_what_was_measured() -> None:
    model, optimizer = build(fused=True, loss_scale=LossScaler(scale=8.0, window=1))
    one(optimizer, model)
    optimizer.backward(model(batch(0, 1, 0, torch.float32)).square().mean())
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "none"
    with pytest.raises(TypeError):
        optimizer.step()
    assert not hasattr(optimizer.inner, "found_inf")
    assert optimizer.loss_scale == 32.0
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    assert optimizer.loss_scale == 64.0
    assert optimizer.num_skipped == 0


def test_an_error_for_gradients_that_are_not_finite_is_one_at_once() -> None:
    model, optimizer = build(fused=True, nonfinite_gradients="error")
    one(optimizer, model)
    with pytest.raises(NonFiniteGradientsError):
        one(optimizer, model, math.inf)


def test_closing_reads_first() -> None:
    model, optimizer = build(fused=True)
    one(optimizer, model)
    one(optimizer, model, math.nan)
    optimizer.close()
    assert optimizer.num_skipped == 1
