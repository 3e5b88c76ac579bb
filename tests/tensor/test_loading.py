"""Each rank reads its own boxes: any degree loads what any other saved, and what does not fit is told first."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.inject.models import model_of
from tests.tensor.models import WIDTH, Decoder, Shape, plan_of
from tests.tensor.test_splitting import shapes, tokens
from torch import nn

from zoo import checkpointing, sim
from zoo.checkpointing.foreign import load_safetensors, open_foreign
from zoo.comm import Communicator
from zoo.layout import Box, boxes_of, split_of
from zoo.nn import pack_linears
from zoo.tensor import Plan, joined, load, parameters_on_meta, slices, split
from zoo.tensor import plan_of as plan_of_model


def written(shape: Shape, folder: Path, seed: int = 4) -> dict[str, torch.Tensor]:
    model = Decoder(shape, seed)
    state = {name: value for name, value in model.state_dict().items() if not (shape.tied and name == "head.weight")}
    save_file(state, folder / "model.safetensors")
    return dict(model.state_dict())


def empty(shape: Shape) -> Decoder:
    with parameters_on_meta():
        model = Decoder(shape)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


class Counted:
    """A source that counts the elements that are asked for."""

    def __init__(self, source: Any) -> None:
        self.source, self.elements = source, 0
        self.shapes, self.roles = source.shapes, source.roles

    def read_box(self, name: str, role: str, box: Any) -> torch.Tensor:
        self.elements += box.numel
        found: torch.Tensor = self.source.read_box(name, role, box)
        return found


@given(shape=shapes(), degree=st.integers(1, 5), training=st.booleans())
@example(shape=Shape(heads=9, kv=3, layout="parts"), degree=4, training=False)
def test_a_rank_reads_its_boxes_and_no_more(shape: Shape, degree: int, training: bool) -> None:
    degree = min(degree, shape.heads)
    with tempfile.TemporaryDirectory() as folder:
        expected = written(shape, Path(folder))

        def fn(rank: int) -> None:
            model, comm = empty(shape), Communicator()
            split(model, plan_of(shape), comm, training=training)
            source = Counted(load_safetensors(folder))
            assert load(model, source, comm=comm) == []
            assert source.elements == sum(parameter.numel() for parameter in model.parameters())
            for name, parameter in model.named_parameters():
                box = split_of(parameter).box
                for laid in boxes_of(box) if box is not None else ():
                    assert torch.equal(parameter[laid.here.ranges], expected[name][laid.box.ranges]), name
                assert box is not None or torch.equal(parameter, expected[name]), name
            assert (model.head.weight is model.words.weight) == shape.tied
            torch.testing.assert_close(model(tokens(shape)), Decoder(shape, 4)(tokens(shape)), rtol=1e-12, atol=1e-12)

        sim.run(degree, fn, seed=0)


@pytest.mark.dear
@given(shape=shapes(), first=st.integers(1, 4), second=st.integers(1, 4), training=st.booleans())
@example(shape=Shape(heads=9, kv=3), first=2, second=4, training=False)
@example(shape=Shape(heads=6, kv=2, layout="groups"), first=4, second=3, training=False)
def test_any_degree_loads_what_another_saved(shape: Shape, first: int, second: int, training: bool) -> None:
    first, second = min(first, shape.heads), min(second, shape.heads)
    with tempfile.TemporaryDirectory() as folder:

        def save(rank: int) -> None:
            model, comm = Decoder(shape, 4), Communicator()
            split(model, plan_of(shape), comm, training=training)
            checkpointing.save(folder, "one", slices(model, comm), comm=comm)

        sim.run(first, save, seed=0)
        with checkpointing.load(folder) as found:
            whole = {name: found.tensor(name) for name in found.shapes}
        for name, value in Decoder(shape, 4).state_dict().items():
            assert torch.equal(whole.get(name, value), value), name
        assert len(whole) == len({id(p) for p in Decoder(shape).parameters()})

        def go_on(rank: int) -> None:
            model, comm = empty(shape), Communicator()
            split(model, plan_of(shape), comm, training=not training)
            with checkpointing.load(folder, comm=comm) as source:
                load(model, source, comm=comm)
            torch.testing.assert_close(model(tokens(shape)), Decoder(shape, 4)(tokens(shape)), rtol=1e-12, atol=1e-12)

        sim.run(second, go_on, seed=0)


def told(folder: str, shape: Shape, error: str, **options: Any) -> None:
    def fn(rank: int) -> None:
        model, comm = empty(shape), Communicator()
        split(model, plan_of(shape), comm)
        with pytest.raises(ValueError, match=error):
            load(model, load_safetensors(folder), comm=comm, **options)
        assert all(parameter.is_meta for parameter in model.parameters())

    sim.run(2, fn, seed=0)


def test_what_does_not_fit_is_told_before_a_weight_is_touched(tmp_path: Path) -> None:
    shape = Shape(bias=False)
    written(shape, tmp_path)
    told(str(tmp_path), replace(shape, inner=12), r"up.weight has shape \(10, 6\) there and \(12, 6\) in the model")
    told(str(tmp_path), replace(shape, layers=3), "tensors are missing: blocks.2.first.weight")
    told(str(tmp_path), replace(shape, layers=1), "are not the model's: blocks.1")
    told(str(tmp_path), replace(shape, vocab=14), "Nothing was changed", strict=False)

    def fn(rank: int) -> None:
        more, comm = Decoder(replace(shape, layers=3), seed=1), Communicator()
        split(more, plan_of(replace(shape, layers=3)), comm)
        before = more.blocks[2].first.weight.clone()
        assert load(more, load_safetensors(tmp_path), comm=comm, strict=False) == []
        assert torch.equal(more.blocks[2].first.weight, before)
        less = Decoder(replace(shape, layers=1), seed=1)
        unused = load(less, load_safetensors(tmp_path), comm=comm, strict=False)
        assert unused
        assert all(name.startswith("blocks.1.") for name in unused)

    sim.run(2, fn, seed=0)


def test_two_tensors_of_one_name_are_told(tmp_path: Path) -> None:
    shape = Shape(tied=False)
    state = written(shape, tmp_path)
    save_file({**state, "old": state["last.weight"] + 1}, tmp_path / "model.safetensors")

    def fn(rank: int) -> None:
        model = Decoder(shape, 5)
        split(model, plan_of(shape), Communicator())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        source = load_safetensors(tmp_path)
        with pytest.raises(ValueError, match=r"last\.weight and old are both last\.weight.* Nothing was changed"):
            load(model, source, rename=lambda name: "last.weight" if name == "old" else name)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    sim.run(2, fn, seed=0)


class Told:
    """A source of tensors with roles as they are given."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], roles: Mapping[str, str]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.roles = {name: {roles.get(name, "parameter"): "float64"} for name in tensors}

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        return self.tensors[name][box.ranges]


