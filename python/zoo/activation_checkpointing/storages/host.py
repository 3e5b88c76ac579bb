"""Tensors of a GPU wait in host memory, and travel on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch

from zoo.activation_checkpointing.storages.protocol import Held, Keep
from zoo.activation_checkpointing.storages.slots import Ring
from zoo.io import BufferPool

__all__ = ["Host"]


class Host:
    """Saved tensors of a GPU are copied to page-locked host memory while it computes, and back one checkpoint ahead.

    Tensors of the CPU are there already and stay as they are, or are copied into the contiguous buffers if there are.

    Args:
        num_checkpoints: contiguous host buffers with so many places; None: each tensor's from a pool.
        capacity_bytes: cap of the pool.

    Raises (in forward):
        zoo.io.PoolExhaustedError: the pool's cap is reached.
    """

    fetches = True

    def __init__(self, *, num_checkpoints: int | None = None, capacity_bytes: int = 1 << 46) -> None:
        self._pool: BufferPool | None = None
        self._capacity_bytes = capacity_bytes
        self._keep = Keep()
        self.ring = None if num_checkpoints is None else Ring(num_checkpoints, lambda size, _: self._empty(size))
        self._streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> Any:
        places = None if self.ring is None else self.ring.num_checkpoints
        return _host, (places, self._capacity_bytes)  # a copy has memory of its own

    @property
    def pool(self) -> BufferPool:
        """Where the host memory is from."""
        if self._pool is None:
            self._pool = BufferPool(self._capacity_bytes)
        return self._pool

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        if flat.device.type != "cuda":
            return self._keep.put(flat, position, private) if self.ring is None else self._in_place(flat, position)
        slot = None if self.ring is None else self.ring.take(position, flat.nbytes, torch.device("cpu"))
        host = self._empty(flat.nbytes) if slot is None else slot.raw
        return _OnHost(flat, host.view(flat.dtype), slot, self.stream(flat.device), self.pool)

    def _in_place(self, flat: torch.Tensor, position: int) -> Held:
        if self.ring is None:
            raise AssertionError("tensors of the CPU are copied into contiguous buffers, and there are none")
        slot = self.ring.take(position, flat.nbytes, flat.device)
        slot.raw.copy_(flat.view(torch.uint8))
        return _Copied(slot.raw.view(flat.dtype), slot)

    def stream(self, device: torch.device) -> Any:
        """The stream of copies between a GPU and the host."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self.pool.empty(num_bytes, dtype=torch.uint8)

    def reset(self) -> None:
        if self.ring is not None:
            self.ring.reset()
        if self._pool is not None:
            self._pool.trim()


def _host(num_checkpoints: int | None, capacity_bytes: int) -> Host:
    return Host(num_checkpoints=num_checkpoints, capacity_bytes=capacity_bytes)


class _Copied:
    __slots__ = ("_host", "_slot", "num_bytes")

    def __init__(self, host: torch.Tensor, slot: Any) -> None:
        self._host, self._slot, self.num_bytes = host, slot, host.nbytes

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        return self._host.clone()


class _OnHost:
    """Values of a GPU tensor in host memory; ``_back``: on their way to the GPU, or there."""

    __slots__ = ("_arrived", "_back", "_device", "_host", "_left", "_pool", "_slot", "_stream", "num_bytes")

    def __init__(self, flat: torch.Tensor, host: torch.Tensor, slot: Any, stream: Any, pool: BufferPool) -> None:
        self._device, self._host, self._slot, self._stream, self._pool = flat.device, host, slot, stream, pool
        self.num_bytes = host.nbytes
        self._back: torch.Tensor | None = None
        self._left: Any = None
        self._arrived: Any = None
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
            self._left = self._recorded()
        flat.record_stream(stream)  # the allocator gives it to nobody before the copy is made

    def _recorded(self) -> Any:
        """An event behind the copy; the pool keeps the memory until then, whoever drops this object before."""
        event = self._stream.record_event()
        self._pool.record_event(self._host, event)
        return event

    def fetch(self) -> None:
        if self._back is None:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(self._device, non_blocking=True)
                self._arrived = self._recorded()

    def get(self) -> torch.Tensor:
        self.fetch()
        found, self._back = self._back, None
        if found is None:
            raise AssertionError("values that were fetched are not there")
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        found.record_stream(current)
        return found

    def __del__(self) -> None:
        # A place of the contiguous buffers goes to the next tensor at once, and the device may still write or read it.
        for event in (self._left, self._arrived) if self._slot is not None else ():
            if event is not None and not event.query():
                event.synchronize()
