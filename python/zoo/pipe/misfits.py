"""A forward without numbers, on the meta device: do the layers fit each other? Asked before a pipeline sends anything.

Only the shapes decide: an error that speaks of none of them (a layer that reads values, an operation that knows no meta
tensors, a collective) leaves the answer open, and what does not fit is then named where it runs.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.comm import no_collectives
from zoo.pipe.runtime.losses import Attached, attaching
from zoo.pipe.specs import LayerSpec, TiedLayerSpec
from zoo.pipe.tracing.segments import Segment
from zoo.pipe.trees import flatten, outline_text, unflatten

__all__ = ["misfit", "outline_of"]

_OF_SHAPES = re.compile(r"\b(shapes?|sizes?|dim|dims|dimensions?|channels)\b|normalized_shape")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def outline_of(layer: Any) -> Any:
    """A copy of a layer without memory, to be kept for :func:`misfit`; None where there can be none.

    Specs and functions are what they are. A module whose parameters are elsewhere already has no shapes to copy.
    """
    if not isinstance(layer, nn.Module):
        return None if isinstance(layer, Segment) else layer
    tensors = [*layer.parameters(), *layer.buffers()]
    if any(hasattr(tensor, "_zoo_numel") or type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return None
    memo: dict[int, Any] = {id(t): _without_memory(t) for t in tensors}
    try:
        found = copy.deepcopy(layer, memo)
    except Exception:  # a module may have what cannot be copied
        return None
    for module in found.modules():
        for hooks in _HOOKS:
            getattr(module, hooks).clear()
    return found


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(tensor, device="meta")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def misfit(
    layers: Sequence[Any], x: Any, *, names: Sequence[str], dtype: torch.dtype | None = None, training: bool = True
) -> str | None:  # fmt: skip
    """A sentence on the first layer that does not take what the one before it gives; None: there is none that is known.

    Args:
        layers: from :func:`outline_of`. x: the input of the first one; only its shapes and dtypes are looked at.
        names: what the layers are called in the sentence.
        dtype: of floating-point parameters, where it is another one than when they were made. training: the mode.
    """
    tied: dict[str, nn.Module] = {}
    tensors, outline = flatten(x, "the inputs of a batch")
    try:
        x = unflatten([torch.empty_like(t, device="meta") for t in tensors], outline)
    except RuntimeError:  # quantised and nested tensors cannot be there
        return None
    silent: Any = _NoCollectives
    with torch.no_grad(), _without_traces(), no_collectives(), silent(), attaching(Attached()):
        for number, layer in enumerate(layers):
            try:
                call, module = _call_of(layer, tied, dtype, training)
            except Exception:  # a constructor that cannot be called here
                return None
            given = x
            try:
                x = call(given)
                flatten(x)
            except Exception as error:
                said = " ".join(str(error).split())
                if not isinstance(error, RuntimeError | ValueError) or isinstance(error, NotImplementedError):
                    return None
                if not _OF_SHAPES.search(said):
                    return None
                return (
                    f"layer {number} ({names[number]}) of the pipeline does not take what "
                    f"{f'layer {number - 1} ({names[number - 1]})' if number else 'the batch'} gives, "
                    f"{outline_text(given)}{_parameters_text(module)}: {said}"
                )
    return None


def _call_of(
    layer: Any, tied: dict[str, nn.Module], dtype: torch.dtype | None, training: bool
) -> tuple[Callable[[Any], Any], nn.Module | None]:
    forward_fn = None
    if layer is None:
        raise ValueError("no outline")
    if isinstance(layer, TiedLayerSpec):
        forward_fn = layer.forward_fn
        module = tied[layer.key] = tied.get(layer.key) or layer.outline()
    elif isinstance(layer, LayerSpec):
        module = layer.outline()
    elif isinstance(layer, nn.Module):
        module = layer
    else:
        return layer, None
    if dtype is not None:
        module.to(dtype)
    module.train(training)
    return module if forward_fn is None else lambda x: forward_fn(module, x), module


def _parameters_text(module: nn.Module | None) -> str:
    shapes: Mapping[str, Any] = dict(module.named_parameters()) if module is not None else {}
    if not 0 < len(shapes) <= 4:
        return ""
    return "; its parameters are " + ", ".join(f"{name} {tuple(p.shape)}" for name, p in shapes.items())


@contextmanager
def _without_traces() -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again after it."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Other ranks do not come along."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise NotImplementedError(f"{func} in a forward without numbers")
        return func(*args, **(kwargs or {}))
