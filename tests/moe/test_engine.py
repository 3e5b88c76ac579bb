"""A model with experts under an engine: the mesh from the layers, noise by the clock, biases, records, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.profiles import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.engine import Engine, initialize
from zoo.moe import Capacity, GroupedExperts, LossFreeGate, MixtureOfExperts, MoE, Top1Gate, Top2Gate
from zoo.moe.dispatch import place_of_rank
from zoo.zero import ZeroOptimizer

WIDTH, EXPERTS, RANKS = 4, 8, 4


class Net(nn.Module):
    """Two mixtures, one that draws and drops, one with a bias that moves; values do not depend on ``ep_size``."""

    def __init__(self, ep_size: int, *, noise: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        place = place_of_rank(ep_size)

        def experts() -> GroupedExperts:
            return GroupedExperts(EXPERTS, WIDTH, 6, activation="silu", gated=True, ep_size=ep_size, ep_rank=place)

        drawing = MixtureOfExperts(Top1Gate(WIDTH, EXPERTS, noise="RSample"), experts(), capacity=Capacity(minimum=1))
        plain = MixtureOfExperts(Top2Gate(WIDTH, EXPERTS, sample_second=False), experts())
        self.mixtures = nn.ModuleList(
            [drawing if noise else plain, MixtureOfExperts(LossFreeGate(WIDTH, EXPERTS, k=2, speed=0.05), experts())]
        )
        self.last = nn.Linear(WIDTH, 1)
        self.factor = 0.1 if noise else 0.0
        self.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".experts." in name:
                    whole = torch.randn(EXPERTS, *parameter.shape[1:], generator=generator, dtype=torch.float64)
                    parameter.copy_(whole[place * len(parameter) : (place + 1) * len(parameter)])
                else:
                    parameter.normal_(generator=generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, extra = torch.tanh(self.first(x)), torch.zeros((), dtype=torch.float64)
        for mixture in self.mixtures:
            found = mixture(h)
            h, extra = h + found.output, extra + self.factor * found.balance
        return (self.last(h) - y).square().mean() + extra


def start(ep_size: int, number: int, *, noise: bool = True, **more: Any) -> Engine:
    dice = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 3, generator=dice, dtype=torch.float64), torch.randn(96, 1, generator=dice, dtype=torch.float64)
    )
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": number, "reduce_bucket_size": 40, "stage3_param_persistence_threshold": 0},
        **more,
    }
    return initialize(config, Net(ep_size, noise=noise), training_data=data)[0]


def told(engine: Engine, steps: int) -> list[tuple[float, dict[str, float]]]:
    found = []
    for _ in range(steps):
        loss = float(engine.train_batch())
        assert engine.record is not None
        found.append((loss, dict(engine.record.metrics)))
    return found


def bias(engine: Engine) -> list[float]:
    gate = engine.module.mixtures[1].gate
    found: list[float] = gate.bias.tolist()
    return found


@pytest.mark.dear
@examples(times=0.5)
@given(ep_size=st.sampled_from([2, 4]), number=st.integers(0, 3))
def test_every_ep_size_trains_alike(ep_size: int, number: int) -> None:
    """The engine makes the mesh that the layers need; nothing is said of it in the configuration."""

    def job(rank: int, size: int) -> Any:
        engine = start(size, number)
        assert (engine.mesh is None) == (size == 1)
        return told(engine, 3), bias(engine)

    expected = sim.run(RANKS, lambda rank: job(rank, 1))
    got = sim.run(RANKS, lambda rank: job(rank, ep_size))
    for (mine, moved), (theirs, also) in zip(got, expected, strict=True):
        torch.testing.assert_close([loss for loss, _ in mine], [loss for loss, _ in theirs], rtol=1e-9, atol=1e-9)
        assert [metrics for _, metrics in mine] == [metrics for _, metrics in theirs]
        assert moved == also
    assert len({tuple(moved) for _, moved in got}) == 1
    assert any(abs(b) > 0 for b in got[0][1])


def test_a_record_says_how_experts_are_used() -> None:
    found = sim.run(2, lambda rank: told(start(2, 1), 1))[0][0][1]
    names = {f"moe/mixtures.{i}/{what}" for i in (0, 1) for what in ("load", "entropy", "dropped")}
    assert names <= set(found)
    assert 0 < found["moe/mixtures.0/dropped"] < 1
    assert found["moe/mixtures.1/dropped"] == 0
    assert all(found[f"moe/mixtures.{i}/load"] >= 1 for i in (0, 1))
    assert all(0 < found[f"moe/mixtures.{i}/entropy"] <= 1 for i in (0, 1))


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 4, 3), (4, 4, 1)), ((4, 4, 0), (1, 4, 2)), ((2, 2, 2), (4, 4, 3)), ((1, 4, 1), (2, 2, 3))],
)
def test_a_checkpoint_goes_on_at_another_ep_size(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    """(ep_size, ranks, stage): experts are saved by their number in the whole model, momenta and biases too."""
    same_ranks = saved[1] == loaded[1]  # noise, capacity and the balance loss are of a rank's micro-batch

    def through(rank: int) -> Any:
        engine = start(saved[0], saved[2], noise=same_ranks)
        told(engine, 2)
        engine.save_checkpoint(tmp_path)
        return [loss for loss, _ in told(engine, 2)], bias(engine)

    def again(rank: int) -> Any:
        engine = start(loaded[0], loaded[2], noise=same_ranks)
        engine.load_checkpoint(tmp_path)
        return [loss for loss, _ in told(engine, 2)], bias(engine)

    expected, got = sim.run(saved[1], through)[0], sim.run(loaded[1], again)
    for losses, moved in got:
        torch.testing.assert_close(losses, expected[0], rtol=1e-9, atol=1e-9)
        assert moved == expected[1]


def test_a_skipped_step_moves_no_bias() -> None:
    engine = start(1, 0, gradient_clipping=1.0)
    before = bias(engine)
    x, y = torch.full((2, 3), torch.nan, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    for _ in range(2):
        engine.backward(engine(x, y))
        engine.step()
    assert engine.record is not None
    assert engine.record.skipped
    assert bias(engine) == before
    told(engine, 1)
    assert bias(engine) != before


def test_recomputation_is_not_counted() -> None:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(LossFreeGate(WIDTH, EXPERTS, k=2), GroupedExperts(EXPERTS, WIDTH, 6))
    x = torch.randn(10, WIDTH, requires_grad=True)
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(lambda x: mixture(x).output, x, use_reentrant=reentrant)
        out.sum().backward()
    assert mixture.tally is not None
    assert mixture.tally.sum(1).tolist() == [40, 40]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"data": 4}, "needs the axis 'expert' of that size"),
        ({"data": 1, "expert": 4}, "needs the axis 'expert' of that size"),
        ({"expert": 2, "data": 2}, r"Make it with ep_rank=mesh\.get_local_rank\('expert'\)"),
    ],
)
def test_a_mesh_that_does_not_fit(axes: dict[str, int], said: str) -> None:
    def job(rank: int) -> None:
        with pytest.raises(ValueError, match=said):
            start(2, 1, mesh={"axes": axes})

    if "expert" in axes and next(iter(axes)) == "expert":
        # Only ranks that would be at another place see it; they are told before anything is sent.
        with pytest.raises(Exception, match=said):
            sim.run(RANKS, lambda rank: start(2, 1, mesh={"axes": axes}))
    else:
        sim.run(RANKS, job)


def test_too_few_ranks_for_the_experts() -> None:
    def job(rank: int) -> None:
        with pytest.raises(ValueError, match="data -1 × expert 2 is no mesh of 3 ranks"):
            start(2, 1, train_batch_size=18)

    sim.run(3, job)


class Counting(nn.Module):
    """An expert with a buffer of its own: how many rows it has had; and parameters in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return self.inner(x) + 0 * self.rows  # type: ignore[no-any-return]


