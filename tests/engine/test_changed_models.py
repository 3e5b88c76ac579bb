"""Models that change after ``initialize``: layers swapped, taken out, renamed or tied. What is saved is called, and has
the partners, that it has in the model then; plain torch's ``state_dict()`` of the same change is what is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from safetensors.torch import load_file, load_model
from torch import nn

from zoo import checkpointing, sim
from zoo.engine import Engine, initialize
from zoo.zero import PartitionedAccessError, get_full_fp32_params, safe_get_full_fp32_param

RATE, WORLD = 0.1, 2


class Net(nn.Module):
    """Four blocks of one shape, a head that may be tied to the first layer, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[2].requires_grad_(False)
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        head = self.head if hasattr(self, "head") else self.top
        out: torch.Tensor = head(x).square().mean()
        return out


def swap(net: Any) -> None:
    net.blocks[0], net.blocks[3] = net.blocks[3], net.blocks[0]


def prune(net: Any) -> None:
    del net.blocks[1]  # the names of those behind it move up


def prune_frozen(net: Any) -> None:
    del net.blocks[2]


def rename(net: Any) -> None:
    net.top = net._modules.pop("head")  # the last child under another key: the same objects in the same places


def tie(net: Any) -> None:
    net.head.weight = net.first.weight


def mask(net: Any) -> None:
    """torch's pruning: the parameter ``weight`` is called ``weight_orig`` from now on; nothing else is in its place."""
    for layer in (net.first, net.blocks[1]):
        torch.nn.utils.prune.custom_from_mask(layer, "weight", torch.eye(6))


def mix(net: Any) -> None:
    swap(net)
    prune(net)
    tie(net)


