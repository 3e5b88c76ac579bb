"""Whole weights out of a checkpoint, with zoo and with torch and numpy alone: the same, and verified."""

from __future__ import annotations

import inspect
import json
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError, load, save, zero_to_fp32
from zoo.checkpointing.consolidation import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zoo.checkpointing.zero_to_fp32 import CODES, Checkpoint, LazyTensor, bytes_of, plan_shards, tensors_of
from zoo.comm import Communicator
from zoo.layout import StateSlice

GOLDEN = Path(__file__).parent / "golden" / "version2"
Values = dict[tuple[str, str], torch.Tensor]


def put(
    root: Path, values: Values, ranks: int = 2, scalars: Mapping[str, float] | None = None, meta: Any = None,
    tag: str = "one",
) -> None:  # fmt: skip
    """A checkpoint of these tensors, each cut evenly."""

    def job(rank: int) -> None:
        mine = []
        for (name, role), tensor in values.items():
            low, high = (k * tensor.numel() // ranks for k in (rank, rank + 1))
            if high > low or rank == 0:
                flat = tensor.reshape(-1)[low:high].clone()
                mine.append(StateSlice(name, role, low, high - low, tuple(tensor.shape), flat))
        save(root, tag, mine, scalars, meta, Communicator())

    sim.run(ranks, job)


def model_values() -> Values:
    torch.manual_seed(0)
    return {
        ("w", "parameter"): torch.randn(700, 900), ("w", "exp_avg"): torch.randn(700, 900),
        ("b|x", "parameter"): torch.randn(7).bfloat16(), ("none", "parameter"): torch.zeros(0, 4),
        ("mean", "buffer"): torch.randn(5, dtype=torch.float64), ("count", "buffer"): torch.tensor(5),
    }  # fmt: skip


def expected(values: Values) -> dict[str, torch.Tensor]:
    found = {name: tensor for (name, role), tensor in values.items() if role in ("parameter", "buffer")}
    return {name: t.float() if t.is_floating_point() else t for name, t in found.items()}


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name


# -- the three functions ----------------------------------------------------------------------------------------------


def test_names_arguments_and_defaults_are_those_of_the_documents() -> None:
    """Section 4.1.3 of DeepSpeed's documentation; ours by name only come after them."""

    def documented(function: Callable[..., object], number: int) -> list[tuple[str, object]]:
        empty = inspect.Parameter.empty
        found = list(inspect.signature(function).parameters.values())
        assert all(one.kind is one.KEYWORD_ONLY or one.name == "lazy_mode" for one in found[number:])
        return [(one.name, None if one.default is empty else one.default) for one in found[:number]]

    rest: list[tuple[str, object]] = [("tag", None), ("exclude_frozen_parameters", False)]
    assert documented(get_fp32_state_dict_from_zero_checkpoint, 3) == [("checkpoint_dir", None), *rest]
    assert documented(load_state_dict_from_zero_checkpoint, 3) == [
        ("model", None), ("checkpoint_dir", None), ("tag", None)
    ]  # fmt: skip
    assert documented(convert_zero_checkpoint_to_fp32_state_dict, 4) == [
        ("checkpoint_dir", None), ("output_file", None), *rest
    ]  # fmt: skip


def test_whole_fp32_tensors_at_once_and_one_by_one(tmp_path: Path) -> None:
    values = model_values()
    put(tmp_path, values)
    same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected(values))
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "one", lazy_mode=True)
    assert all(isinstance(tensor, LazyTensor) for tensor in lazy.values())
    same({name: tensor.contiguous() for name, tensor in lazy.items()}, expected(values))
    assert lazy["w"].dtype is torch.float32
    assert lazy["w"].shape == (700, 900)


def test_a_tag_is_taken_or_the_latest(tmp_path: Path) -> None:
    for tag, number in (("one", 1.0), ("two", 2.0)):
        put(tmp_path, {("w", "parameter"): torch.full((3,), number)}, 1, tag=tag)
    read = get_fp32_state_dict_from_zero_checkpoint
    assert [read(tmp_path, tag)["w"].tolist()[0] for tag in (None, "one", "two")] == [2.0, 1.0, 2.0]
    assert [Checkpoint(tmp_path, tag).tag for tag in (None, "one")] == ["two", "one"]
    with pytest.raises(CheckpointError, match="there is no checkpoint 'three'"):
        read(tmp_path, "three")


