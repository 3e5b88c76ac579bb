"""What a script may do between two steps: plain backward, boundaries, sizes, evaluation, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_engine import BASE, data, net, stage, start
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.engine import Engine, RepeatingLoader, initialize


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """After backwards and before the step, on one rank."""
    return {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}


# -- loss.backward() --------------------------------------------------------------------------------------------------


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


# -- boundaries -------------------------------------------------------------------------------------------------------


def test_an_override_of_the_boundary_wins() -> None:
    engine = start({"gradient_accumulation_steps": 4, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    batches = iter(RepeatingLoader(engine.dataloader))

    def one() -> int:
        engine.backward(engine(*next(batches)))
        engine.step()
        return engine.global_steps

    assert [one() for _ in range(4)] == [0, 0, 0, 1]
    engine.set_gradient_accumulation_boundary(True)
    assert engine.is_gradient_accumulation_boundary()
    assert [one() for _ in range(2)] == [2, 3]
    engine.set_gradient_accumulation_boundary(False)
    assert [one() for _ in range(6)] == [3] * 6
    with pytest.raises(ValueError, match="gradients that no update has used"):
        engine.save_checkpoint("/nowhere")
    engine.set_gradient_accumulation_boundary(True)
    assert one() == 4
    engine.set_gradient_accumulation_boundary(None)
    assert [one() for _ in range(4)] == [4, 4, 4, 5]


def test_the_middle_of_a_step_is_gradients_and_not_a_count(tmp_path: Path) -> None:
    engine = start({"gradient_accumulation_steps": 2, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    engine.backward(engine(*next(iter(engine.dataloader))))
    with pytest.raises(ValueError, match=r"save_checkpoint\(\) in the middle of a step"):
        engine.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"train_batch\(\) in the middle of a step"):
        engine.train_batch()
    engine.zero_grad()
    engine.save_checkpoint(tmp_path)
    assert engine.record is None
    engine.train_batch()
    assert engine.record is not None
    assert engine.record.samples == 4  # those of the dropped micro-batch do not count


def test_after_an_exception_the_next_step_is_as_if_nothing_had_been() -> None:
    changes = {"gradient_accumulation_steps": 2, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}
    engine, twin = start(changes), start(changes)
    batches = list(engine.dataloader)
    with pytest.raises(StopIteration):
        engine.train_batch(iter(batches[:1]))
    with pytest.raises(TypeError):
        engine.train_batch(iter([batches[0], (1,)]))
    assert float(engine.train_batch(iter(batches[:2]))) == float(twin.train_batch(iter(batches[:2])))
    assert engine.record is not None
    assert engine.record.samples == 4
    mine, other = engine.optimizer.consolidated_parameters(), twin.optimizer.consolidated_parameters()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_no_sync_keeps_ranks_silent(number: int) -> None:
    def job(rank: int) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = []
        for quiet in (False, True):
            engine = start({**stage(number), "scheduler": None, "train_batch_size": 8})
            batches = list(engine.dataloader)[:2]
            engine.set_gradient_accumulation_boundary(False)
            engine.module(*batches[0])
            before = engine.comm.log.ops["reduce_scatter"].count if "reduce_scatter" in engine.comm.log.ops else 0
            if quiet:
                with engine.no_sync():
                    engine.backward(engine(*batches[0]))
                    with pytest.raises(ValueError, match=r"step\(\) inside of no_sync"):
                        engine.step()
                after = engine.comm.log.ops["reduce_scatter"].count if "reduce_scatter" in engine.comm.log.ops else 0
                sent = after - before
            else:
                engine.backward(engine(*batches[0]))
            engine.step()
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(*batches[1]))
            engine.step()
            found.append(engine.optimizer.consolidated_parameters())
        return sent, found[0], found[1]

    for sent, loud, silent in sim.run(2, job):
        assert sent == 0
        assert all(torch.allclose(loud[name], silent[name], rtol=1e-5, atol=1e-6) for name in loud)


def test_scale_wrt_gas() -> None:
    engine = start({"gradient_accumulation_steps": 4, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
    batch = next(iter(engine.dataloader))
    engine.backward(engine(*batch))
    divided = gradients(engine)
    engine.zero_grad()
    engine.backward(engine(*batch), scale_wrt_gas=False)
    assert all(torch.allclose(g, 4 * divided[name]) for name, g in gradients(engine).items())
    with pytest.raises(ValueError, match=r"got a tensor of shape \(2,\)"):
        engine.backward(torch.zeros(2))
    with pytest.raises(ValueError, match="got a float"):
        engine.backward(1.0)  # type: ignore[arg-type]


def test_another_batch_size() -> None:
    def job(rank: int) -> list[int]:
        engine = start({"train_batch_size": None, "train_micro_batch_size_per_gpu": 2})
        found = []
        for size in (4, 12, 8):
            engine.set_train_batch_size(size)
            assert engine.train_batch_size == size
            engine.train_batch()
            assert engine.record is not None
            found.append(engine.record.samples)
        with pytest.raises(ValueError, match=r"set_train_batch_size\(6\); it must be a multiple of 4, one micro-batch"):
            engine.set_train_batch_size(6)
        return found

    assert sim.run(2, job) == [[4, 12, 8]] * 2


def test_arguments_of_the_schedule() -> None:
    given: list[Any] = []

    class Schedule:
        def step(self, metrics: float | None = None) -> None:
            given.append(metrics)

    schedule = Schedule()
    engine = initialize({**BASE, "scheduler": None}, net(), training_data=data(), lr_scheduler=schedule)[0]
    assert engine.lr_scheduler is schedule
    engine.backward(engine(*next(iter(engine.dataloader))))
    engine.step(lr_kwargs={"metrics": 0.5})
    assert given == [0.5]


# -- evaluation only, several engines, the end ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
def test_without_an_optimizer_it_only_evaluates(number: int, tmp_path: Path) -> None:
    def job(rank: int) -> list[float]:
        trained = start(stage(number))
        trained.train_batch()
        trained.save_checkpoint(tmp_path)
        batch = next(iter(trained.dataloader))
        expected = float(trained.eval_batch(batch))
        changes = {**BASE, **stage(number), "optimizer": None, "scheduler": None}
        engine, optimizer, loader, schedule = initialize(changes, net())
        assert (optimizer, loader, schedule) == (None, None, None)
        engine.load_checkpoint(tmp_path)
        for call in (engine.train_batch, engine.step, engine.get_lr):
            with pytest.raises(ValueError, match="of an engine without optimizer, which only evaluates"):
                call()
        assert engine.save_16bit_model(tmp_path / "weights") is (number != 3)
        found = [expected, float(engine.eval_batch(batch)), float(engine.eval()(*batch))]
        engine.destroy()
        assert all(p.numel() for p in engine.module.parameters())
        return found

    for expected, first, second in sim.run(2, job):
        assert first == pytest.approx(expected, rel=1e-6)
        assert second == pytest.approx(expected, rel=1e-6)


def test_several_engines_train_side_by_side() -> None:
    def job(rank: int) -> tuple[list[float], list[float]]:
        alone = start(stage(3))
        expected = [float(alone.train_batch()) for _ in range(3)]
        one, other = start(stage(3)), start(stage(1))
        found = []
        for _ in range(3):
            found.append(float(one.train_batch()))
            other.train_batch()
        return expected, found

    for expected, found in sim.run(2, job):
        assert found == expected


@pytest.mark.parametrize("number", [0, 3])
def test_after_the_end_the_model_is_an_ordinary_one(number: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage(number))
        engine.train_batch()
        engine.destroy()
        engine.destroy()
        with pytest.raises(ValueError, match=r"train_batch\(\) after destroy\(\)"):
            engine.train_batch()
        engine.module(*next(iter(engine.dataloader))).backward()
        assert all(p.grad is not None for p in engine.module.parameters())

    sim.run(2, job)


def test_inputs_keep_their_dtype() -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))  # not a dtype to cast everything to

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return (x.float() * self.first.float()).mean()

    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    for more in ({}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "auto_cast": True}}):
        initialize({**config, **more}, Looks())[0].train_batch(iter([torch.ones(2, 2, dtype=torch.float64)]))
    assert seen == [torch.float64, torch.float64, torch.bfloat16]


def test_torch_autocast() -> None:
    engine = start({"torch_autocast": {"enabled": True}})
    batch = next(iter(engine.dataloader))
    got = float(engine.eval()(*batch).detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert got == float(net()(*batch).detach())
    assert got != float(net()(*batch).detach())
    engine.train_batch()


def test_a_loader_of_ones_own_resumes(tmp_path: Path) -> None:
    class Stream:
        """Batches without length, as of streaming data."""

        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Any:
            while self.position < 20:
                self.position += 1
                dice = torch.Generator().manual_seed(self.position)
                x = torch.randn(8, 5, generator=dice)
                yield x, x.sum(1, keepdim=True)
            self.position = 0

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    def begin() -> Engine:
        return initialize(BASE, net(), training_data=Stream())[0]

    engine, again = begin(), begin()
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    expected = [float(engine.train_batch()) for _ in range(3)]
    again.load_checkpoint(tmp_path)
    assert [float(again.train_batch()) for _ in range(3)] == expected


def test_what_is_no_data() -> None:
    with pytest.raises(ValueError, match="training_data is a int; it is a data set"):
        initialize(BASE, net(), training_data=3)
    with pytest.raises(ValueError, match="collate_fn with training_data that is a loader"):
        initialize(BASE, net(), training_data=iter([]), collate_fn=list)
    with pytest.raises(StopIteration, match="has no batches"):
        next(RepeatingLoader([]))


def test_joining_the_process_group() -> None:
    with pytest.raises(ValueError, match="no launcher has set RANK and WORLD_SIZE"):
        initialize(BASE, net(), dist_init_required=True)
    initialize(BASE, net(), dist_init_required=False)

    sim.run(2, lambda rank: initialize(BASE, net(), dist_init_required=True) and None)  # it is there already


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": "fp32"},
    ],
)
def test_how_gradients_travel_changes_nothing_but_rounding(number: int, changes: dict[str, Any]) -> None:
    def job(rank: int) -> tuple[list[float], list[float]]:
        plain, other = start(stage(number)), start({**stage(number), **changes})
        return [float(plain.train_batch()) for _ in range(3)], [float(other.train_batch()) for _ in range(3)]

    for expected, found in sim.run(2, job):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_type_in_which_micro_batches_are_added_up(number: int) -> None:
    """What the sums are is a law of its own (``tests/laws/test_accumulate_dtype.py``)."""
    changes = {**stage(number), "bf16": {"enabled": True, "auto_cast": True}, "scheduler": None, "gradient_clipping": 0}
    changes |= {"gradient_accumulation_steps": 4, "train_batch_size": None, "train_micro_batch_size_per_gpu": 2}

    def job(rank: int) -> None:
        for name, kept in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
            engine = start({**changes, "data_types": {"grad_accum_dtype": name}})
            optimizer = engine.optimizer
            assert optimizer is not None
            batches = iter(engine.dataloader)
            for micro in range(4):
                engine.backward(engine(*next(batches)).float())
                if micro == 3:
                    assert optimizer.memory()["gradients"] == optimizer.forecast().gradients_bytes
                    assert {p.grad.dtype for p in engine.module.parameters() if p.grad is not None} == {kept}
                engine.step()
            assert engine.global_steps == 1

    sim.run(2, job)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(500, 8, sparse=sparse)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(tokens)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_embeddings_travel_as_rows(number: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config |= stage(number)

    def job(rank: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        found = []
        for rows, sparse in ((False, False), (False, True), (True, False), (True, True)):
            engine = initialize({**config, "sparse_gradients": rows}, Words(sparse))[0]
            sent = 0
            for step in range(3):
                random = torch.Generator().manual_seed(10 * step + rank)
                loss = engine(torch.randint(500, (4,), generator=random))
                before = engine.comm.log.wire_bytes
                engine.backward(loss)
                sent += engine.comm.log.wire_bytes - before
                engine.step()
            assert engine.optimizer is not None
            found.append((sent, engine.optimizer.consolidated_parameters()))
        return found

    for found in sim.run(2, job, transport="native"):
        dense, _, rows, _ = (sent for sent, _ in found)
        assert dense - rows > 0.9 * 3 * 500 * 8 * 4 // 2  # at stage 3 parameters are gathered in both
        for _, parameters in found:
            assert all(torch.equal(parameters[name], value) for name, value in found[0][1].items())
