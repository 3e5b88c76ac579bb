"""Indexing a data set by metrics of its samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zoo.comm import Communicator
from zoo.data_efficiency.index import Index, IndexWriter
from zoo.data_efficiency.merging import merge
from zoo.io import Handle


@dataclass(frozen=True)
class Metric:
    """A number of a sample.

    Attributes:
        function: sample → number.
        dtype: int64 or float64.
    """

    function: Callable[[Any], Any]
    dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if self.dtype not in (torch.int64, torch.float64):
            raise ValueError(f"a metric of dtype {self.dtype}; it is torch.int64 or torch.float64.")


class DataAnalyzer:
    """Measures each sample once and writes, for each metric, three files of N numbers into ``path/<metric>/``:

    * ``sample_to_metric.safetensors``: the metric of each sample.
    * ``index_to_metric.safetensors``: the metrics in ascending order.
    * ``index_to_sample.safetensors``: the samples in that order; those of equal metrics in their own.

    :meth:`map` measures one worker's share of the data set, and may run on any machine that sees ``path``;
    :meth:`reduce`, after all of them, joins and sorts. Both hold at most about ``4 * buffer_samples`` numbers in
    memory. :meth:`run` does both with the ranks of a job.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        metrics: name → function of a sample that returns a whole number, or a :class:`Metric`.
        path: directory.
        worker, num_workers: whose share; 0 of 1 is all.
        num_processes: processes that read and measure within a worker; 0: this one. They need functions that can be
            sent to them where processes are not forked.
        buffer_samples: numbers that are sorted at a time.
        handle: what reads and writes; by default one of its own.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        metrics: Mapping[str, Callable[[Any], Any] | Metric],
        path: str | os.PathLike[str],
        *,
        worker: int = 0,
        num_workers: int = 1,
        num_processes: int = 0,
        buffer_samples: int = 1 << 20,
        handle: Handle | None = None,
    ) -> None:
        given: Any = dataset
        if not hasattr(given, "__len__") or not hasattr(given, "__getitem__") or not len(given):
            raise ValueError(f"the data set, a {type(dataset).__name__}, cannot be indexed, or is empty; give another.")
        if not metrics or any(not name or not name.replace("_", "").isalnum() for name in metrics):
            raise ValueError(f"metrics = {list(metrics)}; give at least one, with names of letters, digits and _.")
        if not 0 <= worker < num_workers or buffer_samples < 1 or num_processes < 0:
            raise ValueError(
                f"worker = {worker} of num_workers = {num_workers}, buffer_samples = {buffer_samples}, num_processes = "
                f"{num_processes}; workers are numbered from 0, and at least one sample is sorted at a time."
            )
        self.dataset, self.path = dataset, Path(path)
        self.metrics = {name: m if isinstance(m, Metric) else Metric(m) for name, m in metrics.items()}
        self.worker, self.num_workers, self.num_processes = worker, num_workers, num_processes
        self.buffer, self.num_samples = buffer_samples, len(given)
        self._handle = handle

    def map(self) -> None:
        """Measure this worker's share: samples N w / W to N (w + 1) / W.

        Raises:
            ValueError: a metric returned no number, or one of another kind than its dtype.
        """
        start, stop = self._share(self.worker)
        with self._opened() as handle:
            writers: dict[str, IndexWriter] = {}
            try:
                for name, m in self.metrics.items() if stop > start else ():
                    piece = self._piece(name, self.worker)
                    writers[name] = IndexWriter(piece, stop - start, m.dtype, self._about(name, start), handle)
                self._measure(start, stop, writers)
            except BaseException:
                for writer in writers.values():
                    writer.discard()
                raise
            for writer in writers.values():
                writer.commit()

    def _measure(self, start: int, stop: int, writers: Mapping[str, IndexWriter]) -> None:
        share: Any = DataLoader(
            _Share(self.dataset, start, stop), batch_size=min(64, self.buffer), num_workers=self.num_processes,
            collate_fn=_Measures(self.metrics), generator=torch.Generator(),  # torch's own stays as it is
        )  # fmt: skip
        place, waiting, count = 0, {name: list[torch.Tensor]() for name in writers}, 0
        for measured in share:
            for name, values in measured.items():
                waiting[name].append(values)
            count += len(values)
            if count >= self.buffer or place + count == stop - start:
                for name, writer in writers.items():
                    writer.put(place, torch.cat(waiting[name]))
                    waiting[name].clear()
                place, count = place + count, 0

    def reduce(self) -> None:
        """Join and sort what all workers measured, and remove their pieces.

        Raises:
            ValueError: a worker's piece is missing, or of another data set.
        """
        with self._opened() as handle:
            for name, metric in self.metrics.items():
                self._reduce(name, metric.dtype, handle)

    def _reduce(self, name: str, dtype: torch.dtype, handle: Handle) -> None:
        pieces = [self._read_piece(name, worker, dtype) for worker in range(self.num_workers)]
        count = self.num_samples

        def writer(what: str, kind: torch.dtype) -> IndexWriter:
            return IndexWriter(self.path / name / f"{what}.safetensors", count, kind, self._about(name, 0), handle)

        kinds = (("sample_to_metric", dtype), ("index_to_metric", dtype), ("index_to_sample", torch.int64))
        opened = [writer(what, kind) for what, kind in kinds]
        scratch = [writer("scratch_metric", dtype), writer("scratch_sample", torch.int64)]
        try:
            runs, place = [], 0
            for piece in pieces:
                for values in piece.pieces(self.buffer, handle) if piece is not None else ():
                    opened[0].put(place, values)
                    ordered, order = torch.sort(values, stable=True)
                    scratch[0].put(place, ordered)
                    scratch[1].put(place, order + place)
                    runs.append((place, place + len(values)))
                    place += len(values)

            def read(start: int, stop: int) -> tuple[Any, Any]:
                return scratch[0].get(start, stop).numpy(), scratch[1].get(start, stop).numpy()

            place = 0
            for sorted_values, samples in merge(runs, read, self.buffer):
                opened[1].put(place, torch.from_numpy(np.ascontiguousarray(sorted_values)))
                opened[2].put(place, torch.from_numpy(np.ascontiguousarray(samples)))
                place += len(samples)
            if place != count:
                raise AssertionError(f"{place} of {count} samples were merged")
        except BaseException:
            for item in opened:
                item.discard()
            raise
        finally:
            for item in scratch:
                item.discard()
        for item in opened:
            item.commit()
        for worker in range(self.num_workers):
            self._piece(name, worker).unlink(missing_ok=True)

    def run(self, comm: Communicator | None = None) -> None:
        """Map and reduce. With a communicator its ranks are the workers, and rank 0 reduces; a collective.

        Raises:
            ValueError: what kept a worker from measuring, on all ranks.
        """
        if comm is None:
            self.map()
            self.reduce()
            return
        self.worker, self.num_workers = comm.rank, comm.size
        _on_all(comm, self.map)
        _on_all(comm, self.reduce if comm.rank == 0 else lambda: None)

    def _share(self, worker: int) -> tuple[int, int]:
        return self.num_samples * worker // self.num_workers, self.num_samples * (worker + 1) // self.num_workers

    def _piece(self, name: str, worker: int) -> Path:
        return self.path / name / f"piece-{worker:05d}-of-{self.num_workers:05d}.safetensors"

    def _about(self, name: str, start: int) -> dict[str, str]:
        return {"metric": name, "num_samples": str(self.num_samples), "start": str(start)}

    def _read_piece(self, name: str, worker: int, dtype: torch.dtype) -> Index | None:
        start, stop = self._share(worker)
        if start == stop:
            return None
        piece = Index(self._piece(name, worker))
        if piece.about != {"format": piece.about["format"], **self._about(name, start)} or len(piece) != stop - start:
            raise ValueError(f"{str(piece.path)!r} is of another data set or share; run map() of all workers again.")
        if piece.dtype is not dtype:
            raise ValueError(
                f"{str(piece.path)!r} has {piece.dtype}, and the metric {name!r} {dtype}; run map() again."
            )
        return piece

    def _opened(self) -> Any:
        return _Borrowed(self._handle) if self._handle is not None else Handle()


