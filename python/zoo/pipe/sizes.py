"""The shapes of a layer's parameters, from which :mod:`zoo.cost.stages` estimates what it costs."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.cost.stages import LayerSize
from zoo.pipe.specs import LayerSpec
from zoo.pipe.tracing.segments import Segment

__all__ = ["size_of"]


def size_of(layer: Any) -> LayerSize:
    """Of a spec (without memory, on the meta device), a module, or a function, which has none.

    Of a segment of a traced forward only the number of parameters is known before its place is.
    """
    if isinstance(layer, LayerSpec):
        layer = layer.outline()
    if isinstance(layer, Segment):
        return LayerSize(multiplied=layer.num_parameters, kept_bytes=0, entering_bytes=0)
    return LayerSize.of_shapes(_leaves(layer))


def _leaves(layer: Any) -> list[tuple[list[tuple[int, ...]], int, bool]]:
    """(shapes, bytes of a number, whether it embeds) of each module with parameters of its own."""
    if not isinstance(layer, nn.Module):
        return []
    found = [(list(m.parameters(recurse=False)), isinstance(m, nn.Embedding)) for m in layer.modules()]
    return [
        ([tuple(p.shape) for p in own], own[0].element_size(), embeds)
        for own, embeds in found if own
    ]  # fmt: skip
