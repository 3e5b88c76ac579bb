"""Every dtype that can be saved can be loaded; the others are refused when they are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo.checkpointing import CheckpointError, TensorFile, load, save
from zoo.checkpointing.consolidation import convert_zero_checkpoint_to_fp32_state_dict
from zoo.layout import StateSlice

pytestmark = pytest.mark.filterwarnings("ignore:.*experimental", "ignore:.*deprecated")

ALL = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})
MUST = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
}  # fmt: skip


def slice_of(tensor: torch.Tensor, start: int = 0, shape: tuple[int, ...] = (7,)) -> StateSlice:
    return StateSlice("x", "buffer", start, tensor.numel(), shape, tensor)


def some(dtype: torch.dtype) -> torch.Tensor | None:
    """Seven elements of differing bits, None for dtypes that tensors cannot have."""
    try:
        if dtype is torch.bool:
            return torch.tensor([True, False, True, True, False, False, True])
        return torch.arange(7 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return None


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("name", ALL)
def test_a_dtype_is_loaded_as_it_was_saved_or_refused_when_it_is_saved(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = some(dtype)
    if tensor is None:
        assert name not in MUST
        return
    refused = ""
    try:
        save(tmp_path, "one", [slice_of(tensor[:3]), slice_of(tensor[3:], 3)], rank_state={"own": tensor})
    except CheckpointError as error:
        refused = str(error)
    if refused:
        assert name not in MUST
        assert f"is torch.{name}; a safetensors file holds torch.float64, " in refused
        assert list(tmp_path.iterdir()) == []
        return
    found = load(tmp_path)
    for start in range(7):
        for stop in range(start, 8):
            part = found.read("x", "buffer", start, stop - start)
            assert part.dtype is dtype
            assert bits(part) == bits(tensor[start:stop])
    own = found.rank_state(0)["own"]
    assert own.dtype is dtype
    assert bits(own) == bits(tensor)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ALL)
def test_no_elements_of_any_dtype_come_back(tmp_path: Path, name: str) -> None:
    """A tensor without elements has no place in a file, only in the manifest, which holds any dtype."""
    dtype = getattr(torch, name)
    try:
        empty = torch.empty(0, dtype=dtype)
    except (RuntimeError, TypeError):
        return
    save(tmp_path, "one", [slice_of(empty, 0, (0,))])
    assert load(tmp_path).tensor("x", "buffer").dtype is dtype


@pytest.mark.parametrize("name", sorted(MUST))
def test_a_file_of_any_dtype_is_read_by_the_library(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    tensor = some(getattr(torch, name))
    assert tensor is not None
    with TensorFile(tmp_path / "f.safetensors", {"a": (tensor.dtype, (7,)), "b": (tensor.dtype, ())}, {}) as file:
        file.put("a", tensor)
        file.put("b", tensor[2])
        file.commit()
    found = load_file(tmp_path / "f.safetensors")
    if tensor.is_complex():  # the format has none that the library reads: pairs of real numbers
        found = {key: torch.view_as_complex(value) for key, value in found.items()}
    assert found["a"].dtype is found["b"].dtype is tensor.dtype
    assert bits(found["a"]) == bits(tensor)
    assert bits(found["b"].reshape(1)) == bits(tensor[2:3])


def test_conjugate_and_negative_views_are_saved_as_what_they_show(tmp_path: Path) -> None:
    pair = torch.tensor([1 + 2j, 3 - 1j])
    for tag, view in (("conj", pair.conj()), ("neg", torch._neg_view(torch.ones(2)))):
        save(tmp_path, tag, [slice_of(view, shape=(2,))], rank_state={"own": view})
        with load(tmp_path, tag) as found:
            assert torch.equal(found.tensor("x", "buffer"), view)
            assert torch.equal(found.rank_state(0)["own"], view)


def test_a_name_that_a_safetensors_file_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    name = "__metadata__"
    with pytest.raises(CheckpointError, match="no tensor of the name '__metadata__'"):
        TensorFile(tmp_path / "a.safetensors", {name: (torch.float32, (2,))}, {})
    save(tmp_path, "one", [StateSlice(name, "parameter", 0, 2, (2,), torch.ones(2))])
    assert load(tmp_path).tensor(name).tolist() == [1, 1]
    with pytest.raises(ValueError, match="no tensor of the name '__metadata__'"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "m.safetensors")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "m.bin")
    assert torch.load(tmp_path / "m.bin")[name].tolist() == [1, 1]
