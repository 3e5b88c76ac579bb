"""When the ranks of an optimizer that brings them together by itself meet, and what that asks of a ZeRO optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from zoo.comm import Communicator
from zoo.shard.buckets import Bucket
from zoo.shard.collectives.compressed import Switch
from zoo.shard.collectives.routes import Hop
from zoo.zero.synced.collectives import sent_by_peers
from zoo.zero.update.segments import Segment


class Meetings:
    """Drives a ``zoo.optim.synced.SyncedOptimizer``, and tells the reductions whether it wants means.

    Args:
        inner: the optimizer on this rank's segments.
        switch: what reductions look at.
        everyone: all ranks with this optimizer.

    Raises:
        ValueError: ranks with other layers would meet in other steps.
        NotImplementedError: ranks would step by themselves where none has all that it needs for that.
    """

    def __init__(
        self, inner: Any, switch: Switch, buckets: Sequence[Bucket], segments: Sequence[Segment], everyone: Communicator
    ) -> None:  # fmt: skip
        self._inner, self._switch, self._everyone = inner, switch, everyone
        self._buckets, self._segments = buckets, segments
        inner.driven = True
        split = any(b.placements.states.repeat.size == 1 and b.routes.axes.world.size > 1 for b in buckets)
        every = everyone.all_gather_object((inner.meetings(), split))
        self._split_anywhere = any(split for _, split in every)
        if len({told for told, _ in every}) > 1:
            raise ValueError(
                "ranks with other layers of the model bring their optimizers together in other steps: "
                f"{', '.join(sorted({told for told, _ in every}))}. Construct all of them with the same options."
            )
        self._check_local_steps()

    # A step ----------------------------------------------------------------------------------------------------------

    def decide(self) -> None:
        """Gradients may be reduced for the next step: whether to means, by the options that the optimizer has now."""
        self._switch.decide(own=not self._inner.takes_means(), afresh=not self._has_reduced())

    def begin(self) -> None:
        """A step begins.

        Raises:
            ValueError: gradients were left to an optimizer that takes means now.
        """
        self._check_local_steps()
        if self._switch.left and self._has_reduced() and self._inner.takes_means():
            raise ValueError(
                "the step takes the mean gradient of all ranks, and the gradients are not: "
                f"{type(self._inner).__name__} was to compress when they were reduced, and its options or its state "
                "have changed since. Call zero_grad() and backward again; change options between zero_grad() and "
                "backward."
            )
        self._inner.begin_step()

    def _check_local_steps(self) -> None:
        """Raise NotImplementedError, on all ranks, for steps of a rank where none has all that it needs for them."""
        if self._split_anywhere and self._inner.steps_by_itself():
            raise NotImplementedError(
                f"{type(self._inner).__name__} with local steps, after which each rank has parameters of its own, and "
                "states that are split over all ranks, which have parameters only together. Use stage 0, groups of "
                "mics_shard_size ranks, or no local steps (local_step_clipper=1)."
            )

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Steps inside make states, meet nobody and do not count."""
        self._inner.forming = True
        try:
            self._inner.begin_step()
            yield
        finally:
            self._inner.forming = False

    def resume(self) -> None:
        """States were loaded; ranks whose segments are padding do not see in them how many steps. Collective."""
        states = [self._inner.state.get(s.tensor, {}) for s in self._segments if s.slices()]
        mine = max((int(state["step"]) for state in states if "step" in state), default=0)
        self._inner.resume(max(self._everyone.all_gather_object(mine)))

    def _has_reduced(self) -> bool:
        return any(b.gradients is not None and b.gradients.reduced for b in self._buckets)

    # What ranks have in common ---------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Ranks that repeat a state have different ones after the steps so far."""
        return self._everyone.size > 1 and not self._inner.together()

    def check_writable(self) -> None:
        """Raise RuntimeError where values for parameters would be those of one rank, or undone.

        Between steps at which ranks agree each has parameters of its own, and the next agreement starts from others.
        """
        if not self._inner.agreed():
            raise RuntimeError(
                f"parameters cannot be written to between two steps at which the ranks of {type(self._inner).__name__} "
                "agree on them: each rank has its own now, and what is written would be lost. Write after a step that "
                "ends with an agreement, before the first step, or into a checkpoint."
            )

    def hops(self) -> list[Hop]:
        """What the next step sends to bring ranks together."""
        now, compresses = self._inner.now, self._inner.compressor is not None
        found = [hop for b in self._buckets for hop in sent_by_peers(b, now, compresses=compresses)]
        return found + [Hop("all_reduce", self._everyone, 8)] * (self._everyone.size > 1 and self._inner.asks_for_total)
