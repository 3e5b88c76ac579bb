"""Masks of whole units of a weight: rows, channels, heads."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zoo.compression.place import declare_beside, is_alone, whole_shape
from zoo.compression.pruning.learned import masked_by
from zoo.compression.pruning.masks import (
    check_finite,
    has_values,
    largest,
    num_kept,
    over_units,
    pack,
    unit_norms,
    unpack,
)
from zoo.compression.technique import Order, Site, Transform
from zoo.layout import split_of

Method = Literal["l1", "topk"]


class UnitMask(Transform):
    """w → w, of which units outside of the mask are zero. A unit is the same number of neighbours along one dim.

    * l1: made once, in the first forward after the offset: the units with the largest Σ|w| stay. Its state is the mask
      as bits, one a unit.
    * topk: M(S)·w, S one learned score for each unit, straight through (``learned.py``); S begins as Σ|w|/Σ_units Σ|w|
      times the number of units, so that the scores are about 1. It has no other state.

    Args:
        site: a weight.
        weight: the whole of it, or the part that this rank has: units are of the whole.
        offset: steps that are over before there is a mask.
        ratio: share of units that stay.
        method: l1 or topk.
        dim: along which units are.
        num_units: how many.

    Attributes:
        stays: (U,) bool, what the last forward used; None before the first.
    """

    order: ClassVar[Order] = Order.MASK

    def __init__(
        self, site: Site, weight: Tensor, *, offset: int, ratio: float, method: Method, dim: int, num_units: int
    ) -> None:  # fmt: skip
        self.dim, self.num_units, self.num = dim, num_units, num_kept(ratio, num_units)
        self.takes, self.remembers = f"dim {dim}", method == "l1"
        self.scores: nn.Parameter | None = None
        self.shape, self.made_shape = torch.Size(whole_shape(weight)), (num_units,)
        self.name = f"{site.parameter.replace('.', '_')}_{site.technique.removesuffix('_pruning')}_scores"
        self._begins: Tensor | None = None
        if method == "topk":
            self.scores = nn.Parameter(weight.new_empty(num_units))
            declare_beside(self.scores, weight, self.name)
            if split_of(weight).shape is None or is_alone():
                self._begin(weight)
            else:
                self._begins = weight
        self.stays: Tensor | None = None
        super().__init__(site, offset=offset)

    def _begin(self, weight: Tensor) -> None:
        norms = unit_norms(weight, self.dim, self.num_units)
        if self.scores is not None:
            self.scores.data = (norms / norms.mean().clamp_min(1e-30)).to(weight.dtype)

    def placed(self) -> None:
        """Scores begin with the norms of the whole."""
        weight, self._begins = self._begins, None
        if weight is not None:
            self._begin(self.place.gather(weight.detach()))

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        if self.scores is not None:
            scores = self.now.get(self.name, self.scores)
            self.stays = largest(scores.detach(), self.num)
            factors = over_units(masked_by(scores, self.stays), self.shape, self.dim)
            return value * self.place.cut(factors).to(value.dtype)
        if not has_values(value):
            return value
        if self.stays is None:
            norms = unit_norms(self.place.gather(value.detach()), self.dim, self.num_units)
            check_finite(norms, self.site.name)
            self.stays = largest(norms, self.num)
        elif self.stays.device != value.device:
            self.stays = self.stays.to(value.device)
        return torch.where(self.place.cut(over_units(self.stays, self.shape, self.dim)), value, value.new_zeros(()))

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """``<parameter>_<technique>_scores``, of topk."""
        return {} if self.scores is None else {self.name: self.scores}

    @property
    def made(self) -> Tensor | None:
        """The mask of units."""
        return self.stays if self.scores is None else torch.ones((), dtype=torch.bool)

    def take_made(self, mask: Tensor) -> None:
        """Other ranks have made it."""
        self.stays = mask

    def state_dict(self) -> dict[str, Any]:
        """``mask`` of l1: a bit a unit."""
        return {} if self.stays is None or self.scores is not None else {"mask": pack(self.stays)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; without a mask: the next forward makes it."""
        self.stays = unpack(state["mask"], (self.num_units,), self.site.name) if "mask" in state else None


class FollowingMask(Transform):
    """v → v, of which units that another weight has lost are zero: its bias, or the norm behind it. Scores learn from
    the weight alone.

    Args:
        site: a parameter with one element for each unit.
        of: the mask that it follows. Its module is called first.
    """

    order: ClassVar[Order] = Order.MASK
    takes = "dim 0"

    def __init__(self, site: Site, of: UnitMask) -> None:
        self.of = of
        super().__init__(site, offset=of.offset)

    def __call__(self, value: Tensor) -> Tensor:
        """T(v)."""
        stays = self.of.stays
        if not has_values(value):
            return value
        if stays is None:
            raise ValueError(
                f"{self.site.group}: {self.site.name} loses what {self.of.site.name} loses, and that has no mask yet, "
                f"because {self.of.site.module!r} has not been called after step {self.offset}. Run the whole model "
                "once, or leave it out of related_modules if it does not follow."
            )
        return torch.where(self.place.cut(stays.to(value.device)), value, value.new_zeros(()))
