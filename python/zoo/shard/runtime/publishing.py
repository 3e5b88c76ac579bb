"""After an update: new parameters to every rank that keeps them whole, a few megabytes under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from zoo.comm import Handle
from zoo.shard.buckets import Bucket

BYTES_UNDER_WAY = 4 << 20
"""Of this rank's shards. Ranks that share memory keep so much of each other's there, and its pages stay."""


def publish(buckets: Iterable[Bucket]) -> Callable[[], None]:
    """Bring the updated shards of ``buckets`` to everyone; what is returned waits for the last of them."""
    under_way: deque[tuple[Handle, int]] = deque()
    num_bytes = 0
    updated = list(buckets)
    for bucket in updated:
        size = bucket.num_bytes // bucket.shard_group.size
        while under_way and num_bytes + size > BYTES_UNDER_WAY:
            handle, done = under_way.popleft()
            handle.wait()
            num_bytes -= done
        begun = bucket.parameters.publish()
        if begun is not None:
            under_way.append((begun, size))
            num_bytes += size

    def finish() -> None:
        while under_way:
            under_way.popleft()[0].wait()
        for bucket in updated:
            bucket.parameters.written()

    return finish