class WithBuffers(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, Counting(), 4, ep_size=ep_size, k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.moe(x)[0].square().mean()
        return found

    def numbers(self) -> list[float]:
        return [float(e.rows) for e in self.moe.experts.list]


@pytest.mark.matrix
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_buffers_of_experts_are_saved_by_global_expert(tmp_path: Path, saved: int, loaded: int) -> None:
    def engine_of(ep_size: int) -> Engine:
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        return initialize(config, WithBuffers(ep_size))[0]

    def save(rank: int) -> None:
        engine = engine_of(saved)
        for number, expert in enumerate(engine.module.moe.experts.list, start=engine.module.moe.experts.first):
            expert.rows.fill_(number)
        engine.save_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path / "whole")

    def load(rank: int) -> Any:
        engine = engine_of(loaded)
        engine.load_checkpoint(tmp_path)
        return engine.module.moe.experts.first, engine.module.numbers()

    sim.run(4, save)
    for first, found in sim.run(4, load):
        assert found == [first + i for i in range(4 // loaded)]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert [float(whole[f"moe.experts.list.{e}.rows"]) for e in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert "moe.experts.list.3.inner.weight" in whole


def test_a_broadcast_leaves_the_buffers_of_other_experts_alone() -> None:
    def fn(rank: int) -> tuple[list[float], list[str]]:
        model = WithBuffers(2)
        for expert in model.moe.experts.list:
            expert.rows.fill_(rank)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "expert"))
        optimizer = ZeroOptimizer(
            model, stage=2, optimizer=torch.optim.SGD, lr=0.1, mesh=mesh, data_axes=("data", "expert"),
            buffers="broadcast",
        )  # fmt: skip
        return model.numbers(), sorted(optimizer.consolidated_parameters())

    names = sorted(n for n, _ in WithBuffers(1).named_parameters())
    assert sim.run(2, fn) == [([0.0, 0.0], names), ([1.0, 1.0], names)]
