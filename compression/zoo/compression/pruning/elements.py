"""Masks of single elements or small blocks of one weight: fixed by magnitude, or learned."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.compression.place import declare_like, whole_shape
from zoo.compression.pruning.learned import masked_by
from zoo.compression.pruning.masks import (
    Pattern,
    as_matrix,
    check_finite,
    from_matrix,
    has_values,
    largest,
    num_kept,
    pack,
    unpack,
)
from zoo.compression.technique import Order, Site, Transform


class ElementMask(Transform):
    """w → w where its mask is True, else 0. The gradient goes where the mask is True.

    The mask is made once, from the magnitudes that the first forward after the offset sees, and stays: blocks with the
    largest sum of |w|. Its state is the mask as bits.

    Args:
        site: a weight.
        weight: the whole of it, or the part that this rank has: then parts are gathered to make the mask.
        offset: steps that are over before there is a mask.
        ratio: share of blocks that stay.
        pattern: blocks.
        out_dim: dim of the weight along which outputs are.
    """

    order: ClassVar[Order] = Order.MASK
    remembers = True

    def __init__(
        self, site: Site, weight: Tensor, *, offset: int, ratio: float, pattern: Pattern, out_dim: int = 0
    ) -> None:  # fmt: skip
        self.shape, self.ratio, self.pattern, self.out_dim = whole_shape(weight), ratio, pattern, out_dim
        self.made_shape = tuple(weight.shape)
        self.mask: Tensor | None = None
        super().__init__(site, offset=offset)

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        if not has_values(value):
            return value
        if self.mask is None:
            whole = self.place.gather(value.detach())
            check_finite(whole, self.site.name)
            self.mask = self.place.cut(self.stays(whole.abs())).contiguous()
        elif self.mask.device != value.device:
            self.mask = self.mask.to(value.device)
        return torch.where(self.mask, value, value.new_zeros(()))

    def stays(self, scores: Tensor) -> Tensor:
        """The mask by scores of elements, both as the whole weight is."""
        if self.pattern == Pattern():
            return largest(scores, num_kept(self.ratio, scores.numel()))
        summed = self.pattern.scores(as_matrix(scores.float(), self.out_dim))
        spread = self.pattern.spread(self.pattern.keep(summed, self.ratio))
        return from_matrix(spread, self.shape, self.out_dim)

    @property
    def made(self) -> Tensor | None:
        """The mask of this rank's part."""
        return self.mask

    def take_made(self, mask: Tensor) -> None:
        """Other ranks with this part have made it."""
        self.mask = mask

    def state_dict(self) -> dict[str, Any]:
        """``mask``: a bit an element, of the whole weight."""
        return {} if self.mask is None else {"mask": pack(self.place.gather(self.mask))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; without a mask: the next forward makes it."""
        whole = unpack(state["mask"], self.shape, self.site.name) if "mask" in state else None
        self.mask = None if whole is None else self.place.cut(whole).contiguous()


class LearnedElementMask(ElementMask):
    """w → M(S)·w, S one score for each element, learned straight through (``learned.py``).

    The scores are parameters of the module, trained and sharded as others; they begin as |w|, with which the first mask
    is that of the magnitudes. The paper begins with zeros, where all are equal. There is no other state. Of a weight
    that is split along mesh axes the scores are split as it is, and gathered in each forward.

    Args:
        see :class:`ElementMask`.
    """

    remembers = False

    def __init__(
        self, site: Site, weight: Tensor, *, offset: int, ratio: float, pattern: Pattern, out_dim: int = 0
    ) -> None:  # fmt: skip
        self.scores = nn.Parameter(weight.detach().abs().clone())
        self.name = f"{site.parameter.replace('.', '_')}_sparse_scores"
        declare_like(self.scores, weight, self.name)
        super().__init__(site, weight, offset=offset, ratio=ratio, pattern=pattern, out_dim=out_dim)

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        scores = self.now.get(self.name, self.scores)
        stays = self.place.cut(self.stays(self.place.gather(scores.detach())))
        return value * masked_by(scores, stays).to(value.dtype)

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """``<parameter>_sparse_scores``."""
        return {self.name: self.scores}

    @property
    def made(self) -> Tensor | None:
        """A mask for each forward: nothing to wait for."""
        return torch.ones((), dtype=torch.bool)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: scores are parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
        Transform.load_state_dict(self, state)
