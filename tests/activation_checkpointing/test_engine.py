"""The section in an engine, ZeRO 0 to 3 on simulated ranks, pipelines and mixtures of experts: the same bits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.engine
from zoo import activation_checkpointing as activation
from zoo import sim
from zoo.activation_checkpointing import ActivationCheckpointing
from zoo.activation_checkpointing.state import current
from zoo.activation_checkpointing.storages import Contiguous, Host, Nvme, Partition
from zoo.config import load
from zoo.moe import MixtureOfExperts, ModuleExperts, TopKGate
from zoo.pipe import LayerSpec, PipelineModule
from zoo.zero import ZeroOptimizer

WIDTH = 6


class Block(nn.Module):
    """With a parameter of its own, which at stage 3 only the block's own hooks gather."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.dropout(self.outer(torch.tanh(self.inner(x)))) * self.scale
        return x + (y if mask is None else y * mask)


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask=torch.ones(WIDTH, dtype=x.dtype))
        return self.head(x)


def net(num_blocks: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(num_blocks)


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}  # fmt: skip


def train(rank: int, changes: dict[str, Any], steps: int = 2, inspect: Any = None) -> dict[str, Any]:
    """Losses of each micro-batch, parameters at the end, and the generator's state."""
    engine, *_ = zoo.engine.initialize({**BASE, **changes}, net())
    torch.manual_seed(50 + rank)
    losses = []
    for step in range(2 * steps):
        loss = engine(batch(rank, step).to(engine.module.head.weight.dtype)).square().mean()
        if inspect is not None:
            inspect(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses), "rng": torch.get_rng_state()}
    found |= {name: p.clone() for name, p in whole(engine)}
    engine.destroy()
    return found


def whole(engine: Any) -> list[tuple[str, torch.Tensor]]:
    from zoo.zero import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return [(name, p.detach().clone()) for name, p in engine.module.named_parameters()]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@given(
    stage=st.integers(0, 3), ranks=st.integers(1, 3), reentrant=st.booleans(), dtype=st.sampled_from(["fp32", "bf16"]),
    contiguous=st.booleans(), threshold=st.sampled_from([0, 100_000]),
)  # fmt: skip
def test_steps_are_bit_for_bit_those_without(
    stage: int, ranks: int, reentrant: bool, dtype: str, contiguous: bool, threshold: int
) -> None:
    changes: dict[str, Any] = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold}}
    if dtype == "bf16":
        changes["bf16"] = {"enabled": True}
    section = {"blocks": "auto", "use_reentrant": reentrant}
    if contiguous:
        section |= {"contiguous_memory_optimization": True, "number_checkpoints": 3}
    expected = sim.run(ranks, lambda rank: train(rank, changes))
    found = sim.run(ranks, lambda rank: train(rank, {**changes, "activation_checkpointing": section}))
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def test_contiguous_buffers_have_the_number_that_configure_was_told() -> None:
    def job(rank: int) -> int:
        activation.configure(None, num_checkpoints=4)
        section = {"contiguous_memory_optimization": True, "number_checkpoints": None}
        engine, *_ = zoo.engine.initialize({**BASE, "activation_checkpointing": section}, net())
        made = current().checkpointing
        assert made is not None
        assert isinstance(made.storage, Contiguous)
        engine.destroy()
        return made.storage.ring.num_checkpoints

    assert sim.run(1, job) == [4]


def test_every_key_of_the_section_does_what_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def storage(section: dict[str, Any]) -> Any:
        engine, *_ = zoo.engine.initialize({**BASE, "activation_checkpointing": section}, net())
        made = current().checkpointing
        assert made is not None
        engine.destroy()
        assert current().checkpointing is None
        return made.storage

    assert storage({"partition_activations": True}) is None  # no tensor-parallel ranks
    assert isinstance(storage({"cpu_checkpointing": True}), Host)
    ring = storage({"contiguous_memory_optimization": True, "number_checkpoints": 7})
    assert isinstance(ring, Contiguous)
    assert ring.ring.num_checkpoints == 7
    assert isinstance(storage({"nvme_path": str(tmp_path)}), Nvme)
    published = {"contiguous_memory_optimization": True, "number_checkpoints": None}
    assert storage(published) is storage({**published, "number_checkpoints": False}) is None
    assert caplog.text.count("contiguous_memory_optimization without number_checkpoints: there are no buffers") == 2
    caplog.clear()
    synchronised = []

    def count(engine: Any) -> None:
        synchronised.append(1)

    with caplog.at_level(logging.INFO, "zoo.activation_checkpointing"):
        section = {"profile": True, "synchronize_checkpoint_boundary": True, "blocks": ["blocks.1"]}
        found = train(0, {"activation_checkpointing": section}, steps=1, inspect=count)
    same(found, train(0, {}, steps=1))
    texts = [text.rpartition(":")[0] for text in caplog.messages if "checkpointed" in text]
    assert texts == ["forward of checkpointed Block", "recomputation of checkpointed Block"] * 2


