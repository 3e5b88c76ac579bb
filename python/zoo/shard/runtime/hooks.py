"""What happens when: the hooks that gather, release and reduce buckets while the user's model runs.

Forward, here: when a unit starts, its partitioned buckets are gathered and the next ones of the recorded order are
prefetched; when it ends they are released, up to a budget of bytes that stays for the backward soon to come
(``residency.py``). With gradients enabled each call is written down in a *context* (``contexts.py``), which backward
goes back through (``backward.py``).
All of it is a constant number of Python operations a unit; nothing is done by parameter, and nothing is polled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import Communicator, Recovery
from zoo.parts.hooks import BoundHook, own_hook
from zoo.shard.buckets import Bucket
from zoo.shard.call_stack import check_partitioned_call, exception_of_call, is_called
from zoo.shard.placement.precision import Precision, cast_inputs
from zoo.shard.placement.units import UnitSpec
from zoo.shard.runtime.backward import Backward
from zoo.shard.runtime.compiled import Compiled
from zoo.shard.runtime.contexts import FAILED, Context, Contexts, Unit
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.external import registered, unit_around
from zoo.shard.runtime.outputs import hook_gradient, refuse_output, tensors_in
from zoo.shard.runtime.residency import Residency, ResidencyPolicy
from zoo.shard.runtime.walk import Demand, Reductions

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig
    from zoo.shard.runtime.gather_votes import GatherVotes

_log = logging.getLogger("zoo.zero")
_graph_task = torch._C._current_graph_task_id
_transforms = torch._C._functorch.peek_interpreter_stack
_autocasts = torch._C._is_any_autocast_enabled


class Runtime:
    """Hooks the units of a model to their buckets.

    Args:
        comm: all ranks of the model.
        config, precision: of the model.
        executor: carries out what is decided here.
        policy: what is gathered ahead, and what stays gathered.
        votes: where ranks agree on gathers, None where all of them need the same ones.

    Attributes:
        buckets: all of them. hooked: units with hooks, by the name that they had at construction.
        cast_inputs: a hook that makes inputs of another dtype, where that is asked for.
        unreduced: some backward accumulated without reducing. waiting: gradients of parameters that ranks with other
            layers have too are to be reduced.
        reduced: there is a reduced gradient to step with.
        window: the one that is open.
        recovery: whether all ranks failed where this one did; None where ranks go their own ways.
        demand: sees that every parameter gets a gradient, where that is asked for.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        buckets: Sequence[Bucket],
        *,
        comm: Communicator,
        config: ZeroConfig,
        precision: Precision,
        executor: Executor,
        policy: ResidencyPolicy,
        recovery: Recovery | None,
        votes: GatherVotes | None,
    ) -> None:
        self.unreduced = self.reduced = self.waiting = False
        self.executor, self.recovery, self._votes = executor, recovery, votes
        self.buckets = list(buckets)
        self._mine = frozenset(buckets)
        self.reductions = Reductions(self.buckets, executor, reduce_dtype=precision.reduce)
        self.residency = Residency(self.buckets, executor, policy)
        self.contexts = Contexts()
        self.backward = Backward(
            self.contexts, self.residency, self.reductions, self.buckets, executor=executor, comm=comm,
            overlap=config.overlap_comm, on_end=self._after_backward, recovery=recovery, divergent=votes is not None,
        )  # fmt: skip
        self.demand = None if config.ignore_unused_parameters else Demand(self.buckets)
        self._context: Context | None = None
        self._driven: Context | None = None  # takes what runs until the schedule says otherwise
        self._depth = self._pass = 0  # of running units; the number of the pass
        self._pass_grad = self._trained = False
        self._events: list[Unit | bool] = []  # of this pass: units that start; for each that ends, whether it is a call
        self.latest_calls: list[Unit | bool] = []  # of the latest training pass
        self.window_calls: dict[Hashable, list[Unit | bool]] = {}  # of each micro-batch of the latest window
        self._running: list[Unit] = []
        self.window: object | None = None
        self._model = units[0].module
        self._hooks: list[Any] = self.demand.hooks if self.demand is not None else []
        self.units: list[Unit] = []
        self._has_partitioned = any(b.partitioned for b in self.buckets)
        self._trains = any(b.spec.trainable for b in self.buckets)
        self.hooked: dict[str, Unit] = {}
        self.cast_inputs: Callable[..., Any] | None = None
        if precision.inputs is not None:
            self.cast_inputs = own_hook(cast_inputs(precision.inputs))
            self._hooks.append(self._model.register_forward_pre_hook(self.cast_inputs, with_kwargs=True))
        self._install(units)
        self.compiled = Compiled(self._model, self._hooks, self.units, self.buckets)

    def _install(self, specs: Sequence[UnitSpec]) -> None:
        by_unit: dict[str, list[Bucket]] = {spec.name: [] for spec in specs}
        for bucket in self.buckets:
            for name in dict.fromkeys(bucket.spec.units):
                by_unit[name].append(bucket)
        for spec in specs:
            unit = Unit(spec, by_unit[spec.name])
            self.units.append(unit)
            if not unit.recorded and spec.name:
                continue
            enter = own_hook(BoundHook(self._enter if spec.name else self._enter_model, unit))
            leave = own_hook(BoundHook(self._exit, unit))
            into, out = spec.module.register_forward_pre_hook, spec.module.register_forward_hook
            unit.hooks = into(enter), out(leave, always_call=True)
            self._hooks += unit.hooks
            self.hooked[spec.name] = unit
        for name, unit in self.hooked.items():
            unit.within = frozenset(self.hooked[above] for above in _above(name) if above in self.hooked)
        for bucket in self.buckets:
            bucket.on_refused = self._take_external
        for module in self._model.modules():
            for parameter in registered(module):
                owner = getattr(parameter, "_zoo_bucket", None)
                if owner in self.buckets:
                    self.set_external(module, owner, present=True)

    def remove(self) -> None:
        """Take all hooks off the model."""
        self.compiled.end()
        for hook in (*self._hooks, *self.backward.arrivals):
            hook.remove()
        for bucket in self.buckets:
            if bucket.gradients is not None:
                bucket.gradients.unhook()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _enter_model(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self.compiled.sees_hooks and torch.compiler.is_compiling():  # it is tracing this very call
            from zoo.shard.runtime.hidden import enter_hidden  # here, as it brings the compiler

            enter_hidden(self.compiled, self._enter_model, unit, module, args)
            return
        if self._depth and _graph_task() == -1:
            self._find_interrupted()
        self._enter(unit, module, args)

    def _enter(self, unit: Unit, module: nn.Module, args: Any) -> None:
        # Inside backward with gradients: recomputation. Without, where no backward of ours runs: the user reads values.
        if _graph_task() != -1 and (torch.is_grad_enabled() or self.backward.under_way):
            self.backward.begin()
            unit.depth += 1
            for bucket in unit.partitioned:
                self.executor.wait(bucket)
            return
        # A call inside of another that looks as if that one was over: not within it by name, or once more.
        if self._depth and (unit.entered == self._pass or self._running[-1] not in unit.within):
            self._find_interrupted()
        if self._depth == 0:
            if _transforms() is not None and not self._has_partitioned:
                return  # of torch.func: it goes by tensors of its own, and everything that it reads is whole
            self._begin_pass(unit, module)
        unit.entered = self._pass
        self._depth += 1
        unit.depth += 1
        self._running.append(unit)
        # Without gradients inside of a pass with them: re-entrant checkpointing, which comes back in backward.
        if self._pass_grad or torch.is_grad_enabled():
            if self._context is None:
                self._context = self.contexts.begin(unit)
            self._context.use(unit.recorded)
        if self.executor.watchers:
            self.executor.moved()
        self._events.append(unit)
        if unit.partitioned:
            self.residency.enter(unit.partitioned)

    def _find_interrupted(self) -> None:
        """A forward that was interrupted (``KeyboardInterrupt``) has told no hook of it."""
        if self._depth and not is_called(self._running[0].module):
            self._abandon_forward()

    def _begin_pass(self, unit: Unit, module: nn.Module) -> None:
        if self._has_partitioned:
            check_partitioned_call(self.buckets)
        if self.backward.running:
            self.backward.check_running()
        self.settle_failure()
        if _autocasts():
            # What autocast has cast in an earlier pass leads backward past this one, or was cast without gradients.
            torch.clear_autocast_cache()
        self.compiled.look()
        self._pass += 1
        self._pass_grad = torch.is_grad_enabled()
        self._context = (self._driven or self.contexts.begin(unit)) if self._pass_grad else None
        self._events, self._trained = [], module.training and self._pass_grad
        if self._has_partitioned:
            self.residency.orders.begin((module.training, self._pass_grad))

    def _exit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if unit.depth == 0:  # its forward did not get as far as our first hook
            return
        unit.depth -= 1
        if _graph_task() != -1 and not (self._running and self._running[-1] is unit):
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    hook_gradient(tensor, partial(self.backward.on_late, unit))
            return
        self._depth -= 1
        context = self._context
        before = len(context.calls) if context is not None else 0
        try:
            if context is not None:
                if type(output) is torch.Tensor and (node := output.grad_fn) is not None:
                    calls = context.calls
                    calls.append(unit)
                    node.register_prehook(partial(self.backward.on_output_grad, context, len(calls) - 1))
                elif output is not None:
                    self._record(unit, context, output)
        finally:
            self._leave(unit, called=context is not None and len(context.calls) > before)
            if self._depth == 0:
                if output is None and self._has_partitioned:
                    self._tell(exception_of_call())
                self._end_pass()

    def _leave(self, unit: Unit, *, called: bool) -> None:
        try:
            self._events.append(called)
            if unit.partitioned:
                self.residency.exit(unit.partitioned, backward=self._trains and torch.is_grad_enabled())
        finally:
            self._running.pop()
            if self.executor.watchers:
                self.executor.moved()

    # The same in a compiled graph of all of the model

    def enter_in_graph(self, unit: Unit) -> Context | None:
        """The graph comes to what ``unit`` computes. The context in which it runs."""
        self.compiled.ran = True
        (self._enter if unit.name else self._enter_model)(unit, unit.module, ())
        return self._context

    def leave_in_graph(self, unit: Unit, *, called: bool) -> int:
        """It is past that; ``called``: backward will come back. The number of the call in its context, or -1."""
        unit.depth -= 1
        self._depth -= 1
        context, number = self._context, -1
        if called and context is not None:
            number = len(context.calls)
            context.calls.append(unit)
        self._leave(unit, called=number >= 0)
        return number

    def end_graph(self, output: Any) -> None:
        """The graph has run; or nothing, or the model by its hooks."""
        if self._running:
            unit = self._running[0]
            self._exit(unit, unit.module, (), output)

    def add_in_graph(self, bucket: Bucket, slot: int, gradient: torch.Tensor) -> None:
        """A gradient of a parameter is there, in a backward that may be for something else."""
        if self.backward.walk.accumulates:
            self._add(bucket, slot, gradient)

    def abandon_graph(self, error: BaseException) -> None:
        """It has failed."""
        if self._depth:
            self._tell(error)
            self._abandon_forward()

    def _tell(self, error: BaseException | None) -> None:
        """A forward fails on this rank: where it has gathered, other ranks may be in its next gathers."""
        gathered = any(not isinstance(event, bool) and event.partitioned for event in self._events)
        if error is not None and self.recovery is not None and gathered:
            self.recovery.failed(error)

    def _record(self, unit: Unit, context: Context, output: Any) -> None:
        index = -1
        unknown = refuse_output if unit.gradients and torch.is_grad_enabled() else None
        for tensor in tensors_in(output, unknown and partial(unknown, unit.name)):
            if tensor.requires_grad:
                if index < 0:
                    context.calls.append(unit)
                    index = len(context.calls) - 1
                if (bucket := getattr(tensor, "_zoo_bucket", None)) in self._mine:
                    context.returned[bucket] = None
                hook_gradient(tensor, partial(self.backward.on_output_grad, context, index))
        if index < 0 and unit.partitioned and unit.gradients and torch.is_grad_enabled():
            context.calls.append(unit)  # frozen for a while, perhaps on this rank alone: others come back to it

    def _end_pass(self) -> None:
        context, self._context = self._context, None
        if context is not None and not context.calls and not context.owner:
            self.contexts.expire([context])  # no output needs a gradient: nobody comes back
        if self._has_partitioned:
            self.residency.end()
        if self._trained:
            self.latest_calls = self._events

    def _abandon_forward(self) -> None:
        if self._has_partitioned:
            self._tell(RuntimeError("a forward was interrupted"))
        self._depth, self._context = 0, None
        self._running.clear()
        for unit in self.units:
            unit.depth = 0
        for bucket in self.buckets:
            bucket.active = 0
        self.residency.clear()

    def where(self) -> tuple[str, str, str]:
        """What runs now: forward, backward or outside; of which context; at the call of which unit."""
        backward = self.backward
        if (at := backward.walk.place) is not None:
            return "backward", at[0].name, at[1] or "(model)"
        if self._running:
            context = self._context.name if self._context is not None else ""
            return "forward", context, self._running[-1].name or "(model)"
        # While a backward ends it counts as failed, until it has.
        return "backward" if backward.running or backward.failed else "outside", "", ""

    # Driven ----------------------------------------------------------------------------------------------------------

    def drive(self, context: Context | None) -> None:
        """What runs from now on belongs to ``context``; None: the hooks find contexts again."""
        self._driven = context
        if context is None and self._depth:
            self._abandon_forward()  # it was left with an exception

    def check_between(self, what: str) -> None:
        """Raise RuntimeError inside of the model's forward, or of a forward or backward that is driven."""
        if self._driven is None and _graph_task() == -1:
            self._find_interrupted()
        inside = self.backward.driven or (f"forward of {self._driven.owner}" if self._driven is not None else "")
        if self._depth and not inside:
            inside = "model's forward"
        if inside:
            raise RuntimeError(f"{what} inside of the {inside}: it comes after it.")

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """See :meth:`zoo.zero.ShardedModel.accumulate`."""
        bucket = getattr(parameter, "_zoo_bucket", None)
        if bucket not in self.buckets:
            raise ValueError(
                f"accumulate() got a {type(parameter).__name__} of shape {tuple(parameter.shape)}, which is no "
                "parameter of this model."
            )
        slot: int = parameter._zoo_slot  # type: ignore[attr-defined]
        bucket.check_gradient(slot, gradient)
        if self.backward.failed:
            raise RuntimeError(FAILED)
        self._add(bucket, slot, gradient.detach())
        self.note_unreduced()

    def _add(self, bucket: Bucket, slot: int, gradient: torch.Tensor) -> None:
        if bucket.gradients is not None:
            bucket.gradients.add(slot, gradient)
        if self.demand is not None:
            self.demand.saw(bucket, slot)

    # External parameters ---------------------------------------------------------------------------------------------

    def set_external(self, module: nn.Module, bucket: Bucket, *, present: bool) -> bool:
        """A bucket is used in the forward of ``module``, or no longer; whether that changed anything."""
        unit = unit_around(module, self._model, self.hooked.values())
        if self._depth:
            raise ValueError("external parameters are registered outside of the model's forward.")
        return unit.set_external(bucket, present=present)

    def _take_external(self, bucket: Bucket, slot: int) -> bool:
        """A parameter was touched while no unit that has it runs: the running one takes it from now on."""
        if _graph_task() != -1:
            return self.backward.under_way and self.backward.walk.take_back(bucket)
        if not self._running:
            return False
        unit = self._running[-1]
        # Each running call of the unit gives it back when it ends.
        calls = sum(running is unit for running in self._running)
        if not unit.set_external(bucket, present=True):
            return False
        where = repr(unit.name) if unit.name else "the model itself"
        # Once for each: a rank that does not touch it here would answer this gather with another one.
        if bucket.in_turn is None:
            bucket.agree(
                "an external parameter was found:", f"{bucket.called(slot)} in {where} (register_external_parameter)"
            )
        if self._context is not None:
            self._context.use([bucket])
        bucket.active += calls
        self.residency.enter_late(bucket)
        _log.info(
            "%s is used in the forward of %s, which does not own it: registered as external", bucket.called(slot), where
        )
        return True

    # Gradients -------------------------------------------------------------------------------------------------------

    def _after_backward(self, synced: bool) -> None:
        if synced:
            if self._votes is not None:
                self._votes.settle()  # others may still need shards for backwards of their own
            self.reduce_all()
        else:
            self.unreduced = True
        self.waiting = self.reductions.waits
        if self.demand is not None and synced:
            self.demand.check()

    def note_unreduced(self) -> None:
        """There are gradients of this rank alone."""
        self.unreduced, self.waiting = True, self.reductions.waits

    def reduce_all(self) -> None:
        """Reduce every bucket that this backward has not reduced yet, and wait for all of it. Collective."""
        self.reductions.finish()
        self.unreduced, self.reduced = False, True

    def reduce_tied(self) -> None:
        """Reduce what ranks with other layers have too. Collective, over those as well."""
        self.reductions.finish_tied()
        self.waiting, self.reduced = False, True

    def check(self) -> None:
        """Before gradients are used.

        Raises:
            RuntimeError: the latest backward ended with an exception, or a schedule has not brought a forward back.
        """
        self.backward.check_running()
        if _graph_task() == -1:
            self._find_interrupted()
        self.settle_failure()
        if self.backward.failed:
            raise RuntimeError(FAILED)
        self.contexts.refuse_driven()

    def settle_failure(self) -> None:
        """Before this rank goes on after a backward that failed: the others must have failed too, at the same place.

        Raises:
            RankFailedError: they have not.
        """
        if self.recovery is not None:
            self.recovery.settle()

    def drop_gradients(self) -> None:
        """Forget all gradients, and whatever went wrong when they were made."""
        if _graph_task() != -1 and self.backward.under_way:
            raise RuntimeError("zero_grad() inside of a backward: gradients are still to come. Call it afterwards.")
        if self.backward.driven:
            self.check_between("zero_grad()")
        if _graph_task() == -1:
            self._find_interrupted()
        try:
            self.backward.check_running()
            self.reductions.abandon()
            self.settle_failure()
        finally:
            self.backward.failed, self.backward.refused, self.backward.with_graph = False, 0, 0
            self.unreduced = self.reduced = self.waiting = False
            for bucket in self.buckets:
                if bucket.gradients is not None:
                    bucket.gradients.drop()
            self.buckets[0].memory.give_back()

    def note_calls(self, key: Hashable) -> None:
        """The forward that has just ended was that of micro-batch ``key`` of a window."""
        if self._trained:
            self.window_calls[key] = self._events

    def updated(self) -> None:
        """The parameters have other values: what is gathered is stale, and so is every forward before."""
        self.contexts.refuse_older()
        if self._has_partitioned:
            self.residency.clear()
        for bucket in self.buckets:
            bucket.read_whole = False


def _above(name: str) -> Iterator[str]:
    """The names of the modules that the one of this name is part of."""
    while name:
        name = name.rpartition(".")[0]
        yield name
