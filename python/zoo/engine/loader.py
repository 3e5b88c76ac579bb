"""The data loader: deterministic, different on every rank, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from zoo.engine.numbers import MOST, flag, shown, whole
from zoo.parts import Unused, mixed
from zoo.parts import shuffled as shuffled
from zoo.shard.runtime.outputs import tensors_in

T = TypeVar("T")
_FOLLOWED = 1000
"""Batches that may wait for a forward."""


class ShardedLoader(Generic[T]):
    """Micro-batches of one rank.

    An epoch is one shuffle of the data set. Position p of an epoch counts samples over all ranks: the next micro-batch
    of rank r of N holds the samples at p + r*B … p + (r+1)*B - 1, and then p grows by B*N. What is left at the end of
    an epoch and does not fill a micro-batch on every rank is dropped.

    Iterating goes on from the current position to the end of the epoch; the next iteration is the next epoch.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        micro_batch_size: B, samples in one micro-batch of one rank.
        rank, size: r and N.
        seed: of the shuffles.
        collate_fn: list of samples → batch; torch's ``default_collate`` if not given.
        shuffle: False for the data set's own order in every epoch.
        num_workers: processes that load ahead; 0: the samples are loaded when they are asked for.
        prefetch_factor: micro-batches that each of them is ahead.
        pin_memory: batches lie in page-locked memory, for GPUs.

    The position counts what was handed out, not what workers have loaded, so resuming is exact with them too. Workers
    draw their random numbers anew each time that they start.

    A program may fetch batches ahead: where an engine follows which of them its forwards have had (``unused``), a state
    stands before the oldest that none has had, once there was a forward. A batch is known by its tensors, and copies
    count in the order in which batches were handed out; so a batch that is left out, and whose followers are used as
    copies, counts as one that is still to come. An epoch in which nothing was used was only
    looked at: a program fetches less than an epoch ahead.

    Raises:
        ValueError: an argument cannot be what it should be; a data set without length, or with fewer samples than one
            micro-batch of all ranks.
    """

    _looks = True  # an epoch may be gone through without training

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], T] | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"the data set is a {type(dataset).__name__}; sharding over ranks and resuming need __len__ and "
                f"__getitem__. "
                "Give a map-style data set, or pass your own iterator to engine.train_batch(iterator)."
            )
        if collate_fn is not None and not callable(collate_fn):
            raise ValueError(
                f"collate_fn of ShardedLoader got {shown(collate_fn)}; it takes a callable that makes a batch of a "
                "list of samples."
            )
        self.dataset, self.micro_batch_size = dataset, _whole("micro_batch_size", micro_batch_size)
        self.rank, self.size = _whole("rank", rank, least=0), _whole("size", size)
        if self.rank >= self.size:
            raise ValueError(
                f"ShardedLoader got rank={rank} of size={size} ranks; ranks are numbered from 0 to {self.size - 1}."
            )
        self.seed, self.shuffle = _whole("seed", seed, least=-MOST), flag("shuffle of ShardedLoader", shuffle)
        self.collate_fn: Callable[[list[Any]], T] = collate_fn if collate_fn is not None else default_collate
        self.num_workers = _whole("num_workers", num_workers, least=0)
        self.prefetch_factor = _whole("prefetch_factor", prefetch_factor)
        self.pin_memory = flag("pin_memory of ShardedLoader", pin_memory)
        self.num_samples = len(dataset)
        self.epoch = 0
        self.position = 0
        self.serial = 0  # of the newest iteration, to which the position belongs
        self.handed = 0  # samples of the newest micro-batch
        self.unused: Unused | None = None
        if len(self) == 0:
            raise ValueError(
                f"the data set has {self.num_samples} samples, fewer than one micro-batch of {self.micro_batch_size} "
                f"on each of {self.size} ranks ({self.micro_batch_size * self.size}); use more data, smaller "
                "micro-batches or fewer ranks."
            )

    def __len__(self) -> int:
        """Micro-batches of each rank in a whole epoch."""
        return self.num_samples // (self.micro_batch_size * self.size)

    def __iter__(self) -> Iterator[T]:
        self.serial += 1
        serial, turns, batches = self.serial, self._turns(), self._loaded()
        used = None
        if self.unused is not None:
            self.unused.begin()
            used = self.unused.current
        for _, position, samples in turns:
            batch = next(batches)
            self._check_newest(serial)
            before, self.position, self.handed = self.position, position, samples
            self._hand(batch, before)
            yield batch
            self._check_newest(serial)
        if self.unused is not None:
            self.unused.end()
            if self._looks and self.unused.current is used:
                self.unused.clear()
        self.epoch += 1
        self.position = 0

    def _hand(self, batch: Any, before: int) -> None:
        """A batch is handed out, before which the loader stood there."""
        if self.unused is None:
            return
        if len(self.unused) >= _FOLLOWED:  # whoever uses them does not ask the engine
            self.unused = None
            return
        self.unused.add(
            list(tensors_in(batch)), name="the loader's batch", counts=self.handed,
            before={"epoch": self.epoch, "position": before},
        )  # fmt: skip

    def _check_newest(self, serial: int) -> None:
        if serial != self.serial:
            raise RuntimeError(
                "this iteration of the loader is not the newest: another one has begun, or load_state_dict() has moved "
                "the loader, and its position belongs to that. Begin a new one: iter(loader)."
            )

    def _loaded(self) -> Iterator[T]:
        """The micro-batches from here to the end of the epoch."""
        chosen: Any = (indices for indices, _, _ in self._turns())
        if not self.num_workers and not self.pin_memory:
            return (self.collate_fn([self.dataset[index] for index in indices]) for indices in chosen)
        ahead = {"prefetch_factor": self.prefetch_factor} if self.num_workers else {}
        loader: DataLoader[T] = DataLoader(
            self.dataset, batch_sampler=chosen, collate_fn=self.collate_fn, num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(mixed(self.epoch, self.seed) >> 1),  # torch's own stays as it is
            **ahead,  # type: ignore[arg-type]
        )  # fmt: skip
        return iter(loader)

    def _turns(self) -> Iterator[tuple[list[int], int, int]]:
        """From here to the end of the epoch: (which samples, where the loader stands after them, how many of them
        count)."""
        position, stride = self.position, self.micro_batch_size * self.size
        while position + stride <= self.num_samples:
            first = position + self.rank * self.micro_batch_size
            position += stride
            yield [self._where(first + i) for i in range(self.micro_batch_size)], position, self.micro_batch_size

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, or the training; the same on all ranks."""
        oldest = None if self.unused is None or self.unused.current is None else self.unused.oldest
        at = {"epoch": self.epoch, "position": self.position} if oldest is None else oldest.before
        return {**at, "num_samples": self.num_samples, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there, at any number of ranks and any size of micro-batches.

        Raises:
            ValueError: see :meth:`check_state`.
        """
        self.check_state(state)
        self.epoch, self.position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
        self.serial += 1
        if self.unused is not None:
            self.unused.clear()

    def check_state(self, state: Mapping[str, int]) -> None:
        """Raise ValueError for the state of a data set of another length, whose positions mean other samples, for that
        of another kind of loader, and for one that is no place in the data."""
        given: Any = state
        if not isinstance(given, Mapping):
            raise ValueError(f"the loader's state is a {type(given).__name__}; it is what state_dict() has returned.")
        if not {"num_samples", "epoch", "position", "seed"} <= set(state):
            raise ValueError(
                f"the loader's state has {', '.join(sorted(map(str, state)))}, which is that of another kind of "
                "loader. Continue with the loader that the checkpoint was made with: the same training_data, and the "
                "same options of data_efficiency.data_sampling."
            )
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the loader's state is of a data set of {state['num_samples']} samples; this one has "
                f"{self.num_samples}. "
                "Continue with the data set that the checkpoint was made with."
            )
        whole("the epoch of the loader's state", state["epoch"], least=0)
        whole("the seed of the loader's state", state["seed"], least=-MOST)
        position = whole("the position of the loader's state", state["position"], least=0)
        if position > self.num_samples:
            raise ValueError(
                f"the loader's state has the position {position}; a data set of {self.num_samples} samples has 0 to "
                f"{self.num_samples}."
            )

    def _where(self, index: int) -> int:
        # The seed of an epoch must not be that of a neighbouring seed's neighbouring epoch.
        return shuffled(index, self.num_samples, mixed(self.epoch, self.seed)) if self.shuffle else index


def _whole(name: str, value: Any, *, least: int = 1) -> int:
    return whole(f"{name} of ShardedLoader", value, least=least)


class RepeatingLoader:
    """A loader that begins anew when it has ended.

    Args:
        loader: an iterable, each iteration of which is one epoch.

    Raises:
        ValueError: it cannot be iterated.
    """

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise ValueError(f"RepeatingLoader got {shown(loader)}; it takes a loader, each iteration of which begins.")
        self.loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        kind = type(self.loader).__name__
        if hasattr(self.loader, "__next__") and iter(self.loader) is self.loader:
            raise StopIteration(f"a {kind} is an iterator, which cannot begin anew when it has ended: give the loader")
        raise StopIteration(f"the loader, a {kind}, has no batches")

    def __len__(self) -> int:
        return len(self.loader)
