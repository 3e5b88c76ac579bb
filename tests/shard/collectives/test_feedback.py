"""Law 7: a lossy reduction with error feedback loses nothing, over skipped steps and other numbers of ranks too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.zero.saved import collect, whole
from torch import nn

from zoo import sim
from zoo.layout import FlatLayout, LogicalTensor
from zoo.shard.collectives.feedback import Lossy
from zoo.zero import Stage3Optimizer, ZeroOptimizer

OPTIONS = {"zero_quantized_gradients": True, "quantized_gradients_feedback": True, "param_persistence_threshold": 0}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))


def build(rank: int, nodes: int = 1, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = make()
    given = {**OPTIONS, "optimizer": torch.optim.SGD, "lr": 0.2, "ranks_per_node": nodes, **options}
    return model, Stage3Optimizer(model, **given)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    (model(data(rank, step)).square().mean() * factor).backward()


class Sum:
    """An inner reduction among one rank, and a compressor that keeps two digits."""

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Any:
        out.copy_(coarse(full))

        class Done:
            def wait(self) -> None: ...

        return Done()

    def hops(self, numel: int, itemsize: int) -> list[Any]:
        return []


ALONE: Any = SimpleNamespace(world=None, shard=SimpleNamespace(size=1), replicas=SimpleNamespace(rank=0), place=0)


def coarse(values: torch.Tensor) -> torch.Tensor:
    return (values * 4).round() / 4


@examples(times=5)
@given(st.lists(st.sampled_from(["reduce", "commit", "roll back"]), min_size=1, max_size=12), st.integers(0, 9))
def test_what_is_sent_and_what_is_kept_is_what_was_given(program: list[str], seed: int) -> None:
    """In multiples of 2⁻¹⁰, so that every sum is exact: Σ sent + error = Σ given, over what steps have used."""
    generator = torch.Generator().manual_seed(seed)
    layout = FlatLayout.pack([LogicalTensor(name="w", shape=(6,), dtype="float32")], align=1, multiple=1)
    feedback = Lossy(Sum(), coarse, ALONE, layout)
    given_, sent, pending = torch.zeros(6), torch.zeros(6), []
    for action in program:
        if action == "reduce":
            values = torch.randint(-999, 999, (6,), generator=generator) / 1024
            out = torch.empty(6)
            feedback.start(values, out, "").wait()
            pending.append((values, out))
            continue
        if action == "commit":
            feedback.commit()
            for values, out in pending:
                given_ += values
                sent += out
        else:
            feedback.roll_back()
        pending.clear()
        kept = feedback.error if feedback.error is not None else torch.zeros(6)
        assert torch.equal(sent + kept, given_)


# Of two hops the second sends sums, whose errors nobody keeps: it takes more steps until the first one's show.
@pytest.mark.dear
@pytest.mark.parametrize(("nodes", "steps", "ratio"), [(1, 40, 0.2), pytest.param(2, 120, 0.7, marks=pytest.mark.slow)])
def test_training_follows_exact_gradients_more_closely(nodes: int, steps: int, ratio: float) -> None:
    def fn(rank: int, quantised: bool, feedback: bool) -> dict[str, torch.Tensor]:
        model, optimizer = build(rank, nodes, zero_quantized_gradients=quantised, quantized_gradients_feedback=feedback)
        for step in range(steps):
            backward(model, rank, step % 5)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    ways = ((False, False), (True, False), (True, True))
    exact, plain, fed = (sim.run(4, lambda r, q=q, f=f: fn(r, q, f))[0] for q, f in ways)

    def away(found: dict[str, torch.Tensor]) -> float:
        return float(torch.cat([(found[n] - exact[n]).flatten() for n in exact]).norm())

    assert away(fed) < ratio * away(plain)


def total(state: dict[tuple[str, str], torch.Tensor], name: str, world: int) -> torch.Tensor:
    """s + 1/N Σ_r e_r: what the next means still have to be increased by."""
    owed = state.get((name, "owed"), torch.zeros(()))
    return owed + sum(state.get((name, f"feedback.{r}"), torch.zeros(())) for r in range(world)) / world


@pytest.mark.matrix
@pytest.mark.parametrize("other", [1, 2, 3, 4])
def test_errors_survive_another_number_of_ranks(other: int) -> None:
    def save(rank: int) -> Any:
        model, optimizer = build(rank)
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        saved = collect(optimizer), optimizer.state_scalars()
        backward(model, rank, 3)
        optimizer.step()
        return *saved, optimizer.consolidated_parameters()

    saved = sim.run(4, save)
    state = whole([found for found, _, _ in saved])
    scalars = {k: v for _, found, _ in saved for k, v in found.items()}
    names = [name for name, _ in make().named_parameters()]
    assert any(bool(total(state, name, 4).abs().max() > 0) for name in names)

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        return state[name, role].view(-1)[start : start + length]

    def load(rank: int) -> Any:
        model, optimizer = build(rank)
        optimizer.load_state(read, scalars)
        found = collect(optimizer)
        backward(model, rank, 3)
        optimizer.step()
        after = optimizer.consolidated_parameters()
        return found, after, [f.owed is None for f in optimizer._feedback]

    loaded = sim.run(other, load)
    again = whole([found for found, _, _ in loaded])
    if other > 1:  # one rank sends nothing, so nothing is lost, and there is nobody to owe it
        for name in names:
            torch.testing.assert_close(total(again, name, other), total(state, name, 4), rtol=1e-6, atol=1e-8)
    if other == 4:
        for name in names:
            assert torch.equal(loaded[0][1][name], saved[0][2][name])
    assert all(all(paid) for _, _, paid in loaded)


def test_a_step_that_is_skipped_leaves_the_errors() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(rank, clip_norm=1.0)
        backward(model, rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = [f.error.clone() for f in optimizer._feedback if f.error is not None]
        assert before
        backward(model, rank, 1, float("nan") if rank == 1 else 1.0)
        optimizer.step()
        assert optimizer.skipped
        optimizer.zero_grad()
        backward(model, rank, 2)
        optimizer.zero_grad()  # and so do gradients that are dropped
        after = [f.error for f in optimizer._feedback if f.error is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert optimizer.memory()["feedback"] == sum(e.nbytes for e in before)

    sim.run(2, fn)


def test_a_step_that_raises_because_of_its_gradients_leaves_the_errors() -> None:
    def train(rank: int, fails: bool) -> dict[str, torch.Tensor]:
        model, optimizer = build(rank, clip_norm=1.0, nonfinite_gradients="error")
        for step in range(3):
            if fails and step:
                before = [f.error.clone() for f in optimizer._feedback if f.error is not None]
                backward(model, rank, 7, float("nan") if rank == 1 else 1.0)
                with pytest.raises(FloatingPointError, match="norm of the gradients is nan"):
                    optimizer.step()
                assert optimizer.memory()["feedback"] == sum(e.nbytes for e in before)
                after = [f.error for f in optimizer._feedback if f.error is not None]
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    failed, smooth = (sim.run(2, lambda rank, f=f: train(rank, f))[0] for f in (True, False))
    assert all(torch.equal(failed[name], smooth[name]) for name in smooth)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="there is no error to feed back"):
        Stage3Optimizer(make(), lr=0.1, quantized_gradients_feedback=True)

    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match="with a loss scale"):
            build(rank, loss_scale="dynamic")

    sim.run(2, fn)
