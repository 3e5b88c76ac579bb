"""Masks by the momentum of |w·dL/dw|, in strides, over all weights of a model together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoo.compression.place import whole_shape
from zoo.compression.pruning.masks import Pattern, as_matrix, from_matrix, largest, num_kept, pack, unpack
from zoo.compression.pruning.ranking import largest_of_all
from zoo.compression.technique import Counts, Order, Site, Transform

_log = logging.getLogger("zoo.compression")
MOMENTUM, WEIGHT = 1.0, 0.9
FLOOR = 0.02
"""The share of each weight that stays, however small its scores are beside those of others."""


class Together:
    """The weights that are pruned by one ranking: when, and how far.

    After step t of ``offset < t <= end`` the score of a block is S ← 1.0·S + 0.9·Σ|w·g|, w the weight in that step and
    g the gradient of the masked weight, its sum over micro-batches and mean over ranks (SNIP, Lee et al. 2019,
    arXiv:1810.02340, with the momentum that Intel's Neural Compressor documents for "snip_momentum"). Every ``stride``
    steps, and at ``end``, the blocks of the largest scores stay: of all blocks of all weights the share

        d(t) = 1 - (1 - d)·(1 - (1 - p)³),   p = (t - offset) / (end - offset)    (Zhu, Gupta 2017, arXiv:1710.01878),

    and of each weight at least 2 %. What is masked keeps its value and has a score, and so may come back; after ``end``
    the mask stays. Of an N:M pattern floor(N·(1 - (1 - p)³)) of M go.

    Of equal scores those stay whose weight's name comes first. A weight none of whose scores is above 0 (it is frozen,
    or nothing uses it) stays whole, and is not counted; the log says so once.

    Until ``end`` each rank holds one fp32 number for each element, and sends it once a step (an all-reduce of w·g). Of
    a weight that is split along mesh axes it has the scores of the whole, and sends w·g to the ranks with other parts
    too. Where ranks have other weights (stages of a pipeline, experts) they agree on the least score that stays.
    With fp16 the gradients carry the loss scale; values that are inf or NaN count nothing.

    Args:
        offset, end, stride: steps.
        ratio: d.
        pattern: of blocks.
    """

    def __init__(self, *, offset: int, end: int, stride: int, ratio: float, pattern: Pattern) -> None:
        self.offset, self.end, self.stride, self.ratio, self.pattern = offset, end, stride, ratio, pattern
        self.members: list[SnipMask] = []
        self.ranks: Counts | None = None
        self.step = 0
        self.loaded = self._told = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ranks": None}

    @property
    def collects(self) -> bool:
        """Whether gradients of the step that is not over count."""
        return self.offset <= self.step < self.end

    def set_step(self, step: int) -> None:
        """``step`` steps are over."""
        if step == self.step and not self.loaded:
            return
        forward = step == self.step + 1 and not self.loaded
        self.step, self.loaded = step, False
        since = step - self.offset
        if forward and since > 0 and step <= self.end and (since % self.stride == 0 or step == self.end):
            self.prune(since / (self.end - self.offset))
        if step >= self.end:
            for member in self.members:
                member.scores = member.seen = None

    def prune(self, progress: float) -> None:
        """New masks, of the schedule's share at ``progress`` from 0 to 1."""
        gone = 1 - (1 - progress) ** 3
        known = {member.key: member.scores for member in self.members if member.scores is not None}
        scores = {key: s for key, s in known.items() if not s.numel() or bool(s.any())}
        self._leave([member for member in self.members if member.key in known and member.key not in scores])
        if self.pattern.zeros:
            zeros = int(self.pattern.zeros * gone + 1e-9)
            masks = {key: self.pattern.all_but(s, zeros) for key, s in scores.items()}
        else:
            masks = self._ranked(scores, 1 - (1 - self.ratio) * gone)
        for member in self.members:
            if member.key in masks:
                whole = from_matrix(self.pattern.spread(masks[member.key]), member.shape, member.out_dim)
                member.mask = member.place.cut(whole).contiguous()

    def _leave(self, members: Sequence[SnipMask]) -> None:
        """All of them stays: there is no order among their elements."""
        for member in members:
            member.mask = torch.ones(member.part, dtype=torch.bool, device=member.device)
        if members and not self._told:
            self._told = True
            names = [member.site.name for member in members]
            _log.warning(
                "snip_momentum: no gradient has come to %s, so that nothing of it is pruned; is it frozen? "
                "excluded_modules says that this is meant",
                ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
            )

    def _ranked(self, scores: dict[str, Tensor], ratio: float) -> dict[str, Tensor]:
        least = {key: num_kept(min(FLOOR, ratio), s.numel()) for key, s in scores.items()}
        ranked = {key: s.masked_fill(largest(s, least[key]), torch.inf) for key, s in scores.items()}
        owns = self.ranks.owns if self.ranks is not None else None
        comm = self.ranks.everyone if self.ranks is not None else None
        mine = [key for key in scores if owns is None or owns(key)]
        sums = torch.tensor([sum(scores[key].numel() for key in mine), sum(least[key] for key in mine)])
        if comm is not None and comm.size > 1:
            sums = sums.to(comm.device)
            comm.all_reduce(sums).wait()
        num, fewest = sums.tolist()
        return largest_of_all(ranked, max(num_kept(ratio, num), fewest), comm, owns)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mask: Tensor | None, transform: SnipMask) -> Tensor:
        ctx.save_for_backward(value, mask)
        ctx.transform = transform
        return value.clone() if mask is None else torch.where(mask, value, value.new_zeros(()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        value, mask = ctx.saved_tensors
        ctx.transform.saw(value, grads[0])
        return grads[0] if mask is None else torch.where(mask, grads[0], grads[0].new_zeros(())), None, None


class SnipMask(Transform):
    """w → w where its mask is True, else 0; the mask is that of :class:`Together`. Before the first one all stay.

    Its state is the mask as bits and, until the schedule is over, the scores of blocks in fp32.

    Args:
        site: a weight.
        weight: the whole of it, or the part that this rank has.
        together: with which others it is ranked.
        out_dim: dim of the weight along which outputs are.
    """

    order: ClassVar[Order] = Order.MASK
    remembers = True

    together: Together

    def __init__(self, site: Site, weight: Tensor, together: Together, *, out_dim: int = 0) -> None:
        self.shape, self.together, self.out_dim, self.device = whole_shape(weight), together, out_dim, weight.device
        self.part = tuple(weight.shape)
        self.mask: Tensor | None = None
        self.scores: Tensor | None = None
        self.seen: Tensor | None = None
        super().__init__(site, offset=together.offset)
        together.members.append(self)

    def set_step(self, step: int) -> None:
        """``step`` steps are over; the first of those that are ranked together does it for all."""
        super().set_step(step)
        self.together.set_step(step)

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        if self.mask is not None and self.mask.device != value.device:
            self.mask = self.mask.to(value.device)
        if self.together.collects and value.requires_grad and torch.is_grad_enabled():
            watched: Tensor = _Watched.apply(value, self.mask, self)
            return watched
        return value if self.mask is None else torch.where(self.mask, value, value.new_zeros(()))

    def fixed(self, value: Tensor) -> Tensor:
        """What the mask leaves.

        Raises:
            ValueError: training was over before there was one.
        """
        if self.mask is None:
            raise ValueError(
                f"{self.site.group}: snip_momentum has no mask of {self.site.name} yet, {self.together.step} steps are "
                f"over and the first is made {self.together.stride} steps after schedule_offset = "
                f"{self.together.offset}. Train until schedule_offset_end = {self.together.end} first."
            )
        return self(value.detach()).detach()

    def saw(self, value: Tensor, grad: Tensor) -> None:
        """Backward has come by: Σ w·g over micro-batches."""
        product = value.detach().float() * grad.detach().float()
        self.seen = product if self.seen is None else self.seen + product

    def summed(self) -> Tensor | None:
        """Σ w·g of this rank, zeros where it did not use the weight."""
        if not self.together.collects:
            return None
        seen, self.seen = self.seen, None
        return torch.zeros(self.part, dtype=torch.float32, device=self.device) if seen is None else seen

    def take(self, mean: Tensor) -> None:
        """S ← 1.0·S + 0.9·Σ|w·g|."""
        whole = self.place.gather(mean.abs())
        blocks = self.together.pattern.scores(as_matrix(whole, self.out_dim)).nan_to_num(0.0, 0.0, 0.0)
        before = torch.zeros_like(blocks) if self.scores is None else self.scores.to(blocks.device)
        self.scores = MOMENTUM * before + WEIGHT * blocks

    def drop(self) -> None:
        """The step is skipped."""
        self.seen = None

    def state_dict(self) -> dict[str, Any]:
        """``mask``: a bit an element; ``scores``: of blocks, the same on every rank."""
        state: dict[str, Any] = {} if self.mask is None else {"mask": pack(self.place.gather(self.mask))}
        return state if self.scores is None else {**state, "scores": self.scores.detach().cpu().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        whole = unpack(state["mask"], self.shape, self.site.name) if "mask" in state else None
        self.mask = None if whole is None else self.place.cut(whole).contiguous()
        self.seen, self.scores, self.together.loaded = None, state.get("scores"), True
        if self.scores is not None:
            rows, columns = as_matrix(torch.empty(self.shape, device="meta"), self.out_dim).shape
            wanted = self.together.pattern.scores(torch.empty(rows, columns, device="meta")).shape
            if self.scores.shape != wanted:
                raise ValueError(
                    f"{self.site.group}: the scores of {self.site.name} have the shape {tuple(wanted)} with the "
                    f"block_pattern {str(self.together.pattern)!r}, and those that were loaded "
                    f"{tuple(self.scores.shape)}. Go on with the pattern that they were saved with."
                )
            self.scores = self.scores.to(self.device)
