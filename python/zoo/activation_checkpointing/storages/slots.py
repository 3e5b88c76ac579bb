"""Contiguous buffers, allocated once for a number of checkpoints and used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from zoo.activation_checkpointing.storages.protocol import Held

__all__ = ["Contiguous", "Ring", "Slot"]

_ALIGNMENT = 512  # bytes: what allocators of GPUs give, and a multiple of every cache line


class Slot:
    """A place in a ring: (num_bytes,) uint8. It is free again when the object dies."""

    __slots__ = ("_arena", "_number", "raw")

    def __init__(self, arena: _Arena, number: int, num_bytes: int) -> None:
        self._arena, self._number = arena, number
        self.raw = arena.buffer[number * arena.slot_bytes :][:num_bytes]

    def __del__(self) -> None:
        self._arena.free.append(self._number)


class _Arena:
    """The places of one position: ``buffer`` is (count · slot_bytes,)."""

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, count: int) -> None:
        self.buffer, self.slot_bytes = buffer, slot_bytes
        self.free = list(range(count - 1, -1, -1))


class Ring:
    """Buffers of ``num_checkpoints`` places, one for each position among a checkpoint's tensors.

    bytes = num_checkpoints · Σ over positions (bytes of that tensor in the first checkpoint, rounded up to 512).

    The first checkpoint says how large a place is; smaller tensors fit too. Rajbhandari et al. 2020, "ZeRO", section
    6.3 (constant-size buffers against fragmentation: 6.2 and 6.3).
    """

    def __init__(
        self, num_checkpoints: int, allocate: Callable[[int, torch.device], torch.Tensor] | None = None
    ) -> None:
        if num_checkpoints < 1:
            raise ValueError(f"num_checkpoints={num_checkpoints}; contiguous buffers have places for at least 1.")
        self.num_checkpoints = num_checkpoints
        self._allocate = allocate or _on_device
        self._arenas: dict[tuple[int, torch.device], _Arena] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(arena.buffer.nbytes for arena in self._arenas.values())

    @property
    def num_free(self) -> int:
        """Free places of all buffers."""
        return sum(len(arena.free) for arena in self._arenas.values())

    def take(self, position: int, num_bytes: int, device: torch.device) -> Slot:
        """A free place.

        Raises:
            ValueError: more checkpoints wait than there are places, or the tensor is larger than the first one was.
        """
        with self._lock:
            arena = self._arenas.get((position, device))
            if arena is None:
                size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
                arena = _Arena(self._allocate(size * self.num_checkpoints, device), size, self.num_checkpoints)
                self._arenas[position, device] = arena
            if num_bytes > arena.slot_bytes:
                raise ValueError(
                    f"tensor {position} of a checkpointed call has {num_bytes} bytes and the contiguous buffers have "
                    f"places of {arena.slot_bytes}, as in the first call: contiguous checkpointing takes calls of one "
                    "size; begin with the largest, call reset() before larger ones, or switch it off."
                )
            if not arena.free:
                raise ValueError(
                    f"{self.num_checkpoints} checkpointed calls wait for their backward and one more came: set "
                    "number_checkpoints (num_checkpoints) to as many as wait at the same time, or call reset() "
                    "between forwards that no backward follows."
                )
            return Slot(arena, arena.free.pop(), num_bytes)

    def reset(self) -> None:
        """New buffers at the next call; tensors that wait keep the old ones alive, and only so long."""
        with self._lock:
            self._arenas.clear()


def _on_device(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Contiguous:
    """Tensors wait in a :class:`Ring` on their own device."""

    fetches = False

    def __init__(self, num_checkpoints: int) -> None:
        self.ring = Ring(num_checkpoints)

    def __reduce__(self) -> Any:
        return type(self), (self.ring.num_checkpoints,)  # a copy has buffers of its own

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        slot = self.ring.take(position, flat.nbytes, flat.device)
        slot.raw.copy_(flat.view(torch.uint8))
        return _InSlot(slot, flat.dtype)

    def reset(self) -> None:
        self.ring.reset()


class _InSlot:
    __slots__ = ("_dtype", "_slot", "num_bytes")

    def __init__(self, slot: Slot, dtype: torch.dtype) -> None:
        self._slot, self._dtype = slot, dtype
        self.num_bytes = slot.raw.numel()

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        # The place may be taken again while the recomputed graph still has the tensor: with a copy that is no matter.
        return self._slot.raw.view(self._dtype).clone()
