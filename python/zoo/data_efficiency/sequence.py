"""Shorter sequences: which tensors of a batch are cut, and along which dimensions.

Letters: B samples, T length of the sequences, L length that is kept, S the dimension of the sequence, 1 by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def length_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> int | None:
    """T: the size in dimension ``dim`` of the first integer tensor of more than ``dim`` dimensions, such as (B, T) ids;
    None where a batch has none."""
    for tensor in tensors_of((args, kwargs)):
        if tensor.dim() > dim and not _says_no_length(tensor):
            return int(tensor.shape[dim])
    return None


def _says_no_length(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype is torch.bool


def sequence_dims(tensor: torch.Tensor, length: int, dim: int) -> tuple[int, ...]:
    """Along which dimensions a tensor of a batch holds sequences of ``length``, by its shape.

    * Integers and booleans (ids, labels, masks): every dimension from 1 on of that size.
    * Floating point: dimension ``dim``; where that has another size, trailing dimensions of that size of a tensor of
      four dimensions, which is a mask: (B, 1, T, T) or (B, 1, 1, T).

    One dimension says nothing: (B,) labels with B = T look like (T,) positions. They stay as they are.
    """
    if tensor.dim() < 2:
        return ()
    if not tensor.is_floating_point():
        return tuple(d for d in range(1, tensor.dim()) if tensor.shape[d] == length)
    if dim < tensor.dim() and tensor.shape[dim] == length:
        return (dim,)
    if tensor.dim() == 4:
        return tuple(d for d in (2, 3) if tensor.shape[d] == length)
    return ()


class Cutter:
    """Cuts the sequences of a batch.

    Args:
        dim: S.
        tensors: argument, by position or name, → its dimensions; None: :func:`sequence_dims`.
    """

    def __init__(self, dim: int = 1, tensors: Mapping[str, list[int]] | None = None) -> None:
        self.dim, self.tensors = dim, tensors

    def truncate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first ``length`` elements of each sequence."""
        return self._changed(args, kwargs, length, _cut)

    def reshape(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each (B, T, ...) becomes (B * (T // L), L, ...); the T % L last elements of a sequence are dropped.

        Raises:
            ValueError: a tensor holds sequences along other dimensions than dimension 1, as masks (B, T, T) do; or has
                something for each sample, as labels (B,), of which there would be too few.
        """
        changed = self._changed(args, kwargs, length, _split)
        if (length_of(args, kwargs, self.dim) or 0) // length < 2:
            return changed  # as many samples as before
        samples = next(len(t) for t in tensors_of((args, kwargs)) if t.dim() > self.dim and not _says_no_length(t))
        for tensor in tensors_of(changed):
            if tensor.dim() and len(tensor) == samples:
                raise ValueError(
                    f"curriculum learning that reshapes makes more samples of {samples}, and a tensor "
                    f"{tuple(tensor.shape)} has something for each of these; it would be of the wrong ones. Use "
                    "truncate."
                )
        return changed

    def _changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], length: int,
        change: Callable[[torch.Tensor, tuple[int, ...], int, int], torch.Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        whole = length_of(args, kwargs, self.dim)
        if whole is None:
            raise ValueError(
                f"curriculum learning by sequence length found no integer tensor with a dimension {self.dim} among the "
                "model's arguments, which would tell the length; give (B, T) token ids, or set sequence_dim."
            )
        if whole <= length:
            return args, kwargs

        def cut(value: Any, dims: tuple[int, ...] | None) -> Any:
            if isinstance(value, torch.Tensor):
                found = sequence_dims(value, whole, self.dim) if dims is None else dims
                if max(found, default=0) >= value.dim():
                    raise ValueError(
                        f"curriculum_learning.tensors names dimension {max(found)} of a tensor {tuple(value.shape)}; "
                        f"give dimensions from 1 to {value.dim() - 1}."
                    )
                return change(value, found, length, whole) if found else value
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return tuple(cut(item, dims) for item in value)
            if isinstance(value, list):
                return [cut(item, dims) for item in value]
            return {key: cut(item, dims) for key, item in value.items()} if isinstance(value, dict) else value

        def named(name: str) -> tuple[int, ...] | None:
            return None if self.tensors is None else tuple(self.tensors.get(name, ()))

        if self.tensors is not None:
            present = {*map(str, range(len(args))), *kwargs}
            missing = sorted(set(self.tensors) - present)
            if missing:
                raise ValueError(
                    f"curriculum_learning.tensors names {missing[0]!r}, which the model was not given; its arguments "
                    f"are {', '.join(sorted(present))}."
                )
        changed = tuple(cut(value, named(str(i))) for i, value in enumerate(args))
        return changed, {key: cut(value, named(key)) for key, value in kwargs.items()}


def _cut(tensor: torch.Tensor, dims: tuple[int, ...], length: int, whole: int) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, min(length, tensor.shape[dim]))
    return tensor.contiguous()


def _split(tensor: torch.Tensor, dims: tuple[int, ...], length: int, whole: int) -> torch.Tensor:
    if dims != (1,):
        raise ValueError(
            f"curriculum learning that reshapes got a tensor {tuple(tensor.shape)} with sequences along the dimensions "
            f"{dims}; only (B, T, ...) becomes more samples of length {length}. Use truncate."
        )
    pieces = whole // length
    kept = tensor.narrow(1, 0, pieces * length)
    return kept.reshape(tensor.shape[0] * pieces, length, *tensor.shape[2:])


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
