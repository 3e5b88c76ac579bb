"""Ranks that split or load together: other models, other plans and failures of one are told on all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.tensor import hub
from tests.tensor.models import Decoder, Shape, plan_of
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.comm import Communicator
from zoo.layout import Box, split_of
from zoo.tensor import load, prove, split
from zoo.tensor import plan_of as plan_of_model
from zoo.tensor.agreement import _checksum

SHAPE = Shape()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("seed", r"rank 1 of the axis has another tensor words\.weight than rank 0 and \d+ more"),
        ("value", r"rank 1 of the axis has another tensor blocks\.1\.second\.bias than rank 0\. All its ranks make"),
        ("dtype", r"rank 1 of the axis has another tensor last\.weight than rank 0\."),
        ("buffer", r"rank 1 of the axis has another tensor table than rank 0\."),
        ("integers", r"rank 1 of the axis has another tensor places than rank 0\."),
        ("complex", r"rank 1 of the axis has another tensor turns than rank 0\."),
        ("frozen", r"rank 1 of the axis has another tensor last\.weight than rank 0\."),
        ("plan", "rank 1 of the axis has another plan than rank 0"),
        ("training", "rank 1 of the axis has another setting than rank 0"),
        ("width", r"splitting a model failed: rank 1: blocks\.\*\.perceptron\.up has 11 features"),
    ],
)
def test_what_differs_is_told_on_all_ranks_and_nothing_changes(what: str, told: str) -> None:
    def fn(rank: int) -> None:
        shape = Shape(inner=10 + rank) if what == "width" else SHAPE
        model: Any = Decoder(shape, seed=rank if what == "seed" else 0)
        model.register_buffer("table", torch.full((2,), float(rank if what == "buffer" else 0)))
        model.register_buffer("places", torch.arange(3) + (rank if what == "integers" else 0))
        model.register_buffer("turns", torch.full((3,), 1j * (rank if what == "complex" else 1)))
        model.last.weight.requires_grad_(what != "frozen" or rank == 0)
        if what == "value" and rank == 1:
            model.blocks[1].second.bias.data[3] = 1e-9
        if what == "dtype" and rank == 1:
            model.last.weight.data = model.last.weight.data.float()
        plan = replace(plan_of(SHAPE), name="other" if what == "plan" and rank == 1 else "decoder")
        with pytest.raises(ValueError, match=told):
            split(model, plan, Communicator(), training=what != "training" or rank == 0)
        assert not any(split_of(parameter).axes for parameter in model.parameters())

    sim.run(2, fn, seed=0)


def test_what_is_no_mesh_is_told() -> None:
    def fn(rank: int) -> None:
        for mesh in (None, "tensor", 2, init_device_mesh("cpu", (2,))):
            with pytest.raises(ValueError, match="as its mesh; it takes a DeviceMesh with named dims"):
                split(Decoder(SHAPE), plan_of(SHAPE), mesh)
        with pytest.raises(ValueError, match=r"the axes \('tensor',\) of a mesh with \('data',\)"):
            split(Decoder(SHAPE), plan_of(SHAPE), init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))

    sim.run(2, fn, seed=0)


def test_a_source_that_fails_on_one_rank_fails_on_all_without_being_asked() -> None:
    """The ranks that load together are those that have parts of the model."""
    tensors = {name: value.detach() for name, value in Decoder(SHAPE).state_dict().items()}
    tensors.pop("head.weight")

    def fn(rank: int) -> None:
        class Source:
            def __init__(self) -> None:
                self.shapes = {name: tuple(value.shape) for name, value in tensors.items()}
                self.roles = {name: {"parameter": ""} for name in tensors}

            def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
                if rank == 1 and name == "last.bias":
                    raise OSError("the disk is gone")
                return tensors[name][box.ranges]

        model = Decoder(SHAPE)
        split(model, plan_of(SHAPE), Communicator())
        with pytest.raises(ValueError, match="reading its tensors failed: rank 1: OSError: the disk is gone"):
            load(model, Source())

    sim.run(2, fn, seed=0)


def test_a_proof_leaves_the_generators_of_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-parallel ranks would draw the same numbers after it."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model = hub.model_of("llama", initializer_range=0.03)
    before = torch.get_rng_state()
    seeds.clear()
    prove(model, model.config, plan_of_model(model), 2)
    assert not seeds
    assert torch.equal(before, torch.get_rng_state())


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@given(
    dtype=st.sampled_from(DTYPES), numel=st.integers(0, 20),
    offset=st.integers(0, 3), at=st.integers(0, 19),
)  # fmt: skip
@example(dtype=torch.float32, numel=0, offset=0, at=0)
@example(dtype=torch.bfloat16, numel=7, offset=1, at=6)
def test_a_checksum_is_of_values_and_not_of_where_they_lie(
    dtype: torch.dtype, numel: int, offset: int, at: int
) -> None:
    values = torch.randn(numel + offset, generator=torch.Generator().manual_seed(numel)).to(dtype)
    here = values[offset:]
    apart = torch.empty(numel, 2, dtype=dtype)[:, 0]
    apart.copy_(here)
    for same in (here.clone(), apart):
        assert _checksum(same) == _checksum(here)
    if numel:
        other = here.clone()
        other[at % numel] = 5.0
        assert _checksum(other) != _checksum(here)
