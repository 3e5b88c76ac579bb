"""What happens when: the hooks that gather, release and reduce buckets while the user's model runs.

Forward: when a unit starts, its partitioned buckets are gathered and the next ones of the recorded order are
prefetched; when it ends they are released, up to a budget of bytes that stays for the backward soon to come. With
gradients enabled each call is written on a *tape*: a plain list of units.

Backward: the one hook on a unit's output runs right before the unit's own backward. The autograd engine runs nodes in
the reverse order of their creation, so at that moment everything recorded later on the tape is finished; the tape is
walked back to this entry, which gathers what this and the skipped units need, releases and reduces what is finished, in
an order that depends on the tape alone. So every rank issues the same collectives in the same order even when a part of
the model gets a gradient on some ranks only. What no hook reached is walked at the end of backward.

All of it is a constant number of Python operations a unit; nothing is done by parameter, and nothing is polled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from zoo.zero.buckets import Bucket
from zoo.zero.external import registered
from zoo.zero.orders import Orders
from zoo.zero.reductions import Demand, Reductions
from zoo.zero.tape import Tape, Unit
from zoo.zero.units import UnitSpec

# A bucket that one of the next acquisitions of the recorded order needs again is not released in between.
REUSE_WINDOW = 4

_log = logging.getLogger("zoo.zero")
_graph_task = torch._C._current_graph_task_id


class Runtime:
    """Hooks the units of a model to their buckets.

    Args:
        reduce_dtype: dtype in which gradients travel, None for their own.
        overlap: reduce buckets during backward; otherwise all at its end.
        prefetch_bytes: how far ahead of the running unit buckets are gathered.
        demand_all: a synchronised backward that leaves a trainable parameter without a gradient is an error.
        keep_bytes: gathered buckets kept after a forward for the backward to come, the latest first.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        buckets: Sequence[Bucket],
        *,
        reduce_dtype: torch.dtype | None,
        overlap: bool,
        prefetch_bytes: int,
        keep_bytes: int,
        demand_all: bool = False,
    ) -> None:
        self.sync = True
        self.unreduced = False  # some backward accumulated without reducing
        self.reduced = False  # there is a reduced gradient to step with
        self._overlap, self._prefetch_bytes, self.keep_bytes = overlap, prefetch_bytes, keep_bytes
        self._buckets = list(buckets)
        self.reductions = Reductions(self._buckets, reduce_dtype=reduce_dtype)
        self._demand = Demand(self._buckets) if demand_all else None
        self._kept: dict[Bucket, None] = {}
        self._kept_bytes = 0
        self._early: dict[Bucket, None] = {}  # prefetched in this forward, not used yet
        self._orders = Orders()
        self._tape: Tape | None = None
        self._visited: list[Tape] = []
        self._serial = 0
        self._depth = 0
        self._pass_grad = False
        self._in_backward = False
        self._hold = False  # reduce nothing before the end of this backward
        self.held: dict[Bucket, list[int]] = {}
        self._running: list[Unit] = []
        self._model = units[0].module
        self._hooks: list[Any] = self._demand.hooks if self._demand is not None else []
        self._units: list[Unit] = []
        self._has_partitioned = any(b.partitioned for b in self._buckets)
        self._hooked: dict[str, Unit] = {}
        self._install(units)

    def _install(self, specs: Sequence[UnitSpec]) -> None:
        by_unit: dict[str, list[Bucket]] = {spec.name: [] for spec in specs}
        for bucket in self._buckets:
            for name in dict.fromkeys(bucket.spec.units):
                by_unit[name].append(bucket)
        for spec in specs:
            unit = Unit(spec, by_unit[spec.name])
            self._units.append(unit)
            if not unit.recorded and spec.name:
                continue
            self._hooks.append(spec.module.register_forward_pre_hook(partial(self._enter, unit)))
            self._hooks.append(spec.module.register_forward_hook(partial(self._exit, unit), always_call=True))
            self._hooked[spec.name] = unit
        for bucket in self._buckets:
            bucket.on_refused = self._take_external
        for module in self._model.modules():
            for parameter in registered(module):
                owner = getattr(type(parameter), "_zoo_bucket", None)
                if owner in self._buckets:
                    self.set_external(module, owner, present=True)

    def remove(self) -> None:
        """Take all hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _enter(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if _graph_task() != -1:  # recomputation inside backward
            self._begin_backward()
            unit.depth += 1
            for bucket in unit.partitioned:
                bucket.parameters.wait()
            return
        if self._depth == 0:
            self._begin_pass(module)
        self._depth += 1
        unit.depth += 1
        self._running.append(unit)
        self._record(unit.recorded)
        if unit.partitioned:
            self._acquire(unit)

    def _record(self, buckets: Sequence[Bucket]) -> None:
        tape = self._tape
        # Without gradients inside of a pass with them: re-entrant checkpointing, which comes back in backward.
        if tape is not None and (self._pass_grad or torch.is_grad_enabled()):
            serial, start = tape.serial, len(tape.units)
            for bucket in buckets:
                if bucket.tape_serial != serial:
                    bucket.tape_serial = serial
                    bucket.pending += 1
                    tape.order.append((start, bucket))

    def _begin_pass(self, module: nn.Module) -> None:
        self._serial += 1
        self._tape = Tape(self._serial)
        self._pass_grad = torch.is_grad_enabled()
        if self._has_partitioned:
            self._orders.begin((module.training, self._pass_grad))

    def _acquire(self, unit: Unit) -> None:
        for bucket in unit.partitioned:
            bucket.active += 1
            self._claim(bucket)
        if self._prefetch_bytes:
            self._prefetch()
        for bucket in unit.partitioned:
            bucket.parameters.wait()

    def _claim(self, bucket: Bucket) -> None:
        parameters = bucket.parameters
        if parameters.live or parameters.coming:
            if bucket in self._kept:
                del self._kept[bucket]
                self._kept_bytes -= bucket.num_bytes
            self._early.pop(bucket, None)
        else:
            parameters.gather()
        self._orders.advance(bucket.index)

    # External parameters ---------------------------------------------------------------------------------------------

    def set_external(self, module: nn.Module, bucket: Bucket, *, present: bool) -> bool:
        """A bucket is used in the forward of ``module``, or no longer; whether that changed anything."""
        path = next((name for name, found in self._model.named_modules() if found is module), None)
        if path is None:
            raise ValueError(f"this {type(module).__name__} is not part of the model of the optimizer.")
        if self._depth:
            raise ValueError("external parameters are registered outside of the model's forward.")
        while path not in self._hooked:
            path = path.rpartition(".")[0]
        return self._hooked[path].set_external(bucket, present=present)

    def _take_external(self, bucket: Bucket, name: str) -> bool:
        """A parameter was touched while no unit that has it runs: the running one takes it from now on."""
        if not self._running or _graph_task() != -1:
            return False
        unit = self._running[-1]
        # Each running call of the unit gives it back when it ends.
        calls = sum(running is unit for running in self._running)
        if not unit.set_external(bucket, present=True):
            return False
        where = repr(unit.name) if unit.name else "the model itself"
        # Once for each: a rank that does not touch it here would answer this gather with another one.
        bucket.agree("an external parameter was found:", f"{name} in {where} (register_external_parameter)")
        self._record([bucket])
        bucket.active += calls
        self._claim(bucket)
        bucket.parameters.wait()
        _log.info("%s is used in the forward of %s, which does not own it: registered as external", name, where)
        return True

    def _prefetch(self) -> None:
        ahead = 0
        under_way = [bucket for bucket in self._early if bucket.parameters.coming]  # for a unit's time by now
        for index in self._orders.upcoming():
            bucket = self._buckets[index]
            ahead += bucket.num_bytes
            if ahead > self._prefetch_bytes:
                break
            if not bucket.parameters.live:
                self._early[bucket] = None
                bucket.parameters.gather()
        for bucket in under_way:
            bucket.parameters.advance()

    def _exit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if unit.depth == 0:  # its forward did not get as far as our first hook
            return
        unit.depth -= 1
        if _graph_task() != -1:
            if torch.is_grad_enabled():
                for tensor in _tensors(output):
                    self._hook(tensor, partial(self._on_late, unit))
            return
        self._depth -= 1
        self._running.pop()
        tape = self._tape
        if tape is not None:
            recorded = False
            for tensor in (output,) if type(output) is torch.Tensor else _tensors(output):
                if tensor.requires_grad:
                    if not recorded:
                        recorded = True
                        tape.units.append(unit)
                    self._hook(tensor, partial(self._on_output_grad, tape, len(tape.units) - 1))
        for bucket in unit.partitioned:
            bucket.active -= 1
            if bucket.active == 0:
                self._set_aside(bucket, keep=torch.is_grad_enabled())
        if self._depth == 0:
            self._end_pass()

    @staticmethod
    def _hook(tensor: torch.Tensor, function: Callable[..., None]) -> None:
        node = tensor.grad_fn
        if node is not None:
            node.register_prehook(function)
        elif tensor.requires_grad and getattr(type(tensor), "_zoo_bucket", None) is None:  # a parameter stays
            tensor.register_hook(function)  # type: ignore[no-untyped-call]

    def _set_aside(self, bucket: Bucket, *, keep: bool) -> None:
        if len(bucket.spec.units) > 1 and bucket.index in islice(self._orders.upcoming(), REUSE_WINDOW):
            self._early[bucket] = None  # the next unit of the same bucket is about to start
            bucket.parameters.hide()
            return
        again = keep or self._pass_grad
        if not keep or bucket.num_bytes > self.keep_bytes:
            bucket.parameters.release(again=again)
            return
        bucket.parameters.hide()
        self._kept[bucket] = None
        self._kept_bytes += bucket.num_bytes
        while self._kept_bytes > self.keep_bytes:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._kept_bytes -= oldest.num_bytes
            oldest.parameters.release(again=True)

    def _end_pass(self) -> None:
        self._tape = None
        if self._has_partitioned:
            self._orders.end()
            # Prefetched and not used: the prediction was wrong.
            for bucket in self._early:
                bucket.parameters.release()
            self._early.clear()

    # Backward --------------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if not self._in_backward:
            if self.sync:
                self.reductions.begin()
            self._in_backward, self._hold = True, False
            Variable._execution_engine.queue_callback(self._end_backward)

    def _on_output_grad(self, tape: Tape, index: int, grads: Any) -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "backward(create_graph=True) through a model under a ZeRO optimizer: gradients accumulate in flat "
                "buffers, which a second derivative cannot pass through."
            )
        self._begin_backward()
        if tape.spent:
            # A second backward through a retained graph: the tape no longer tells what is finished.
            self._hold = True
            self._open(tape.units[index])
            return
        if tape.cursor < 0:
            tape.cursor = len(tape.units)
            self._visited.append(tape)
        if index < tape.cursor:
            self._walk(tape, index)

    def _walk(self, tape: Tape, index: int) -> None:
        """Go back to call ``index``, through every call after it that backward has not visited.

        Each call is treated alike whether its hook fired or not, so that the sequence of collectives depends on the
        tape alone. A call is skipped when its output is the very tensor that another unit returned (a model returns
        what its last layer does), or when on this rank nothing of it led to the loss; other ranks may need it all the
        same.
        """
        while tape.cursor > index:
            tape.cursor -= 1
            while tape.order and tape.order[-1][0] > tape.cursor:
                self._finished(tape.order.pop()[1])
            unit = tape.units[tape.cursor]
            self._open(unit)
            if unit.partitioned:
                self._prefetch_before(tape)
            if self._overlap and self.sync and not self._hold:
                self.reductions.launch_ready()

    def _prefetch_before(self, tape: Tape) -> None:
        ahead, position = 0, tape.cursor - 1
        under_way: dict[Bucket, bool] = {}
        while position >= 0 and ahead < self._prefetch_bytes:
            for bucket in tape.units[position].partitioned:
                ahead += bucket.num_bytes
                if ahead <= self._prefetch_bytes:
                    under_way.setdefault(bucket, bucket.parameters.coming)
                    bucket.parameters.gather()
            position -= 1
        for bucket, since_before in under_way.items():
            if since_before:
                bucket.parameters.advance()

    def _open(self, unit: Unit) -> None:
        for bucket in unit.partitioned:
            bucket.parameters.wait()
        for gradients in unit.gradients:
            gradients.open()

    def _on_late(self, unit: Unit, grads: Any) -> None:
        # A unit that was run inside backward (re-entrant checkpointing) and now gets its own, nested backward.
        self._begin_backward()
        self._open(unit)

    def _finished(self, bucket: Bucket) -> None:
        bucket.pending -= 1
        if bucket.pending == 0 and bucket.partitioned:
            if bucket in self._kept:
                del self._kept[bucket]
                self._kept_bytes -= bucket.num_bytes
            bucket.parameters.release()
            bucket.parameters.drop_secondary()

    def _end_backward(self) -> None:
        for tape in self._visited:
            if tape.cursor > 0:
                self._walk(tape, 0)
            while tape.order:
                self._finished(tape.order.pop()[1])
            tape.spent = True
        self._visited.clear()
        self._in_backward = False
        if self.sync:
            self.reduce_all()
        else:
            self.unreduced = True
        self._release_all()
        if self._demand is not None and self.sync:
            self._demand.check()

    def abandon(self) -> None:
        """Forget a forward or backward that ended with an exception."""
        self.unreduced = self.reduced = False
        self.reductions.abandon()
        if not (self._in_backward or self._depth):
            return
        self._in_backward, self._depth = False, 0
        self._tape = None
        self._visited.clear()
        self._running.clear()
        for unit in self._units:
            unit.depth = 0
        for bucket in self._buckets:
            bucket.active = 0
        self._release_all()

    def reduce_all(self) -> None:
        """Reduce every bucket that this backward has not reduced yet, and wait for all of it."""
        self.reductions.finish()
        self.unreduced, self.reduced = False, True

    def _release_all(self) -> None:
        if self._has_partitioned:
            self._kept.clear()
            self._early.clear()
            self._kept_bytes = 0
            for bucket in self._buckets:
                if bucket.partitioned and not bucket.active:
                    bucket.parameters.release()
                bucket.parameters.drop_secondary()

    # Held by the user ------------------------------------------------------------------------------------------------

    def hold(self, bucket: Bucket) -> tuple[bool, bool]:
        """Make a bucket whole and keep it so; returns what :meth:`let_go` needs. Collective."""
        parameters = bucket.parameters
        stays = parameters.live and (bucket.active > 0 or not parameters.rounds)
        before = (stays, parameters.hidden)
        parameters.wait(exact=True)
        bucket.active += 1
        if bucket not in self.held:
            self.note(bucket)
        return before

    def note(self, bucket: Bucket) -> None:
        """Remember the versions of a held bucket's parameters: a later change is somebody's write."""
        self.held[bucket] = [p._version for p in bucket.spec.parameters]

    def let_go(self, bucket: Bucket, before: tuple[bool, bool], *, forget: bool) -> None:
        """End a :meth:`hold`; with ``forget`` what is gathered is not used any more."""
        was_live, was_hidden = before
        bucket.active = max(bucket.active - 1, 0)  # an abandoned pass has set it to zero
        if bucket.active:
            return
        self.held.pop(bucket, None)
        if forget or not was_live:
            self.forget(bucket)
        elif was_hidden:
            bucket.parameters.hide()

    def forget(self, bucket: Bucket) -> None:
        """What is gathered of this bucket is stale; the next use gathers it again."""
        if bucket in self._kept:
            del self._kept[bucket]
            self._kept_bytes -= bucket.num_bytes
        self._early.pop(bucket, None)
        if not bucket.active:
            bucket.parameters.release()

    def calls(self) -> list[tuple[Bucket, ...]]:
        """The partitioned buckets of each unit call of the latest training forward, or of all units in turn."""
        recorded = self._orders.latest((True, True))
        if recorded is not None:
            return [(self._buckets[index],) for index in recorded]
        return [unit.partitioned for unit in self._units if unit.partitioned]

    def reset(self) -> None:
        """Drop gathered parameters: an update made them stale."""
        self._release_all()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in a module's output: nested tuples, lists, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for member in dataclasses.fields(output):
            yield from _tensors(getattr(output, member.name))
