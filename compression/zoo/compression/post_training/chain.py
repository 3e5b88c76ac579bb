"""Blocks of a model one after the other: what goes into each, as earlier ones leave it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
Run = Callable[[nn.Module, Any], Any]
"""Calls the model with one batch: (model, batch)."""


class _StopHere(Exception):
    """The inputs of a block are known: the rest of the forward is not needed."""


@dataclass
class Call:
    """How a block was called with one batch; the first argument comes from the block before."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(model: nn.Module, batch: Any) -> Any:
    """``model(**batch)`` of a mapping, ``model(*batch)`` of a tuple or list, else ``model(batch)``."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def first_of(output: Any) -> Tensor:
    """The hidden state that a block returned: itself, or the first of several."""
    found: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return found


@dataclass
class Chain:
    """The blocks of a model with what goes into the next of them.

    Args:
        model: in evaluation mode.
        blocks: called one after the other by its forward, each with what the one before returned as first argument.
        batches: for calibration.
        run: calls the model with a batch.

    Raises:
        ValueError: no blocks or batches, or the forward does not call the blocks like that.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    batches: Sequence[Any]
    run: Run = call
    calls: list[Call] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        if not self.blocks or not self.batches:
            raise ValueError(f"{len(self.blocks)} blocks and {len(self.batches)} batches; there must be one of each.")
        self._check()
        self.calls = [self._caught(batch) for batch in self.batches]

    @torch.no_grad()
    def _caught(self, batch: Any) -> Call:
        found: list[Call] = []

        def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_as_call(args, kwargs))
            raise _StopHere

        handle = self.blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            self.run(self.model, batch)
        except _StopHere:
            pass
        finally:
            handle.remove()
        if not found:
            raise ValueError("the model's forward does not call its first block; name the blocks that it calls.")
        _check_inputs(found[0].hidden)
        return found[0]

    @torch.no_grad()
    def _check(self) -> None:
        """One batch through the whole model: each block gets what the one before returned."""
        seen: list[tuple[int, Tensor, Tensor]] = []  # number of the block, its input, its output
        handles = [
            block.register_forward_hook(
                lambda _, args, kwargs, output, i=i: seen.append((i, _as_call(args, kwargs).hidden, first_of(output))),
                with_kwargs=True,
            )
            for i, block in enumerate(self.blocks)
        ]
        try:
            self.run(self.model, self.batches[0])
        finally:
            for handle in handles:
                handle.remove()
        if [i for i, _, _ in seen] != list(range(len(self.blocks))):
            raise ValueError(
                f"the model's forward calls its blocks in the order {[i for i, _, _ in seen]}; each has to be called "
                f"once, in order, 0 to {len(self.blocks) - 1}."
            )
        _check_inputs(seen[0][1])
        for (i, _, before), (_, after, _) in itertools.pairwise(seen):
            if before.shape != after.shape or not torch.equal(before, after):
                raise ValueError(
                    f"block {i + 1} does not get what block {i} returns; something lies between them. Name blocks that "
                    "follow each other directly."
                )

    @property
    def block(self) -> nn.Module:
        """The one whose turn it is."""
        return self.blocks[self.at]

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """Of the block, for each batch."""
        return [first_of(self.block(each.hidden, *each.args, **each.kwargs)).detach() for each in self.calls]

    def on(self, outputs: Iterable[Tensor]) -> None:
        """These go into the next block."""
        for each, output in zip(self.calls, outputs, strict=True):
            each.hidden = output
        self.at += 1


def _check_inputs(hidden: Tensor) -> None:
    if not hidden.numel() or not bool(torch.isfinite(hidden).all()):
        why = "with NaN or infinite elements" if hidden.numel() else "which is none"
        raise ValueError(
            f"a batch gives the first block inputs of shape {tuple(hidden.shape)}, {why}: nothing can be learned of it."
        )


def _as_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if args and not isinstance(args[0], Tensor):
        raise ValueError(
            f"a block is called with a {type(args[0]).__name__}; its input has to be a tensor, the first argument or "
            "the one called hidden_states. Name blocks that get one."
        )
    if args:
        return Call(args[0].detach().clone(), args[1:], dict(kwargs))
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    if name != "hidden_states":
        raise ValueError(
            f"a block is called with {sorted(kwargs)} by name only; its input has to be the first argument, or "
            "be called hidden_states."
        )
    return Call(kwargs[name].detach().clone(), (), {k: v for k, v in kwargs.items() if k != name})