CHANGES: list[Callable[[Any], None]] = [swap, prune, prune_frozen, rename, tie, mix]
CASES = [(change, stage) for change in CHANGES for stage in range(4)] + [(mask, stage) for stage in range(3)]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def start(stage: int, net: nn.Module | None = None, **more: Any) -> Engine:
    zero = {
        "stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 60,
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    optimizer = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": optimizer, "zero_optimization": zero, **more}
    return initialize(config, net if net is not None else Net())[0]


def train(engine: Engine, rank: int, step: int) -> None:
    engine.backward(engine(batch(rank, step)))
    engine.step()


def torch_twin(change: Callable[[Any], None], before: int, after: int) -> dict[str, torch.Tensor]:
    """Plain torch on the batches of all ranks, with the change between two steps."""
    net = Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=RATE)
    for step in range(before + after):
        if step == before:
            change(net)
        for rank in range(WORLD):
            (net(batch(rank, step)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.matrix
@pytest.mark.parametrize(("change", "stage"), CASES)
def test_what_is_saved_is_called_as_it_is_now(tmp_path: Path, stage: int, change: Callable[[Any], None]) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(stage)
        train(engine, rank, 0)
        change(engine.module)
        train(engine, rank, 1)
        assert engine.save_16bit_model(tmp_path)
        assert engine.save_16bit_model(tmp_path, "model.bin")
        shown = dict(get_full_fp32_params(engine.module.parameters()))
        assert set(shown) == {name for name, _ in engine.module.named_parameters()}
        for name, value in engine.optimizer.consolidated_parameters().items():
            assert torch.equal(shown[name], value)  # type: ignore[arg-type]
        return dict(engine.module_state_dict())

    expected = torch_twin(change, 1, 1)
    for found in sim.run(WORLD, job):
        same(found, expected)
        assert list(found) == list(expected)
    fresh = Net()
    change(fresh)
    assert load_model(fresh, tmp_path / "model.safetensors") == (set(), [])  # strict: tied names are those of now
    same(fresh.state_dict(), expected)
    same(torch.load(tmp_path / "model.bin", weights_only=True), expected)
    names = {name for name, _ in (*fresh.named_parameters(), *fresh.named_buffers())}
    assert load_file(tmp_path / "model.safetensors").keys() == names


@pytest.mark.matrix
@pytest.mark.parametrize(("change", "stage"), CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_in_a_model_that_was_built_so(
    tmp_path: Path, stage: int, change: Callable[[Any], None], precision: str
) -> None:
    """Parameters, states and steps of the optimizer come under the names of now, so that a model with the change made
    before ``initialize`` goes on as the one that was changed; and that one takes its own checkpoint back."""
    more: dict[str, Any] = {} if precision == "fp32" else {"bf16": {"enabled": True, "auto_cast": True}}

    def changed(rank: int) -> list[dict[str, torch.Tensor]]:
        engine = start(stage, **more)
        train(engine, rank, 0)
        change(engine.module)
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()
        runs = []
        for _ in range(2):
            train(engine, rank, 1)
            runs.append(dict(engine.module_state_dict()))
            engine.load_checkpoint(tmp_path)
        return runs

    def fresh(rank: int) -> dict[str, torch.Tensor]:
        net = Net()
        change(net)
        engine = start(stage, net, **more)
        engine.load_checkpoint(tmp_path)  # strict
        train(engine, rank, 1)
        return dict(engine.module_state_dict())

    first, again = sim.run(WORLD, changed)[0]
    other = sim.run(WORLD, fresh)[0]
    for name, value in first.items():
        assert torch.equal(again[name], value), name
        torch.testing.assert_close(other[name].to(value.dtype), value, msg=lambda m, n=name: f"{n}: {m}")
    if precision == "fp32":
        same(first, torch_twin(change, 1, 1))
    found = checkpointing.load(tmp_path)
    net = Net()
    change(net)
    assert set(found.shapes) == {name for name, _ in (*net.named_parameters(), *net.named_buffers())}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_state_dict_gives_goes_to_the_names_of_now(stage: int) -> None:
    """``load_module_state_dict`` of what ``module_state_dict`` gave before the change fills by name, as torch does."""

    def job(rank: int) -> None:
        engine = start(stage)
        train(engine, rank, 0)
        before = engine.module_state_dict()
        swap(engine.module)
        engine.load_module_state_dict(before)
        after = engine.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        value = safe_get_full_fp32_param(engine.module.blocks[0].weight)
        assert torch.equal(value, before["blocks.0.weight"])

    sim.run(WORLD, job)


WAYS: dict[str, Callable[[Engine, Path], Any]] = {
    "state_dict": lambda engine, path: engine.load_module_state_dict(engine.module_state_dict()),
    "not strict": lambda engine, path: engine.load_module_state_dict(engine.module_state_dict(), strict=False),
    "path": lambda engine, path: engine.load_module_state_dict(engine.save_checkpoint(path)),
    "custom": lambda engine, path: engine.load_module_state_dict(
        engine.save_checkpoint(path), custom_load_fn=lambda src, dst: dst.load_state_dict(src)
    ),
    "module only": lambda engine, path: (
        engine.save_checkpoint(path), engine.load_checkpoint(path, load_module_only=True)
    ),
    "no states": lambda engine, path: (
        engine.save_checkpoint(path), engine.load_checkpoint(path, load_optimizer_states=False)
    ),
    "all": lambda engine, path: (engine.save_checkpoint(path), engine.load_checkpoint(path)),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [prune, prune_frozen, tie, mix])
def test_its_own_values_change_nothing(
    tmp_path: Path, stage: int, way: str, change: Callable[[Any], None]
) -> None:  # fmt: skip
    """Whatever way they come back: the states of what the model does not have any more stay too."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = start(stage)
        train(engine, rank, 0)
        change(engine.module)
        WAYS[way](engine, tmp_path)
        train(engine, rank, 1)
        return dict(engine.module_state_dict())

    for found in sim.run(WORLD, job):
        same(found, torch_twin(change, 1, 1))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_that_comes_back_has_what_it_had(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage)
        train(engine, rank, 0)
        before = engine.module_state_dict()
        taken = engine.module.blocks
        engine.module.blocks = nn.ModuleList(list(taken)[:2])
        assert set(engine.module_state_dict()) == {name for name in before if ".2." not in name and ".3." not in name}
        state = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(state)
        engine.module.blocks = taken
        after = engine.module_state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], value) for name, value in before.items())

    sim.run(WORLD, job)


def test_a_message_has_the_name_of_now() -> None:
    def job(rank: int) -> None:
        engine = start(3)
        swap(engine.module)
        rename(engine.module)
        with pytest.raises(PartitionedAccessError, match=r"'blocks\.0\.weight'"):
            engine.module.blocks[0].weight.sum()
        with pytest.raises(PartitionedAccessError, match=r"'top\.weight'"):
            engine.module.top.weight.sum()
        train(engine, rank, 0)
        assert "'top'" in engine.sharded.table()
        assert "'head'" not in engine.sharded.table()

    sim.run(WORLD, job)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_that_change_otherwise_are_named_on_all(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage)
        train(engine, rank, 0)
        if rank == 1:
            swap(engine.module)
        saves: list[Callable[[], Any]] = [engine.module_state_dict]
        saves += [lambda: engine.save_checkpoint(tmp_path), lambda: engine.save_16bit_model(tmp_path)]
        for save in saves:
            with pytest.raises(ValueError, match=r"model of rank 1 was changed otherwise than that of rank 0"):
                save()
        if rank == 1:
            swap(engine.module)
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()

    sim.run(WORLD, job)