class _Borrowed:
    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __enter__(self) -> Handle:
        return self.handle

    def __exit__(self, *exc: object) -> None:
        return None


class _Share(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], start: int, stop: int) -> None:
        self.dataset, self.start, self.stop = dataset, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> tuple[int, Any]:
        if index >= len(self):
            raise IndexError(index)
        return self.start + index, self.dataset[self.start + index]


class _Measures:
    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics

    def __call__(self, samples: list[tuple[int, Any]]) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor([_number(metric, name, *sample) for sample in samples], dtype=metric.dtype)
            for name, metric in self.metrics.items()
        }


def _number(metric: Metric, name: str, number: int, sample: Any) -> int | float:
    value = metric.function(sample)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    whole = metric.dtype is torch.int64
    number_like = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    low, high = (-(1 << 63), 1 << 63) if whole else (float("-inf"), float("inf"))
    if not number_like or not (low < value < high):
        wanted = "a whole number" if whole else "a finite number"
        raise ValueError(
            f"the metric {name!r} returned {value!r} for sample {number}; it returns {wanted}"
            + (", or is a Metric(function, torch.float64)." if whole else ".")
        )
    return int(value) if whole else float(value)


def _on_all(comm: Communicator, action: Callable[[], None]) -> None:
    """Do it, and raise on all ranks what failed on one."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    told = comm.all_gather_object(str(failure) if failure is not None else None)
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise ValueError(f"rank {rank} could not analyse its share of the data set: {text}")
