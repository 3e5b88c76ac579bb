"""Layers that do not fit each other are named on all ranks before anything is sent; all else trains as without."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipe.test_training import Case, config
from torch import nn

import zoo.engine
from zoo import sim
from zoo.comm import Communicator, no_collectives
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zoo.pipe.misfits import misfit, outline_of

X, Y = torch.ones(5, 4), torch.ones(5, 2)


def engine_of(layers: list[Any], stages: int, **more: Any) -> Any:
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return zoo.engine.initialize({**config(Case(pipe=stages, num_micro=2)), **more}, model)[0]


def sends(engine: Any) -> int:
    found: int = engine.comm.log.ops["send"].count if "send" in engine.comm.log.ops else 0
    return found


class Wide(nn.Module):
    """A perceptron whose first matrix has ``given`` columns."""

    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(given, 16), nn.Linear(16, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


WRONG = {
    "spec": lambda: [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 6), LayerSpec(nn.Linear, 8, 2)],
    "module": lambda: [nn.Linear(4, 4), nn.Linear(4, 6), Wide(8, 2)],
    "after a function": lambda: [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 6), LayerSpec(Wide, 8, 2)],
    "norm": lambda: [nn.Linear(4, 4), nn.Linear(4, 6), nn.LayerNorm(8)],
    "tied": lambda: [nn.Linear(4, 4), nn.Linear(4, 6), TiedLayerSpec("a", nn.Linear, 8, 2)],
    "tied with a forward": lambda: [
        nn.Linear(4, 4), nn.Linear(4, 6),
        TiedLayerSpec("a", nn.Linear, 2, 8, forward_fn=lambda module, x: x @ module.weight),
    ],
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_does_not_fit_is_named_before_anything_is_sent(name: str, precision: str) -> None:
    def fn(rank: int) -> None:
        more: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        engine = engine_of(WRONG[name](), 3, **more)
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                engine.train_batch(iter([(X.to(dtype), Y.to(dtype))] * 2))
            said = str(raised.value)
            kind = {"module": "Wide", "norm": "LayerNorm", "after a function": "Wide"}.get(name, "Linear")
            assert f"layer 2 ({kind}) of the pipeline does not take what layer 1 (Linear) gives, (5, 6)" in said
            assert "weight (2, 8)" in said or "weight (16, 8)" in said or "weight (8,)" in said or "[8, 2]" in said
            assert isinstance(raised.value, ValueError) or "rank 0 says ValueError" in said
            assert sends(engine) == 0

    sim.run(3, fn, seed=0, group_timeout_s=5.0)


def test_without_it_the_layer_is_named_where_it_runs() -> None:
    def fn(rank: int) -> None:
        engine = engine_of(WRONG["spec"](), 3, pipeline={"check_shapes": False})
        words = r"in layer 2 \(Linear\) of the pipeline, whose input is \(5, 6\) float32"
        with pytest.raises(RuntimeError, match=words):
            engine.train_batch(iter([(X, Y)] * 2))
        assert rank == 2 or sends(engine)

    sim.run(3, fn, seed=0, group_timeout_s=5.0)


def test_the_batch_itself_may_be_what_does_not_fit_and_the_next_one_trains() -> None:
    def fn(rank: int) -> float:
        engine = engine_of([LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 2)], 2)
        with pytest.raises((ValueError, RuntimeError), match=r"layer 0 \(Linear\) .* what the batch gives, \(5, 3\)"):
            engine.train_batch(iter([(torch.ones(5, 3), Y)] * 2))
        return float(engine.train_batch(iter([(X, Y)] * 2)))

    first, second = sim.run(2, fn, seed=0, group_timeout_s=5.0)
    assert first == second


class Talks(nn.Linear):
    """Asks all ranks of the job in forward, by torch and by a communicator, and reads values."""

    def __init__(self, what: str) -> None:
        super().__init__(4, 4)
        self.what, self.comm = what, Communicator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "reads" and float(x.detach().sum()) == 12345.0:
            return x[:0]
        if self.what == "torch":
            total = torch.ones(1, device=x.device)
            dist.all_reduce(total)
            assert float(total) == 2
        if self.what == "comm":
            total = torch.ones(1, device=x.device)
            self.comm.all_reduce(total).wait()
            assert float(total) == 2
        if self.what == "objects":
            assert self.comm.all_gather_object(1) == [1, 1]
        return nn.Linear.forward(self, x)


@pytest.mark.parametrize("what", ["reads", "torch", "comm", "objects"])
def test_layers_that_talk_or_read_values_leave_the_answer_open(what: str) -> None:
    def fn(rank: int) -> None:
        layers = [outline_of(layer) for layer in (Talks(what), nn.Linear(4, 6), nn.Linear(8, 2))]
        assert misfit(layers, X, names=["Talks", "Linear", "Linear"]) is None
        assert misfit(layers[1:], X, names=["Linear", "Linear"]) is not None

    sim.run(2, fn, seed=0, group_timeout_s=5.0)


VALID: dict[str, tuple[torch.Tensor, Any]] = {
    "mask": (X, lambda x: x[x > 0.5]), "nonzero": (X, torch.nonzero), "unique": (X, torch.unique),
    "one_hot": (X.long(), nn.functional.one_hot), "counts": (X.long().flatten(), torch.bincount),
    "list": (X, lambda x: torch.ones(len(x.tolist()))), "slice": (X, lambda x: x[: int(x.max())]),
    "numpy": (X, lambda x: torch.from_numpy(x.numpy())), "branch": (X, lambda x: x if x.sum() > 0 else x.view(99)),
    "repeat": (X.long().flatten(), lambda x: x.repeat_interleave(x)), "elsewhere": (X, lambda x: x @ torch.ones(4, 2)),
    "to": (X, lambda x: x.to("cpu")),
    "equal": (X, lambda x: x if torch.equal(x, x) else x.view(99)), "draws": (X, lambda x: torch.multinomial(x, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_no_layer_that_runs_is_called_a_misfit(name: str) -> None:
    x, layer = VALID[name]
    layer(x)
    assert misfit([layer, nn.Identity()], x, names=[name, "Identity"]) is None


def test_inputs_without_a_place_on_the_meta_device_are_left_alone() -> None:
    quantised = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    for x in (quantised, nested, X.to_sparse(), X.to(torch.complex64)):
        assert misfit([nn.Identity()], x, names=["Identity"]) is None


class Random(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(1) + random.random()  # the same device or not: nobody may notice
        return super().forward(x) * float(noise)


def test_nothing_is_left_behind() -> None:
    """Random numbers, hooks, buffers and parameters are as if nobody had asked."""
    seen: list[Any] = []

    def fn(rank: int, asks: bool) -> Any:
        seen.clear()
        random.seed(7)
        layers = [nn.BatchNorm1d(4), Random(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)]
        layers[0].register_forward_hook(lambda *given: seen.append(given))
        engine = engine_of(layers, 2, pipeline={"check_shapes": asks})
        torch.manual_seed(3)
        loss = float(engine.train_batch(iter([(X, Y)] * 2)))
        buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
        return loss, len(seen), buffers, engine.optimizer.consolidated_parameters()

    with_it, without = (sim.run(2, lambda rank, asks=asks: fn(rank, asks), seed=0)[0] for asks in (True, False))
    assert with_it[:2] == without[:2]
    for place in (2, 3):
        assert with_it[place].keys() == without[place].keys()
        assert all(torch.equal(value, without[place][name]) for name, value in with_it[place].items())


def test_communicators_are_silent_inside() -> None:
    def fn(rank: int) -> None:
        comm, tensor = Communicator(), torch.ones(2)
        with no_collectives():
            for ask in (lambda: comm.all_reduce(tensor), lambda: comm.send(tensor, 1 - rank), comm.barrier,
                        lambda: comm.all_gather_object(1), lambda: comm.broadcast_object(1)):  # fmt: skip
                with pytest.raises(NotImplementedError, match="in a forward that this rank makes alone"):
                    ask()
        assert comm.all_gather_object(rank) == [0, 1]

    sim.run(2, fn, seed=0)
