"""New values for parameters under a ZeRO optimizer: written everywhere that they live.

A parameter's value is in up to four places: the whole copy, this rank's shard in its tier, and the fp32 value that the
optimizer updates, in its tier. Writing to one alone would be undone by the next gather or the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zoo.shard.buckets import Bucket
from zoo.shard.roles import ORIGINAL, PARAMETER, RoleBuffer

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
def write_values(changes: Mapping[Bucket, Values], *, keep_equal: bool) -> None:
    """Give parameters new values, on this rank: in every role that has them.

    Args:
        changes: for each bucket the values by name. Whole parameters must be given where copies are whole.
        keep_equal: an exact value stays where it rounds to the value given: what nobody changed keeps its precision.
    """
    for bucket in changes:  # before anything changes
        bucket.check_writable()
    kept = [bucket for bucket in changes if bucket.spec.trainable and bucket.states is not None]
    states = kept[0].states if kept else None
    for bucket, values in changes.items():
        parameters = bucket.parameters
        parameters.drop_secondary()
        if parameters.live:
            parameters.versions()  # others may have been written to
            for offset, part in overlaps(values, bucket.layout.slices(0, bucket.layout.size)):
                parameters.full[offset : offset + part.numel()].copy_(part)
            parameters.written()
        for name, role in bucket.roles.items():
            if name == ORIGINAL or (name == PARAMETER and bucket.partitioned):
                _write(bucket, role, values, keep_equal=keep_equal and name == ORIGINAL)
    if states is None:
        return
    follow = states.that_follow

    def change(piece: Any, roles: dict[str, torch.Tensor]) -> None:
        value = roles[PARAMETER]
        for offset, part in overlaps(changes[piece.bucket], piece.slices()):
            place = slice(offset, offset + part.numel())
            _overwrite(value[place], part, piece.bucket, keep_equal=keep_equal)
            for name in roles.keys() & follow:
                roles[name][place].copy_(value[place])

    states.edit(kept, change, precise=not keep_equal)


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


def take_from(
    rank: int, slots: Mapping[Bucket, Sequence[int]], seen: Mapping[Bucket, Sequence[int]]
) -> tuple[dict[Bucket, Values], bool]:
    """Bring the values that ``rank`` has of parameters to everybody, in the whole copies; and give them back, with
    whether it has written to any of these buckets so that autograd saw it. Collective.

    ``seen``: the versions of a bucket's parameters before, as autograd counts them.

    Raises:
        RuntimeError: a whole copy is gone.
    """
    changes, wrote = dict[Bucket, Values](), False
    for bucket in slots:  # before anything changes
        bucket.check_writable()
    for bucket, chosen in slots.items():
        if not bucket.parameters.live:
            raise RuntimeError(
                f"the parameters of {bucket.label} were partitioned again inside GatheredParameters, by a step or "
                "a nested context: what was written to them is lost. Step outside of it."
            )
        found = {}
        for slot in chosen:
            view = bucket.parameters.flat_of(slot)
            if view.numel():
                bucket.routes.axes.world.broadcast(view, rank).wait()
            found[bucket.spec.names[slot]] = (0, view)
        changes[bucket] = found
        wrote = _wrote(bucket, rank, seen[bucket]) or wrote
    return changes, wrote


def _wrote(bucket: Bucket, rank: int, seen: Sequence[int]) -> bool:
    """Whether ``rank`` wrote to the bucket so that autograd saw it. Collective."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = any(p._version != version for p, version in zip(bucket.spec.parameters, seen, strict=True))
    flag = torch.tensor([float(mine)], device=bucket.device)
    bucket.routes.axes.world.broadcast(flag, rank).wait()
    return bool(flag)
