"""Layers that are asked once, and not at each call, whether they still are what was proved.

Where one token comes at a time, asking and handing over takes the host more time than small layers take to compute. A
loop that lets nobody near the model meanwhile asks before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from zoo.inject.decoder import IGNORED, STATE, State, knows_positions
from zoo.inject.kinds import attention_function
from zoo.inject.watch import is_plain, only_check
from zoo.kernels import loading
from zoo.kernels.decoder_layer import prepare
from zoo.kernels.thin_linear import FEW
from zoo.parts.hooks import is_compiled

Tensor = torch.Tensor
KNOWN = ("torch.nn.modules.", "transformers.", "zoo.nn.")
"""Where the modules are from that change nothing about a model while it computes."""


@dataclass(eq=False)
class _Entered:
    """One ``with prepared(...)``. thread: that is within it; None once it is left, which one step does: whatever
    interrupts the rest, a layer that is still prepared is not called."""

    thread: int | None


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Within it the injected layers of a model keep what they multiply by, for calls of this thread with one token of a
    row and a cache of ``zoo.inference``; all others are computed as ever, and so are all of a model with hooks, with
    compiled modules or such of other packages, or split over ranks.

    Who enters says that nobody gives the model other modules, hooks, options or tensors before it is left. Values of
    tensors may change.
    """
    entered, ours = _Entered(get_ident()), list[State]()
    try:
        if is_plain() and not _dispatches() and all(map(_is_left_alone, model.modules())):
            for layer in model.modules():
                state: State | None = layer.__dict__.get(STATE)
                if state is None or (state.prepared is not None and state.prepared.entered.thread is not None):
                    continue  # another thread's
                ours.append(state)
                state.prepared = _prepared(layer, state, entered)
        yield
    finally:
        entered.thread = None
        for state in ours:
            state.prepared = None


def _dispatches() -> bool:
    """Whether every operation is handed to somebody."""
    return torch._C._len_torch_dispatch_stack() > 0


def _is_left_alone(module: nn.Module) -> bool:
    return (
        f"{type(module).__module__}.".startswith(KNOWN)
        and "forward" not in module.__dict__
        and not is_compiled(module)
        and not module._forward_hooks
        and (not module._forward_pre_hooks or only_check(module._forward_pre_hooks))
    )


@dataclass(eq=False)
class Prepared:
    """A layer as one call. index: in the cache. groups, dim: of keys and values."""

    layer: Callable[..., Tensor]
    entered: _Entered
    dtype: torch.dtype
    index: int
    groups: int
    dim: int

    def __call__(self, x: Tensor, mask: Any, positions: Any, cache: Any, others: dict[str, Any]) -> Tensor | None:
        """As a decoder layer is called; None: something is asked for that it does not know."""
        layers = getattr(cache, "layers", ())
        if (
            type(x) is not Tensor or x.dim() != 3 or x.shape[1] != 1 or x.shape[0] > FEW or x.dtype is not self.dtype
            or self.index >= len(layers) or self.entered.thread != get_ident() or not is_plain()
        ):  # fmt: skip
            return None
        if any(value is not None and name not in IGNORED for name, value in others.items()):
            return None
        layer = layers[self.index]
        place = getattr(layer, "place", None)
        if place is None or not knows_positions(positions, x):
            return None
        seen = layer.get_mask_sizes(1)[0]
        if mask is not None and not (
            type(mask) is Tensor and mask.dtype is torch.bool and mask.shape == (x.shape[0], 1, 1, seen)
        ):
            return None
        places = place(x.shape[0], 1, self.groups, self.dim, x)
        if places is None:
            return None
        cos, sin = positions
        z = self.layer(x.contiguous(), cos.contiguous(), sin.contiguous(), *places, seen, mask)
        layer.placed(1)
        return z


def _prepared(layer: nn.Module, state: State, entered: _Entered) -> Prepared | None:
    pieces = state.pieces
    if pieces is None or state.dtype is None or pieces.split or pieces.how() != "sdpa":
        return None
    drops = layer.training and any(of.get(name) for of, name in pieces.drops)
    if drops or attention_function() is not pieces.function or not pieces.watch.intact():
        return None
    products = pieces.products()
    first, second = pieces.norms
    if products is None or not loading.runs("decoder_before_cache", first.weight):
        return None
    qkv, out, gate_up, down = products
    if any(one.weight.dtype is not state.dtype for one in pieces.dense):
        return None
    if any(joint.bias() is not None for joint in pieces.joint.values()):
        return None  # it is a copy, which would not have the values of later
    made = prepare(
        first.now(), qkv, heads=pieces.heads, groups=pieces.groups, scale=pieces.scaling, out=out, second=second.now(),
        gate_up=gate_up, activation=pieces.activation, down=down,
        head_norms=[] if pieces.head_norms is None else [norm.now() for norm in pieces.head_norms],
    )  # fmt: skip
    if made is None:
        return None
    return Prepared(made, entered, state.dtype, pieces.attention.layer_idx, pieces.groups, pieces.dim)
