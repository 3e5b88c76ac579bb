"""What happens in a step: the forward and the backward pass of each micro-batch, and the update at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import CollectiveMismatchError
from zoo.engine.batches import count, placed
from zoo.parts import Clock
from zoo.shard.runtime.graph_tasks import multiplied, note_multiplied
from zoo.shard.runtime.without_graph import go_backward

if TYPE_CHECKING:
    from zoo.engine.attachments import Parts
    from zoo.engine.records import Boundary, Records
    from zoo.engine.timing import Stopwatch
    from zoo.zero import ZeroOptimizer

_NOTHING = contextlib.nullcontext()


class Passes:
    """What runs a micro-batch forward and backward, for an engine and for its runner.

    Args:
        training: the optimizer, or a ValueError that says why there is none for what it is asked.
        input_dtype: of floating-point arguments of the model; None: they keep theirs.
        autocast_dtype: of the forward; None: none.
        watch: gets the seconds of each pass; None: nobody asks for them.
    """

    def __init__(
        self, module: nn.Module, *, training: Callable[[str], ZeroOptimizer], parts: Parts, records: Records,
        boundary: Boundary, device: torch.device, input_dtype: torch.dtype | None, autocast_dtype: torch.dtype | None,
        watch: Stopwatch | None,
    ) -> None:  # fmt: skip
        self._module, self._training, self._parts = module, training, parts
        self._records, self._boundary, self._watch = records, boundary, watch
        self._device, self._input_dtype, self._autocast_dtype = device, input_dtype, autocast_dtype
        self._divides = False  # a backward is under way whose loss was divided

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, trains: bool) -> Any:
        """The model's output."""
        args, kwargs = self.admit(args, kwargs, trains=trains)
        with self.timed("forward"), self._precision():
            output = self._module(*args, **kwargs)
        if trains:
            self._records.follow(output)
        return output

    def admit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, trains: bool, ahead: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward, as parts have left them, on the device; they are counted.

        Args:
            trains: it is for training. ahead: how many micro-batches after the one at hand.
        """
        if trains:
            self._records.begin()
            counts = True
            if self._parts.changes_batches and self._module.training:
                clock = self._clock_at(ahead)
                args, kwargs = self._parts.on_batch(args, kwargs, clock)
                counts = self._parts.counts_batch(clock)
            self._records.admitted(count(args, kwargs) if counts else (0, 0))
        found: tuple[tuple[Any, ...], dict[str, Any]] = placed((args, kwargs), self._device, self._input_dtype)
        return found

    def _clock_at(self, ahead: int) -> Clock:
        clock = self._records.clock
        return dataclasses.replace(clock, micro_batch=clock.micro_batch + ahead) if ahead else clock

    @contextlib.contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """A "forward", in the precision that the configuration asks for, or a "backward"; it is timed."""
        with self.timed(what), self._precision() if what == "forward" else _NOTHING:
            yield

    def _precision(self) -> Any:
        dtype = self._autocast_dtype
        return _NOTHING if dtype is None else torch.autocast(self._device.type, dtype)

    def timed(self, what: str) -> Any:
        """A context: its seconds are of that phase of the step."""
        return _NOTHING if self._watch is None else self._watch.of(what, self._device)

    # -- backward -----------------------------------------------------------------------------------------------------

    def final_loss(self, loss: torch.Tensor, *, ahead: int = 0) -> torch.Tensor:
        """The loss of a micro-batch, ``ahead`` of the one at hand, as parts have left it."""
        return self._parts.on_loss(loss, self._clock_at(ahead)) if self._parts.changes_loss else loss

    def backward(self, loss: torch.Tensor, scale: float, *, last: bool, retain_graph: bool = False) -> torch.Tensor:
        """The gradients of ``loss * scale``; returns a copy of the loss, as parts have left it."""
        optimizer = self._training("backward")
        loss = self.final_loss(loss)
        local = self._boundary.stays_local(last=last)
        self._divides = True
        try:
            with optimizer.no_sync() if local else _NOTHING, self.timed("backward"):
                divided = _scaled(loss, scale) if scale != 1.0 else loss
                go_backward(
                    optimizer.runtime.backward, divided, optimizer.scale_loss, retain_graph=retain_graph,
                    joins=not optimizer.config.update_in_backward,
                )  # fmt: skip
        finally:
            self._divides = False
        return loss.detach().clone()  # the user's own may be changed, for a log

    def arriving(self) -> tuple[float, bool]:
        """Of a backward that begins: what its gradients are multiplied by, and whether it may reduce them.

        Raises:
            ValueError: no :meth:`backward` of this, and 1/G is no power of two: other bits would come out; or a part
                changes the loss, which it has not seen.
        """
        self._records.adds()
        if self._divides:
            return 1.0, True
        self._parts.check_untouched_loss()
        n = self._boundary.micro_batches
        factor = 1.0 / (n * multiplied("accumulation"))  # by an engine that shares the loss
        if math.frexp(factor)[0] != 0.5:
            raise ValueError(
                f"loss.backward() under an engine with gradient_accumulation_steps={n}: to divide gradients where "
                "they arrive gives the bits of a loss that is divided only by powers of two. Call "
                "engine.backward(loss)."
            )
        return factor, not self._boundary.stays_local(last=self._boundary.reached())


class Update:
    """Everything between the last backward of a step and the first forward of the next.

    Parameters move; the schedule moves the learning rates when what the step came to is read.

    Args:
        timed: see :meth:`zoo.engine.passes.Passes.timed`.
    """

    def __init__(
        self, *, parts: Parts, records: Records, boundary: Boundary, timed: Callable[[str], Any]
    ) -> None:  # fmt: skip
        self._parts, self._records, self._boundary, self._timed = parts, records, boundary, timed
        self._bound: tuple[Any, ...] = ()  # the latest schedule, and names of arguments that its step takes

    def run(self, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any] | None, *, micro_steps: int = 0) -> None:
        """``micro_steps``: of its micro-batches, how many are not counted yet. A collective."""
        records = self._records
        records.read_outcome()
        clock = records.clock
        self._parts.before_update(clock)
        scale = optimizer.loss_scale
        rates = rates_of(optimizer)  # what is none is told before anything changes
        factor = self._parts.lr_factor(clock)
        with _scaled_rates(optimizer, factor), self._timed("update"):
            rates = rates if factor == 1.0 else rates_of(optimizer)
            self._step(optimizer)
        optimizer.zero_grad()
        records.launched(optimizer, rates, scale, lr_kwargs or {}, micro_steps=micro_steps)

    def _step(self, optimizer: ZeroOptimizer) -> None:
        alike = {"gradient_accumulation_steps": self._boundary.micro_batches}
        optimizer.step(tally=self._records.tally(), alike=alike)

    def refuse(self, optimizer: ZeroOptimizer) -> None:
        """This rank has refused a loss, and comes to the step, where the others are: they are told, or have too."""
        optimizer.runtime.backward.with_graph = 0  # nothing is updated
        with contextlib.suppress(CollectiveMismatchError):
            self._step(optimizer)

    def check(self, what: str, lr_kwargs: Any) -> None:
        """Raise ValueError for arguments of a schedule's step that are none, or that no schedule takes."""
        if lr_kwargs is not None and not (
            isinstance(lr_kwargs, Mapping) and all(isinstance(key, str) for key in lr_kwargs)
        ):
            from zoo.engine.numbers import shown

            raise ValueError(
                f"{what} got lr_kwargs={shown(lr_kwargs)}; it takes arguments of the schedule's step by name."
            )
        if lr_kwargs and self._records.schedule is None:
            raise ValueError(
                f"{what} got lr_kwargs={dict(lr_kwargs)}, and this engine has no schedule whose step would take them. "
                "Leave them out, or give the configuration a scheduler section or initialize an lr_scheduler."
            )

    def check_schedule(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Raise ValueError, before anything has changed, where the schedule's step needs what nobody gives."""
        given = lr_kwargs or {}
        schedule, bound = self._records.schedule, (self._records.schedule, tuple(given))
        if schedule is None or bound == self._bound:
            return
        try:
            inspect.signature(schedule.step).bind(**given)
        except TypeError as error:
            name = type(schedule).__name__
            raise ValueError(
                f"the step of the schedule {name} cannot be called with {dict(given)}: {error}. Give what it needs to "
                "engine.step(lr_kwargs={...}), after engine(...) and engine.backward(loss)."
            ) from None
        self._bound = bound


def rates_of(optimizer: ZeroOptimizer) -> tuple[float, ...]:
    """The learning rate of each parameter group.

    Raises:
        ValueError: one is no number.
    """
    return tuple(_rate(i, group["lr"]) for i, group in enumerate(optimizer.param_groups))


def _rate(group: int, value: Any) -> float:
    if type(value) is float:
        return value
    from zoo.engine.numbers import real

    return real(f"the lr of group {group}", value)


@contextlib.contextmanager
def _scaled_rates(optimizer: ZeroOptimizer, factor: float) -> Iterator[None]:
    groups = optimizer.param_groups
    kept = [group["lr"] for group in groups]
    if factor != 1.0:
        for group in groups:
            group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        if factor != 1.0:
            for group, lr in zip(groups, kept, strict=True):
                group["lr"] = lr


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """``loss * scale``, of which other engines hear whose parameters its backward reaches."""

    def begun(gradient: torch.Tensor) -> None:
        note_multiplied("accumulation", scale)

    found = loss * scale
    if found.requires_grad:
        found.register_hook(begun)  # type: ignore[no-untyped-call]
    return found
