"""Losses of middle layers: attached to what the layer returns, so that they go backward with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Attached", "again", "attach_loss", "attaching"]


@dataclass
class Attached:
    """What is attached while a micro-batch runs: ``factor`` of its losses in backward, and their values by name."""

    factor: float | torch.Tensor = 1.0
    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def repeated(self) -> Attached:
        """For a forward that is repeated in backward, for its activations."""
        return Attached(self.factor)


_current: ContextVar[Attached | None] = ContextVar("zoo_pipe_attached", default=None)


@contextmanager
def attaching(attached: Attached) -> Iterator[None]:
    """Losses that are attached inside belong to this."""
    token = _current.set(attached)
    try:
        yield
    finally:
        _current.reset(token)


def again() -> Callable[[], AbstractContextManager[None]]:
    """A context for a part of the forward that runs here for the first time, and once more in backward: then its
    losses belong to the same micro-batch, and their values are known already."""
    attached, runs = _current.get(), [0]

    def context() -> AbstractContextManager[None]:
        runs[0] += 1
        return nullcontext() if attached is None or runs[0] == 1 else attaching(attached.repeated())

    return context


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor, attached: Attached) -> torch.Tensor:
        ctx.attached, ctx.like = attached, loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], torch.ones_like(ctx.like) * ctx.attached.factor, None


def attach_loss(output: torch.Tensor, loss: torch.Tensor, name: str = "auxiliary") -> torch.Tensor:
    """``output``, with a loss that is trained on beside the model's own: total = loss_fn(…) + Σ attached.

    For layers in the middle of a pipeline, such as experts with a balance loss: the loss does not travel; its gradient
    begins where that of ``output`` arrives, with the factor of the model's own loss (loss scale, number of
    micro-batches). Its mean over micro-batches, stages and ranks that have it is in the record of the step, as
    ``pipeline/NAME``.

    Args:
        output: what the layer returns, with gradients. loss: one element.

    Raises:
        ValueError: a loss of several elements, or an output that gets no gradient.
        RuntimeError: outside of a pipeline's forward, where nobody knows the factor.
    """
    if loss.numel() != 1:
        raise ValueError(f"attach_loss got a loss of shape {tuple(loss.shape)}; it takes one element.")
    attached = _current.get()
    if attached is None:
        raise RuntimeError(
            "attach_loss outside of a pipeline's forward: add the loss to the model's own there, loss + attached."
        )
    attached.values.setdefault(name, []).append(loss.detach())
    if not torch.is_grad_enabled():
        return output
    if not output.is_floating_point():
        raise ValueError(f"attach_loss got an output of {output.dtype}, which gets no gradient.")
    found: torch.Tensor = _Attach.apply(output, loss, attached)
    return found
