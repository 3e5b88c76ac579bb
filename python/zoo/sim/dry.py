"""A run without its arithmetic: the runtime allocates, plans and communicates as ever, and large tensors keep whatever
their memory has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.comm.check import without_values

__all__ = ["dry"]

Tensor = torch.Tensor
SMALL_BYTES = 1 << 15
ALWAYS = {
    "aten::resize_",
    "aten::set_",
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::is_same_size",
    "zoo_moe::sum_over",
    "zoo_moe::exchange_counts",
    "zoo_moe::exchange_start",
    "zoo_moe::exchange_finish",
}
"""What runs in any case: it looks at sizes, or sends."""
_MADE: dict[Any, Any] = {}
"""Of an operation and the kinds of its arguments: the kinds of its results."""


@contextmanager
def dry(small_bytes: int = SMALL_BYTES) -> Iterator[None]:
    """Within the context, this rank computes nothing with tensors of more than ``small_bytes``.

    An operation that makes tensors allocates them and does not touch their memory: pages that nobody writes take no
    room. One that writes into a tensor leaves it as it is. Where all tensors of an operation are small it is computed,
    so that numbers which decide what a program does (counts, steps, what ranks tell each other) are real. Small results
    of large tensors are zeros, or where they have two dims the same numbers between 0 and 1 each time, by which tokens
    are dealt to experts; the places of the largest (topk) go round.

    What is allocated when is that of a real run, as far as it does not depend on values. What an operation needs for
    itself is not seen. Operations that torch knows no shapes of without values are computed.

    Args:
        small_bytes: of a tensor; larger ones are not computed with.
    """
    mode: Any = _Dry
    with without_values(), mode(small_bytes):
        yield


class _Dry(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, small_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._small = small_bytes
        self._noise = torch.Generator()  # the program's own stays as it is

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._schema.name in ALWAYS or func.namespace in ("c10d", "prim", "profiler"):
            return func(*args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        large = any(t.numel() * t.element_size() > self._small for t in tensors)
        if any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        if not large and (tensors or not self._makes_much(func, args, kwargs)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._written(func, args, kwargs)
        return self._made(func, leaves, form)

    def _makes_much(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func._schema.name
        if name in ("aten::zeros", "aten::empty", "aten::empty_strided", "aten::scalar_tensor"):
            return False
        size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        return 8 * math.prod(size) > self._small if all(isinstance(n, int) for n in size) else False

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What it writes to is returned as it is."""
        schema = func._schema
        if not schema.returns:
            return None
        by_alias = {}
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for name in argument.alias_info.before_set:
                    by_alias[name] = value
        found = []
        for one in schema.returns:
            names = one.alias_info.before_set if one.alias_info is not None else ()
            if not names:
                leaves, form = pytree.tree_flatten((args, kwargs))
                return self._made(func, leaves, form)
            found.append(by_alias[next(iter(names))])
        return found[0] if len(found) == 1 else tuple(found)

    def _made(self, func: Any, leaves: list[Any], form: Any) -> Any:
        key = (func, str(form), *(_kind(leaf) for leaf in leaves))
        if key not in _MADE:
            metas = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor)
                else torch.device("meta") if isinstance(x, torch.device) else x
                for x in leaves
            ]  # fmt: skip
            args, kwargs = pytree.tree_unflatten(metas, form)
            if not any(isinstance(x, Tensor) for x in leaves):
                kwargs["device"] = torch.device("meta")
            try:
                with torch.utils._python_dispatch._disable_current_modes():
                    found, shape = pytree.tree_flatten(func(*args, **kwargs))
                _MADE[key] = [_of(one) if isinstance(one, Tensor) else one for one in found], shape
            except (NotImplementedError, RuntimeError):
                _MADE[key] = None
        made = _MADE[key]
        if made is None:
            args, kwargs = pytree.tree_unflatten(leaves, form)
            return func(*args, **kwargs)
        kinds, shape = made
        found = [self._tensor(func, one) if isinstance(one, tuple) else one for one in kinds]
        if func._schema.name == "aten::topk":
            _deal(found[1], leaves)
        return pytree.tree_unflatten(found, shape)

    def _tensor(self, func: Any, kind: tuple[Any, ...]) -> Tensor:
        size, stride, dtype = kind
        made = torch.empty_strided(size, stride, dtype=dtype)
        small = made.nbytes <= self._small
        if dtype is torch.bool:
            return made.fill_(func._schema.name == "aten::all")
        if not dtype.is_floating_point:
            return made.zero_()
        if small and made.ndim > 1:  # such as the scores of experts, by which tokens are dealt
            return made.uniform_(generator=self._noise.manual_seed(0))  # the same ones when it is recomputed
        return made.zero_() if small else made


def _deal(places: Tensor, leaves: list[Any]) -> None:
    """Tokens, or whatever asks for the largest, go to all in turn."""
    dim = leaves[2] if len(leaves) > 2 and isinstance(leaves[2], int) else -1
    places.copy_((torch.arange(places.numel()) % leaves[0].shape[dim]).view(places.shape))


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return str(value)


def _of(meta: Tensor) -> tuple[Any, ...]:
    return tuple(meta.shape), meta.stride(), meta.dtype
