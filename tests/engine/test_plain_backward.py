"""``loss.backward()`` in the place of ``engine.backward(loss)``: the same gradients, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_engine import net, stage, start
from tests.engine.test_steps import gradients
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.engine import RepeatingLoader, initialize


@pytest.mark.dear
@examples(times=2)
@given(st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 4]), st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_plain_backward_is_the_engines(number: int, accumulation: int, plain: list[bool]) -> None:
    changes = {**stage(number), "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}
    changes |= {"gradient_accumulation_steps": accumulation, "scheduler": None}

    def job(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = []
        for mixed in (False, True):
            engine = start(changes)
            batches = iter(RepeatingLoader(engine.dataloader))
            for i in range(2 * accumulation):
                loss = engine(*next(batches))
                if mixed and plain[i]:
                    loss.backward()
                else:
                    engine.backward(loss)
                engine.step()
            assert engine.global_steps == 2
            found.append(engine.optimizer.consolidated_parameters())
        return found[0], found[1]

    for expected, got in sim.run(2, job):
        assert all(torch.equal(got[name], expected[name]) for name in expected)


class Pair(NamedTuple):
    hidden: torch.Tensor
    made: Callable[[], torch.Tensor]


class Nested(nn.Module):
    """One output is made from another, one is a closure's, and one is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Pair, Iterator[torch.Tensor]]:
        hidden = torch.tanh(self.encoder(x))
        logits = self.head(hidden)
        self.kept = hidden.square().mean()
        return logits.logsumexp(-1).mean(), logits, Pair(hidden, lambda: logits.exp().mean()), iter([hidden.sin()])

    def loss(self, outputs: Any) -> torch.Tensor:
        loss, logits, pair, parts = outputs
        penalty = sum((p.square().sum() for p in self.parameters()), torch.zeros(()))
        more = logits.cos().mean() + pair.hidden.abs().mean() + pair.made() + next(parts).mean()
        return loss + more + self.kept + 0.01 * penalty


@examples(times=2)
@given(st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 100))
def test_a_plain_backward_divides_what_arrives_at_parameters(stage: int, g: int, world: int, seed: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": g, "gradient_clipping": 0.3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20},
    }  # fmt: skip

    def batch(rank: int, number: int) -> torch.Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * seed + 10 * number + rank))

    def job(rank: int, plainly: bool) -> dict[str, torch.Tensor]:
        engine = initialize(config, Nested())[0]
        for number in range(2 * g):
            # At stage 3 a penalty reads parameters that are whole inside of a forward only.
            with engine.sharded.gathered():
                loss = engine.module.loss(engine(batch(rank, number)))
                loss.backward() if plainly else engine.backward(loss)
            engine.step()
        assert engine.global_steps == 2
        found: dict[str, torch.Tensor] = engine.optimizer.consolidated_parameters()
        return found

    twin = Nested()
    for step in range(2):
        numbers = range(step * g, (step + 1) * g)
        sum(twin.loss(twin(batch(r, n))) for r in range(world) for n in numbers).div(world * g).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        with torch.no_grad():
            for p in twin.parameters():
                p -= 0.5 * p.grad  # type: ignore[operator]
                p.grad = None
    plain, by_engine = (sim.run(world, lambda rank, how=how: job(rank, how)) for how in (True, False))  # type: ignore[misc]
    for got, same in zip(plain, by_engine, strict=True):
        for name, p in twin.named_parameters():
            assert torch.equal(got[name], same[name])
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_a_plain_backward_that_cannot_give_the_same_bits_is_refused() -> None:
    engine = start({"gradient_accumulation_steps": 3, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    batch = next(iter(engine.dataloader))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3.* Call\s+engine.backward\(loss\)"):
        engine(*batch).backward()
    engine.zero_grad()
    engine.backward(engine(*batch))


def test_gradients_between_micro_batches_are_divided_and_strays_are_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    engine = initialize({**config, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}, Nested())[0]
    twin, x = Nested(), torch.randn(3, 4)
    engine.module.loss(engine(x)).backward()
    twin.loss(twin(x)).div(4).backward()
    for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
        p.grad.mul_(0.5)  # what the user does to it stays
        q.grad.mul_(0.5)
    engine.module.loss(engine(2 * x)).backward()
    twin.loss(twin(2 * x)).div(4).backward()
    for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    engine.backward(engine.module.loss(engine(x)))
    engine.module.head.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="a penalty on the weights alone"):
        engine.backward(engine.module.loss(engine(x)))


@pytest.mark.parametrize("number", [0, 1])
def test_a_gradient_that_is_kept_between_micro_batches_goes_on_being_the_gradient(number: int) -> None:
    zero = {"zero_optimization": {"stage": number}}
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, **zero}
    engine = initialize({**config, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}, Nested())[0]
    twin, kept, wanted = Nested(), None, None
    for micro_batch in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(micro_batch))
        engine.module.loss(engine(x)).backward()
        engine.step()
        twin.loss(twin(x)).div(4).backward()
        kept = kept or [p.grad for p in engine.module.parameters()]  # taken once, as torch's objects may be
        wanted = wanted or [p.grad for p in twin.parameters()]
        torch.testing.assert_close([g.clone() for g in kept if g is not None], wanted)


