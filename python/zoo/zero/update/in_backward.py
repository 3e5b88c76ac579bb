"""Updates that do not wait for the end of backward: a shard is updated as soon as its gradient is reduced.

What an update has to move, states from NVMe and back, travels while backward computes, and a reduced gradient lives
only until its piece is updated. The arithmetic is that of an update after backward, so the bits are the same. It is
possible where no gradient has a say in the update of another one: without clipping by the global norm, without a loss
scale, where overflow turns into a skipped step, and with an elementwise optimizer.

Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", section 3.1, fuse SGD
with backward to save the memory of gradients; here it is any elementwise optimizer, over ranks, and states move
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zoo.shard.buckets import Bucket
from zoo.zero.update.clipping import UNCHANGED
from zoo.zero.update.updater import Updater

PATIENCE = 1
"""Pieces whose gradients are there while their states are still on the way, before backward waits for the device."""


class UpdateInBackward:
    """Runs the pieces of an update in the order in which backward completes them.

    Nothing between the beginning and the end of a backward is collective, so each rank may update at the moment that
    suits its device.

    Args:
        updater: has the pieces, the last buckets first.
        options: the parameter groups at the moment of the update.
        publish: brings updated parameters to everyone who keeps them whole. Collective.
        take_writes: takes over what the user wrote into parameters since the latest update.
    """

    def __init__(
        self, updater: Updater, options: Callable[[], Sequence[dict[str, Any]]], publish: Callable[[], None],
        take_writes: Callable[[], None],
    ) -> None:  # fmt: skip
        self._updater, self._options, self._publish, self._take_writes = updater, options, publish, take_writes
        self._pieces = [dict.fromkeys(s.bucket for s in piece) for piece in updater.pieces()]
        self._pieces_of: dict[Bucket, list[int]] = {}
        for index, buckets in enumerate(self._pieces):
            for bucket in buckets:
                self._pieces_of.setdefault(bucket, []).append(index)
        self._missing: list[int] = []  # gradients that each piece still waits for
        self._next = 0
        self._running = self._begun = False
        self.done = False  # a backward has updated everything, and step() has not been called since

    def begin(self) -> None:
        """A backward that reduces starts.

        Raises:
            ValueError: the one before was not followed by ``step()``.
            OffloadError: an earlier update failed.
            RuntimeError: the user wrote something that is lost.
        """
        if self.done:
            raise ValueError(
                "a second backward before step(): with update_in_backward=True each backward outside of no_sync() is a "
                "step. Put all but the last of several backwards into `with optimizer.no_sync():`."
            )
        self._take_writes()
        self._updater.begin(self._options())
        self._missing = [len(piece) for piece in self._pieces]
        self._next, self._running, self._begun = 0, True, False

    @torch.no_grad()
    def reduced(self, bucket: Bucket) -> None:
        """The gradient of ``bucket`` is the mean over all ranks now."""
        for index in self._pieces_of.get(bucket, ()):
            self._missing[index] -= 1
        self._advance(PATIENCE)

    def _advance(self, patience: int) -> None:
        complete = self._next
        while complete < len(self._missing) and not self._missing[complete]:
            complete += 1
        while self._next < complete:
            if complete - self._next <= patience and not self._updater.arrived(self._next):
                return
            self._begun = True
            self._updater.run(self._next, UNCHANGED)
            for bucket in self._pieces[self._next]:
                if self._pieces_of[bucket][-1] == self._next and bucket.gradients is not None:
                    bucket.gradients.consume()
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """All gradients are reduced: update what is left. Collective."""
        self._advance(0)
        self._running, self.done = False, True
        self._publish()
        self._updater.read_ahead()

    def step(self) -> None:
        """The update that backward made is the user's step."""
        self.done = False

    def check_dropped(self) -> None:
        """Gradients are about to be dropped.

        Raises:
            ValueError: ``step()`` has not been called since they were used.
        """
        if self.done:
            raise ValueError(
                "zero_grad() between a backward and its step(): with update_in_backward=True the update has been made. "
                "Decide before backward whether there is to be a step."
            )

    def abandon(self) -> None:
        """The backward ended with an exception."""
        if self._running:
            self._running = False
            if self._begun:
                self._updater.give_up("a backward that updates ended with an exception")
            else:
                self._updater.drop_read()
