"""New values for parameters under a ZeRO optimizer: written everywhere that they live.

A parameter's value is in up to four places: the whole copy, this rank's shard in its tier, and the fp32 value that the
optimizer updates, in its tier. Writing to one alone would be undone by the next gather or the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zoo.zero.sharding.buckets import Bucket
from zoo.zero.sharding.roles import ORIGINAL, PARAMETER, RoleBuffer
from zoo.zero.update.segments import Segment

if TYPE_CHECKING:
    from zoo.zero.optimizer import ZeroOptimizer
    from zoo.zero.sharded import ShardedModel

Values = Mapping[str, tuple[int, torch.Tensor]]
"""By the name of a parameter: new values of its elements [start, start + len) in its row-major order."""


def overlaps(values: Values, pieces: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Where the values lie in what ``pieces`` (:class:`zoo.layout.Slice`) describe: (offset, values)."""
    for piece in pieces:
        if piece.name not in values:
            continue
        first, given = values[piece.name]
        low, high = max(first, piece.start), min(first + given.numel(), piece.start + piece.length)
        if low < high:
            yield piece.offset + low - piece.start, given[low - first : high - first]


@torch.no_grad()
def write_values(optimizer: ZeroOptimizer | None, changes: Mapping[Bucket, Values], *, keep_equal: bool) -> None:
    """Give parameters new values, on this rank.

    Args:
        optimizer: which may have fp32 values of them; None without one.
        changes: for each bucket the values by name. Whole parameters must be given where copies are whole.
        keep_equal: an fp32 value stays where it rounds to the value given: what nobody changed keeps its precision.
    """
    trainable = [bucket for bucket in changes if bucket.spec.trainable]
    if trainable and optimizer is not None:
        optimizer.updater.check_writable()
    for bucket, values in changes.items():
        parameters = bucket.parameters
        parameters.drop_secondary()
        if parameters.live:
            for offset, part in overlaps(values, bucket.layout.slices(0, bucket.layout.size)):
                parameters.full[offset : offset + part.numel()].copy_(part)
        for name, role in bucket.roles.items():
            if name == ORIGINAL or (name == PARAMETER and bucket.partitioned):
                _write(bucket, role, values, keep_equal=keep_equal and name == ORIGINAL)

    def change(segment: Segment, state: dict[str, Any]) -> None:
        target = segment.value(state)
        for offset, part in overlaps(changes[segment.bucket], segment.slices()):
            place = slice(offset, offset + part.numel())
            _overwrite(target[place], part, segment.bucket, keep_equal=keep_equal)
            for name in follows & state.keys():
                state[name][place].copy_(target[place])

    follows = set(getattr(optimizer.inner, "follows", ())) if optimizer is not None else set[str]()
    if trainable and optimizer is not None:
        optimizer.updater.edit(trainable, change, precise=not keep_equal)


def _write(bucket: Bucket, role: RoleBuffer, values: Values, *, keep_equal: bool) -> None:
    found = list(overlaps(values, bucket.layout.slices(role.first, role.first + role.numel)))
    if found:
        with role.borrow() as kept:
            for offset, part in found:
                _overwrite(kept[offset : offset + part.numel()], part, bucket, keep_equal=keep_equal)


def _overwrite(old: torch.Tensor, value: torch.Tensor, bucket: Bucket, *, keep_equal: bool) -> None:
    new = value.to(old.device, old.dtype)
    if keep_equal:
        rounded = old.to(bucket.spec.dtype).to(old.dtype)
        new = torch.where(rounded == new, old, new)
    old.copy_(new)


def publish(
    model: ShardedModel, slots: Mapping[Bucket, Sequence[int]], rank: int, seen: Mapping[Bucket, Sequence[int]]
) -> None:  # fmt: skip
    """See :meth:`zoo.zero.state.gathered.Owner.publish`."""
    user = model.user  # before anything changes
    changes: dict[Bucket, dict[str, tuple[int, torch.Tensor]]] = {}
    for bucket, chosen in slots.items():
        if not bucket.parameters.live:
            raise RuntimeError(
                f"the parameters of {bucket.label} were partitioned again inside GatheredParameters, by a step or "
                "a nested context: what was written to them is lost. Step outside of it."
            )
        changes[bucket] = {}
        for slot in chosen:
            view = bucket.parameters.flat_of(slot)
            if view.numel():
                bucket.routes.axes.world.broadcast(view, rank).wait()
            changes[bucket][bucket.spec.names[slot]] = (0, view)
        if _wrote(bucket, rank, seen[bucket]):
            model.runtime.contexts.refuse_older()  # as torch does on the rank that wrote
        model.runtime.note(bucket)
    write_values(user, changes, keep_equal=True)


def _wrote(bucket: Bucket, rank: int, seen: Sequence[int]) -> bool:
    """Whether ``rank`` wrote to the bucket so that autograd saw it. Collective."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = any(p._version != version for p, version in zip(bucket.spec.parameters, seen, strict=True))
    flag = torch.tensor([float(mine)], device=bucket.device)
    bucket.routes.axes.world.broadcast(flag, rank).wait()
    return bool(flag)
