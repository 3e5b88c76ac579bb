"""Sequence parallelism between tensor-parallel blocks: what is no matrix is computed on a share of the tokens.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section
4.2.2. Between blocks each rank has T / t of the tokens: norms, dropout and residuals are computed once, not t times,
and their activations are kept once. The way into a block gathers tokens (its gradient: summed and scattered), the way
out sums and scatters them (its gradient: gathered). Together they send what two sums send.

Before the first layer tokens are scattered, after the last one gathered. Where no gradients are computed and the model
is not in training, as in a step of decoding, ranks have all tokens as without it.

A layer's own forward does this, not hooks of the module: what computes a layer again in backward may call its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.tensor.dropout import WholeMasks
from zoo.tensor.layers import Layer, become
from zoo.tensor.region import Region, eager
from zoo.tensor.shares import Run

Way = Callable[[torch.Tensor], torch.Tensor]


class Tokens:
    """Which tokens this rank has between blocks; none, where there are fewer than ranks. T is dim -2 of (…, T, C)."""

    def __init__(self, total: int, comm: Communicator) -> None:
        self.total, self.comm = total, comm
        each, more = divmod(total, comm.size)
        starts = [rank * each + min(rank, more) for rank in range(comm.size + 1)]
        self.runs = list(pairwise(starts))
        self.most = max(stop - start for start, stop in self.runs)

    @property
    def mine(self) -> Run:
        """[start, stop) of T."""
        return self.runs[self.comm.rank]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all."""
        start, stop = self.mine
        return x.narrow(-2, start, stop - start).contiguous()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of each rank's."""
        mine = x.new_zeros(self.most, *x.shape[:-2], x.shape[-1])
        mine[: x.shape[-2]] = x.movedim(-2, 0)
        everyone = x.new_empty(self.comm.size, *mine.shape)
        self.comm.all_gather(everyone.view(-1), mine.view(-1), label="tokens").wait()
        parts = [everyone[rank, : stop - start] for rank, (start, stop) in enumerate(self.runs)]
        return torch.cat(parts).movedim(0, -2).contiguous()

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of the sum over ranks."""
        full = x.new_zeros(self.comm.size, self.most, *x.shape[:-2], x.shape[-1])
        for rank, (start, stop) in enumerate(self.runs):
            full[rank, : stop - start] = x.narrow(-2, start, stop - start).movedim(-2, 0)
        out = torch.empty_like(full[0])
        self.comm.reduce_scatter(full.view(-1), out.view(-1), label="tokens").wait()
        start, stop = self.mine
        return out[: stop - start].movedim(0, -2).contiguous()


class _Moved(torch.autograd.Function):
    """One of the ways of :class:`Tokens`, whose gradient takes another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Moved.apply(grad, ctx.back, ctx.there), None, None