def test_version_2_is_read(tmp_path: Path) -> None:
    found = load(GOLDEN)
    (written,) = convert_zero_checkpoint_to_fp32_state_dict(GOLDEN, tmp_path / "out.bin")
    got = torch.load(written, weights_only=True)
    same(got, {name: found.tensor(name).float() for name in found.shapes if "parameter" in found.roles[name]})
    with pytest.raises(ValueError, match=r"is of version 2, and this script reads 3 and 4; `zoo ckpt export`"):
        Checkpoint(GOLDEN)


def test_frozen_parameters_are_left_out_where_asked(tmp_path: Path) -> None:
    one, values = torch.ones(2), {}
    values |= {("a", "parameter"): one, ("a", "exp_avg"): one, ("b", "parameter"): one, ("c", "parameter"): one}
    values |= {("mean", "buffer"): one}
    put(tmp_path, values, 1, {"step/b": 3.0})
    read = get_fp32_state_dict_from_zero_checkpoint
    assert set(read(tmp_path, exclude_frozen_parameters=True)) == {"a", "b", "mean"}
    assert set(read(tmp_path)) == {"a", "b", "c", "mean"}
    put(tmp_path, values, 1, meta={"model": {"frozen": ["a"]}}, tag="said")
    assert set(read(tmp_path, "said", True)) == {"b", "c", "mean"}
    put(tmp_path, {("a", "parameter"): one}, 1, tag="unknown")
    with pytest.raises(ValueError, match="'unknown' does not tell which parameters are frozen: it has no state"):
        read(tmp_path, "unknown", True)


def test_names_of_one_tied_parameter_share_it_everywhere(tmp_path: Path) -> None:
    put(tmp_path, {("emb", "parameter"): torch.randn(4, 3)}, meta={"model": {"tied": {"head": "emb", "odd": "gone"}}})
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found["head"] is found["emb"]
    assert "odd" not in found
    (torch_file,) = convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out.pt")
    back = torch.load(torch_file, weights_only=True)
    assert back["head"].data_ptr() == back["emb"].data_ptr()
    (safe,) = convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out.safetensors")
    model = nn.Module()
    model.emb = nn.Parameter(torch.zeros(4, 3))
    model.head = model.emb
    load_model(model, safe)
    assert torch.equal(model.emb, back["emb"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight


def _once(model: nn.Module) -> Values:
    found: Values = {(name, "parameter"): p.detach() for name, p in model.named_parameters()}
    return {**found, **{(name, "buffer"): b for name, b in model.named_buffers()}}


def test_a_model_takes_the_weights_tied_ones_too(tmp_path: Path) -> None:
    given = Tied()
    given.norm.running_mean.uniform_()
    put(tmp_path, _once(given))
    model = Tied().bfloat16()
    assert load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert model.head.weight is model.emb.weight
    same(model.state_dict(), {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.state_dict().items()})


def test_a_model_in_double_precision_gets_all_of_its_digits(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1).double()
    third = torch.full((1, 2), 1 / 3, dtype=torch.float64)
    put(tmp_path, {("weight", "parameter"): third, ("bias", "parameter"): third[0, :1]}, 1)
    load_state_dict_from_zero_checkpoint(model, tmp_path)
    assert torch.equal(model.weight, third)
    single = torch.nn.Linear(2, 1)
    load_state_dict_from_zero_checkpoint(single, tmp_path)
    assert torch.equal(single.weight, third.float())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.pop(("norm.bias", "parameter")), "checkpoint 'one' lacks 'norm.bias'"),
        (lambda v: v.update({("more", "parameter"): torch.ones(1)}), "has 'more', which the model lacks"),
        (
            lambda v: v.update({("norm.bias", "parameter"): torch.ones(5)}),
            r"'norm.bias' has shape \(4,\); .* has \(5,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    tmp_path: Path, change: Callable[[Values], object], said: str
) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values = {key: torch.zeros_like(tensor) for key, tensor in _once(model).items()}
    change(values)
    put(tmp_path, values, 1)
    with pytest.raises(CheckpointError, match=said):
        load_state_dict_from_zero_checkpoint(model, tmp_path)
    same(model.state_dict(), before)


def test_a_model_that_is_split_over_ranks_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    put(tmp_path, _once(model), 1)
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="'weight' is not whole on this rank"):
        load_state_dict_from_zero_checkpoint(model, tmp_path)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("reader", ["zoo", "alone"])
