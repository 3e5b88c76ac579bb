"""An update that is prepared once: a step hands over numbers, and no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from zoo.kernels import loading
from zoo.kernels.checks import check_flat
from zoo.kernels.update import reference
from zoo.kernels.update.algebra import Flag, Rule, Settings, num_states
from zoo.kernels.update.ops import Tensors, check


class UpdatePlan(Protocol):
    """Parameters on the CPU with their states, held natively (``plan.h``), or in a list by the reference."""

    def update(self, rule: int, flags: int, settings: Sequence[float], step: int) -> bool:
        """Step ``step``, counted from 1, of all parameters; False, and nothing done, if one has no gradient.

        Every tensor is looked at before the first is changed: memory that was moved or resized is found where it is.

        Args:
            rule, flags: as for :func:`~zoo.kernels.update.update_`.
            settings: what :meth:`~zoo.kernels.update.algebra.Settings.values` returns, with the learning rate.

        Raises:
            ValueError: a rule of other states, or a tensor that cannot be updated any more, with the numbers: of
                another dtype, size or layout than at first, or with too little memory for its elements.
        """

    def count(self) -> None:
        """All parameters have taken one more step."""


def update_plan(params: Tensors, states: Sequence[Tensors], masters: Tensors, steps: torch.Tensor) -> UpdatePlan:
    """An update of these tensors, which the plan keeps alive; the bits are those of ``update_`` with ``p.grad``.

    Args:
        params, states, masters: as for :func:`~zoo.kernels.update.update_`; on the CPU.
        steps: fp32, (len(params),): how many steps each parameter has taken.

    Returns:
        The native plan; where there is none the reference. The same mode must run all its steps.

    Raises:
        ValueError: lists of unequal length.
        BuildError: see :func:`~zoo.kernels.loading.classes`.
    """
    classes = loading.classes()
    if classes is None:
        return ReferencePlan(params, states, masters, steps)
    kernels = loading.address_of("zoo_update_kernels")
    return cast(UpdatePlan, classes.UpdatePlan(kernels, list(params), [list(s) for s in states], list(masters), steps))


class ReferencePlan:
    """The plan in plain torch: oracle, and what runs where the module of classes cannot be had."""

    def __init__(self, params: Tensors, states: Sequence[Tensors], masters: Tensors, steps: torch.Tensor) -> None:
        for what, tensors in {**{f"states{k}": s for k, s in enumerate(states)}, "masters": masters or params}.items():
            if len(tensors) != len(params):
                raise ValueError(
                    f"{what} has {len(tensors)} tensors and params has {len(params)}; they must be as many."
                )
        if not params:
            raise ValueError("params has no tensors; it must have at least one.")
        check_flat(steps, "steps", len(params), (torch.float32,), params[0])
        self._params, self._states, self._masters, self._steps = params, states, masters, steps

    @torch.no_grad()
    def update(self, rule: int, flags: int, settings: Sequence[float], step: int) -> bool:
        """See :meth:`UpdatePlan.update`."""
        given, grad_scale = Settings.of(Rule(rule), Flag(flags), settings)
        scalars = given.at(step, grad_scale=grad_scale)
        grads: list[Any] = [p.grad for p in self._params]
        if any(g is None for g in grads):
            return False
        check(self._params, grads, self._states, self._masters, num_states(given.rule, given.flags))
        for i, (p, g) in enumerate(zip(self._params, grads, strict=True)):
            master = self._masters[i] if self._masters else None
            reference.update_row(given.rule, given.flags, p, g, [s[i] for s in self._states], master, scalars)
        return True

    @torch.no_grad()
    def count(self) -> None:
        """See :meth:`UpdatePlan.count`."""
        self._steps += 1
