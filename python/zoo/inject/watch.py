"""Whether a layer still is what was proved: its pieces, their classes and functions, sizes, and nobody in between."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from zoo.kernels.operators import computes_alone
from zoo.parts.hooks import is_checking_hook

Children = dict[str, Any]


@dataclass(frozen=True)
class Watch:
    """What is compared at each call.

    Attributes:
        places: (children of a module, name, child, its class).
        forwards: (class, its forward). functions: (globals of a forward, a name that it uses, what that stands for).
        parameters: (parameters of a module, name, its class and shape; None where there is none).
    """

    places: tuple[tuple[Children, str, nn.Module, type[nn.Module]], ...]
    forwards: tuple[tuple[type[nn.Module], Any], ...]
    functions: tuple[tuple[dict[str, Any], str, Any], ...]
    parameters: tuple[tuple[Children, str, type[torch.Tensor] | None, torch.Size | None], ...]

    def intact(self) -> bool:
        """No piece was replaced, wrapped, patched, resized or given hooks."""
        for children, name, module, kind in self.places:
            if (
                children.get(name) is not module
                or module.__class__ is not kind
                or (module._forward_hooks and not hooks_rest(module._forward_hooks))
                or (module._forward_pre_hooks and not only_check(module._forward_pre_hooks))
                or "forward" in module.__dict__
            ):
                return False
        for owner, forward in self.forwards:
            if owner.forward is not forward:
                return False
        for known, name, function in self.functions:
            if known.get(name) is not function:
                return False
        for children, name, kind_of, shape in self.parameters:
            value = children.get(name)
            if value is None or shape is None:
                if value is not None or shape is not None:
                    return False
            elif type(value) is not kind_of or value.shape != shape or not (value.dim() > 1 or value.is_contiguous()):
                return False
        return True


def watch(layer: nn.Module, modules_of: Iterable[nn.Module]) -> Watch:
    """Of a layer and those of its modules that have pieces as children."""
    parents = [layer, *modules_of]
    places = [(p._modules, name, child, type(child)) for p in parents for name, child in p.named_children()]
    pieces = [layer, *(child for _, _, child, _ in places)]
    forwards = {type(piece): type(piece).forward for piece in pieces}
    functions: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    for forward in forwards.values():
        inner: Any = inspect.unwrap(forward)
        known: dict[str, Any] = getattr(inner, "__globals__", {})
        for name in getattr(getattr(inner, "__code__", None), "co_names", ()):
            if name in known:
                functions[id(known), name] = known, name, known[name]
    parameters = [
        (piece._parameters, name, *((None, None) if value is None else (type(value), value.shape)))
        for piece in pieces
        for name, value in piece._parameters.items()
    ]
    return Watch(tuple(places), tuple(forwards.items()), tuple(functions.values()), tuple(parameters))


def only_check(hooks: Mapping[int, Any]) -> bool:
    """Whether all are zoo's own that raise and change nothing."""
    return all(map(is_checking_hook, hooks.values()))


def hooks_rest(hooks: Mapping[int, Any]) -> bool:
    """Whether all are those that transformers leaves in attentions once anybody has asked for hidden states, and nobody
    asks for attentions now."""
    if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return False
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return collector is not None and (wanted is None or not any("attention" in key for key in wanted))


_CAPTURING = "transformers.utils.output_capturing"


def is_plain() -> bool:
    """Whether values are computed and nothing else, with no hook on all modules and no mode for all functions."""
    return computes_alone() and is_unwatched()


def is_unwatched() -> bool:
    """No hook on all modules and no mode for all functions."""
    return (
        not modules._global_forward_hooks
        and not modules._global_forward_pre_hooks
        and (torch._C._len_torch_function_stack() == 0 or _are_devices())
    )


def _are_devices() -> bool:
    """Function modes that say where new tensors are, and no more."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in stack)
