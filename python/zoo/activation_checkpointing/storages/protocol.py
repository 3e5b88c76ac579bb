"""What a storage is, and the one that keeps tensors as they are."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Held", "Keep", "Storage"]


class Held(Protocol):
    """A run of values that waits. What it holds goes back to its storage when the object dies: with the graph, or with
    the exception that ended it."""

    num_bytes: int
    """That it occupies where it waits; 0 for a tensor that somebody else keeps."""

    def fetch(self) -> None:
        """Begin to bring the values back, where that takes time; called one checkpoint ahead, and not always."""

    def get(self) -> torch.Tensor:
        """(n,) the values, on the device that they came from; again at each call."""


class Storage(Protocol):
    """Takes runs of values in forward; called on the thread that computes, in the order of the program."""

    fetches: bool
    """Whether ``fetch`` does anything."""

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        """Keep the (n,) values.

        Args:
            position: number of the tensor among those of its checkpoint.
            private: nobody else has or changes ``flat``. Otherwise it is the user's: a storage copies it, or finds out
                whether it was changed.
        """

    def reset(self) -> None:
        """Give back what is free. What waits stays valid."""


class Keep:
    """The tensor waits where it is."""

    fetches = False

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        return Kept(flat, private)

    def reset(self) -> None:
        pass


class Kept:
    """Values in the memory of the tensor itself, which must not change."""

    __slots__ = ("_flat", "_version", "num_bytes")

    def __init__(self, flat: torch.Tensor, private: bool) -> None:
        self._flat = flat
        self._version = None if flat.is_inference() else flat._version
        self.num_bytes = flat.nbytes if private else 0

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        if self._version is not None and self._flat._version != self._version:
            raise RuntimeError(
                f"an argument of a checkpointed function, {tuple(self._flat.shape)} {self._flat.dtype}, was changed in "
                "place after the call, so that the function cannot be computed again: change a copy of it."
            )
        return self._flat