def test_one_file_and_shards_with_an_index(tmp_path: Path, safe: bool, reader: str) -> None:
    values, root, out = model_values(), tmp_path / "run", tmp_path / "out"
    put(root, values)
    source = load(root) if reader == "zoo" else Checkpoint(root)
    read: Callable[[Path], dict[str, torch.Tensor]] = (
        load_file if safe else lambda path: torch.load(path, weights_only=True, mmap=True)  # type: ignore[assignment]
    )
    tensors = tensors_of(source)
    suffix = "safetensors" if safe else "bin"
    (file,) = zero_to_fp32.write_model(tensors, tmp_path / f"one.{suffix}", safe=safe, max_shard_bytes=None)
    same(read(file), expected(values))
    *shards, index = zero_to_fp32.write_model(tensors, out, safe=safe, max_shard_bytes=100)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (*shards, index))
    assert shards[0].name == f"{'model' if safe else 'pytorch_model'}-00001-of-00002.{suffix}"
    assert index.name == f"{'model' if safe else 'pytorch_model'}.{suffix}.index.json"
    document = json.loads(index.read_text())
    assert document["metadata"]["total_size"] == sum(t.nbytes for t in expected(values).values())
    got = {name: read(out / file)[name] for name, file in document["weight_map"].items()}
    same(got, expected(values))
    assert all(set(read(path)) == {n for n, f in document["weight_map"].items() if f == path.name} for path in shards)


def test_dtypes_stay_where_none_is_asked_for_and_torch_reads_all(tmp_path: Path) -> None:
    values: Values = {
        (str(k), "parameter"): torch.arange(1, 8).to(dtype) if dtype is not torch.bool else torch.ones(7, dtype=dtype)
        for k, dtype in enumerate(CODES)
    }
    put(tmp_path / "run", values)
    tensors = tensors_of(Checkpoint(tmp_path / "run"), dtype=None)
    for suffix in ("bin", "safetensors"):
        path = tmp_path / f"out.{suffix}"
        zero_to_fp32.write_model(tensors, path, safe=suffix != "bin", max_shard_bytes=None)
        got = torch.load(path, weights_only=True) if suffix == "bin" else load_file(path)
        same(got, {name: tensor for (name, _), tensor in values.items()})


def test_the_torch_file_is_a_sound_archive_with_aligned_tensors(tmp_path: Path) -> None:
    put(tmp_path, model_values())
    (path,) = convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out.bin")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            raw = path.read_bytes()[info.header_offset :][:30]
            begin = (
                info.header_offset + 30 + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
            )
            assert begin % 64 == 0, info.filename


def test_never_more_than_a_piece_is_asked_for_where_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, model_values())
    monkeypatch.setattr(zero_to_fp32, "PIECE_BYTES", 8000)
    source, lengths = Checkpoint(tmp_path), []
    real = source.read

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        lengths.append(length)
        return real(name, role, start, length)

    monkeypatch.setattr(source, "read", read)
    for safe in (True, False):
        zero_to_fp32.write_model(tensors_of(source), tmp_path / "out", safe=safe, max_shard_bytes=None)
        assert max(lengths) == 1000
        assert sum(lengths) == 700 * 900 + 7 + 5 + 1
        lengths.clear()


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    limit=st.integers(1, 60),
    ties=st.lists(st.integers(0, 11), max_size=3),
)
@examples(times=10)
def test_shards_hold_every_tensor_once_in_order_and_no_more_than_fits(
    sizes: list[int], limit: int, ties: list[int]
) -> None:
    each = {str(k): LazyTensor(str(k), "parameter", (n,), torch.uint8, None) for k, n in enumerate(sizes)}  # type: ignore[arg-type]
    tied = {f"tied {k}": each[str(k)] for k in ties if str(k) in each}
    shards = plan_shards({**each, **tied}, limit)
    assert [name for shard in shards for name in shard if name in each] == list(each)
    assert {name for shard in shards for name in shard} == {*each, *tied}
    for before, shard in zip([{}, *shards], shards, strict=False):
        size = sum(tensor.nbytes for name, tensor in shard.items() if name in each)
        assert size <= limit or sum(tensor.nbytes > 0 for name, tensor in shard.items() if name in each) == 1
        if before:
            first = next(tensor for name, tensor in shard.items() if name in each)
            assert sum(t.nbytes for name, t in before.items() if name in each) + first.nbytes > limit
    for name, tensor in tied.items():
        assert any(
            name in shard and any(other is tensor for n, other in shard.items() if n in each) for shard in shards
        )


