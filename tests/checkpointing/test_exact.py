"""What a checkpoint holds beside tensors comes back exactly, types included, or is refused when it is saved."""

from __future__ import annotations

import argparse
import enum
import json
import math
import shutil
import time
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime, timedelta, timezone
from datetime import time as time_of_day
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.manifests import rewrite
from tests.profiles import examples

from zoo.checkpointing import CheckpointError, load, save
from zoo.checkpointing.format.exact import decode, dtype_named, dumps
from zoo.checkpointing.format.manifest import SUM

numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.complex_numbers() | st.binary(max_size=5)
strings = st.text(max_size=5) | st.text("ab\ud83d\ude00", max_size=3) | st.sampled_from(["__zoo__", "", "1"])
scalars = st.sampled_from(
    [np.float32(1.5), np.int64(3), np.bool_(True), np.longdouble(1) / 3, np.str_(""), np.bytes_(b"a"),
     np.datetime64("2020-01-01", "25s"), np.timedelta64(3, "ns"), np.complex64(1 - 0j), np.float16("nan")]
)  # fmt: skip
torchs = st.sampled_from(
    [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([]), torch.Size([2, 0])]
)
hashable = st.recursive(
    numbers | strings | scalars | torchs, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3)
)
arrays = scalars | st.sampled_from(
    [np.void(b"abc"), np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 2)), np.array("x"), np.array([["ab", "c"]]),
     np.eye(3, dtype=np.complex128)[:, ::2], np.asfortranarray(np.eye(2, 3)), np.array(["NaT"], dtype="M8[us]")]
)  # fmt: skip
tensors = st.sampled_from(
    [torch.tensor(0.1), torch.zeros(0, 3), torch.tensor([1, 2], dtype=torch.uint16), torch.eye(2, dtype=torch.bfloat16)]
)
names = st.sampled_from(["a", "b_2", "__zoo__", "with space"])
kinds = st.sampled_from([bool, int, float, str, list, dict, set])
zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
times = (
    st.datetimes(timezones=zones) | st.dates() | st.times(timezones=zones) | st.timedeltas()
    | st.sampled_from([Path("a/../b"), Path("/"), datetime(2026, 10, 25, 2, 30, fold=1)])
)  # fmt: skip
values = st.recursive(
    hashable | arrays | tensors | times,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(strings, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(hashable, inner, max_size=3).map(lambda pairs: defaultdict(None, pairs))
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
        | st.tuples(inner)
        | st.dictionaries(names, inner, max_size=3).map(lambda pairs: argparse.Namespace(**pairs))
        | st.dictionaries(names, inner, max_size=3).map(lambda pairs: SimpleNamespace(**pairs))
        | st.builds(defaultdict, kinds, st.dictionaries(hashable, inner, max_size=3))
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        same_bytes = left.reshape(-1).view(torch.uint8).tolist() == right.reshape(-1).view(torch.uint8).tolist()
        return left.dtype is right.dtype and left.shape == right.shape and same_bytes
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        same_sign = math.copysign(1, left) == math.copysign(1, right)
        return (left == right and same_sign) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (argparse.Namespace, SimpleNamespace)):
        return same(vars(left), vars(right))
    if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, (datetime, time_of_day)):
        return repr(left) == repr(right)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (torch.dtype, torch.device)):
        return left == right
    if isinstance(left, deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (set, frozenset)):  # not by "==": a NaN is equal to nothing, 1 equals True
        return len(left) == len(right) and all(any(same(a, b) for b in right) for a in left)
    return bool(left == right)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@examples(times=5)
@given(values)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert same(decode(json.loads(dumps(value, "it"))), value)


@pytest.mark.parametrize("bits", [1999, 2000, 2001, 100_000])
def test_integers_of_any_size_come_back(bits: int) -> None:
    value = [2**bits - 1, -(2**bits), {2**bits: ()}]
    assert decode(json.loads(dumps(value, "it"))) == value


class Colour(enum.IntEnum):
    RED = 1


