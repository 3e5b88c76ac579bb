"""What would be wrong in silence after a model is split: layers that others have put in the place of those that were
split, and methods of transformers that take a part for the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from zoo.parts import checking_hook
from zoo.parts.hooks import Nameless
from zoo.tensor.adapters import base_of
from zoo.tensor.layers import goes_on_as

_METHODS = {
    "add_adapter": "would make factors of a part as if it were the matrix; add adapters before zoo.tensor.split",
    "save_pretrained": "would write this rank's parts as if they were the model; give it state_dict=, whole tensors, "
    "on the rank that writes, or save with the engine or zoo.tensor.slices",
    "push_to_hub": "would write this rank's parts as if they were the model; save whole tensors, and upload these",
    "resize_token_embeddings": "would take this rank's words for all of them; resize before zoo.tensor.split",
}


def guard(model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse these uses of ``model`` from now on; ``paths``: of what was split."""
    children: dict[str, dict[str, nn.Module]] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        if path:
            children.setdefault(parent, {})[name] = model.get_submodule(path)
    for parent, named in children.items():
        model.get_submodule(parent).register_forward_pre_hook(checking_hook(_Same(parent, named)))
    for whole in dict.fromkeys((model, base_of(model)[1])):
        for name in _METHODS:
            if callable(getattr(whole, name, None)):
                whole.__dict__[name] = _Refused(whole, name)


class _Same(Nameless):
    """A hook of a module: its children are those that were split."""

    unscripted = "this one guards a split over tensor-parallel ranks. Script the model before zoo.tensor.split."

    def __init__(self, path: str, children: dict[str, nn.Module]) -> None:
        self._path, self._children = path, children

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, child in self._children.items():
            now = module._modules.get(name)
            if now is not child and not goes_on_as(now, child):
                raise ValueError(
                    f"{self._path}.{name} is a {type(module._modules.get(name)).__name__} in the place of the layer "
                    "that was split, and knows nothing of other ranks. Wrap and replace layers, as LoRA does, before "
                    "zoo.tensor.split."
                )


class _Refused:
    """In the place of a method of ``model``."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "save_pretrained" and kwargs.get("state_dict") is not None:
            return getattr(type(self._model), self._name)(self._model, *args, **kwargs)
        raise ValueError(f"{self._name} of a model that is split over tensor-parallel ranks {_METHODS[self._name]}.")