def test_what_is_no_value_of_a_tensor_is_not_taken_for_one() -> None:
    shape = Shape(tied=False)

    def fn(rank: int) -> None:
        state, model = dict(Decoder(shape, 4).state_dict()), Decoder(shape, 5)
        split(model, plan_of(shape), Communicator())
        with pytest.raises(ValueError, match=r"last\.weight has no values there, and is only exp_avg\. Nothing was"):
            load(model, Told(state, {"last.weight": "exp_avg"}))
        load(model, Told(state, {"last.weight": "master", "last.bias": "buffer"}))
        assert torch.equal(model.last.weight, state["last.weight"])

    sim.run(2, fn, seed=0)


def test_parts_with_other_roles_and_no_parts_are_told() -> None:
    shape = Shape(tied=False)

    def written(rank: int) -> dict[str, torch.Tensor]:
        model = Decoder(shape, 4)
        split(model, plan_of(shape), Communicator())
        return dict(model.state_dict())

    first, second = sim.run(2, written, seed=0)
    parts = [Told(first, {}), Told(second, {"last.weight": "master"})]
    with pytest.raises(ValueError, match=r"rank 1 has 'last\.weight' as master, others as parameter"):
        joined(parts, Decoder(shape), plan_of(shape))
    with pytest.raises(ValueError, match="joined got no parts"):
        joined([], Decoder(shape), plan_of(shape))


def test_buffers_without_values_are_told(tmp_path: Path) -> None:
    """Of a model made on the device "meta", which parameters_on_meta() would have left their values."""

    class Rotating(Decoder):
        def __init__(self) -> None:
            super().__init__(Shape(tied=False))
            self.register_buffer("angles", torch.ones(3), persistent=False)

    save_file(dict(Rotating().state_dict()), tmp_path / "model.safetensors")

    def fn(rank: int) -> None:
        with torch.device("meta"):
            model = Rotating()
        split(model, plan_of(Shape(tied=False)), Communicator())
        with pytest.raises(ValueError, match=r"buffers .* no checkpoint has: angles.*parameters_on_meta"):
            load(model, load_safetensors(tmp_path))
        assert all(parameter.is_meta for parameter in model.parameters())

    sim.run(2, fn, seed=0)


def test_a_failure_of_one_rank_is_told_on_all(tmp_path: Path) -> None:
    shape = Shape()
    written(shape, tmp_path)

    def fn(rank: int) -> None:
        model, comm = empty(shape), Communicator()
        split(model, plan_of(shape), comm)
        source = Counted(load_safetensors(tmp_path))
        if rank == 1:
            source.shapes = {**source.shapes, "words.weight": (3, WIDTH)}
        with pytest.raises(ValueError, match=r"rank 1.*words\.weight has shape \(3, 6\)"):
            load(model, source, comm=comm)

    sim.run(2, fn, seed=0)


