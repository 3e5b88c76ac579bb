"""Clones for torch.save: the same structure, values, dtypes and ties, in files of the size of the tensors."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.checkpointing import clone_tensors_for_torch_save
from zoo.zero import ZeroOptimizer


class Pair(NamedTuple):
    first: Any
    second: Any


class Special(dict[str, Any]):
    """Of a user."""


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Views of a large buffer: contiguous, transposed, with gaps, expanded, or with no elements."""
    dtype = draw(st.sampled_from(DTYPES))
    whole = torch.randint(0, 2, (1000,)).to(dtype)
    sizes = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    start, step = draw(st.integers(0, 50)), draw(st.integers(1, 3))
    count = torch.Size(sizes).numel()
    view = whole[start : start + count * step : step].view(sizes) if step == 1 else torch.as_strided(
        whole, sizes, [step * n for n in torch.empty(sizes).stride()], start
    )  # fmt: skip
    if sizes and draw(st.booleans()):
        view = view.transpose(0, -1)
    return view.expand(2, *view.shape) if draw(st.booleans()) else view


def containers(children: Any) -> Any:
    names = st.one_of(st.text(max_size=3), st.integers(0, 9))
    return st.one_of(
        st.lists(children, max_size=3), st.lists(children, max_size=3).map(tuple),
        st.tuples(children, children).map(lambda pair: Pair(*pair)), st.dictionaries(names, children, max_size=3),
        st.dictionaries(names, children, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), children, max_size=3).map(Special),
        st.dictionaries(names, children, max_size=3).map(lambda d: defaultdict(list, d)),
    )  # fmt: skip


def check(copy: Any, item: Any) -> None:
    assert type(copy) is type(item)
    if isinstance(item, torch.Tensor):
        assert copy.dtype is item.dtype
        assert torch.equal(copy, item)
        assert copy.untyped_storage().nbytes() == item.numel() * item.element_size()
        assert not item.numel() or copy.data_ptr() != item.data_ptr()
    elif isinstance(item, (list, tuple)):
        assert len(copy) == len(item)
        for one, other in zip(copy, item, strict=True):
            check(one, other)
    elif isinstance(item, dict):
        assert list(copy) == list(item)
        assert copy is not item
        for key in item:
            check(copy[key], item[key])
        assert getattr(copy, "default_factory", None) is getattr(item, "default_factory", None)
    else:
        assert copy is item


@pytest.mark.dear
@given(st.recursive(st.one_of(tensors(), st.integers(), st.none(), st.text(max_size=2)), containers, max_leaves=8))
def test_a_copy_is_the_same_and_no_larger(item: Any) -> None:
    check(clone_tensors_for_torch_save(item), item)
    check(clone_tensors_for_torch_save(item, device="cpu"), item)


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_of_an_optimizer_is_saved_without_its_buffers(stage: int) -> None:
    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.BatchNorm1d(100))
        model[1].weight = model[0].weight
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = ZeroOptimizer(model, stage=stage)
        state = model.state_dict()
        lean = clone_tensors_for_torch_save(state)
        assert type(lean) is OrderedDict
        assert lean._metadata == state._metadata
        assert all(torch.equal(lean[name], value) for name, value in expected.items())
        assert lean["0.weight"].data_ptr() == lean["1.weight"].data_ptr()  # tied as they were
        one = clone_tensors_for_torch_save(state["0.bias"])
        assert one.untyped_storage().nbytes() == 400 < state["0.bias"].untyped_storage().nbytes()
        assert saved_bytes(one) < saved_bytes(state["0.bias"])
        size = sum({value.data_ptr(): value.nbytes for value in lean.values()}.values())
        assert size < saved_bytes(lean) < size + 10_000
        optimizer.close()

    sim.run(2, job)


def test_gradients_do_not_follow() -> None:
    weight = nn.Parameter(torch.ones(3))
    copy = clone_tensors_for_torch_save({"a": weight})["a"]
    assert not copy.requires_grad
    assert clone_tensors_for_torch_save(torch.ones(2), device="meta").is_meta
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(clone_tensors_for_torch_save(sparse).to_dense(), torch.eye(3))


class Named(dict[str, Any]):
    """Wants an argument when it is made."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


def test_counters_and_dicts_that_want_arguments_stay_what_they_are() -> None:
    flat = torch.arange(10.0)
    given: dict[str, Any] = {
        "counts": Counter("aab"),
        "named": Named("x"),
        "by default": defaultdict(list, a=[flat[:2]]),
    }
    given["named"]["part"] = flat[2:4]
    found = clone_tensors_for_torch_save(given)
    assert found["counts"] == Counter("aab")
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in given.items()}
    assert found["by default"]["nothing"] == []
    for part in (found["named"].pop("part"), found["by default"]["a"][0]):
        assert part.untyped_storage().nbytes() == 8
    assert found["named"] == {"name": "x"}
    assert given["named"]["part"].untyped_storage().nbytes() == 40
