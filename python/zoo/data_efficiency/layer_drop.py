"""Progressive layer dropping: the engine part ``progressive_layer_drop``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zoo.data_efficiency.config import LayerDropConfig
from zoo.data_efficiency.curriculum import takes
from zoo.data_efficiency.scope import Scope, hidden_of, join_output, split_output
from zoo.nn.blocks import Blocks, find_blocks
from zoo.parts import Clock, Environment, uniform

_WHO = "progressive_layer_drop"
_ARGUMENTS = ("progressive_layer_drop", "pld_theta")
_log = logging.getLogger("zoo.data_efficiency")


def theta(step: int, *, limit: float, gamma: float) -> float:
    """theta(t) = (1 - theta_bar) exp(-gamma t) + theta_bar (Zhang, He 2020, equation 5): 1 at t = 0, then theta_bar."""
    return (1.0 - limit) * math.exp(-gamma * step) + limit


def keep_probability(number: int, count: int, theta: float) -> float:
    """p_l = 1 - l/L (1 - theta), l = number + 1 (section 4.2): the first blocks stay, the last one goes most often."""
    return 1.0 - (number + 1) / count * (1.0 - theta)


class ProgressiveLayerDrop:
    """Blocks that are left out in training, at random, the more the longer training lasts and the deeper they are.

    With x the input of block F, l its number and G ~ Bernoulli(p_l), training computes

        y = x + G (F(x) - x) / p_l,

    whose mean over G is F(x), what evaluation computes. t is the number of steps that are over.

    Zhang, He 2020, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping",
    section 4. Departs from algorithm 1 there, which divides what attention and MLP of a block add by p_l one by one:
    blocks are scaled as wholes here, because nothing is known of their insides.

    G is drawn from seed, step, micro-batch and l, so all ranks skip the same blocks, checkpoints hold no random state,
    and activation checkpointing recomputes what ran. At ZeRO stage 3 a block that is left out is not gathered; its
    gradients are zero. A block is never left out before it has been seen to return hidden states, which it has after
    the first step, because theta(0) = 1.

    Args:
        section: ``progressive_layer_drop``.
        environment: of the engine.
    """

    before = ("data_efficiency",)  # so that random-LTD is told of blocks that are left out

    def __init__(self, section: LayerDropConfig, environment: Environment) -> None:
        self.section, self.seed = section, int(environment.config.seed)
        self.theta = 1.0
        self.executed: list[list[int]] = []
        """Of each training forward of the step at hand: which blocks ran."""
        self._arguments = section.apply == "arguments"
        self._blocks: Blocks | None = None
        self._scope: Scope | None = None
        self._count = 0
        self._forms: dict[int, int | None] = {}  # of a block's output: see split_output
        self._first: dict[int, Clock] = {}  # when that was seen first; its recomputation is of the same clock
        self._forwards = self._calls = 0
        self._ran = 0.0

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Find the blocks and stand before them, or tell the model by arguments."""
        if self.section.apply == "auto" and takes(module, _ARGUMENTS):
            self._arguments = True
            _log.info("%s: %s takes pld_theta and skips layers itself", _WHO, type(module).__name__)
        if self._arguments:
            return
        blocks = find_blocks(module, self.section.blocks, _WHO)
        self._count = len(blocks)
        self._blocks, self._scope = Blocks(blocks, self._route, _WHO), Scope(module)

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins."""
        self.theta = theta(clock.step, limit=self.section.theta, gamma=self.section.gamma)
        if self._scope is None:
            return args, {**kwargs, "progressive_layer_drop": True, "pld_theta": self.theta}
        if clock.micro_batch == 0:
            self.executed = []
            self._forwards = self._calls = 0
        self.executed.append([])
        self._forwards += 1
        self._scope.tell(clock)
        return args, kwargs

    def keeps(self, number: int, clock: Clock) -> bool:
        """Whether block ``number`` runs in the forward at ``clock``: G."""
        probability = keep_probability(number, self._count, self._theta_at(clock))
        return uniform(self.seed, clock.step, clock.micro_batch, number) < probability

    def _theta_at(self, clock: Clock) -> float:
        return theta(clock.step, limit=self.section.theta, gamma=self.section.gamma)

    def _route(
        self, number: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        clock = self._scope.clock if self._scope is not None else None
        if clock is None:
            return block(*args, **kwargs)
        self._calls += 1
        x = hidden_of(args, kwargs, _WHO)
        known = number in self._forms and self._first.get(number) != clock
        if known and not self.keeps(number, clock):
            return join_output(x, self._forms[number])
        if self.executed and number not in self.executed[-1]:
            self.executed[-1].append(number)
        output = block(*args, **kwargs)
        y, form = split_output(output, _WHO, x.shape)
        if number not in self._forms:
            self._first[number] = clock
        self._forms[number] = form
        probability = keep_probability(number, self._count, self._theta_at(clock))
        if probability == 1.0 or not known:
            return output
        return join_output(x + (y - x) / probability, form)

    def before_update(self, clock: Clock) -> None:
        """Tell the user of blocks that are not there where they were found."""
        if self._scope is not None and self._forwards and not self._calls:
            raise ValueError(
                f"{_WHO}: none of the {self._count} blocks was called in the step, so that none could be skipped; name "
                f"those that are: {_WHO}.blocks."
            )
        ran = [len(numbers) for numbers in self.executed]
        self._ran = sum(ran) / len(ran) if ran else 0.0

    def metrics(self) -> dict[str, float]:
        """theta, and how many blocks ran, as the mean over this rank's micro-batches."""
        return {"theta": self.theta} if self._scope is None else {"theta": self.theta, "layers": self._ran}

    def state_dict(self) -> dict[str, Any]:
        """What blocks have been seen to return; the rest is a function of the clock."""
        return {"forms": {str(number): form for number, form in self._forms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        saved = state.get("forms", {})
        self._forms = {number: saved[str(number)] for number in range(self._count) if str(number) in saved}
        self._first = {}
        wrong = [form for form in self._forms.values() if form is not None and (type(form) is not int or form < 1)]
        if wrong:
            raise ValueError(f"{_WHO}: the saved state says that a block returns {wrong[0]!r}; it was not saved by it.")

    def close(self) -> None:
        """Blocks are called as before."""
        for item in (self._blocks, self._scope):
            if item is not None:
                item.close()
        self._blocks = self._scope = None
