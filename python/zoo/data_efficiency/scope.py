"""Which forward runs, and what goes in and out of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.parts import Clock, own_hook
from zoo.parts.hooks import BoundHook


class Scope:
    """Which forward of training runs: the one that the engine has told of, and its recomputation in backward.

    ``clock`` is its clock; None in evaluation, and in forwards that did not go through the engine.
    """

    def __init__(self, module: nn.Module) -> None:
        self.clock: Clock | None = None
        self._told: Clock | None = None
        self._saved: list[Clock | None] = []
        self._hooks = [
            module.register_forward_pre_hook(own_hook(BoundHook(self._enter))),
            module.register_forward_hook(own_hook(BoundHook(self._leave)), always_call=True),
        ]

    def tell(self, clock: Clock) -> None:
        """The next forward of the model is one of training."""
        self._told = clock

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._saved.append(self.clock)
        # What was told of a forward that then did not come, because something before it raised, is of no evaluation.
        trains = module.training and torch.is_grad_enabled()
        self.clock, self._told = self._told if trains else None, None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        before = self._saved.pop() if self._saved else None
        if self.clock is None:  # none of ours: what an activation checkpoint recomputes belongs to the one before
            self.clock = before

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self.clock = None


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any], who: str) -> torch.Tensor:
    """The hidden states among a block's arguments: the first, ``hidden_states``, or the first tensor by name.

    Raises:
        ValueError: there are none.
    """
    found = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"{who}: a block was called without hidden states, a tensor, as its first argument.")
    return found


def split_output(output: Any, who: str, wanted: torch.Size) -> tuple[torch.Tensor, int | None]:
    """The hidden states that a block returned, and the length of the tuple that they came in; None for no tuple.

    Raises:
        ValueError: it returned more than them, or they have another shape than expected.
    """
    items = output if isinstance(output, tuple) else (output,)
    hidden = items[0] if items else None
    if not isinstance(hidden, torch.Tensor) or any(item is not None for item in items[1:]):
        raise ValueError(
            f"{who} is for blocks that return hidden states, as a tensor or a tuple with nothing else in it; this one "
            "returned more. Switch off caches and attention outputs (use_cache=False, output_attentions=False)."
        )
    if hidden.shape != wanted:
        raise ValueError(
            f"{who} is for blocks whose output has the shape of their input, {tuple(wanted)}; this one returned "
            f"{tuple(hidden.shape)}. Choose other blocks."
        )
    return hidden, len(output) if isinstance(output, tuple) else None


def join_output(hidden: torch.Tensor, form: int | None) -> Any:
    """The reverse of :func:`split_output`."""
    return hidden if form is None else (hidden, *([None] * (form - 1)))