class Named(str):
    __slots__ = ()


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"a": [1, object()]},
            r"^meta\.a\[1\] is of the type object, which a checkpoint cannot give back exactly; it holds None",
        ),
        ({"a": {2: (len,)}}, r"^meta\.a\[2\]\[0\] is of the type builtin_function_or_method"),
        ({"a": Colour.RED}, r"^meta\.a is of the type .*Colour"),
        ({"a": Named("x")}, r"^meta\.a is of the type .*Named"),
        ({"a": defaultdict(len)}, r"^meta\.a is a defaultdict with a factory that is code; it may be one of bool, int"),
        ({"a": argparse.Namespace(b=len)}, r"^meta\.a\.b is of the type builtin_function_or_method"),
        (
            {"a": time_of_day(tzinfo=timezone(timedelta(microseconds=1)))},
            r"^meta\.a is of the type datetime\.time",
        ),
        ({"a": datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))}, r"^meta\.a is of the type datetime\.datetime"),
        ({"a": np.array([(1, 2)], dtype="i4,i4")}, r"^meta\.a is of the type numpy\.ndarray and holds \["),
        ({"a": np.bytes_(b"a\0")}, r"^meta\.a is .*, whose last zeros numpy drops"),
        (
            {"a": torch.zeros(2, dtype=torch.uint8).view(torch.int4).expand(3, 2)},
            r"^meta\.a is a tensor of .*int4",
        ),
        ({("a", Colour.RED): 1}, r"^a key of meta\[1\] is of the type .*Colour"),
        ({"a": torch.nn.Parameter(torch.zeros(1))}, r"^meta\.a is of the type torch\.nn\.parameter\.Parameter"),
        ({"a": torch.eye(2).to_sparse()}, r"^meta\.a is of the type torch\.Tensor, not dense"),
        ({"a": torch.zeros(1, device="meta")}, r"^meta\.a is of the type torch\.Tensor, not dense or without data"),
        ({"a": np.array([object()])}, r"^meta\.a is of the type numpy\.ndarray and holds object"),
        ({"a": CIRCLE}, "^meta contains itself"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_its_place(
    tmp_path: Path, value: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        dumps(value, "meta")
    with pytest.raises(CheckpointError, match=said.lstrip("^")):
        save(tmp_path, "one", [], meta=value)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_gives_its_meta_back(tmp_path: Path) -> None:
    meta = {"milestones": Counter({3: 1, 5: 2}), "betas": (0.9, 0.99), 7: "seven", "plain": {"a": [1, None]}}
    save(tmp_path, "one", [], meta=meta)
    assert same(load(tmp_path).meta, meta)


def test_a_kind_of_value_that_is_not_known_is_said(tmp_path: Path) -> None:
    save(tmp_path, "one", [], meta={"a": (1,)})
    rewrite(tmp_path / "one", lambda document: document["meta"]["a"].update(__zoo__=["hexagon", [1]]))
    with pytest.raises(CheckpointError, match="kind 'hexagon' is not known; a newer zoo"):
        load(tmp_path)


def test_checkpoints_of_version_1_are_read(tmp_path: Path) -> None:
    """It wrote what JSON held, as it was."""
    shutil.copytree(Path(__file__).parent / "golden" / "version2", tmp_path / "runs")
    path = tmp_path / "runs" / "one" / "manifest.json"
    document = json.loads(path.read_text())
    document.update(version=1, meta={"__zoo__": ["tuple", []], "note": [1]})
    path.write_text(json.dumps(document))
    assert load(tmp_path / "runs").meta == {"__zoo__": ["tuple", []], "note": [1]}


def test_a_manifest_is_json_as_the_standard_has_it(tmp_path: Path) -> None:
    """Without NaN, which other readers refuse."""
    meta = {"nan": float("nan"), "many": [float("inf"), -float("inf"), complex(float("nan"), 1.0)]}
    save(tmp_path, "one", [], {"x": float("inf")}, meta)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "one" / "manifest.json").read_text(), parse_constant=refuse)
    found = load(tmp_path)
    assert found.scalars == {"x": float("inf")}
    assert same(found.meta, meta)


