"""Sequence parallelism between tensor-parallel blocks: what is no matrix is computed on a share of the tokens.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section
4.2.2. Between blocks each rank has T / t of the tokens: norms, dropout and residuals are computed once, not t times,
and their activations are kept once. The way into a block gathers tokens (its gradient: summed and scattered), the way
out sums and scatters them (its gradient: gathered). Together they send what two sums send.

Before the first layer tokens are scattered, after the last one gathered. Where T is less than the degree, as in a step
of decoding, and where no gradients are computed, ranks have all tokens as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.tensor.region import Region
from zoo.tensor.shares import Run, deal

Way = Callable[[torch.Tensor], torch.Tensor]


class Tokens:
    """Which tokens this rank has between blocks. T is dim -2 of (…, T, C)."""

    def __init__(self, total: int, comm: Communicator) -> None:
        self.total, self.comm = total, comm
        self.runs = [deal(total, comm.size, rank) for rank in range(comm.size)]
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
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad), None, None


class SequenceRegion(Region):
    """A region whose ways in and out gather and scatter tokens, within the repeated layers.

    Attributes:
        tokens: those of the layer that runs; None where ranks have all of them.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.tokens: Tokens | None = None
        self._latest: Tokens | None = None
        self._gathered: torch.Tensor | None = None
        self._begun = False

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, from here to :meth:`end`."""
        self._latest, self._begun = None, True
        if not torch.is_grad_enabled() or x.shape[-2] < self.comm.size:
            return x
        self._latest = Tokens(x.shape[-2], self.comm)
        tokens = self._latest
        # All ranks have the same x: each gives its tokens' gradient.
        found: torch.Tensor = _Moved.apply(x, tokens.take, tokens.gather)
        return found

    def layer(self) -> None:
        """A layer begins, perhaps once more to compute what its backward needs.

        Raises:
            ValueError: the first of the layers never ran here, as in a later stage of a pipeline.
        """
        if not self._begun:
            raise ValueError(
                "sequence parallelism where the first of the layers is on another rank, as in a pipeline: nobody knows "
                "here which tokens arrive. Split the model without sequence=True."
            )
        self.tokens = self._latest

    def out(self) -> None:
        """A layer ends, or stops in its midst: what is computed again ends where nothing more is needed."""
        self.tokens = self._gathered = None
        self.inside = False

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens again."""
        if self.tokens is None:
            return x
        # All ranks compute the same from all tokens: gradients are the same.
        found: torch.Tensor = _Moved.apply(x, self.tokens.gather, self.tokens.take)
        return found

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
                f"{tokens.total}. Forwards whose layers are computed again have one number of tokens until backward."
            )
        # Ranks use all tokens differently: gradients are summed.
        self._gathered = _Moved.apply(x, tokens.gather, tokens.scatter)
        return self._gathered

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self._gathered is None:
            return super().enter(x)
        if x is not self._gathered:
            raise ValueError(
                "sequence parallelism with a block that computes something before its matrices, or has a second input: "
                "its gradient would be summed twice. Leave sequence=True out."
            )
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self._gathered is None or self.tokens is None:
            return super().leave(x)
        self._entered, self.inside, self._gathered = None, False, None
        found: torch.Tensor = _Moved.apply(x, self.tokens.scatter, self.tokens.gather)
        return found


def share_tokens(layers: list[nn.Module], blocks: list[nn.Module], region: SequenceRegion) -> None:
    """Hooks: tokens are scattered before the first layer and gathered after the last; blocks gather their inputs.

    Args:
        layers: the repeated layers, in order; the first argument of each is what the one before returns.
        blocks: in them, what has column-parallel layers, which its input goes to as it is.
    """
    hooks = _Hooks(region)
    layers[0].register_forward_pre_hook(hooks.begin, with_kwargs=True)
    layers[-1].register_forward_hook(hooks.end)
    for layer in layers:
        layer.register_forward_pre_hook(hooks.layer)
        layer.register_forward_hook(hooks.out, always_call=True)
    for block in blocks:
        block.register_forward_pre_hook(hooks.come, with_kwargs=True)


class _Hooks:
    def __init__(self, region: SequenceRegion) -> None:
        self._region = region

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _first(args, kwargs, self._region.begin)

    def layer(self, module: nn.Module, args: Any) -> None:
        self._region.layer()

    def come(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _first(args, kwargs, self._region.come)

    def out(self, module: nn.Module, args: Any, found: Any) -> None:
        self._region.out()

    def end(self, module: nn.Module, args: Any, found: Any) -> Any:
        if isinstance(found, tuple):
            return (self._region.end(found[0]), *found[1:])
        return self._region.end(found)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With the first argument, or that called ``hidden_states``, changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}
