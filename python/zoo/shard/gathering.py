"""One gather of a bucket's parameters: from this rank's part, in whatever tier it lives, to a whole buffer.

The buffer is that of the model's parameters (``parameters.py``), or one of a compiled graph (``zoo.compile``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import Handle, advance

if TYPE_CHECKING:
    from zoo.shard.collectives.routes import Gather
    from zoo.shard.parameters import BucketParameters


class Gathering:
    """A gather that has begun. All ranks begin and finish theirs in the same order.

    What comes from NVMe is exchanged later, by :meth:`advance` or :meth:`finish`.

    Args:
        parameters: of the bucket. full: (P,) where they go, in the dtype in which they travel.
        exact: as the ranks keep them, also where gathering rounds.

    Raises:
        OffloadError: what is on NVMe cannot be read; nothing has begun.
    """

    def __init__(self, parameters: BucketParameters, full: torch.Tensor, *, exact: bool = False) -> None:
        bucket = parameters.bucket
        self._parameters, self._bucket, self._full = parameters, bucket, full
        self._label = f"parameters of {bucket.label}"
        routes, shard = bucket.routes, parameters.shard
        self._route: Gather = routes.exact if exact else routes.gather
        self._reading: tuple[Any, torch.Tensor] | None = None
        self._handle: Handle | None = None
        self._casts = full.dtype is not bucket.spec.dtype
        if parameters.secondary is not None and routes.secondary is not None and not (exact and parameters.rounds):
            self._route = routes.secondary
            self._send(parameters.secondary)
        elif shard.values is not None and shard.values.device == full.device:
            self._send(shard.values)
        elif shard.packed is not None:
            packed = shard.packed.to(full.device, non_blocking=True)
            shard.copying()
            self._handle = packed.start(full, self._label)
        else:
            self._from_tier()

    def _send(self, values: torch.Tensor) -> None:
        """``values`` lie on the device, and stay until the gather is over."""
        if self._casts:
            values = values.to(self._full.dtype)
            self._sent = values  # until it is over
        self._handle = self._route.start(self._full, values, self._label)

    def _from_tier(self) -> None:
        shard, full = self._parameters.shard, self._full
        own = self._own()
        if shard.values is not None:
            own.copy_(shard.values, non_blocking=True)
            shard.copying()
            self._handle = self._route.start(full, own, self._label)
            return
        into = own if shard.pack is None else own.view(torch.uint8)[: shard.stored_nbytes]
        if self._casts or (own.device.type != "cpu" and not shard.reaches(own.device)):
            dtype = self._bucket.spec.dtype if shard.pack is None else torch.uint8
            into = shard.buffer(into.numel(), dtype)
        self._reading = (shard.begin_read(into, urgent=True), into)

    def _own(self) -> torch.Tensor:
        """This rank's part of the whole buffer."""
        low, high = self._bucket.own_range
        return self._full[low:high]

    def advance(self) -> None:
        """A gather that has two stages, and has been under way for a while, goes on to the second."""
        if self._reading is not None:
            self._exchange()
        else:
            advance(self._handle)

    def _exchange(self) -> None:
        """What was read from NVMe goes to all ranks."""
        if self._reading is None:
            return
        (future, read), self._reading = self._reading, None
        shard = self._parameters.shard
        shard.finish(future)
        if shard.pack is not None:
            # It may lie in the memory that is gathered into: that is written when what was sent has arrived.
            self._handle = shard.pack.over(read).to(self._full.device).start(self._full, self._label)
            return
        own = self._own()
        if read.device != own.device or read.dtype is not own.dtype:
            own.copy_(read)
        self._handle = self._route.start(self._full, own, self._label)

    def finish(self) -> None:
        """Wait until the buffer is whole.

        Raises:
            OffloadError: what is on NVMe could not be read: nothing of it is valid.
        """
        self._exchange()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
