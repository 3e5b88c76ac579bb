"""The analyser and its files: against a plain sort, with buffers smaller than the data, and with broken files."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo import sim
from zoo.comm import Communicator
from zoo.data_efficiency import DataAnalyzer, Index, Metric
from zoo.data_efficiency.index import IndexWriter, SortedIndex
from zoo.data_efficiency.merging import merge
from zoo.io import Handle


class Numbers:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def numbers(count: int, top: int = 9) -> Numbers:
    dice = torch.Generator().manual_seed(count)
    return Numbers(torch.randint(top, (count,), generator=dice).tolist())


def check(path: Path, values: list[Any]) -> None:
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    for name, expected in (
        ("sample_to_metric", values), ("index_to_metric", [values[i] for i in order]), ("index_to_sample", order),
    ):  # fmt: skip
        index = Index(path / f"{name}.safetensors")
        assert index.values.tolist() == expected
        assert safetensors.numpy.load_file(index.path)["values"].tolist() == expected  # others can read it
    assert sorted(p.name for p in path.iterdir()) == [
        "index_to_metric.safetensors", "index_to_sample.safetensors", "sample_to_metric.safetensors",
    ]  # fmt: skip


@examples(times=10)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 40))
def test_merging_is_a_stable_sort(runs: list[list[int]], buffer: int) -> None:
    values = np.array([v for run in runs for v in run])
    edges = np.cumsum([0, *map(len, runs)])
    spans = [(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    order = np.concatenate([a + np.argsort(values[a:b], kind="stable") for a, b in spans])
    held = []

    def read(start: int, stop: int) -> Any:
        held.append(stop - start)
        return values[order[start:stop]], order[start:stop]

    pieces = list(merge(spans, read, buffer))
    expected = np.argsort(values, kind="stable")
    assert np.concatenate([s for _, s in pieces]).tolist() == expected.tolist()
    assert np.concatenate([v for v, _ in pieces]).tolist() == values[expected].tolist()
    assert max(held) <= max(1, buffer // len(runs))


@pytest.mark.matrix
@pytest.mark.parametrize(("count", "workers", "buffer"), [(1, 1, 4), (1000, 1, 1 << 20), (1000, 3, 64), (2, 3, 1)])
def test_files_are_those_of_a_plain_sort(tmp_path: Path, count: int, workers: int, buffer: int) -> None:
    data = numbers(count)
    metrics = {"value": lambda x: x, "tenth": Metric(lambda x: -x / 10, torch.float64)}
    for worker in range(workers):
        DataAnalyzer(data, metrics, tmp_path, worker=worker, num_workers=workers, buffer_samples=buffer).map()
    DataAnalyzer(data, metrics, tmp_path, num_workers=workers, buffer_samples=buffer).reduce()
    check(tmp_path / "value", data.values)
    check(tmp_path / "tenth", [-x / 10 for x in data.values])


def test_processes_and_ranks(tmp_path: Path) -> None:
    data = numbers(300)
    DataAnalyzer(data, {"value": abs}, tmp_path / "processes", num_processes=2, buffer_samples=50).run()
    check(tmp_path / "processes" / "value", data.values)

    def job(rank: int) -> None:
        DataAnalyzer(data, {"value": abs}, tmp_path / "ranks", buffer_samples=50).run(Communicator())
        assert len(Index(tmp_path / "ranks" / "value" / "index_to_sample.safetensors")) == 300

    sim.run(3, job)
    check(tmp_path / "ranks" / "value", data.values)


def test_two_that_write_one_file_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "values.safetensors"
    with Handle() as handle:
        first, second = (IndexWriter(path, 4, torch.int64, {}, handle) for _ in range(2))
        first.put(0, torch.ones(4, dtype=torch.int64))
        second.put(0, torch.full((2,), 2))
        first.commit()
        assert Index(path).values.tolist() == [1, 1, 1, 1]
        second.put(2, torch.full((2,), 2))
        assert Index(path).values.tolist() == [1, 1, 1, 1]
        second.commit()
    assert Index(path).values.tolist() == [2, 2, 2, 2]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_analysing_draws_no_random_numbers(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    DataAnalyzer([1, 2, 3], {"number": int}, tmp_path).run()  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_failure_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    data = Numbers([1, 2, 3, "four"])

    def job(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            DataAnalyzer(data, {"value": lambda x: x}, tmp_path).run(Communicator())
        return str(caught.value)

    first, second = sim.run(2, job)
    assert "returned 'four' for sample 3" in second
    assert first.startswith("rank 1 could not analyse")
    assert not list((tmp_path / "value").glob("*.part"))


@pytest.mark.parametrize("value", [1.5, True, None, float("nan"), 1 << 63, torch.ones(2)])
def test_what_is_no_metric(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"the metric 'm' returned .* for sample 0"):
        DataAnalyzer(Numbers([0]), {"m": lambda _: value}, tmp_path).run()


@pytest.mark.parametrize("value", ["x", None, float("nan"), float("inf"), True])
def test_what_is_no_fraction(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="it returns a finite number"):
        DataAnalyzer(Numbers([0]), {"m": Metric(lambda _: value, torch.float64)}, tmp_path).run()


def test_pieces_of_something_else_are_refused(tmp_path: Path) -> None:
    DataAnalyzer(numbers(10), {"m": abs}, tmp_path, num_workers=2).map()
    with pytest.raises(ValueError, match="cannot be read"):
        DataAnalyzer(numbers(10), {"m": abs}, tmp_path, num_workers=2).reduce()
    DataAnalyzer(numbers(10), {"m": abs}, tmp_path, worker=1, num_workers=2).map()
    with pytest.raises(ValueError, match="another data set or share"):
        DataAnalyzer(numbers(11), {"m": abs}, tmp_path, num_workers=2).reduce()
    with pytest.raises(ValueError, match=r"has torch\.int64, and the metric"):
        DataAnalyzer(numbers(10), {"m": Metric(abs, torch.float64)}, tmp_path, num_workers=2).reduce()
    DataAnalyzer(numbers(10), {"m": abs}, tmp_path, num_workers=2).reduce()


def test_broken_files_are_refused(tmp_path: Path) -> None:
    data = numbers(100)
    DataAnalyzer(data, {"m": abs}, tmp_path).run()
    path = tmp_path / "m" / "index_to_sample.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])

    def changed(**values: Any) -> bytes:
        text = json.dumps({**header, **values}).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    lies = {"dtype": "I64", "shape": [99], "data_offsets": [0, 800]}
    for content in (
        b"", whole[:5], whole[:100], whole[:-8], whole + b"\0", b"\xff" * 64, changed(values=lies), changed(more={}),
        changed(values={**lies, "shape": [True]}), changed(values={**lies, "shape": []}), changed(__metadata__={}),
        changed(values={**lies, "dtype": "F32"}), struct.pack("<Q", 4) + b"[[[[",
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be used"):
            Index(path)
    values = str(tmp_path / "m" / "index_to_metric.safetensors")
    for place, number, sentence in (
        (3, 100, "numbers of samples"),
        (3, -1, "numbers of samples"),
        (3, 0, "every sample"),
    ):
        broken = bytearray(whole)
        struct.pack_into("<q", broken, 8 + length + 8 * place, number)
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=sentence):
            SortedIndex(str(path), values, 100)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="is of 100 samples, and the data set has 99"):
        SortedIndex(str(path), values, 99)
    with pytest.raises(ValueError, match="order of its values"):
        SortedIndex(str(path), str(tmp_path / "m" / "sample_to_metric.safetensors"), 100)


def test_how_many_a_difficulty_allows(tmp_path: Path) -> None:
    data = numbers(57)
    DataAnalyzer(data, {"m": abs}, tmp_path).run()
    index = SortedIndex(
        str(tmp_path / "m/index_to_sample.safetensors"), str(tmp_path / "m/index_to_metric.safetensors"), 57
    )
    for difficulty in range(-1, 11):
        assert index.up_to(difficulty) == sum(v <= difficulty for v in data.values)
    assert [index.percentile(p) for p in (1, 50, 99, 100)] == [1, 29, 57, 57]


def test_a_directory_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "second").write_text("a file in the place of a directory")
    analyser = DataAnalyzer([[1, 2], [3]], {"first": len, "second": len}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"second/.*' cannot be written \(File exists\); give another directory"):
        analyser.run()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["second"]
