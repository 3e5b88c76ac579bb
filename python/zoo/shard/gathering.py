"""One gather of a bucket's parameters: from this rank's part, in whatever tier it lives, to a whole buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import Handle, advance

if TYPE_CHECKING:
    from zoo.shard.collectives.routes import Gather
    from zoo.shard.roles import RoleBuffer


class Gathering:
    """A gather that has begun. All ranks begin and finish theirs in the same order.

    What comes from NVMe is exchanged later, by :meth:`advance` or :meth:`finish`.

    Args:
        shard: this rank's part. full: (P,) where all of them go. own: [start, stop) of this rank's part in it.
        route: how. secondary: a part that is nearer than the shard, gathered by ``route`` (hpZ). label: for messages.

    Raises:
        OffloadError: what is on NVMe cannot be read; nothing has begun.
    """

    def __init__(
        self, shard: RoleBuffer, full: torch.Tensor, own: tuple[int, int], *, route: Gather,
        secondary: torch.Tensor | None, label: str,
    ) -> None:  # fmt: skip
        self._shard, self._full, self._range, self._route, self._label = shard, full, own, route, label
        self._reading: tuple[Any, torch.Tensor] | None = None
        self._handle: Handle | None = None
        if secondary is not None:
            self._send(secondary)
        elif shard.values is not None and shard.values.device == full.device:
            self._send(shard.values)
        elif shard.packed is not None:
            packed = shard.packed.to(full.device, non_blocking=True)
            shard.copying()
            self._handle = packed.start(full, self._label)
        else:
            self._from_tier()

    @property
    def _own(self) -> torch.Tensor:
        """Where this rank's part is in the whole buffer."""
        return self._full[self._range[0] : self._range[1]]

    def _send(self, values: torch.Tensor) -> None:
        self._handle = self._route.start(self._full, values, self._label)

    def _from_tier(self) -> None:
        shard, own = self._shard, self._own
        if shard.values is not None:
            own.copy_(shard.values, non_blocking=True)
            shard.copying()
            self._send(own)
            return
        into = own if shard.pack is None else own.view(torch.uint8)[: shard.stored_nbytes]
        if own.device.type != "cpu" and not shard.reaches(own.device):
            into = shard.buffer(into.numel(), into.dtype)
        self._reading = (shard.begin_read(into, urgent=True), into)

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
        self._shard.finish(future)
        if self._shard.pack is not None:
            # It may lie in the memory that is gathered into: that is written when what was sent has arrived.
            self._handle = self._shard.pack.over(read).to(self._full.device).start(self._full, self._label)
            return
        own = self._own
        if read.device != own.device:
            own.copy_(read)
        self._send(own)

    def finish(self) -> None:
        """Wait until the buffer is whole.

        Raises:
            OffloadError: what is on NVMe could not be read: nothing of it is valid.
        """
        self._exchange()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
