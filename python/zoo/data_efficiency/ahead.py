"""Micro-batches in the order in which they were chosen, each with where the loader stands after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from zoo.parts import Unused
from zoo.shard.runtime.outputs import tensors_in

Place = TypeVar("Place")


class Newest:
    """A loader whose position belongs to its newest iteration; an older one that is asked for more is refused.

    Attributes:
        serial: of the newest iteration; loading a state begins another one too.
        unused: where it is followed which batches are used. A state is that before the oldest which is not then: a
        program may fetch ahead. None: it is not, and a state is that after what was handed out.
    """

    serial = 0
    unused: Unused | None = None

    def begin(self) -> int:
        """An iteration begins: its number."""
        self.serial += 1
        if self.unused is not None:
            self.unused.begin()
        return self.serial

    def hand(self, batch: Any, before: Any, counts: Any) -> None:
        """A batch is handed out: see :class:`~zoo.parts.Handed`."""
        if self.unused is not None:
            self.unused.add(list(tensors_in(batch)), name="the loader's batch", before=before, counts=counts)

    def end(self) -> None:
        """The iteration at hand is at its end."""
        if self.unused is not None:
            self.unused.end()

    def move(self) -> None:
        """A state is loaded."""
        self.begin()
        if self.unused is not None:
            self.unused.clear()

    def check_newest(self, serial: int) -> None:
        """Raise RuntimeError in an iteration that is not the newest: its batches would be drawn twice."""
        if serial != self.serial:
            raise RuntimeError(
                "this iteration of the loader is not the newest: another one has begun, or load_state_dict() has moved "
                "the loader, and its position belongs to that. Begin a new one: iter(loader)."
            )


def loaded(
    dataset: Any, chosen: Iterator[tuple[list[int], Place]], collate_fn: Callable[[list[Any]], Any], *,
    num_workers: int, pin_memory: bool, seed: int,
) -> Iterator[tuple[Any, Place]]:  # fmt: skip
    """(micro-batch, place) for each (numbers of samples, place).

    Args:
        num_workers: processes that read ahead; the places are those of what is handed out all the same.
        pin_memory: batches lie in page-locked memory.
        seed: of the workers' random numbers; torch's own generator stays as it is.
    """
    if not num_workers and not pin_memory:
        for numbers, place in chosen:
            yield collate_fn([dataset[number] for number in numbers]), place
        return
    places: deque[Place] = deque()

    def sampler() -> Iterator[list[int]]:
        for numbers, place in chosen:
            places.append(place)
            yield numbers

    found: Any = DataLoader(
        dataset, batch_sampler=sampler(), collate_fn=collate_fn, num_workers=num_workers, pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(seed >> 1),
    )  # fmt: skip
    for batch in found:
        yield batch, places.popleft()