@pytest.mark.parametrize("safe", [True, False])
def test_a_write_that_ends_in_the_middle_leaves_no_index_of_two_models(tmp_path: Path, safe: bool) -> None:
    put(tmp_path / "a", {(name, "parameter"): torch.zeros(4) for name in "abc"}, 1)
    put(tmp_path / "b", {(name, "parameter"): torch.ones(4) for name in "abc"}, 1)
    write = partial(zero_to_fp32.write_model, output=tmp_path / "out", safe=safe, max_shard_bytes=16)
    *_, index = write(tensors_of(Checkpoint(tmp_path / "a")))
    damaged = Checkpoint(tmp_path / "b")
    read = damaged.read

    def fails(name: str, role: str, start: int, length: int) -> torch.Tensor:
        if name == "b":
            raise ValueError("another CRC-32C")
        return read(name, role, start, length)

    damaged.read = fails  # type: ignore[method-assign]
    assert index.exists()
    with pytest.raises(ValueError, match="another CRC-32C"):
        write(tensors_of(damaged))
    assert not index.exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1GiB", 1 << 30), ("500mb", 500 * 10**6), (7, 7), ("12", 12), ("3 KB", 3000)],
)
def test_sizes_are_read_as_hugging_face_has_them(text: int | str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "5 G", "0", 0, -3, "1.5GB", "9" * 30, "GB", None])
def test_sizes_that_are_none_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="write a number of bytes, or one like '5GB'"):
        bytes_of(text)


def test_where_the_output_goes(tmp_path: Path) -> None:
    put(tmp_path / "run", {("w", "parameter"): torch.ones(3)}, 1)

    def convert(*args: Any, **given: Any) -> list[str]:
        found = convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", *args, **given)
        return [str(path.relative_to(tmp_path)) for path in found]

    assert convert(tmp_path / "deep" / "new" / "w.bin") == ["deep/new/w.bin"]
    assert convert(tmp_path / "folder") == ["folder/pytorch_model.bin"]
    assert convert(output_dir=tmp_path / "a.bin") == ["a.bin/pytorch_model.bin"]
    assert convert(output_dir=tmp_path / "safe", safe_serialization=True) == ["safe/model.safetensors"]
    assert convert(output_dir=tmp_path / "safe", safe_serialization=True) == ["safe/model.safetensors"]  # replaced
    for options, said in (
        ({}, "takes output_file or output_dir"),
        ({"output_file": "a", "output_dir": "b"}, "takes output_file or output_dir"),
        ({"output_file": tmp_path / "x.bin", "safe_serialization": True}, "is a name of the torch format"),
        ({"output_file": tmp_path / "x.safetensors", "safe_serialization": False}, "is a name of safetensors"),
        ({"output_dir": tmp_path / "deep/new/w.bin"}, "is a file"),
        ({"output_dir": tmp_path / "x", "max_shard_size": "many"}, "write a number of bytes"),
    ):
        with pytest.raises(ValueError, match=said):
            convert(**options)
    (tmp_path / "plain").write_text("")
    with pytest.raises(ValueError, match="is a file; OUTPUT is a folder, or a name that ends in"):
        convert(tmp_path / "plain")


def test_files_of_another_model_in_the_folder_are_not_mixed_with_this_one(tmp_path: Path) -> None:
    """A reader takes model.safetensors before an index."""
    put(tmp_path / "run", model_values())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"another")
    (tmp_path / "out" / "config.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"holds model.safetensors of another model; give a folder without"):
        convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "run", output_dir=tmp_path / "out", safe_serialization=True, max_shard_size=10
        )
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"another"


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    put(tmp_path / "run", model_values())
    data = next((tmp_path / "run" / "one").glob("*.00001.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-9] ^= 1
    data.write_bytes(raw)
    for path in (tmp_path / "out.bin", tmp_path / "out.safetensors"):
        path.write_bytes(b"before")
        with pytest.raises(CheckpointError, match="have another CRC-32C than the index says"):
            convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", path)
        assert path.read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bin", "out.safetensors", "run"]