@pytest.mark.parametrize("number", [True, np.float64(1.0), "1", None, torch.tensor(1)])
def test_scalars_are_plain_numbers(tmp_path: Path, number: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the number 'x' is .*; an int or a float"):
        save(tmp_path, "one", [], {"x": number})


def test_ranks_that_give_the_same_nan_agree(tmp_path: Path) -> None:
    from zoo import sim
    from zoo.comm import Communicator

    sim.run(2, lambda rank: save(tmp_path, "one", [], {"x": float("nan")}, comm=Communicator()))
    assert math.isnan(load(tmp_path).scalars["x"])


DTYPES = sorted({str(found) for found in vars(torch).values() if isinstance(found, torch.dtype)})


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_any_dtype_comes_back_bit_by_bit(name: str) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    if "q" in name:  # quantized
        with pytest.raises(CheckpointError, match="not dense"):
            dumps(torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8), "it")
        return
    content = torch.arange(32, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.randint(0, 256, (32,)).byte()
    for value in (content.view(dtype), content.view(dtype)[:1].view(())):
        assert same(decode(json.loads(dumps(value, "it"))), value)


def test_tensors_come_back_from_views_and_without_autograd() -> None:
    whole = torch.arange(6.0).reshape(2, 3).requires_grad_()
    value = [whole.t(), whole[:, 1].expand(2, 2), torch.ones(2, dtype=torch.cfloat).conj()]
    found = decode(json.loads(dumps(value, "it")))
    assert [x.tolist() for x in found[:2]] == [[[0, 3], [1, 4], [2, 5]], [[1, 4], [1, 4]]]
    assert not found[0].requires_grad
    assert not found[2].is_conj()


RAW = "AAAAAAAAAAA="  # eight bytes


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "parts", "said"),
    [
        ("tensor", ["float32", [3], RAW], r"meta\.a is said to be a tensor, and has 8 bytes; \[3\] of float32 has 12"),
        ("tensor", ["float32", [-1], RAW], "not a list of sizes"),
        ("tensor", ["float32", [10**30, 0], ""], "not a list of sizes"),
        ("tensor", ["float32", [2**62, 2**62, 0], ""], "torch makes no such tensor"),
        ("tensor", ["float32", [True, 2], RAW], "not a list of sizes"),
        ("tensor", ["float32", [2], "A?"], "is not base 64"),
        ("tensor", ["onnx", [2], RAW], "'onnx' is no dtype of torch"),
        ("tensor", [["float32"], [2], RAW], "is no dtype of torch"),
        ("tensor", [], "not dtype, shape and bytes"),
        ("array", ["<f4", [3], RAW], r"has 8 bytes; \[3\] of <f4 has 12"),
        ("array", ["<f4", [-1], RAW], "not a list of sizes"),
        ("array", ["|O", [1], RAW], "no dtype of numbers"),
        ("array", ["<i4,<i4", [1], RAW], "no dtype of numbers"),
        ("array", [[["a", "<i8"]], [1], RAW], "no dtype of numbers"),
        ("array", ["<f3", [2], RAW], "numpy makes no such array"),
        ("scalar", ["<f4", [2], RAW], r"its shape is \(2,\)"),
        ("dict", [[1, 2, 3]], "not all pairs"),
        ("dict", [[[], 2]], "cannot be: .*unhashable"),
        ("set", [[]], "cannot be: .*unhashable"),
        ("tuple", "abc", "not a list"),
        ("deque", [-1, []], "not its maxlen"),
        ("complex", ["1", "2"], "not two floats"),
        ("int", "0x", "no number in base 16"),
        ("str", RAW[:-1], "not base 64"),
        ("str", "/w==", "not UTF-8"),
        ("Size", [-1], "not a list of sizes"),
        ("dtype", "nn", "'nn' is no dtype"),
        ("device", "os:1:2", "no device"),
        ("device", "nothing", "no device"),
        ("defaultdict of", ["len", {}], "not the name of a factory"),
        ("defaultdict of", ["int", [1]], "its second part is no dict"),
        ("Namespace", [1], "they are no attributes"),
        ("Namespace", {"__zoo__": ["dict", [[1, 2]]]}, "they are no attributes"),
        ("Path", 3, "it is no text"),
        ("datetime", ["yesterday", 0], "Invalid isoformat"),
        ("datetime", ["2026-01-01T00:00:00", 2], "fold must be"),
        ("timedelta", [10**9, 0, 0], "must have magnitude"),
        ("timedelta", [1.5, 0, 0], "no whole numbers"),
        (["tuple"], [], r"meta\.a: a value of the kind \['tuple'\] is not known"),
    ],
)
def test_what_a_file_says_is_checked(tmp_path: Path, kind: Any, parts: Any, said: str) -> None:
    save(tmp_path, "one", [], meta={"a": 0})
    rewrite(tmp_path / "one", lambda document: document["meta"].update(a={"__zoo__": [kind, parts]}))
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("meta", ['{"__zoo__": 1}', '{"__zoo__": ["tuple", []], "b": 1}', "[" * 100_000])
def test_marks_and_nesting_of_a_file_are_checked(tmp_path: Path, meta: str) -> None:
    save(tmp_path, "one", [], meta={"a": 0})
    rewrite(tmp_path / "one", lambda document: document.pop(SUM))
    path = tmp_path / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"a": 0', f'"a": {meta}'))
    with pytest.raises(CheckpointError, match=r"a mark is|cannot be read"):
        load(tmp_path)


def test_reading_imports_nothing_that_the_file_names() -> None:
    with pytest.raises(ValueError, match="no dtype"):
        dtype_named("_inductor")
    with pytest.raises(ValueError, match="no dtype"):
        dtype_named("nn")


@pytest.mark.parametrize("name", ["<U0", "|S0", "|V0"])
def test_arrays_of_elements_without_bytes_are_no_large_arrays(name: str) -> None:
    """numpy makes four bytes of each: a text of forty bytes would ask for terabytes."""
    for shape in ([1 << 50], [1 << 28], [0], [1]):
        with pytest.raises(ValueError, match="has no bytes"):
            decode({"__zoo__": ["array", [name, shape, ""]]})
    assert decode({"__zoo__": ["scalar", ["<U0", [], ""]]}) == ""


def test_decoding_takes_time_in_proportion() -> None:
    """Of long keys above many values, and of values that have one hash."""
    key = "k" * 300_000
    began = time.process_time()
    assert decode({key: [[]] * 300_000})[key][-1] == []
    assert decode({key: {str(k): [] for k in range(100_000)}})[key]["7"] == []
    assert time.process_time() - began < 10  # by paths that are put together: 90 GB are copied
    with pytest.raises(ValueError, match=r"^meta\.k{197}\.\.\.\[1\]\.x is marked as"):
        decode({key: [0, {"x": {"__zoo__": 1}}]}, "meta")
    equal = [k * ((1 << 61) - 1) for k in range(100_000)]
    for mark in (["set", equal], ["frozenset", equal], ["dict", [[k, 0] for k in equal]]):
        with pytest.raises(ValueError, match="100000 of its items have one hash; at most 1000 may"):
            decode({"__zoo__": mark})
    assert len(decode({"__zoo__": ["set", equal[:500]]})) == 500