def test_tensor_ranks_share_what_is_saved() -> None:
    def fn(rank: int) -> None:
        section = {"partition_activations": True, "blocks": "auto"}
        changes = {"mesh": {"axes": {"data": 2, "tensor": 2}}, "activation_checkpointing": section}
        saved = []
        # All four ranks have whole layers here; those of one tensor group see the same samples.
        engine, *_ = zoo.engine.initialize({**BASE, **changes}, net())
        here = current().checkpointing
        assert here is not None
        assert isinstance(here.storage, Partition)
        assert here.storage.comm.size == 2
        torch.manual_seed(rank // 2)
        loss = engine(batch(rank // 2, 0)).square().mean()
        saved.append(here.saved_bytes)
        engine.backward(loss)
        assert saved == [3 * (4 * WIDTH * 4 // 2 + WIDTH * 4 // 2)]  # x and mask of three blocks, halved
        assert here.saved_bytes == 0
        engine.destroy()

    sim.run(4, fn)


def test_blocks_that_are_not_there_and_blocks_afterwards() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing.blocks = \['layers'\]: the model has no module"):
        zoo.engine.initialize({**BASE, "activation_checkpointing": {"blocks": ["layers"]}}, net())
    model = net()
    engine, *_ = zoo.engine.initialize({**BASE, "activation_checkpointing": {"blocks": "auto"}}, model)
    assert "_call_impl" in model.blocks[0].__dict__
    copied = copy.deepcopy(model.blocks[0])
    engine.destroy()
    assert "_call_impl" not in model.blocks[0].__dict__
    assert torch.equal(copied.eval()(torch.ones(2, WIDTH)), model.blocks[0].eval()(torch.ones(2, WIDTH)))


def test_engines_end_in_any_order_and_configure_has_the_last_word() -> None:
    def made(number: int) -> Any:
        section = {"contiguous_memory_optimization": True, "number_checkpoints": number}
        return zoo.engine.initialize({**BASE, "activation_checkpointing": section}, net())[0]

    def number() -> int | None:
        return activation.current().config.number_checkpoints

    first, second = made(1), made(2)
    assert number() == 2
    first.destroy()
    assert number() == 2
    second.destroy()
    assert not activation.is_configured()
    activation.configure(None, num_checkpoints=3)
    third = made(4)
    assert number() == 4
    third.destroy()
    assert number() == 3
    fifth = made(5)
    activation.configure(None, num_checkpoints=6)
    assert number() == 6
    fifth.destroy()
    assert number() == 6


def test_dropped_layers_are_those_that_are_dropped_without() -> None:
    changes = {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 5.0}}
    found = train(0, {**changes, "activation_checkpointing": {"blocks": "auto"}}, steps=4)
    same(found, train(0, changes, steps=4))


def test_a_function_of_the_model_calls_the_documented_checkpoint() -> None:
    class Calls(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = activation.checkpoint(block, x)
            return self.head(x)

    def fn(rank: int, stage: int, cls: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = cls()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer="AdamW", lr=0.01)
        torch.manual_seed(rank)
        losses = []
        for step in range(3):
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    for stage in range(4):
        found, expected = (sim.run(2, lambda rank, s=stage, c=cls: fn(rank, s, c)) for cls in (Calls, Net))  # type: ignore[misc]
        assert found == expected


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_checkpoints_as_the_section_says(schedule: str) -> None:
    def fn(rank: int, section: dict[str, Any] | None) -> Any:
        model = PipelineModule(
            [LayerSpec(Layer) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True,
            activation_checkpoint_interval=0 if section is None else 1, schedule=schedule,
        )  # fmt: skip
        changes = {} if section is None else {"activation_checkpointing": section}
        engine, *_ = zoo.engine.initialize({**BASE, "zero_optimization": {"stage": 1}, **changes}, model)
        torch.manual_seed(3)
        rows = [(batch(0, n), batch(1, n)) for n in range(2)]
        losses = [engine.train_batch(iter(rows)).detach().clone() for _ in range(3)]
        made = current().checkpointing
        if section is not None:
            assert made is not None
            assert made.storage is not None
            assert sum(len(arena.free) for arena in made.storage.ring._arenas.values()) > 0  # it went through there
        engine.destroy()
        return losses

    ring = {"contiguous_memory_optimization": True, "number_checkpoints": 8}
    for section in (ring, {**ring, "use_reentrant": True}) if schedule == "1f1b" else (ring,):
        assert sim.run(2, lambda rank, s=section: fn(rank, s)) == sim.run(2, lambda rank: fn(rank, None))  # type: ignore[misc]


def test_mixtures_of_experts() -> None:
    def fn(checkpointing: ActivationCheckpointing | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        experts = ModuleExperts(
            [nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, WIDTH)) for _ in range(4)]
        )
        layer = MixtureOfExperts(TopKGate(WIDTH, 4), experts)
        x = batch(0, 0).requires_grad_()
        y = layer(x) if checkpointing is None else checkpointing(layer, x)
        out = y.output
        out.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]

    expected = fn(None)
    for made in (ActivationCheckpointing(), ActivationCheckpointing(storage=Contiguous(2))):
        assert all(torch.equal(a, b) for a, b in zip(fn(made), expected, strict=True))
    config = activation.ActivationCheckpointingConfig(use_reentrant=True)
    with pytest.raises(ValueError, match=r"a re-entrant checkpoint of a function that returns a Mixed with tensors in"):
        fn(ActivationCheckpointing(config))


def test_the_document_says_it() -> None:
    section = load({"train_batch_size": 8, "activation_checkpointing": {}}).activation_checkpointing  # type: ignore[attr-defined]
    assert section.model_dump() == {
        "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
        "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False, "nvme_path": None,
        "use_reentrant": False, "save": [], "blocks": None,
    }  # fmt: skip
