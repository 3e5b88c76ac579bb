"""What a collective sends: bytes of a rank, by the algorithms with the least of them."""

from __future__ import annotations

from collections.abc import Callable

WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "all_gather_object": lambda n: (n - 1) / n,
    "broadcast_object": lambda n: 1.0,
    "barrier": lambda n: 0.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
}
"""Of the bytes of the whole logical buffer, the part that each of n ranks sends."""


def wire_bytes(op: str, message_bytes: int, group_size: int, num_local: int | None) -> tuple[int, int, int]:
    """(all, to the same node, to other nodes): what one rank sends.

    The conventions are those of ``zoo.comm.OpStats``: to other nodes goes what goes there if every message goes
    straight to the rank that needs it.

    Args:
        num_local: how many ranks of the group are on the sender's node; None, for unknown, gives (all, 0, 0).
    """
    sent = round(message_bytes * WIRE_FACTOR[op](group_size))
    if num_local is None or group_size == 1:
        return sent, 0, 0
    inter = round(sent * (group_size - num_local) / (group_size - 1))
    return sent, sent - inter, inter
