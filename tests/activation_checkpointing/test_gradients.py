"""Gradients and random numbers with checkpoints are bit for bit those without: policies × types × dropout × nesting."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingConfig, CudaRNGStatesTracker
from zoo.activation_checkpointing.storages import Contiguous, Host, Keep, Nvme, Storage

WIDTH, CALLS = 8, 8
Checkpoint = Callable[..., Any]


@contextmanager
def storage_of(name: str) -> Iterator[Storage | None]:
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Callable[[], Storage | None]] = {
            "none": lambda: None, "keep": Keep, "contiguous": lambda: Contiguous(CALLS), "host": Host,
            "contiguous host": lambda: Host(num_checkpoints=CALLS), "nvme": lambda: Nvme(folder),
            "nvme, waiting": lambda: Nvme(folder, staging_bytes=1),
        }  # fmt: skip
        storage = made[name]()
        yield storage
        if isinstance(storage, Nvme):
            storage.reset()
            assert storage.file_bytes == storage.pool.stats().in_use_bytes == 0
            assert list(Path(folder).iterdir()) == []  # the file never had a name for longer than a moment
            storage.close()
        if isinstance(storage, Contiguous) or getattr(storage, "ring", None) is not None:
            ring = storage.ring  # type: ignore[union-attr]
            assert ring.num_free == CALLS * len(ring._arenas)
        if isinstance(storage, Host):
            storage.reset()
            assert storage.pool.stats().in_use_bytes == 0


STORAGES = ("none", "keep", "contiguous", "host", "contiguous host", "nvme", "nvme, waiting")


class Unit(nn.Module):
    """Takes and returns a tree; draws from the generator and from the tracker's state."""

    def __init__(self, tracker: CudaRNGStatesTracker, dropout: float) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tracker, self.dropout = tracker, dropout

    def forward(self, x: torch.Tensor, tree: dict[str, Any], *, shift: torch.Tensor | None = None) -> Any:
        h = nn.functional.dropout(torch.tanh(self.linear(x)), self.dropout)
        if self.tracker.states_:
            with self.tracker.fork():
                h = nn.functional.dropout(self.mix(h), self.dropout)
        h = h[:, tree["order"]] * tree["pair"][0] + (0 if shift is None else shift)
        return h, {**tree, "pair": (h.sin(), tree["pair"][1])}


@dataclass(frozen=True)
class Case:
    storage: str
    reentrant: bool
    dtype: torch.dtype
    dropout: float
    nested: bool
    tracked: bool
    autocast: bool
    layout: str


cases = st.builds(
    Case, storage=st.sampled_from(STORAGES), reentrant=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), dropout=st.sampled_from([0.0, 0.5]),
    nested=st.booleans(), tracked=st.booleans(), autocast=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
)  # fmt: skip


def run(case: Case, checkpoint: Checkpoint, tracker: CudaRNGStatesTracker) -> list[torch.Tensor]:
    """Two steps; every gradient, and what the generators give afterwards."""
    torch.manual_seed(0)
    units = [Unit(tracker, case.dropout).to(case.dtype) for _ in range(3)]
    tracker.reset()
    if case.tracked:
        tracker.add("model-parallel-rng", 17)
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        leaf = input_of(case)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
            out, tree = forward(case, units, checkpoint, leaf)
            loss = out.float().square().sum() + tree["pair"][0].float().sum()
        loss.backward()
        found += [leaf.grad, *(p.grad for unit in units for p in unit.parameters() if p.grad is not None)]
    found += [torch.rand(3)]
    if case.tracked:
        with tracker.fork():
            found += [torch.rand(3)]
    return [x.clone() for x in found]


def input_of(case: Case) -> torch.Tensor:
    shape = {"plain": (4, WIDTH), "transposed": (WIDTH, 4), "sliced": (4, 2 * WIDTH), "expanded": (1, WIDTH)}
    return torch.randn(*shape[case.layout]).to(case.dtype).requires_grad_()


def forward(case: Case, units: list[Unit], checkpoint: Checkpoint, leaf: torch.Tensor) -> Any:
    x = {
        "plain": lambda: leaf, "transposed": lambda: leaf.t(), "sliced": lambda: leaf[:, ::2],
        "expanded": lambda: leaf.expand(4, WIDTH),
    }[case.layout]()  # fmt: skip
    tree: dict[str, Any] = {"order": torch.randperm(WIDTH), "pair": (torch.ones(4, WIDTH, dtype=case.dtype), None)}
    x, tree = checkpoint(units[0], x, tree)
    if case.nested:

        def two(x: torch.Tensor, tree: dict[str, Any]) -> Any:
            x, tree = checkpoint(units[1], x, tree, shift=x.mean())
            return checkpoint(units[2], x, tree)

        return checkpoint(two, x, tree)
    x, tree = checkpoint(units[1], x, tree, shift=x.mean())
    return checkpoint(units[2], x, tree)


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@given(case=cases)
def test_every_bit_is_as_without_checkpoints(case: Case) -> None:
    tracker = CudaRNGStatesTracker("cpu")
    expected = run(case, plain, tracker)
    with storage_of(case.storage) as storage:
        config = ActivationCheckpointingConfig(use_reentrant=case.reentrant)
        checkpointing = ActivationCheckpointing(config, storage=storage, tracker=tracker)
        found = run(case, checkpointing.checkpoint, tracker)
        assert checkpointing.saved_bytes == 0  # nothing outlives its graph
        del checkpointing
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("save", [["matmul"], ["aten.mul", "attention"]])
def test_results_that_are_kept_change_nothing(save: list[str]) -> None:
    case = Case("none", False, torch.float32, 0.5, True, True, False, "plain")
    tracker = CudaRNGStatesTracker("cpu")
    expected = run(case, plain, tracker)
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save=save), tracker=tracker)
    assert all(torch.equal(x, y) for x, y in zip(run(case, checkpointing, tracker), expected, strict=True))


class Counts(TorchDispatchMode):
    """How often a matrix product is computed."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("save", "number"), [([], 3), (["matmul"], 2)])
def test_operations_that_are_saved_are_not_computed_again(save: list[str], number: int) -> None:
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(save=save))
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with Counts() as counts:
        checkpointing(lambda x: torch.sin(x @ w).exp(), x).sum().backward()
    assert counts.number == number  # forward, again, gradient


def test_an_operation_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"'aten.mmm': no such operation; did you mean 'mm'\? Allowed: matmul, "):
        ActivationCheckpointing(ActivationCheckpointingConfig(save=["aten.mmm"]))