class SequenceRegion(Region):
    """A region whose ways in and out gather and scatter tokens, within the repeated layers.

    Attributes:
        tokens: those of the layer that runs; None where ranks have all of them.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.tokens: Tokens | None = None
        self._latest: Tokens | None = None
        self._totals: set[int] = set()
        """Of all forwards so far; the same on all ranks."""
        self._gathered: torch.Tensor | None = None

    @eager
    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, from here to :meth:`end`."""
        self._latest = tokens = Tokens(x.shape[-2], self.comm)
        self._totals.add(tokens.total)
        # All ranks have the same x: each gives its tokens' gradient.
        found: torch.Tensor = _Moved.apply(x, tokens.take, tokens.gather)
        return found

    @eager
    def layer(self, x: torch.Tensor, first: bool) -> None:
        """A layer begins, perhaps once more to compute what its backward needs. In a backward, and where forwards had
        other numbers of tokens, ranks add up their shares: of 5 tokens and of 6 a rank may have 3.

        Args:
            x: this rank's share of what the layer gets. first: of the layers, whose tokens :meth:`begin` has seen.

        Raises:
            ValueError: the first of the layers never ran here: a layer by itself, or a later stage of a pipeline.
        """
        if self._latest is None:
            raise ValueError(
                "a layer of a model with sequence=True runs where the first of them has not: nobody knows which "
                "tokens arrive. Call the whole model; in a pipeline, split it without sequence=True."
            )
        self.tokens = self._latest
        if not first and len(self._totals) > 1 and _in_backward():
            total = torch.tensor(x.shape[-2], device=x.device)
            self.comm.all_reduce(total).wait()
            self.tokens = Tokens(int(total), self.comm)

    @eager
    def out(self) -> None:
        """A layer ends, or stops in its midst: what is computed again ends where nothing more is needed."""
        self.tokens = self._gathered = None
        self.rest()

    @eager
    def end(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens again."""
        if self.tokens is None:
            return x
        # All ranks compute the same from all tokens: gradients are the same.
        found: torch.Tensor = _Moved.apply(x, self.tokens.gather, self.tokens.take)
        return found

    @eager
    def come(self, x: torch.Tensor) -> torch.Tensor:
        """Into a block.

        Raises:
            ValueError: x has other tokens than those of this forward.
        """
        tokens = self.tokens
        if tokens is None:
            return x
        if x.shape[-2] != tokens.mine[1] - tokens.mine[0]:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} where this rank has {tokens.mine[1] - tokens.mine[0]} tokens of "
                f"{tokens.total}, in a layer with sequence=True. Tokens are dim -2 of what a block gets."
            )
        # Ranks use all tokens differently: gradients are summed.
        self._gathered = _Moved.apply(x, tokens.gather, tokens.scatter)
        return self._gathered

    @eager
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is None:
            return super().enter(x)
        if not _same_memory(x, self._gathered):
            raise ValueError(
                "sequence parallelism with a block that computes something before its matrices, or has a second input: "
                "its gradient would be summed twice. Leave sequence=True out."
            )
        return x

    @eager
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is None:
            return super().leave(x)
        if self._gathered is None:
            raise AssertionError(f"rank {self.comm.rank}: a block sums tokens that it has not gathered")
        self._gathered = None
        self.rest()
        found: torch.Tensor = _Moved.apply(x, self.tokens.scatter, self.tokens.gather)
        return found


def _in_backward() -> bool:
    """Whether autograd calls this, as to compute a layer again; what torch.utils.checkpoint asks."""
    return torch._C._current_graph_task_id() != -1


def _same_memory(x: torch.Tensor, gathered: torch.Tensor | None) -> bool:
    """Hooks of modules for their backward give them views of what they get."""
    return x is gathered or (
        gathered is not None and x.numel() == gathered.numel() and x.data_ptr() == gathered.data_ptr() != 0
    )


class TokenLayer(Layer):
    """A repeated layer, between whose blocks each rank has a share of the tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place: Place = self.__dict__[_PLACE]
        if not (self.training or torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        region = place.region
        if place.first:
            args, kwargs = _first(args, kwargs, region.begin)
        region.layer(_hidden(args, kwargs), place.first)
        masks = place.masks
        if masks is not None:
            masks.begin(self, args)
        try:
            found = super().forward(*args, **kwargs)
            if place.last and isinstance(found, tuple):
                return (region.end(found[0]), *found[1:])
            return region.end(found) if place.last else found
        finally:
            region.out()
            if masks is not None:
                masks.end(self, args, None)


_PLACE = "_zoo_place"


@dataclass(frozen=True)
class Place:
    """Of a layer among layers. masks: for what it drops of its share of the tokens; None where it drops nothing."""

    region: SequenceRegion
    masks: WholeMasks | None
    first: bool
    last: bool

    def give(self, layer: nn.Module) -> None:
        """Make ``layer`` one of those."""
        become(layer, TokenLayer, None)
        layer.__dict__[_PLACE] = self


def gather_tokens(block: nn.Module, region: SequenceRegion) -> None:
    """A hook: ``block``, in a layer, has column-parallel layers, and gathers the input that they get as it is."""
    block.register_forward_pre_hook(_Coming(region), with_kwargs=True)


class _Coming:
    def __init__(self, region: SequenceRegion) -> None:
        self._region = region

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _first(args, kwargs, self._region.come)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With what :func:`_hidden` finds changed."""
    changed = change(_hidden(args, kwargs))
    if args:
        return (changed, *args[1:]), kwargs
    return args, {**kwargs, _name(kwargs): changed}


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument, or that called ``hidden_states``."""
    return args[0] if args else kwargs[_name(kwargs)]


def _name(kwargs: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
