"""Law 2 and 3 on the tensor axis: any plan, any heads, degree 1 to 5, with ZeRO 0 to 3, trains as one process does.

Losses, gathered gradients' norm and the parameters after k AdamW steps equal the whole model's, with other data on each
data-parallel rank. A state saved at one degree and stage goes on at any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import pick, whole
from tests.laws.test_families import states as states_of
from tests.processes import run_ranks
from tests.profiles import examples
from tests.tensor.models import Decoder, Shape, plan_of
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from zoo import sim
from zoo.layout import Box
from zoo.tensor import split
from zoo.zero import ZeroOptimizer

STEPS = 3
RATE: Any = {"lr": 0.01, "eps": 1e-4}
"""The gradient of a bias of keys is zero, up to rounding: nothing divides by it."""


@dataclass(frozen=True)
class Case:
    shape: Shape = field(default_factory=Shape)
    degree: int = 2
    data: int = 2
    stage: int = 3
    bucket_size: int = 1
    threshold: int = 0
    clip: float = 0.0
    order: tuple[str, ...] = ("data", "tensor")
    sequence: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv = draw(st.integers(1, 3))
    shape = Shape(
        heads=kv * draw(st.integers(1, 3)), kv=kv, inner=draw(st.integers(5, 8)), vocab=draw(st.integers(5, 9)),
        layers=draw(st.integers(1, 2)), layout=draw(st.sampled_from(["apart", "parts", "heads", "groups"])),
        bias=draw(st.booleans()), tied=draw(st.booleans()), norm=draw(st.booleans()), packed=draw(st.booleans()),
    )  # fmt: skip
    degree = draw(st.integers(1, min(5, shape.heads)))
    return Case(
        shape=shape, degree=degree, data=draw(st.integers(1, 2)), stage=draw(st.integers(0, 3)),
        bucket_size=draw(st.sampled_from([1, 10**6])), threshold=draw(st.sampled_from([0, 10])),
        clip=draw(st.sampled_from([0.0, 0.3])), order=tuple(draw(st.permutations(("data", "tensor")))),
        sequence=draw(st.booleans()),
    )  # fmt: skip


def tokens(case: Case, replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(case.shape.vocab, (2, 5), generator=generator)


def loss_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def reference(case: Case, steps: int = STEPS) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = Decoder(case.shape)
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    losses, norms = [], []
    for step in range(steps):
        each = [loss_of(model, tokens(case, replica, step)) / case.data for replica in range(case.data)]
        sum(each, torch.zeros((), dtype=torch.float64)).backward()
        losses.append(sum(float(loss.detach()) for loss in each))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def build(case: Case) -> tuple[Any, Decoder, ZeroOptimizer, int]:
    sizes = {"data": case.data, "tensor": case.degree}
    mesh = init_device_mesh("cpu", tuple(sizes[axis] for axis in case.order), mesh_dim_names=case.order)
    model = Decoder(case.shape)
    split(model, plan_of(case.shape), mesh, sequence=case.sequence)
    optimizer = ZeroOptimizer(
        model, optimizer=torch.optim.AdamW, **RATE, stage=case.stage, mesh=mesh, data_axes=["data"],
        clip_norm=case.clip, reduce_bucket_size=case.bucket_size, param_persistence_threshold=case.threshold,
    )  # fmt: skip
    return mesh, model, optimizer, mesh.get_local_rank("data")


def train(case: Case, model: Decoder, optimizer: ZeroOptimizer, replica: int, steps: range) -> tuple[list[float], ...]:
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, tokens(case, replica, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(optimizer.grad_norm or 0.0) if case.clip else 0.0)
    return losses, norms


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(case=cases())
@example(case=Case(shape=Shape(heads=9, kv=3), degree=2, sequence=True))
@example(case=Case(shape=Shape(heads=9, kv=3, layout="parts"), degree=4, data=1, stage=2))
@example(case=Case(shape=Shape(heads=6, kv=3, layout="groups", norm=True), degree=3, stage=1, clip=0.3))
@example(  # parts of other sizes, and the same buckets
    case=Case(
        shape=Shape(heads=3, kv=1, inner=5, vocab=5, bias=False, tied=False), degree=3, data=1, stage=0,
        bucket_size=10**6, threshold=10,
    )
)  # fmt: skip
@example(case=Case(shape=Shape(heads=5, kv=5, vocab=7, tied=False), degree=5, data=1, stage=0))
@example(  # parts of other sizes, and gathers at the same places
    case=Case(
        shape=Shape(heads=2, kv=2, inner=5, vocab=5, layers=1, layout="parts", tied=False, packed=True), data=1,
        sequence=True,
    )
)  # fmt: skip
def test_any_plan_at_any_degree_and_stage_trains_as_one_process(case: Case) -> None:
    losses, norms, expected = reference(case)

    def fn(rank: int) -> Any:
        _, model, optimizer, replica = build(case)
        found = train(case, model, optimizer, replica, range(STEPS))
        return replica, *found, optimizer.consolidated_parameters()

    everyone = sim.run(case.degree * case.data, fn, seed=0)
    sums = [0.0] * STEPS
    for replica, of_rank, of_norm, parameters in everyone:
        same = next(other for other in everyone if other[0] == replica)
        assert of_rank == pytest.approx(same[1], rel=1e-12)
        sums = [a + b / (case.data * case.degree) for a, b in zip(sums, of_rank, strict=True)]
        if case.clip:
            assert of_norm == pytest.approx(norms, rel=1e-12)
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    assert sums == pytest.approx(losses, rel=1e-12)


GLOO = Case(shape=Shape(heads=9, kv=3), degree=2, data=1, stage=3, clip=0.3)


def of_rank(rank: int) -> Any:
    _, model, optimizer, replica = build(GLOO)
    losses, norms = train(GLOO, model, optimizer, replica, range(STEPS))
    return losses, norms, optimizer.consolidated_parameters()


@pytest.mark.slow
def test_over_gloo() -> None:
    losses, norms, expected = reference(GLOO)
    for of_losses, of_norms, parameters in run_ranks(2, of_rank).values():
        assert of_losses == pytest.approx(losses, rel=1e-12)
        assert of_norms == pytest.approx(norms, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def state_of(states: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    return whole([found for found, _ in states])


def go_on(states: list[Any], case: Case, steps: range) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The states of all ranks of ``case`` that have loaded, and the parameters after ``steps``."""
    kept = state_of(states)
    scalars = {key: value for _, found in states for key, value in found.items()}

    def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        return pick(kept[name, role], start, length)

    def fn(rank: int) -> Any:
        _, model, optimizer, replica = build(case)
        optimizer.load_state(read, scalars)
        train(case, model, optimizer, replica, steps)
        return (states_of(optimizer), optimizer.state_scalars()), optimizer.consolidated_parameters()

    found = sim.run(case.degree * case.data, fn, seed=0)
    return [state for state, _ in found], found[0][1]


@pytest.mark.dear
@examples(times=0.34)
@given(case=cases(), other=cases())
@example(case=Case(shape=Shape(heads=9, kv=3)), other=Case(degree=4, data=1, stage=1))
def test_a_state_goes_on_at_another_degree_and_stage(case: Case, other: Case) -> None:
    """A → B → A changes no bit, and each of them goes on as if nothing had been."""
    other = replace(other, shape=case.shape, degree=min(other.degree, case.shape.heads), data=case.data, clip=case.clip)
    _, _, expected = reference(case)

    def begin(rank: int) -> Any:
        _, model, optimizer, replica = build(case)
        train(case, model, optimizer, replica, range(2))
        return states_of(optimizer), optimizer.state_scalars()

    first = sim.run(case.degree * case.data, begin, seed=0)
    there, _ = go_on(first, other, range(0))
    back, _ = go_on(there, case, range(0))
    for found in (there, back):
        same = state_of(found)
        assert same.keys() == state_of(first).keys()
        assert all(torch.equal(same[key], value) for key, value in state_of(first).items())
    for here in (other, case):
        _, parameters = go_on(there, here, range(2, STEPS))
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
