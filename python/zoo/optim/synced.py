"""Optimizers that bring ranks together inside of their step, by compressed messages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from zoo.comm.compression import Codec, OneBit, TopK
from zoo.kernels.update import Settings, lamb, lamb_apply_
from zoo.optim.base import flat
from zoo.optim.plan import Batch, Idle
from zoo.optim.sync_policy import Sync, SyncPolicy
from zoo.optim.whole import Measured, Parts, WholeTensorOptimizer

_log = logging.getLogger("zoo.optim")
Tensor = torch.Tensor
Flat = tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]]
"""Parameters, gradients, states and masters of a batch, in one dimension each."""


class Peers(Protocol):
    """The R ranks that train the same parameters, each on its own data; who gives an optimizer its parameters has it.

    Means and totals are collective: each of the R ranks calls the same ones in the same order, with its part of the
    same tensors, and gets the same bits.
    """

    def compressed_mean(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks see of the mean of ``values``, fp32, one for each of ``params``; what they do not see is kept,
        and added next time.
        """

    def mean(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """1/R Σ_r of the fp32 values, in full precision."""

    def numel(self, param: Tensor) -> int:
        """Elements of one of the parameters that are no padding. Not collective."""

    def total(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        """Σ over all elements of all parameters, () fp64: what several ranks have alike counts once."""


def codec_of(compressor: Any) -> Codec:
    """The codec that an option ``compressor`` says.

    Raises:
        ValueError: it says none, or one that is no codec.
    """
    from zoo import (
        registry,  # here, so that updates need torch alone: the GPU benchmarks run where there is nothing else
    )

    found = compressor
    if compressor is None:
        found = OneBit()
    elif isinstance(compressor, str):
        found = registry.build("compressor", compressor, {})
    elif isinstance(compressor, Mapping):
        if not isinstance(compressor.get("type"), str) or set(compressor) - {"type", "params"}:
            raise ValueError(f"compressor={dict(compressor)!r}; a mapping has a 'type', and 'params' of it.")
        found = registry.build("compressor", compressor["type"], compressor.get("params", {}))
    if not isinstance(found, Codec) or isinstance(found, TopK):
        raise ValueError(
            f"compressor={compressor!r}; momentum travels in two steps, for which the compressor has to be a codec of "
            "all elements: 'onebit', 'blockwise' or 'fp8'."
        )
    return found


class SyncedOptimizer(WholeTensorOptimizer):
    """Base of the optimizers that compress what ranks tell each other; a policy says when they do.

    Whoever makes the gradients asks :meth:`takes_means` before a backward: where it is false each rank gets the mean of
    its own losses only. A step that compresses makes c_r of each parameter, gets the mean of all ranks in its place,
    and moves the parameters along it with a variance that is the same on all ranks.

    **Parameters without a gradient.** Every call of :meth:`step` is a step of the schedule. One in which a parameter
    has no gradient leaves it and its states alone, and does not count for it: bias corrections, and sums over the steps
    since ranks agreed, are over the steps that it has made. A step in which ranks agree brings in, gradient or not,
    what has made a step since they last did.

    **Elements without a gradient.** Where the variance is zero there has never been a gradient. Signs know no zero: the
    element would get a momentum, to be divided by ε. So its momentum is kept at zero as long as the variance is; a
    warm-up must have seen every parameter that is to be trained.

    Args:
        compressor: of what ranks tell each other: the name of a codec (registry, kind "compressor"), a mapping of its
            "type" and "params", or a codec; None for signs with a scale for each 2,048 elements.
        peers: the other ranks; None: there are none, and nothing is rounded.
        parts: see :class:`~zoo.optim.whole.WholeTensorOptimizer`.
    """

    needs_whole_tensors = False
    driven = False
    """Whoever calls :meth:`step`, for some parameters at a time, calls :meth:`begin_step` and :meth:`finish_step`."""
    follows: tuple[str, ...] = ()
    """States that are the parameter's value where all ranks have the same: who writes to it writes to them."""
    forming = False
    """States are to be made by a step that meets nobody, and does not count."""
    synchronises = True
    """It takes ``peers=``, and gradients that are not always means."""
    counts_missed = False
    """Not all steps update the variance: of each parameter it is counted which it has missed."""

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, peers: Peers | None = None, parts: Parts | None = None,
        master_dtype: torch.dtype | None = torch.float32, compressor: Any = None,
    ) -> None:  # fmt: skip
        self.peers, self.compressor, self.codec = peers, compressor, codec_of(compressor)
        self._now, self._at = Sync(), 0
        self._names: list[tuple[str, ...]] = []
        super().__init__(params, {**defaults, **self.counters()}, parts=parts, master_dtype=master_dtype)
        self._check_groups()

    @property
    def gradient_unit(self) -> float:
        """What a gradient counts in what is compressed."""
        return 1.0 - float(self.param_groups[0]["betas"][0])

    # What is synchronised when ---------------------------------------------------------------------------------------

    def policy(self, group: dict[str, Any]) -> SyncPolicy:
        """When ranks meet, by the options of a group."""
        raise NotImplementedError

    def _check_groups(self) -> None:
        """All parameters meet in the same steps: a rank has one gradient at a time."""
        policies = {self.policy(group) for group in self.param_groups}
        if len(policies) > 1:
            raise ValueError(
                f"the parameter groups of {type(self).__name__} would synchronise in different steps: "
                f"{', '.join(sorted(map(str, policies)))}. Give all of them the same options for that."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the group synchronises when the others do, and counts the steps that it has missed.

        Raises:
            ValueError: the variance is frozen already: without one the group would never be trained.
        """
        if self.param_groups:
            if self.state and self._is_frozen():
                raise ValueError(
                    f"add_param_group() of {type(self).__name__} after {self.num_steps} steps: the variance is frozen "
                    "since, and parameters without one are not trained. Add the group while the variance is updated, "
                    "or construct a new optimizer with it."
                )
            for name in self.counters():
                param_group.setdefault(name, self.param_groups[0][name])
        super().add_param_group(param_group)
        self._check_groups()

    def _is_frozen(self) -> bool:
        """The variance changes no more."""
        return False

    @property
    def num_steps(self) -> int:
        """Steps taken so far; known to a rank without parameters too. Parameters may have made fewer."""
        return max((int(group["num_steps"]) for group in self.param_groups), default=0)

    def resume(self, num_steps: int) -> None:
        """States of so many steps were loaded; a group that counts otherwise has not counted those."""
        for group in self.param_groups:
            if int(group["num_steps"]) != num_steps:
                group.update(self.counters(num_steps), num_steps=num_steps)

    def counters(self, num_steps: int = 0) -> dict[str, Any]:
        """What a group counts, after as many steps of an optimizer that does not."""
        return {"num_steps": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`~zoo.optim.base.ElementwiseOptimizer.load_state_dict`; options that are not there stay."""
        kept = [{**{k: v for k, v in g.items() if k != "params"}, **self.counters()} for g in self.param_groups]
        saved = state_dict["param_groups"]
        if len(kept) == len(saved):
            saved = [{**mine, **theirs} for mine, theirs in zip(kept, saved, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": saved})
        self._check_groups()
        if not all("num_steps" in group for group in state_dict["param_groups"]):  # another optimizer's
            self.resume(max((int(state["step"]) for state in self.state.values() if "step" in state), default=0))

    @property
    def now(self) -> Sync:
        """What the next step synchronises."""
        if self.forming:
            return Sync(gradients=True, variance=True)
        return self.policy(self.param_groups[0]).at(self.num_steps + 1)

    def meetings(self) -> str:
        """What ranks with other parameters of the model have to say alike, so that all meet in the same steps."""
        return f"{type(self).__name__} with {self.policy(self.param_groups[0])}"

    def takes_means(self) -> bool:
        """The gradients of the next step are to be means over ranks."""
        return self.peers is None or self.now.gradients

    def together(self) -> bool:
        """After the steps so far all ranks have the same parameters and states."""
        return True

    def agreed(self) -> bool:
        """After the steps so far all ranks have the same parameters."""
        return self.together()

    def steps_by_itself(self) -> bool:
        """There are steps after which ranks have other parameters."""
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | Tensor = 1.0) -> Any:
        """See :meth:`~zoo.optim.base.ElementwiseOptimizer.step`. With ``peers`` it is collective."""
        if not self.driven:
            self.begin_step()
        loss = super().step(closure, grad_scale=grad_scale)
        if self.counts_missed and not self.forming:
            self._count_missed()
        if not self.driven:
            self.finish_step()
        return loss

    @property
    def asks_for_total(self) -> bool:
        """Whether the end of the next step calls :meth:`Peers.total`."""
        return False

    def begin_step(self) -> None:
        """No parameter has had the next step yet.

        Raises:
            ValueError: options that cannot be, since they were changed.
        """
        self._check_groups()
        names = [self.state_names(group) for group in self.param_groups]
        if names != self._names:  # states that the plans do not have
            self._forget()
            self._names = names
        self._now, self._at = self.now, self.num_steps + 1

    def finish_step(self) -> None:
        """All parameters have had the step. Collective over all ranks."""
        if not self.forming:
            for group in self.param_groups:
                group["num_steps"] = self._at

    # Parameters that were given other values ----------------------------------------------------------------------

    def begin_round(self) -> None:
        """Parameters were given other values, the same on all ranks: what ranks have moved since they last agreed is
        forgotten. To be called after weights were loaded between two agreements. Collective with ``peers``.
        """
        self.forget_moved()
        self.round_begun()

    def forget_moved(self) -> None:
        """The first half, for the parameters that the groups have now."""

    def round_begun(self) -> None:
        """The second half: all parameters had the first."""
        for group in self.param_groups:
            if "local_steps" in group:
                group["local_steps"] = 0

    # Parameters without a gradient -----------------------------------------------------------------------------------

    def _count_missed(self) -> None:
        """Of each parameter that has made a step, and none now."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and (state := self.state.get(p)):
                    for name, more in (("missed", 1), ("missed_variances", int(self._now.variance))):
                        dict.__setitem__(state, name, state.get(name, 0) + more)  # the optimizer's own: no plan changes

    def _missed(self, p: Tensor) -> tuple[int, int]:
        """How many steps a parameter has missed since its first, and how many of these have updated the variance."""
        state = self.state[p]
        return int(state.get("missed", 0)), int(state.get("missed_variances", 0))

    def _kind(self, p: Tensor) -> tuple[int, int]:
        return self._missed(p)

    def _idle(self) -> Iterator[tuple[dict[str, Any], Idle]]:
        """The parameters that have states and no gradient, and their groups."""
        for group in self.param_groups:
            names = self.state_names(group)
            for p in group["params"]:
                if p.grad is None and names[0] in self.state.get(p, {}):
                    self._make_states(group, p, names)  # they lie as the parameter does
                    yield group, Idle(p, self.state[p], self._names_of(p, names))

    # Steps that compress ---------------------------------------------------------------------------------------------

    def _compressed_mean(self, measured: Sequence[Measured], values: Sequence[Tensor]) -> list[Tensor]:
        """What all ranks see of the mean of ``values``, one for each parameter of ``measured``; 0 without variance."""
        if self.peers is None:
            return list(values)
        params = [p for one in measured for p in one.batch.params]
        variances = [v for one in measured for v in one.batch.lists["exp_avg_sq"]]
        found = self.peers.compressed_mean(params, values)
        return [
            mean.masked_fill_(flat(v, p) == 0, 0.0) for mean, v, p in zip(found, variances, params, strict=True)
        ]  # fmt: skip

    def _comes_late(self, batch: Batch) -> bool:
        """These parameters make their first step, and others have made some."""
        return not batch.step and any(int(state.get("step", 0)) for state in self.state.values())

    def _report(self, batch: Batch) -> None:
        """Say which elements have no variance now that it is frozen."""
        variances = batch.lists["exp_avg_sq"]
        padding = 0 if self.peers is None else sum(p.numel() - self.peers.numel(p) for p in batch.params)
        idle = sum(int((v == 0).sum()) for v in variances) - padding
        if idle > 0:
            _log.warning(
                "%d of %d elements had no gradient before the variance was frozen: they are not trained from here on. "
                "A longer warm-up would include them.", idle, sum(v.numel() for v in variances) - padding,
            )  # fmt: skip

    def _momenta(self, group: dict[str, Any], flat: Flat, grad_scale: float) -> list[Tensor]:
        """β1·m + (1-β1)·g of a batch, new fp32 tensors: g has its scale and, where decay is coupled, weight_decay·p."""
        params, grads, (m, v, *_), masters = flat
        beta1, coupled = group["betas"][0], 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
        found = []
        for p, g, old, variance in zip(masters or params, grads, m, v, strict=True):
            new = torch.mul(old, beta1).add_(g, alpha=(1 - beta1) * grad_scale)
            if coupled:
                new.add_(p, alpha=(1 - beta1) * coupled)
            found.append(new.masked_fill_(variance == 0, 0.0))
        return found

    def _move(
        self, group: dict[str, Any], flat: Flat, moments: Sequence[Tensor], *, lr: float, step: int, variances: int,
        ratios: Tensor | None = None, decays: bool = True,
    ) -> None:  # fmt: skip
        """p ← p - lr·φ·(m̂ / (√v̂ + ε) + λ·p): LAMB's second pass, which reads m and v and changes neither.

        Args:
            flat: of a batch.
            moments: m, fp32.
            step: of which m̂ is, 0 for m itself; variances: how many updates v has had.
            ratios: φ of each tensor, default 1.
            decays: False takes λ as zero.
        """
        params, _, states, masters = flat
        settings = self._direction(group, lr, decays=decays)
        gain = settings.at(step).gain if step else 1.0
        scalars = dataclasses.replace(settings.at(max(variances, 1)), gain=gain)
        phi = torch.ones(len(params), device=params[0].device) if ratios is None else ratios
        lamb_apply_(settings.flags, params, moments, states[1], masters, ratios=phi, scalars=scalars)

    def _direction(self, group: dict[str, Any], lr: float, *, decays: bool = True) -> Settings:
        """Those of a step along m̂ / (√v̂ + ε) + λ·p."""
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"] if decays and group["decoupled_weight_decay"] else 0.0
        return lamb(
            lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay,
            bias_correction=group["bias_correction"], eps_inside_sqrt=group["eps_inside_sqrt"],
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "compressor": self.compressor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.peers, self.codec = None, codec_of(self.compressor)
        self._now, self._at, self._names = Sync(), 0, []
