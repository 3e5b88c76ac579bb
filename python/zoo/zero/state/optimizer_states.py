"""What an optimizer keeps of buckets: the values that it updates, and its states, by role.

The tensors are its own, among its parameters and in its ``state``, and stay the same objects: these roles are adopted.
A bucket asks here (``bucket.states``) for what it does not hold itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zoo.shard.buckets import Bucket
from zoo.shard.roles import ORIGINAL, PARAMETER
from zoo.zero.state.logical import tensor_states
from zoo.zero.update.segments import Segment

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer


class OptimizerStates:
    """Of all buckets that ``optimizer`` trains; it does not keep the optimizer."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        _take_originals(optimizer)
        for bucket in optimizer.buckets:
            bucket.states = self

    @property
    def optimizer(self) -> ZeroOptimizer:
        """Whose they are.

        Raises:
            ValueError: it is gone.
        """
        found = self._optimizer()
        if found is None:
            raise ValueError(
                "the optimizer of this model does not exist any more: the model runs, and keeps the values that it "
                "has. Keep the optimizer as long as its model, or close() it before it goes."
            )
        return found

    @property
    def are_whole(self) -> bool:
        """They exist, and are all of one step."""
        found = self._optimizer()
        return found is not None and found.updater.broken is None

    def segments(self, bucket: Bucket) -> Iterator[tuple[Segment, dict[str, Any]]]:
        """Each segment of a bucket and its entries in the optimizer's state, while they are in memory, to be read.

        Go to the end: what came from NVMe is put away afterwards.
        """
        optimizer = self.optimizer
        for segment in optimizer.updater.visit([bucket]):
            yield segment, optimizer.inner.state.get(segment.tensor, {})

    def read(self, bucket: Bucket) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """By role what this rank has of a bucket, piece by piece: where it begins in the flat buffer, and elements.

        "parameter" is the value that the optimizer updates, exact.
        """
        for segment, entries in self.segments(bucket):
            yield segment.first, {PARAMETER: segment.value(entries), **tensor_states(entries, segment)}

    def edit(
        self, buckets: Collection[Bucket], change: Callable[[Segment, dict[str, torch.Tensor]], None], *,
        precise: bool = False,
    ) -> None:  # fmt: skip
        """Let ``change`` write to the roles of each segment of ``buckets``, as :meth:`read` gives them.

        Args:
            precise: values may have more bits than the parameters: an optimizer that makes its masters in the first
                step gets them now.
        """

        def apply(segment: Segment, entries: dict[str, Any]) -> None:
            change(segment, {PARAMETER: segment.value(entries), **tensor_states(entries, segment)})

        self.optimizer.updater.edit(buckets, apply, precise=precise)

    @property
    def that_follow(self) -> Collection[str]:
        """The roles that take new values of the parameters too."""
        found: Collection[str] = getattr(self.optimizer.inner, "follows", ())
        return found

    def check_writable(self) -> None:
        """Raise RuntimeError where each rank has parameters of its own now."""
        self.optimizer.updater.check_writable()

    def refuse_writes(self, why: str) -> None:
        """Raise RuntimeError as :meth:`check_writable`; every step is refused then until a state is loaded."""
        try:
            self.check_writable()
        except RuntimeError:
            self.optimizer.updater.give_up(why)
            raise


def _take_originals(optimizer: ZeroOptimizer) -> None:
    """Masters become what the parameters came with; nothing else keeps that any more."""
    optimizer.updater.take_originals()
    sharded = optimizer.sharded
    files: Mapping[int, Any] = {id(f): f for b in sharded.trainable if (f := b.stores.get(ORIGINAL)) is not None}
    for file in files.values():
        if sharded.scratch is not None:
            sharded.scratch.drop(file)
