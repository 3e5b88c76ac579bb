"""Curriculum by metrics of samples: a loader that draws from a pool which grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from zoo.data_efficiency.ahead import Newest, loaded
from zoo.data_efficiency.config import CurriculumMetric
from zoo.data_efficiency.curriculum import Growing
from zoo.data_efficiency.index import SortedIndex
from zoo.parts import mixed, shuffled


class Pool:
    """The samples that all metrics allow, at given difficulties.

    With one metric it is a beginning of the index, which stays in its file; with several it is an array of as many
    numbers as samples are allowed.

    Args:
        metrics: name → options; those with clustering_type "schedule_based" pick samples.
        num_samples: of the data set.
    """

    def __init__(self, metrics: Mapping[str, CurriculumMetric], num_samples: int) -> None:
        self.metrics = {n: m for n, m in metrics.items() if m.clustering_type == "schedule_based"}
        self.num_samples = num_samples
        self._indexes = {
            name: SortedIndex(
                str(m.index_to_sample_path),
                m.index_to_metric_path if m.difficulty_type == "value" else None,
                num_samples,
            )
            for name, m in self.metrics.items()
        }

    def counts(self, difficulties: Mapping[str, int]) -> dict[str, int]:
        """How many samples each metric allows; equal counts are equal pools.

        Raises:
            ValueError: there are none.
        """
        counts = {}
        for name, metric in self.metrics.items():
            index, difficulty = self._indexes[name], difficulties[name]
            counts[name] = (
                index.up_to(difficulty) if metric.difficulty_type == "value" else index.percentile(difficulty)
            )
            if not counts[name]:
                raise ValueError(
                    f"the curriculum metric {name!r} allows no sample at difficulty {difficulty}; raise min_difficulty."
                )
        return counts

    def of(self, counts: Mapping[str, int]) -> Any:
        """The numbers of the allowed samples, as an array; None for all of them.

        Raises:
            ValueError: there are none.
        """
        limiting = [name for name, count in counts.items() if count < self.num_samples]
        if not limiting:
            return None
        if len(limiting) == 1:
            return self._indexes[limiting[0]].samples.values[: counts[limiting[0]]]
        allowed = np.ones(self.num_samples, dtype=bool)
        for name in limiting:
            mine = np.zeros(self.num_samples, dtype=bool)
            mine[self._indexes[name].samples.values[: counts[name]]] = True
            allowed &= mine
        found = np.flatnonzero(allowed)
        if not len(found):
            raise ValueError(
                f"no sample is allowed by all of the curriculum metrics {', '.join(limiting)}, which allow "
                f"{dict(counts)} of them; raise min_difficulty."
            )
        return found


@dataclass(frozen=True)
class Place:
    """Where a :class:`CurriculumLoader` stands."""

    epoch: int = 0
    """Shuffles that are over."""
    position: int = 0
    """Samples of this shuffle that are drawn, of all ranks."""
    samples: int = 0
    """Samples that are drawn since training began, of all ranks."""
    difficulties: Mapping[str, int] = field(default_factory=dict)
    """Those that the latest samples were drawn at."""
    counts: Mapping[str, int] | None = None
    """How many samples each metric allowed then."""
    allowed: int = 0
    """How many all of them allowed."""


class CurriculumLoader(Newest):
    """Micro-batches of one rank, of samples that the curriculum allows.

    Step t of the curriculum (the first is 1) is that of the micro-batches drawn: t = s / samples_a_step + 1, rounded
    down, with s the samples drawn by all ranks; so it runs ahead of training no further than the loader does, and does
    not depend on the number of ranks. While the pool stays the same, samples are drawn without repetition: a shuffle
    of the pool after the other. When the pool changes, a new shuffle begins. Positions and shuffles are those of the
    engine's own loader: with all samples allowed both draw the same. An iteration goes on through all shuffles to the
    end of num_epochs; one that is left goes on in the next.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        metrics: name → options.
        growing: name → difficulty by step, for each metric that picks samples.
        samples_a_step: of all ranks: train_batch_size.
        micro_batch_size, rank, size, seed, collate_fn: as of ``make_loader`` of an engine part.
        num_epochs: nothing comes any more when more samples were drawn than so many passes over the data set have, as
            in DeepSpeed. Shuffles do not count: while the pool is small or grows there are many of them.
        num_workers, pin_memory: see :func:`~zoo.data_efficiency.ahead.loaded`.

    Attributes:
        place: where it stands.
    """

    def __init__(
        self, dataset: Any, metrics: Mapping[str, CurriculumMetric], growing: Mapping[str, Growing], *,
        samples_a_step: int, micro_batch_size: int, rank: int, size: int, seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_epochs: int = 1000,
        num_workers: int = 0, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        self.dataset, self.num_samples = dataset, len(dataset)
        self.pool = Pool(metrics, self.num_samples)
        self._growing = {name: growing[name] for name in self.pool.metrics}
        self.samples_a_step, self.micro_batch_size, self.rank, self.size = samples_a_step, micro_batch_size, rank, size
        self.seed, self.num_epochs = seed, num_epochs
        self.collate_fn: Callable[[list[Any]], Any] = collate_fn if collate_fn is not None else default_collate
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.place = Place(allowed=self.num_samples)

    def __len__(self) -> int:
        """Micro-batches of each rank from the beginning of training to the end: ⌊num_epochs·N / (B·ranks)⌋ + 1."""
        return self.num_epochs * self.num_samples // (self.micro_batch_size * self.size) + 1

    @property
    def allowed(self) -> int:
        """Samples in the pool that was drawn from last."""
        return self.place.allowed

    def __iter__(self) -> Iterator[Any]:
        serial = self.begin()
        found = loaded(
            self.dataset, self._chosen(self.place), self.collate_fn, num_workers=self.num_workers,
            pin_memory=self.pin_memory, seed=mixed(self.place.epoch, self.seed),
        )  # fmt: skip
        for batch, place in found:
            self.check_newest(serial)
            before, self.place = self.place, place
            self.hand(batch, before, place)
            yield batch
            self.check_newest(serial)
        self.end()

    def _chosen(self, place: Place) -> Iterator[tuple[list[int], Place]]:
        """This rank's samples of each micro-batch to the end, and where the loader stands after it."""
        stride = self.micro_batch_size * self.size
        pool = self.pool.of(place.counts) if place.counts is not None else None
        while place.samples <= self.num_epochs * self.num_samples:
            place, pool = self._looked(place, pool)
            count = place.allowed
            wraps = count < stride  # a pool smaller than what ranks need at once is gone through several times
            if place.position + stride > count and not (wraps and place.position == 0):
                place = replace(place, epoch=place.epoch + 1, position=0)  # the next shuffle of the same pool
            first = place.position + self.rank * self.micro_batch_size
            seed = mixed(place.epoch, self.seed)
            found = [shuffled((first + i) % count, count, seed) for i in range(self.micro_batch_size)]
            place = replace(place, position=place.position + stride, samples=place.samples + stride)
            yield (found if pool is None else [int(pool[where]) for where in found]), place

    def _looked(self, place: Place, pool: Any) -> tuple[Place, Any]:
        """With the pool of the step at hand."""
        step = place.samples // self.samples_a_step + 1
        difficulties = {name: growing.at(step) for name, growing in self._growing.items()}
        if difficulties == place.difficulties and place.counts is not None:
            return place, pool
        counts = self.pool.counts(difficulties)
        if counts == place.counts:
            return replace(place, difficulties=difficulties), pool
        if place.counts is not None and place.position:
            place = replace(place, epoch=place.epoch + 1, position=0)
        pool = self.pool.of(counts)
        allowed = self.num_samples if pool is None else len(pool)
        return replace(place, difficulties=difficulties, counts=counts, allowed=allowed), pool

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands; the same on all ranks."""
        oldest = None if self.unused is None else self.unused.oldest
        place: Place = self.place if oldest is None else oldest.before
        return {
            "epoch": place.epoch, "position": place.position, "samples": place.samples, "num_samples": self.num_samples,
            "seed": self.seed, "difficulties": dict(place.difficulties),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, at any number of ranks and any size of micro-batches. The state of an engine's own loader
        counts as one at which all samples were allowed.

        Raises:
            ValueError: see :meth:`check_state`.
        """
        self.check_state(state)
        self.move()
        self.seed, epoch, position = int(state["seed"]), int(state["epoch"]), int(state["position"])
        samples = int(state.get("samples", epoch * self.num_samples + position))
        self.place = Place(epoch, position, samples, allowed=self.num_samples)
        saved = {str(name): int(value) for name, value in state.get("difficulties", {}).items()}
        if saved and set(saved) == set(self._growing):
            counts = self.pool.counts(saved)
            pool = self.pool.of(counts)
            allowed = self.num_samples if pool is None else len(pool)
            self.place = replace(self.place, difficulties=saved, counts=counts, allowed=allowed)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for the state of another data set, or of a loader that counts something else."""
        if not {"num_samples", "epoch", "position", "seed"} <= set(state):
            raise ValueError(
                f"the loader's state has {', '.join(sorted(map(str, state)))}, which is that of another kind of "
                "loader. Continue with the options of data_efficiency.data_sampling that the checkpoint was made with."
            )
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the loader's state is of a data set of {state['num_samples']} samples; this one has "
                f"{self.num_samples}. Continue with the data set that the checkpoint was made with."
            )
