"""What a module computes by, beside its arguments and the values of its tensors: to tell whether that has changed."""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch import nn

from zoo.inject.watch import hooks_rest, is_unwatched
from zoo.kernels.operators import has_tangents
from zoo.parts.hooks import is_checking_hook

Tensor = torch.Tensor
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
LARGE = 256
"""Members up to which a container is looked into; of a larger one counts which it is."""
_SILENT = frozenset({
    "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
"""Attributes of a module that no forward without gradients looks at."""


def plain(value: Any) -> Hashable:
    """With its type: 1 is not True, and 0.0 is not -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


def is_watched() -> bool:
    """Whether somebody wants to see each function that is called: a mode, a transform, a trace or a compiler."""
    return (
        not is_unwatched()
        or torch._C._len_torch_dispatch_stack() > 0
        or has_tangents()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )


class _Key:
    """Many values that are compared seldom, as a key."""

    def __init__(self, values: tuple[Hashable, ...]) -> None:
        self._values, self._number = values, hash(values)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._values == other._values)


class Description:
    """Of a module: its submodules, their classes, attributes and configurations, and where its tensors are.

    Attributes:
        key: equal for two descriptions if nothing but values of tensors has changed between.
        held: the objects of which the identity is in ``key``; while they live, nothing else has it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.held: list[Any] = []
        self._found: list[Any] = []
        self._known: dict[int, int] = {}
        self._modules: list[tuple[nn.Module, type[nn.Module]]] = []
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._empty: list[dict[Any, Any]] = []
        self._lists: list[tuple[list[Any] | tuple[Any, ...], list[Any]]] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self._tensors: list[tuple[Tensor, Hashable]] = []
        self._look_at(module)
        self.key = _Key(tuple(self._found))

    def holds(self) -> bool:
        """Whether another one of the same module would have the same key. Quicker than making it."""
        return (
            all(module.__class__ is kind for module, kind in self._modules)
            and not any(self._empty)
            and all(list(now) == keys and all(map(is_, now.values(), old)) for now, keys, old in self._dicts)
            and all(len(now) == len(old) and all(map(is_, now, old)) for now, old in self._lists)
            and all(now == old for now, old in self._sets)
            and all(_place(tensor) == place for tensor, place in self._tensors)
        )

    def runs_python(self) -> bool:
        """Whether hooks are called with forwards, but for those that do nothing now."""
        for module, _ in self._modules:
            after, before = module._forward_hooks, module._forward_pre_hooks
            if (after and not all(map(is_checking_hook, after.values())) and not hooks_rest(after)) or (
                before and not all(map(is_checking_hook, before.values()))
            ):
                return True
        return False

    def _look_at(self, value: Any) -> None:
        if isinstance(value, PLAIN):
            self._found.append(plain(value))
        elif isinstance(value, Tensor):
            self._tensors.append((value, _place(value)))
            self._found.append(self._tensors[-1][1])
        elif isinstance(value, (nn.Module, dict, list, tuple)):
            known = self._known.get(id(value))
            if known is not None:
                self._found.append(known)
            else:
                self._found.append(type(value))
                self._known[id(value)] = len(self._known)
                self._look_into(value)
        elif isinstance(value, (set, frozenset)):
            self._sets.append((value, frozenset(value)))
            self._found.append(frozenset(plain(one) if isinstance(one, PLAIN) else id(one) for one in value))
        else:
            self._hold(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._modules.append((value, type(value)))
            self._look_at(value.__dict__)
            self._look_at(getattr(value.__dict__.get("config"), "__dict__", None))
        elif len(value) > LARGE:
            self._hold(value)
            self._found.append(len(value))
        elif isinstance(value, dict):
            kept = {key: one for key, one in value.items() if key not in _SILENT}
            if value:
                self._dicts.append((value, list(value), list(value.values())))
            else:
                self._empty.append(value)
            for key, one in kept.items():
                self._look_at(key)
                self._look_at(one)
            self._found.append(len(kept))
        else:
            self._lists.append((value, list(value)))
            for one in value:
                self._look_at(one)
            self._found.append(len(value))

    def _hold(self, value: Any) -> None:
        self._found.append(id(value))
        self.held.append(value)


def _place(tensor: Tensor) -> Hashable:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