def test_names_with_or_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    class Named(nn.Module):
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 2)

    class Base(nn.Linear):
        base_model_prefix = "model"

    values = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    save_file(values, tmp_path / "model.safetensors")
    model = Named()
    load(model, load_safetensors(tmp_path))
    assert torch.equal(model.model.weight, values["weight"])
    save_file({f"model.{name}": 2 * value for name, value in values.items()}, tmp_path / "model.safetensors")
    base = Base(3, 2)
    load(base, load_safetensors(tmp_path))
    assert torch.equal(base.weight, 2 * values["weight"])
    load(base, load_safetensors(tmp_path), rename=lambda name: name.removeprefix("model."))


def test_parameters_on_meta_are_this_threads_and_take_no_memory() -> None:
    with parameters_on_meta():
        layer = nn.BatchNorm1d(3)
        assert layer.weight.is_meta
        assert not layer.running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def parts_of(shape: Shape, degree: int, training: bool, folder: Path) -> list[Any]:
    """As Megatron-LM writes them: a file a rank, with other things beside the model's state."""

    def write(rank: int) -> Path:
        model = Decoder(shape, seed=4)
        split(model, plan_of(shape), Communicator(), training=training)
        state = {name: value for name, value in model.state_dict().items() if not shape.tied or name != "head.weight"}
        place = folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        place.parent.mkdir()
        torch.save({"args": argparse.Namespace(degree=degree), "iteration": 7, "model": state}, place)
        return place

    return [open_foreign(place, key="model") for place in sim.run(degree, write, seed=0)]


@given(shape=shapes(), before=st.integers(1, 5), after=st.integers(1, 5), training=st.booleans())
@example(shape=Shape(heads=9, kv=3, layout="parts"), before=4, after=2, training=True)
def test_files_of_other_ranks_parts(shape: Shape, before: int, after: int, training: bool) -> None:
    before, after = min(before, shape.heads), min(after, shape.heads)
    expected = Decoder(shape, seed=4).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(shape, before, training, Path(folder))

        def fn(rank: int) -> None:
            model, comm = empty(shape), Communicator()
            source = joined(parts, model, plan_of(shape), training=training)
            split(model, plan_of(shape), comm)
            assert load(model, source, comm=comm) == []
            for name, parameter in model.named_parameters():
                for laid in boxes_of(split_of(parameter).box or Box.whole(tuple(parameter.shape))):
                    assert torch.equal(parameter[laid.here.ranges], expected[name][laid.box.ranges]), name

        sim.run(after, fn, seed=0)


def test_files_of_other_parts_than_the_plan_says(tmp_path: Path) -> None:
    shape = Shape()
    parts = parts_of(shape, 2, True, tmp_path)
    model = empty(shape)
    with pytest.raises(ValueError, match=r"of 1 ranks .*'words.weight' of shape \(7, 6\), and the plan gives it"):
        joined(parts[:1], model, plan_of(shape))
    with pytest.raises(ValueError, match=r"under plan 'short': rank 0 has 'blocks.0.first.weight'"):
        joined(parts, nn.ModuleDict({"head": model.head, "words": model.words}), Plan(
            name="short", rules=plan_of(shape).rules[:1] + plan_of(shape).rules[-1:]
        ))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_a_process_takes_the_memory_of_its_boxes_and_of_one_tensor(training: bool) -> None:
    pytest.importorskip("transformers")
    from benchmarks.tensor.loading import figures
    from benchmarks.tensor.step import SMOLLM2

    for found in figures(SMOLLM2 | {"num_hidden_layers": 10}, 2, training=training):
        assert found["peak"] <= 1.05 * (found["boxes"] + found["largest"])
        assert found["boxes"] <= found["read"] <= 1.02 * found["boxes"]


def test_codes_are_no_part_of_a_whole_tensor() -> None:
    """Those of the first rank would be everybody's."""
    pytest.importorskip("transformers")

    def fn(rank: int) -> None:
        comm, model = Communicator(), model_of("Llama")
        split(model, plan_of_model(model), comm, training=False)
        source = _Of(dict(model.state_dict()))
        pack_linears(model, group_size=16)
        coded = _Of(dict(model.state_dict()))
        with pytest.raises(ValueError, match=r"is of a layer in codes \(zoo.nn.pack_linears\), which are no part"):
            list(slices(model, comm))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for strict in (True, False):
            with pytest.raises(ValueError, match=r"is of a layer in codes.*Nothing was changed"):
                load(model, coded, strict=strict)
        with pytest.raises(ValueError, match="tensors are missing"):
            load(model, source)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    sim.run(2, fn)


class _Of:
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self.roles = {name: {"parameter": "float32"} for name in state}

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        return self.state[name][box.ranges]
