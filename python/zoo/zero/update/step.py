"""One step of a ZeRO optimizer, from the gradients of this rank to new parameters on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from zoo.shard.gradients import GradientPhase
from zoo.zero.update.alike import Outcome
from zoo.zero.update.clipping import UNCHANGED, NonFiniteGradientsError
from zoo.zero.update.torch_interface import OuterOptimizer

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket
    from zoo.shard.collectives.routes import Feedback
    from zoo.shard.gradients import BucketGradients
    from zoo.shard.runtime.hooks import Runtime
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.alike import Comparison, Tally
    from zoo.zero.update.clipping import Clipping, Factors
    from zoo.zero.update.in_backward import UpdateInBackward
    from zoo.zero.update.loss_scale import LossScaler
    from zoo.zero.update.updater import Updater


class Stepping(OuterOptimizer):
    """The part of :class:`~zoo.zero.ZeroOptimizer` that steps.

    Attributes:
        num_updates: that all ranks have made together; of a state that was loaded, at least its own.
        outcome: of the latest step, while nobody has read it; else None.
        sharded: the model. runtime: what gathers, releases and reduces. clipping: what a step multiplies by.
        updater: the wrapped optimizer on this rank's segments.
    """

    num_updates: int
    outcome: Outcome | None = None
    sharded: ShardedModel
    runtime: Runtime
    clipping: Clipping
    updater: Updater
    _scaler: LossScaler | None
    _gradients: list[BucketGradients]
    _trainable: list[Bucket]
    _feedback: list[Feedback]
    _comparison: Comparison
    _in_backward: UpdateInBackward | None
    _away: Any = None
    """States that were taken off the device, and not brought back."""
    _late: bool
    _reads_late: ClassVar[bool | None] = None
    """Steps leave what they came to on the device, where they can; None: where that is a GPU. Tests choose."""

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, tally: torch.Tensor | None = None,
        alike: Mapping[str, float] | None = None,
    ) -> Any:  # fmt: skip
        """Clip, update this rank's segments, and bring the new parameters to every rank that keeps them whole.

        With loss scaling a step whose gradients are not finite on some rank is skipped on all (``skipped``).
        Does nothing when there was no backward since ``zero_grad``.

        On a GPU nothing waits for the norm where nothing can be skipped (neither clipping nor a loss scale), or the
        wrapped optimizer is told on the device (``found_inf``: torch's with ``fused=True``, those of ``zoo.optim`` with
        ``capturable=True``, in their second step and later). What the step came to is read before the next one, before
        a scaled backward, a save, or when somebody asks. Any other optimizer, errors of reductions that are fed back,
        states in another tier and ``nonfinite_gradients="error"`` wait for the norm once a step, as does everything on
        the CPU.

        Args:
            closure: called first; its value is returned.
            tally: (k,) numbers of this rank, on all ranks. Their sums over ranks are ``tallied`` afterwards, whatever
                the step did; where the norm is measured they travel with it.
            alike: numbers by name that all ranks have to have alike.

        The options of the parameter groups (learning rates, betas, ...) and ``alike`` of all ranks are compared where
        the step sends numbers of each rank anyway: with a ``tally``, or where the norm is measured over all ranks that
        split the model (stages 1 to 3; not over ``layer_axes``). It costs no collective of its own.

        Raises:
            CollectiveMismatchError: (on all ranks) they are not alike; it names them and the ranks. Nothing has changed
                then, but where updates are made in backward or the numbers are read later: then every step is refused
                until a state is loaded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_open()
        if torch._C._current_graph_task_id() != -1 and self.runtime.backward.under_way:
            raise RuntimeError("step() inside of a backward: its gradients are not complete. Call it afterwards.")
        self.read_outcome()
        self.clipping.begin()
        rest = self._step(tally, alike or {})
        if rest is not None:
            self.outcome = rest
        if not self._late:
            self.read_outcome()
        return loss

    def _step(self, mine: torch.Tensor | None, alike: Mapping[str, float]) -> Outcome | None:
        """What is still to be read: the tally of ``mine``, where the norm was not measured, which it travels with."""
        groups = self._options_of_update()
        self.runtime.backward.check_running()
        self.updater.check_whole()
        self.runtime.check()
        self.sharded.executor.updating()
        self.sharded.members.check()
        self.sharded.writes.take()
        self.sharded.wait_for_layers()
        self._settle()
        self.sharded.sync_buffers()
        clipping = self.clipping
        tally = self._comparison.tally(
            mine,
            alike,
            groups,
            measures=clipping.may_skip,
            loss_scale=self.loss_scale,
            clip_norm=clipping.max_norm,
            clipped=clipping.clipped,
        )
        told = partial(self._told, tally)
        if self._in_backward is not None:
            self._in_backward.step()
            self._settle_errors(used=True)
            return told(made=True)
        # Where numbers are read later all ranks update: those that have others' gradients would wait for this one.
        if not self._has_gradients() or (self.runtime.backward.has_nothing and not self._late):
            self.clipping.norm = None
            if tally is not None and self.clipping.may_skip:  # others may have gradients, and measure their norm
                self.clipping.travel(tally)
            return told(made=False)
        measured = self.clipping.may_skip
        rest = None if measured or self._late else told(made=False)
        try:
            factors = self._measured(tally, groups) if measured else UNCHANGED
        except NonFiniteGradientsError:
            self._settle_errors(used=False)
            raise
        if factors is None:
            self._settle_errors(used=False)
            return None
        try:
            self.updater.begin(groups)
            self._update(factors)
        finally:
            if self.outcome is None:
                self.clipping.rescale()
        self._settle_errors(used=True)
        self._publish()
        return told(made=True) if self._late and not measured else rest

    def _update(self, factors: Factors) -> None:
        self.clipping.owe(factors)
        try:
            self.updater.update(factors)
        except BaseException:
            # What the wrapped optimizer had changed when it failed stays, as in torch, and is brought to all ranks:
            # those on which it did not fail are on their way to that too.
            if self.updater.broken is None:
                self._publish()
            raise

    def _told(self, tally: Tally | None, *, made: bool) -> Outcome | None:
        """What goes with a step beside its norm. It is read here where the update has not been ``made``, and nothing is
        read later.

        Raises:
            CollectiveMismatchError: ranks do not have alike what they have to.
        """
        sums, rows = tally.told() if tally is not None else (None, None)
        if sums is None and rows is None:
            return None
        found = Outcome(None, sums, rows, made=made)
        if not (made or self._late):
            found.read()
            self._comparison.refuse(found)
        return found

    def _measured(self, tally: Tally | None, groups: list[dict[str, Any]]) -> Factors | None:
        """What the update multiplies by; None for no update. Waits for the norm unless the update can do without."""
        clipping, unscale = self.clipping, self.clipping.unscale
        norm = clipping.measure(tally=tally)
        outcome = Outcome(norm, *(tally.told() if tally is not None else (None, None)))
        late = self._late and not clipping.raises and not self._feedback
        if late and self.updater.skips_on_device.possible(groups):
            outcome.made = True
            self.outcome = outcome
            return clipping.factors_on_device(norm)
        try:
            used = clipping.learn(outcome)
        finally:
            self.runtime.backward.scale = self.loss_scale
        return clipping.factors(clipping.norm, unscale) if used else None

    def _settle_errors(self, *, used: bool) -> None:
        """Reductions that keep errors learn whether their latest results were used."""
        for feedback in self._feedback:
            feedback.commit() if used else feedback.roll_back()

    def _options_of_update(self) -> list[dict[str, Any]]:
        if self._away is not None:
            raise ValueError("an update while states are offloaded; call reload_states() first.")
        self.check_groups()
        return self.param_groups

    def _count_updates(self) -> int:
        self.read_outcome()
        return self.num_updates

    def _publish(self, *, updated: bool = True) -> None:
        finish = self.sharded.executor.publish_all(self._trainable)
        self.num_updates += updated
        self.runtime.updated()
        self.sharded.writes.updated(self._trainable)
        finish()

    # What it asks, and what others ask too --------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ValueError after :meth:`~zoo.zero.ZeroOptimizer.close`."""
        if self.sharded.closed:
            raise ValueError("this optimizer was closed: the model is an ordinary one again. Construct a new one.")

    def read_outcome(self) -> None:
        """Wait for what the latest step came to, where it has not waited itself: the norm and the tally.

        What follows from them happens here: the loss scale moves, and gradients that were kept get the new one.
        Everything that needs it calls this; a second call does nothing. Starts no collective.
        """
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            if not self.clipping.learn(outcome) and outcome.made:
                self.num_updates -= 1  # it was counted before that was known
            self.clipping.rescale()
            self.runtime.backward.scale = self.loss_scale

    @property
    def loss_scale(self) -> float:
        """The factor :meth:`~zoo.zero.ZeroOptimizer.backward` multiplies the loss by; 1.0 without loss scaling."""
        if self._scaler is None:
            return 1.0
        self.read_outcome()
        return self._scaler.scale

    def _has_gradients(self) -> bool:
        """There is something to step with; what was dropped one by one counts as zero then."""
        for gradients in self._gradients:
            gradients.check_strays()
        here = self.runtime.reduced and any(g.reduced for g in self._gradients)
        if not self.sharded.on_any_layer(here):
            self.runtime.reduced = False
            return False
        for gradients in self._gradients:
            gradients.make_zero()
        return True

    def _settle(self) -> None:
        if self.runtime.unreduced and not any(g.phase is GradientPhase.ACCUMULATING for g in self._gradients):
            self.runtime.unreduced = False  # the model's zero_grad() dropped it all
        self.sharded.reduce()

    def check_groups(self) -> None:
        """Raise ValueError if somebody has added or removed groups, or parameters of one."""
        groups, lists = self.param_groups, self._lists
        if len(groups) != len(lists):
            raise ValueError(
                f"param_groups has {len(groups)} groups, and had {len(lists)} at construction, when all of them were "
                "laid out. Give the groups to a new optimizer (params=...); to leave one out for a while set its "
                "lr=0.0 and weight_decay=0.0."
            )
        for index, (group, (members, count)) in enumerate(zip(groups, lists, strict=True)):
            now = group.get("params")
            if now is not members or len(members) != count:
                self._check_members(index, now)

    def _check_members(self, index: int, now: Any) -> None:
        before = self._members[index]
        here = list(now) if isinstance(now, (list, tuple)) else []
        if len(here) == len(before) and all(a is b for a, b in zip(here, before, strict=True)):
            return
        kept, known = {id(p) for p in here}, {id(p) for p in before}
        gone = [cast("Any", p)._zoo_name for p in before if id(p) not in kept]
        new = [getattr(p, "_zoo_name", f"a {type(p).__name__}") for p in here if id(p) not in known]
        told = [
            f"{', '.join(map(repr, names[:5]))} {what}"
            for names, what in ((gone, "taken out"), (new, "added"))
            if names
        ]
        raise ValueError(
            f"param_groups[{index}]['params'] was changed ({'; '.join(told) or 'another order'}); parameters are laid "
            "out in groups at construction. Put the list back, give the groups to a new optimizer (params=...), or "
            "leave parameters out for a while by the options of a group of their own (lr=0.0, weight_decay=0.0)."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. ``set_to_none`` makes no difference: the flat buffers are zeroed when next used."""
        self.check_open()
        if self._in_backward is not None:
            self._in_backward.check_dropped()
        self.runtime.drop_gradients()
        self.clipping.forget()
