"""Techniques that tests can see through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.compression import Order, Site, Technique, Transform
from zoo.compression.technique import Where, weights_of


class Times(Transform):
    """v -> factor·v."""

    order: ClassVar[Order] = Order.QUANTISER

    def __init__(self, site: Site, *, offset: int = 0, factor: float = 3.0) -> None:
        super().__init__(site, offset=offset)
        self.factor = factor

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor


class Masked(Transform):
    """v -> v where |v| is at least what its scores say; remembers how many stayed."""

    order: ClassVar[Order] = Order.MASK

    def __init__(self, site: Site, *, offset: int = 0, shape: tuple[int, ...] | None = None) -> None:
        super().__init__(site, offset=offset)
        self.mask: Tensor | None = None
        self.scores = None if shape is None else nn.Parameter(torch.ones(shape))

    def __call__(self, value: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = value.detach() > 0
        kept = value * self.mask
        return kept if self.scores is None else kept * self.scores

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        return {} if self.scores is None else {"mask_scores": self.scores}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.mask is None else {"mask": self.mask}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mask = state.get("mask")


class Timesing(Technique[Any, Any]):
    """Weights times a number, under the name and the section of weight quantisation."""

    name = "weight_quantization"

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        return [("weight", name) for name in weights_of(module)]

    def transform(self, site: Site, group: Any, module: nn.Module) -> Transform:
        return Times(
            site, offset=self.section.shared_parameters.schedule_offset, factor=float(group.params.target_bits)
        )


def site(module: str = "", parameter: str = "weight", *, technique: str = "times", where: Where = "weight") -> Site:
    return Site(module=module, where=where, parameter=parameter if where == "weight" else "", technique=technique)
