"""What a script may do between two steps: boundaries, sizes, evaluation, the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, data, net, stage, start
from torch import nn

from zoo import sim
from zoo.engine import Engine, RepeatingLoader, initialize


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """After backwards and before the step, on one rank."""
    return {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}


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
