"""What goes from stage to stage: tensors in tuples, lists, dicts and plain values, taken apart and put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["Outline", "flatten", "outline_text", "unflatten"]

Outline = Any
"""A tree of plain data that says where the tensors were: ("tensor",), ("tuple", [...]), ("value", 3), …"""

_PLAIN = (bool, int, float, str, type(None))


def flatten(tree: Any, what: str = "a layer's output") -> tuple[list[torch.Tensor], Outline]:
    """The tensors of ``tree`` in order, and how to put them back.

    Raises:
        ValueError: something in it is neither a tensor, a plain value (None, bool, int, float, str), nor a tuple, list
            or dict of such.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _outline(tree, "", what, tensors)


# Functions of their own: one that is defined within another and calls itself is a circle, which keeps the tensors until
# Python looks for circles.
def _outline(value: Any, path: str, what: str, tensors: list[torch.Tensor]) -> Outline:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor",)
    if type(value) in _PLAIN:
        return ("value", value)
    if type(value) in (tuple, list):
        return (type(value).__name__, [_outline(v, f"{path}[{i}]", what, tensors) for i, v in enumerate(value)])
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        items = value.items()
        return ("dict", [(key, _outline(item, f"{path}[{key!r}]", what, tensors)) for key, item in items])
    raise ValueError(
        f"{what} has a {type(value).__name__} at {path or 'its top'}, which cannot go from one pipeline stage to "
        "the next. Allowed are tensors, None, bool, int, float and str, and tuples, lists and dicts of them."
    )


def unflatten(tensors: Sequence[torch.Tensor], outline: Outline) -> Any:
    """The tree again."""
    return _built(outline, iter(tensors))


def _built(outline: Outline, tensors: Iterator[torch.Tensor]) -> Any:
    kind = outline[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return outline[1]
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in outline[1]}
    items = [_built(item, tensors) for item in outline[1]]
    return tuple(items) if kind == "tuple" else items


def outline_text(tree: Any) -> str:
    """Shapes and dtypes of a tree, for a sentence: ``((4, 8) float32, None)``."""
    if isinstance(tree, torch.Tensor):
        return f"{tuple(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(outline_text, tree))})"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {outline_text(item)}" for key, item in tree.items()) + "}"
    return repr(tree) if type(tree) in _PLAIN else f"a {type(tree).__name__}"