def test_what_the_user_does_to_a_loss_is_not_in_the_record() -> None:
    engine = start({"gradient_accumulation_steps": 2, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    batches, wanted = iter(RepeatingLoader(engine.dataloader)), []
    for _ in range(2):
        loss = engine(*next(batches))
        engine.backward(loss)
        wanted.append(float(loss))
        loss.detach().mul_(100)  # as an all_reduce for a log does
        engine.step()
    assert engine.record is not None
    assert engine.record.loss == pytest.approx(sum(wanted) / 2, rel=1e-6)
    mean = engine.train_batch()
    before = engine.record.loss
    mean.mul_(100)
    assert engine.record.loss == before


def test_two_engines_divide_a_loss_that_they_share_once_each() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    first, second = (initialize({**config, "gradient_accumulation_steps": g}, Chain())[0] for g in (2, 4))
    twins, x = (Chain(), Chain()), torch.randn(3, 4)
    for twin, engine in zip(twins, (first, second), strict=True):
        twin.load_state_dict(engine.module.state_dict())
    first.backward(second(first(x)[0])[0].sum())
    twins[1](twins[0](x)[0])[0].sum().backward()
    for engine, twin, g in ((first, twins[0], 2), (second, twins[1], 4)):
        for name, p in twin.named_parameters():
            torch.testing.assert_close(gradients(engine)[name], p.grad / g)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.inner(x)), x


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_outputs_that_go_through_the_model_again_are_divided_once(accumulation: int) -> None:
    torch.manual_seed(0)
    model, twin = Chain(), Chain()
    twin.load_state_dict(model.state_dict())
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = initialize({**config, **sgd}, model)[0]
    x = torch.randn(3, 4, requires_grad=True)

    def loss_of(call: Any) -> torch.Tensor:
        first, same = call(x)
        second, passed = call(first)
        return (first * second).sum() + passed.square().mean() + same.exp().sum()

    loss_of(engine).backward()
    got, got_input = gradients(engine), x.grad
    x.grad = None
    loss_of(twin).backward()
    for name, p in twin.named_parameters():
        assert p.grad is not None
        assert torch.allclose(got[name], p.grad / accumulation, rtol=1e-5, atol=1e-6)
    assert torch.allclose(got_input, x.grad, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_autograd_grad_is_no_training_and_is_not_divided() -> None:
    engine = start({"gradient_accumulation_steps": 4, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    x, y = next(iter(engine.dataloader))
    x.requires_grad_()
    (got,) = torch.autograd.grad(engine(x, y), x)
    (expected,) = torch.autograd.grad(net()(x, y), x)
    assert torch.allclose(got, expected)
    assert not engine.optimizer.holds_gradients


def test_under_fp16_a_plain_backward_is_refused() -> None:
    engine = start({"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}})
    loss = engine(*next(iter(engine.dataloader)))
    with pytest.raises(ValueError, match="backward was called on a loss without it") as told:
        loss.backward()
    assert isinstance(told.value, RuntimeError), "as autograd's own errors"
