"""Two checkpoints side by side: what differs is named, and nothing else; what is written anew is the same."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.test_checkpoints import SHAPES, check_values, write
from tests.checkpointing.test_consolidation import GOLDEN, Values, put
from tests.profiles import examples

from zoo.checkpointing import CheckpointError, load, resharding, save
from zoo.checkpointing.comparing import Difference, compare, distance
from zoo.checkpointing.listing import DAMAGED, UNFINISHED, WHOLE, listing
from zoo.checkpointing.resharding import num_bytes, reshard


def differences(a: Path, b: Path, **options: Any) -> list[tuple[str, str, str]]:
    with load(a) as left, load(b) as right:
        return [(one.name, one.role, one.what) for one in compare(left, right, **options)]


def test_the_same_state_of_other_ranks_does_not_differ(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 3)
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_each_kind_of_difference_is_named(tmp_path: Path) -> None:
    ones = torch.ones(4)
    a: Values = {
        ("same", "parameter"): torch.tensor([1.0, math.nan, math.inf, -0.0]), ("only a", "parameter"): ones,
        ("value", "parameter"): ones, ("shape", "parameter"): ones, ("dtype", "parameter"): ones,
        ("value", "exp_avg"): ones, ("value", "only a"): ones,
    }  # fmt: skip
    b: Values = {
        ("same", "parameter"): torch.tensor([1.0, math.nan, math.inf, 0.0]), ("only b", "parameter"): ones,
        ("value", "parameter"): torch.tensor([1.0, 1.5, 1.0, -3.0]), ("shape", "parameter"): ones.view(2, 2),
        ("dtype", "parameter"): ones.bfloat16(), ("value", "exp_avg"): ones,
    }  # fmt: skip
    put(tmp_path / "a", a, 2, {"s": 1, "n": math.nan, "a": 1}, {"x": {"y": [1], "z": 1}, "t": (1,)})
    put(tmp_path / "b", b, 2, {"s": 2, "n": math.nan}, {"x": {"y": [2], "z": 1}, "t": [1], "m": 0})
    assert set(differences(tmp_path / "a", tmp_path / "b")) == {
        ("only a", "parameter", "missing in B"), ("only b", "parameter", "missing in A"),
        ("value", "only a", "missing in B"), ("value", "parameter", "values"), ("shape", "parameter", "shape"),
        ("dtype", "parameter", "dtype"), ("s", "", "number"), ("a", "", "missing in B"), ("meta.x.y", "", "meta"),
        ("meta.t", "", "meta"), ("meta.m", "", "missing in A"),
    }  # fmt: skip
    assert differences(tmp_path / "a", tmp_path / "b", role="exp_avg") == []
    with load(tmp_path / "a") as left, load(tmp_path / "b") as right:
        (value,) = (one for one in compare(left, right) if one.what == "values")
        (shape,) = (one for one in compare(left, right) if one.what == "shape")
    assert value == Difference(
        name="value", role="parameter", what="values", num_elements=2, max_abs=4.0, max_relative=4 / 3
    )
    assert shape.detail == "(4,) and (2, 2)"


def test_what_belongs_to_a_rank_is_compared_at_the_same_number_of_ranks(tmp_path: Path) -> None:
    for name, own in (("a", {"rng": torch.zeros(3), "x": torch.ones(1)}), ("b", {"rng": torch.ones(3)})):
        save(tmp_path / name, "one", [], rank_state=own)
    found = differences(tmp_path / "a", tmp_path / "b")
    assert found == [("rng", "rank 0", "of rank"), ("x", "rank 0", "missing in B")]


def test_tolerances_as_their_formula_says(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, 10.0, math.inf, math.nan]), torch.tensor([1.1, 11.0, math.inf, math.nan])
    assert distance(a, b)[0] == 2
    assert distance(a, b, atol=0.2)[0] == 1
    assert distance(a, b, rtol=0.1)[0] == 0
    assert distance(a, b, atol=2)[0] == 0
    for odd in (math.inf, -math.inf, math.nan):
        for left, right in ((0.0, odd), (odd, 0.0)):
            found = distance(torch.tensor([left]), torch.tensor([right]), atol=1e9, rtol=1.0)
            assert found == (1, math.inf, math.inf)


@given(
    a=st.lists(st.floats(-4, 4, width=32) | st.sampled_from([math.nan, math.inf, 0.0]), min_size=1, max_size=6),
    changed=st.dictionaries(st.integers(0, 5), st.floats(-4, 4, width=32)),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float64])] * 2),
)
@examples(times=10)
def test_the_distance_is_that_of_plain_python(a: list[float], changed: dict[int, float], dtypes: Any) -> None:
    left = torch.tensor(a).to(dtypes[0])
    right = torch.tensor([changed.get(k, x) for k, x in enumerate(a)]).to(dtypes[1])
    pairs = list(zip(left.double().tolist(), right.double().tolist(), strict=True))
    differ = [(x, y) for x, y in pairs if x != y and not (math.isnan(x) and math.isnan(y))]
    gaps = [abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf for x, y in differ]
    parts = [g / max(abs(x), abs(y)) if math.isfinite(g) else g for g, (x, y) in zip(gaps, differ, strict=True)]
    assert distance(left, right) == (len(differ), max(gaps, default=0.0), max(parts, default=0.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_differ_where_float64_cannot_tell(dtype: torch.dtype) -> None:
    a = torch.tensor([2**62, 5]).to(dtype)
    b = torch.tensor([2**62 + 1, 5]).to(dtype)
    assert distance(a, b)[:2] == (1, 1.0)
    assert distance(a, a.clone()) == (0, 0.0, 0.0)


def test_integers_of_two_signs_are_not_confused() -> None:
    assert distance(torch.tensor([-1]).view(torch.uint64), torch.tensor([-1]))[0] == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_of_complex_numbers_count(dtype: torch.dtype) -> None:
    a = torch.tensor([3 + 4j, 1j, complex(math.nan, 1)], dtype=dtype)
    b = torch.tensor([3 + 5j, 1j, complex(math.nan, 1)], dtype=dtype)
    count, gap, relative = distance(a, b)
    assert (count, gap) == (1, 1.0)
    assert relative == pytest.approx(1 / math.sqrt(34))
    assert distance(a, b, atol=1.5)[0] == 0
    assert distance(a, a.clone()) == distance(a, a.to(torch.complex128)) == (0, 0.0, 0.0)
    b[2] = complex(math.nan, 2)
    assert distance(a, b)[:2] == (2, math.inf)
    assert distance(a[:1], torch.tensor([3]))[:2] == (1, 4.0)


# -- written anew -----------------------------------------------------------------------------------------------------


@given(st.data())
@examples(times=0.5)
def test_two_reshardings_in_a_row_change_no_element_and_cut_evenly(data: st.DataObject) -> None:
    ranks = [data.draw(st.integers(1, 6), "ranks") for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "0", ranks[0])
        for k in (0, 1):
            with load(root / str(k)) as found:
                read: list[int] = []
                assert reshard(found, root / str(k + 1), ranks[k + 1], told=read.append) == root / str(k + 1) / "one"
                assert sum(read) == num_bytes(found)
            with load(root / str(k + 1)) as new:
                assert new.world_size == len(new.index.files) == ranks[k + 1]
                assert new.version == 4
                owned = new.rank_state(0)
                assert (owned == {}) == (ranks[k + 1] != ranks[k] or not found.rank_state(0))
                columns = new.index.columns
                for file in range(ranks[k + 1]):
                    rows = columns["file"] == file
                    widths = [4 if new.index.states[s].role == "parameter" else 2 for s in columns["state"][rows]]
                    held = sum(n * w for n, w in zip(columns["length"][rows].tolist(), widths, strict=True))
                    assert abs(held - num_bytes(new) / ranks[k + 1]) <= 4
            check_values(root / str(k + 1))
        found_differences = differences(root / "0", root / "2")
        if len(set(ranks)) > 1:  # what belongs to one rank does not outlive another number of ranks
            found_differences = [row for row in found_differences if not row[1].startswith("rank ")]
        assert found_differences == []


def test_version_2_becomes_the_present_one_with_all_that_it_has(tmp_path: Path) -> None:
    with load(GOLDEN) as found:
        reshard(found, tmp_path, found.world_size)
        with load(tmp_path) as new:
            assert (found.version, new.version) == (2, 4)
            assert list(compare(found, new)) == []
            assert new.rank_state(1).keys() == found.rank_state(1).keys() != set()


def test_pieces_are_small_whatever_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "PIECE_BYTES", 16)
    write(tmp_path / "a", 1)
    with load(tmp_path / "a") as found:
        reshard(found, tmp_path / "b", 2)
    check_values(tmp_path / "b")
    assert max(load(tmp_path / "b").index.columns["length"].tolist()) == 8
    assert math.prod(SHAPES["cube"]) == 60


def test_a_resharding_that_cannot_be_is_refused_or_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    with load(tmp_path / "a") as found:
        for ranks in (0, -1, 1025):
            with pytest.raises(ValueError, match="is written as 1 to 1024 ranks would"):
                reshard(found, tmp_path / "b", ranks)
        (tmp_path / "link").symlink_to(tmp_path / "a")
        for place in ("a", "link"):
            with pytest.raises(ValueError, match="is the directory of the checkpoint itself"):
                reshard(found, tmp_path / place, 3)
        write(tmp_path / "c", 1)
        with pytest.raises(ValueError, match="has a checkpoint 'one'; remove it"):
            reshard(found, tmp_path / "c", 3)
    data = next((tmp_path / "a" / "one").glob("*.00001.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-3] ^= 1
    data.write_bytes(raw)
    with load(tmp_path / "a") as found, pytest.raises(CheckpointError, match="have another CRC-32C than the index"):
        reshard(found, tmp_path / "b", 3)
    assert not (tmp_path / "b").exists()


# -- listed -----------------------------------------------------------------------------------------------------------


def test_a_directory_is_listed_with_what_is_damaged_and_unfinished(tmp_path: Path) -> None:
    for number, tag in enumerate(("b", "a", "c", "d")):
        write(tmp_path, number + 1, tag)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("")
    (tmp_path / "zero_to_fp32.py").write_text("")
    next((tmp_path / "c").glob("*.index")).write_bytes(b"")
    (tmp_path / "d" / "manifest.json").unlink()
    found = {one.tag: one for one in listing(tmp_path)}
    assert {tag: one.state for tag, one in found.items()} == {
        "b": WHOLE, "a": WHOLE, "c": DAMAGED, "d": UNFINISHED
    }  # fmt: skip
    assert [one.tag for one in listing(tmp_path) if one.state == WHOLE] == ["b", "a"]
    assert (found["a"].number, found["a"].num_ranks, found["a"].num_tensors, found["a"].version) == (2, 2, 5, 4)
    assert found["a"].num_bytes == sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    assert "has another SHA-256 than the manifest says" in found["c"].why
    (tmp_path / "latest").write_text("a\n")
    assert [one.tag for one in listing(tmp_path) if one.is_latest] == ["a"]
    (tmp_path / "latest").write_text("../a\n")
    assert not any(one.is_latest for one in listing(tmp_path))
    with pytest.raises(CheckpointError, match="there is no directory"):
        listing(tmp_path / "nowhere")
