"""Files for torch.load: what is put in is what torch, and the reader here, take out; all of it or nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import TorchFile, load_torch, open_foreign

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


def of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return raw.view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6), st.randoms())
def test_torch_and_the_reader_here_take_out_what_was_put_in(tmp_path_factory, kinds, dice) -> None:  # type: ignore[no-untyped-def]
    tensors = {f"layer.{number}|ü": of(dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("bin") / "model.bin"
    with TorchFile(path, {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}) as file:
        order = list(tensors)
        dice.shuffle(order)
        for key in order:
            file.put(key, tensors[key])
        file.commit()
    there = torch.load(path, weights_only=True)
    mapped = torch.load(path, weights_only=True, mmap=True)
    here = load_torch(path).value
    assert list(there) == list(here) == list(tensors)
    assert all(same(there[k], t) and same(mapped[k], t) and same(here[k].tensor(), t) for k, t in tensors.items())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_tied_parameters_are_one_storage_again(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    with TorchFile(tmp_path / "m.bin", {"a": (weight.dtype, (4, 3))}, {"b": "a"}) as file:
        file.put("a", weight)
        file.commit()
    found = torch.load(tmp_path / "m.bin", weights_only=True)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert torch.equal(found["b"], weight)
    with pytest.raises(CheckpointError, match="not in the file"):
        TorchFile(tmp_path / "n.bin", {"a": (weight.dtype, (4, 3))}, {"b": "c"})


def test_a_file_that_is_not_whole_never_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_text("old")
    with TorchFile(path, {"a": (torch.float32, (2,)), "b": (torch.float32, ())}) as file:
        file.put("a", torch.ones(2))
        for key, value, match in (
            ("a", torch.ones(2), "put before"), ("c", torch.ones(2), "not announced"),
            ("b", torch.ones(2), "announced as"),
        ):  # fmt: skip
            with pytest.raises(CheckpointError, match=match):
                file.put(key, value)
        with pytest.raises(CheckpointError, match="would lack 1 tensors: b"):
            file.commit()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]
    with pytest.raises(CheckpointError, match="no storages of"):
        TorchFile(path, {"a": (torch.qint8, (2,))})


def test_sizes_beyond_four_gigabytes_are_in_the_long_fields(tmp_path: Path) -> None:
    # Sparse: five gigabytes of zeros in no space on the disk.
    path, shape = tmp_path / "m.bin", (5 << 28,)
    with TorchFile(path, {"zeros": (torch.float32, shape), "b": (torch.float32, ())}) as file:
        file._missing.discard("zeros")
        file.put("b", torch.tensor(7.0))
        file.commit()
    assert path.stat().st_size > 5 << 30
    found = load_torch(path, verify=False).value
    assert found["zeros"].shape == shape
    assert found["zeros"].read((5 << 28) - 3).tolist() == [0, 0, 0]
    assert found["b"].tensor() == 7
    assert torch.load(path, weights_only=True, mmap=True)["b"] == 7


@pytest.mark.parametrize("legacy", [False, True])
def test_conjugate_and_negative_views_are_read_as_what_they_show(tmp_path: Path, legacy: bool) -> None:
    pair = torch.tensor([1 + 2j, 3 - 1j])
    views = {
        "pair": pair, "conj": pair.conj(), "imag": torch.tensor([5j, 2]).conj().imag, "neg": torch._neg_view(pair),
        "transposed": torch.ones(2, 3, dtype=torch.complex64).mH,
    }  # fmt: skip
    torch.save(views, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    found = load_torch(tmp_path / "file.pt").value
    assert {name: torch.equal(found[name].tensor(), view) for name, view in views.items()} == dict.fromkeys(views, True)
    weights = open_foreign(tmp_path / "file.pt")  # one memory, and not one tensor under three names
    assert all(torch.equal(weights.tensor(name), view) for name, view in views.items())
    assert "tied" not in weights.meta
