"""Buckets without memory, of which a plan is made: what residency, walks, reductions and executors ask of real ones.

Whatever does not change (names, sizes, placements, routes) is the bucket's own; what happens to it happens here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zoo.comm import DONE, Handle
from zoo.shard.buckets import Bucket
from zoo.shard.gradients import GradientPhase
from zoo.shard.parameters import Presence


@dataclass
class Moves:
    """What is written down beside actions.

    Attributes:
        gathers: the buckets that are gathered, and whether from what hpZ keeps of them.
        secondary: the buckets of which hpZ keeps a part for backward.
    """

    gathers: list[tuple[Bucket, bool]] = field(default_factory=list)
    secondary: set[Bucket] = field(default_factory=set)


class StandIn:
    """See :class:`~zoo.shard.buckets.Bucket`."""

    in_turn = None

    def __init__(self, bucket: Bucket, moves: Moves) -> None:
        self.bucket = bucket
        self.index, self.spec, self.num_bytes, self.memory = bucket.index, bucket.spec, bucket.num_bytes, bucket.memory
        self.partitioned, self.mean_bytes = bucket.partitioned, bucket.mean_bytes
        self.leases, self.active, self.context_serial = 0, 0, -1
        self.parameters = StandInParameters(self, moves)
        self.gradients = StandInGradients(self) if bucket.gradients is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bucket, name)


class StandInUnit:
    """See :class:`~zoo.shard.runtime.contexts.Unit`; ``recorded``: stand-ins of its buckets."""

    def __init__(self, name: str, recorded: tuple[StandIn, ...]) -> None:
        self.name, self.recorded = name, recorded
        self.partitioned = tuple(bucket for bucket in recorded if bucket.partitioned)
        self.gradients = tuple(bucket.gradients for bucket in recorded if bucket.gradients is not None)


class StandInParameters:
    """See :class:`~zoo.shard.parameters.BucketParameters`: only what is here, and what is under way."""

    samples, rounds, is_exact = None, False, True

    def __init__(self, owner: StandIn, moves: Moves) -> None:
        self._owner, self._moves = owner, moves
        self.presence = Presence.SHARDED if owner.partitioned else Presence.SHOWN
        self.secondary: bool | None = None

    @property
    def live(self) -> bool:
        """They are whole, hidden or shown."""
        return self.presence in (Presence.HIDDEN, Presence.SHOWN)

    def is_saved(self) -> bool:
        """As it was in the latest backward."""
        return self._owner.bucket.parameters.saved

    def start(self, *, exact: bool = False) -> None:
        """A gather begins."""
        self._moves.gathers.append((self._owner.bucket, self.secondary is not None))
        self.presence = Presence.UNSHARDING

    def finish(self) -> None:
        """It is over."""
        self.presence = Presence.HIDDEN

    def show(self) -> None:
        """Somebody uses them."""
        self.presence = Presence.SHOWN

    def hide(self) -> None:
        """Nobody does."""
        if self.presence is Presence.SHOWN:
            self.presence = Presence.HIDDEN

    def advance(self) -> None:
        """A gather of two stages goes on, which is no action."""

    def keep_part(self) -> None:
        """hpZ keeps a part."""
        if self._owner.bucket.secondary_bytes() and self.secondary is None:
            self.secondary = True
            self._moves.secondary.add(self._owner.bucket)

    def free(self) -> None:
        """Each rank has its shard alone."""
        self.presence = Presence.SHARDED

    def publish(self) -> Handle:
        """Nothing moves."""
        return DONE


class StandInGradients:
    """See :class:`~zoo.shard.gradients.BucketGradients`: only the phase that they are in."""

    def __init__(self, owner: StandIn) -> None:
        self.bucket, self.phase = owner, GradientPhase.IDLE

    def expect(self) -> None:
        """Gradients arrive."""
        self.phase = GradientPhase.ACCUMULATING

    def start_reduce(self, dtype: Any) -> Callable[[], None]:
        """A reduction begins; returns what waits for it."""
        self.phase = GradientPhase.LAUNCHED
        return _nothing

    def advance(self) -> None:
        """A reduction of two stages goes on, which is no action."""

    def settle(self) -> None:
        """The backward that reduced it is over."""
        self.phase = GradientPhase.IDLE


def _nothing() -> None:
    return None
