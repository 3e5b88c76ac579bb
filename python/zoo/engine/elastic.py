"""Any number of ranks trains with the same global batch: the engine part of the section ``elasticity``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from zoo.config.elastic import Elasticity
from zoo.engine.batches import tensors
from zoo.engine.loader import ShardedLoader
from zoo.launch.elastic import shares
from zoo.parts import Clock, Environment, Unused

__all__ = ["Elastic", "ElasticLoader"]


class ElasticLoader(ShardedLoader[Any]):
    """Micro-batches of one rank, of shares that may be uneven.

    The next T samples of an epoch are those of the next step, on however many ranks; rank r of N holds
    ⌊r·T/N⌋ … ⌊(r+1)·T/N⌋ - 1 of them, in as many micro-batches as every rank (:func:`zoo.launch.elastic.shares`). A
    micro-batch without samples is one sample that counts for nothing, so that all ranks run the model as often. What is
    left at the end of an epoch and does not fill a batch is dropped.

    The position is that of a step: a state that is taken within one begins it anew. Where it is followed which batches
    are used (``unused``), a state is that before the oldest which is not: a program may fetch ahead.

    Args:
        batch: T.
        dataset, micro_batch_size, rank, size, more: as of :class:`~zoo.engine.ShardedLoader`; no micro-batch has more
            samples.
    """

    _looks = False

    def __init__(
        self, dataset: Dataset[Any], batch: int, micro_batch_size: int, *, rank: int = 0, size: int = 1, **more: Any
    ) -> None:
        self.batch = batch
        self.shares = shares(batch, size, micro_batch_size)
        if hasattr(dataset, "__len__") and len(dataset) < batch:
            raise ValueError(
                f"the data set has {len(dataset)} samples, fewer than a batch of {batch}; use more data, or a smaller "
                "train_batch_size."
            )
        super().__init__(dataset, micro_batch_size, rank=rank, size=size, **more)

    def __iter__(self) -> Iterator[Any]:
        self._turn = 0
        return super().__iter__()

    def _hand(self, batch: Any, before: int) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % len(self.shares[0])
        if self.unused is not None:
            self.unused.add(
                list(tensors(batch)), name=f"batch {turn} of this rank's share", turn=turn, counts=self.handed,
                before={"epoch": self.epoch, "position": before},
            )  # fmt: skip

    def state_dict(self) -> dict[str, int]:
        """Where the training stands; the same on all ranks."""
        oldest = None if self.unused is None else self.unused.oldest
        return {**super().state_dict(), **({} if oldest is None else oldest.before)}

    def __len__(self) -> int:
        """Micro-batches of each rank in a whole epoch."""
        return self.num_samples // self.batch * len(self.shares[0])

    def _turns(self) -> Iterator[tuple[list[int], int, int]]:
        mine, position = self.shares[self.rank], self.position
        while position + self.batch <= self.num_samples:
            at = position + self.rank * self.batch // self.size
            for turn, count in enumerate(mine):
                after = position + self.batch if turn == len(mine) - 1 else position
                chosen = range(at, at + count) if count else range(position, position + 1)
                yield [self._where(index) for index in chosen], after, count
                at += count
            position += self.batch


class Elastic:
    """Deals the batch, and weights each micro-batch's loss by its samples.

    A model returns the mean loss of its micro-batch. With n samples of T in it, of G micro-batches a step on W ranks,
    the loss is multiplied by n·G·W/T: the engine divides by G and averages over W, so each sample counts 1/T.

    Args:
        section: ``elasticity``.
        environment: of the engine.
    """

    def __init__(self, section: Elasticity, environment: Environment) -> None:
        config = environment.config
        self._batch = int(config.train_batch_size)
        self._passes = int(config.gradient_accumulation_steps) * environment.batch_ranks
        self.loader: ElasticLoader | None = None
        self._unused = Unused("elasticity")
        self._counts: dict[int, int] = {}  # micro-batch of the step at hand → its samples
        self._step = -1

    def make_loader(
        self, dataset: Any, *, micro_batch_size: int, rank: int, size: int, seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> ElasticLoader:  # fmt: skip
        """The loader of this rank's shares."""
        self.loader = ElasticLoader(
            dataset, self._batch, micro_batch_size, rank=rank, size=size, seed=seed, collate_fn=collate_fn
        )
        self.loader.unused = self._unused
        return self.loader

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins, on a batch of the loader."""
        if self.loader is None or not self.loader.serial:
            raise ValueError(
                "elasticity deals shares of the batch by the engine's own loader, and this batch is not of it: give "
                "initialize a data set with __len__ and __getitem__ as training_data, and take engine.dataloader."
            )
        if (clock.micro_batch == 0 and len(self._counts) > 1) or clock.step != self._step:
            self._counts, self._step = {}, clock.step
        turn, turns = clock.micro_batch, len(self.loader.shares[0])
        given_now = list(tensors((args, kwargs)))
        found = self._unused.find(given_now)
        if found is None or found.turn != turn:
            given = "one that the loader has not handed out" if found is None else f"batch {found.turn} of the {turns}"
            raise ValueError(
                f"elasticity: micro-batch {turn} of a step is given {given} of this rank's share, and its loss would "
                "count for another number of samples; use each batch of engine.dataloader once, in their order, and "
                "begin a new iteration only between two steps."
            )
        self._unused.use(found, given_now)
        self._counts[turn] = found.counts
        return args, kwargs

    def counts_batch(self, clock: Clock) -> bool:
        """Whether the micro-batch at hand has samples of the batch, and does not stand for none."""
        return self._counts.get(clock.micro_batch, 1) > 0

    def on_loss(self, loss: torch.Tensor, clock: Clock) -> torch.Tensor:
        """The loss, by its samples."""
        if clock.micro_batch not in self._counts:
            raise ValueError(
                "engine.backward() of an elastic job got a loss that no forward of the engine has computed, and does "
                "not know of how many samples it is: compute it by engine(batch)."
            )
        weight = self._counts[clock.micro_batch] * self._passes / self._batch
        return loss if weight == 1 else loss * weight
