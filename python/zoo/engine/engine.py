"""The engine: forward, backward and step with accumulation, and what is told about each step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import CollectiveMismatchError
from zoo.config import Config
from zoo.engine.attachments import Parts
from zoo.engine.batches import count, evaluating, placed
from zoo.engine.checkpoints import Checkpoints
from zoo.engine.plain import check_arguments, kind_of, scaled_loss
from zoo.engine.records import Records
from zoo.parts import Clock, Runner
from zoo.registry import Registry
from zoo.shard import ShardedModel
from zoo.shard.runtime.backward import multiplied
from zoo.shard.runtime.without_graph import NoGraphError, go_backward
from zoo.zero import ZeroOptimizer

if TYPE_CHECKING:
    from zoo.monitor import Feed


_log = logging.getLogger("zoo.engine")
_NOTHING = contextlib.nullcontext()


class Engine(Checkpoints, Records):
    """A model in training, or in evaluation only (``optimizer`` is None).

    ``loss = engine(x, y)``, ``engine.backward(loss)``, ``engine.step()`` for each micro-batch: parameters move once in
    ``gradient_accumulation_steps`` micro-batches, the *boundary*. Or :meth:`train_batch`, which does one whole step.
    ``loss.backward()`` leaves the same bits as ``engine.backward(loss)``, without a loss in the record: what arrives at
    parameters is divided by the number G of micro-batches, whatever it came through, and nothing on the way is. Where G
    is no power of two that would round otherwise, and is refused; so it is where a part changes the loss.

    Attributes:
        module: the model. config: the configuration. optimizer, dataloader: as ``initialize`` returned
        them, each None where there is none.
        comm: the communicator of the data-parallel ranks. mesh: the DeviceMesh of the job, None without one.
        parts: what takes part in training, by name. feed: what takes records to sinks.
        global_steps: steps taken, skipped ones included.
        micro_steps: micro-batches that went through :meth:`step`.
    """

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        *,
        optimizer: ZeroOptimizer | None,
        sharded: ShardedModel,
        parts: Parts,
        feed: Feed,
        registry: Registry,
        mesh: Any = None,
        batch_ranks: int,
        batch_rank: int = 0,
        input_dtype: torch.dtype | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        Records.__init__(self)
        self.config, self.module, self.comm, self.mesh = config, module, sharded.comm, mesh
        self._optimizer, self.sharded, self.batch_ranks = optimizer, sharded, batch_ranks
        self.batch_rank = batch_rank
        self.dataloader: Any = None
        self._parts, self.parts, self.feed = parts, parts.all, feed
        self.global_steps = self.micro_steps = 0
        self.registered: dict[str, Any] = {}
        self._accumulation = int(config.gradient_accumulation_steps)
        self._in_step = 0  # micro-batches since the latest update
        self._boundary: bool | None = None
        self._locally = self._dividing = self._destroyed = False
        self.accumulation_was_set = False
        self._input_dtype, self._autocast_dtype = input_dtype, autocast_dtype
        self._watch = None
        if config.wall_clock_breakdown:
            from zoo.engine.timing import Stopwatch

            self._watch = Stopwatch()
        self._asked: tuple[Any, ...] = ()  # the latest schedule and names of arguments that its step takes
        self._discard = False  # an exception has left gradients of a step behind
        self._batches: Iterator[Any] | None = None
        self._serial: int | None = None
        first = next(module.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")
        if optimizer is not None:
            optimizer.runtime.backward.arriving = self._arriving
        name = getattr(module, "engine_runner", "plain")
        self._runner: Runner = registry.build("runner", name, engine=self)

    @property
    def optimizer(self) -> ZeroOptimizer:
        """What ``initialize`` returned; None for an engine that only evaluates."""
        return self._optimizer  # type: ignore[return-value]

    def training(self, what: str) -> ZeroOptimizer:
        """The optimizer; raises ValueError where ``what`` cannot be done, without one or after :meth:`destroy`."""
        if self._destroyed:
            raise ValueError(f"{what} after destroy(): this engine is no more. Call initialize again.")
        if self._not_loaded:
            raise ValueError(f"{what} of an engine that is not loaded: {self._not_loaded} Load another checkpoint.")
        if self._optimizer is None:
            raise ValueError(
                f"{what} of an engine without optimizer, which only evaluates. Give initialize an optimizer, or the "
                "configuration an optimizer section."
            )
        return self._optimizer

    # -- one micro-batch after the other ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; tensors come to its device. They keep their dtype, but where ``auto_cast`` is on."""
        trains = torch.is_grad_enabled() and self._optimizer is not None
        if trains and self._discard:
            self.zero_grad()
        args, kwargs = self.admit(args, kwargs, trains=trains)
        with self._timed("forward"), self._precision():
            return self.module(*args, **kwargs)

    def admit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, trains: bool, ahead: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """For runners: the arguments of the model's forward, as parts have left them, on the device; they are counted.

        Args:
            trains: it is for training. ahead: how many micro-batches after the one at hand.
        """
        if trains:
            if self._began is None:
                self._began = time.perf_counter()
            if self._parts.changes_batches and self.module.training:
                args, kwargs = self._parts.on_batch(args, kwargs, self._clock_at(ahead))
            self._latest = count(args, kwargs)
        found: tuple[tuple[Any, ...], dict[str, Any]] = placed((args, kwargs), self.device, self._input_dtype)
        return found

    def _clock_at(self, ahead: int) -> Clock:
        clock = self.clock
        return dataclasses.replace(clock, micro_batch=clock.micro_batch + ahead) if ahead else clock

    @contextlib.contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """For runners: a forward, in the precision that the configuration asks for, or a backward; it is timed."""
        with self._timed(what), self._precision() if what == "forward" else _NOTHING:
            yield

    def _precision(self) -> Any:
        dtype = self._autocast_dtype
        return _NOTHING if dtype is None else torch.autocast(self.device.type, dtype)

    def _timed(self, what: str) -> Any:
        return _NOTHING if self._watch is None else self._watch.of(what, self.device)

    def _arriving(self) -> tuple[float, bool]:
        """Of a backward that begins: what its gradients are multiplied by, and whether it may reduce them.

        Raises:
            ValueError: no :meth:`backward` of an engine, and 1/G is no power of two: other bits would come out; or a
                part changes the loss, which it has not seen.
        """
        if self._dividing:
            return 1.0, True
        self._parts.check_untouched_loss()
        factor = 1.0 / (self._accumulation * multiplied("accumulation"))  # by an engine that shares the loss
        if math.frexp(factor)[0] != 0.5:
            raise ValueError(
                f"loss.backward() under an engine with gradient_accumulation_steps={self._accumulation}: to divide "
                "gradients where they arrive gives the bits of a loss that is divided only by powers of two. Call "
                "engine.backward(loss)."
            )
        return factor, not self._stays_local(last=self.is_gradient_accumulation_boundary())

    def _stays_local(self, *, last: bool) -> bool:
        """The gradients of this micro-batch wait for those of the last."""
        section = self.config.zero_optimization
        return (section.stage <= 1 or section.update_in_backward) and not last and not self._locally

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its step."""
        return self._in_step + 1 >= self._accumulation if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """From now on every micro-batch is the last of its step, or none is; None: every n-th again."""
        given: Any = is_boundary
        if getattr(given, "ndim", None) == 0:  # of torch or NumPy
            given = given.item()
        if given is not None and not (isinstance(given, int) and given in (0, 1)):
            from zoo.engine.numbers import shown

            raise ValueError(
                f"set_gradient_accumulation_boundary() got {shown(is_boundary)}; it takes True, False or None."
            )
        self._boundary = None if given is None else bool(given)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """Gradients of ``loss`` (the mean over this micro-batch), added to those of the step so far.

        At stages 0 and 1 only the boundary communicates; at 2 and 3 every micro-batch does, because no rank has room
        for gradients that are not its own.

        Args:
            loss: one element.
            retain_graph: as of ``torch.Tensor.backward``.
            scale_wrt_gas: divide by the number of micro-batches in a step.
        """
        self.training("backward()")
        given: Any = loss
        if not isinstance(given, torch.Tensor) or given.numel() != 1:
            raise ValueError(f"engine.backward got {kind_of(given)}; it takes the mean loss, a tensor of one element.")
        scale = 1.0 / self._accumulation if scale_wrt_gas else 1.0
        last = self.is_gradient_accumulation_boundary()
        self._losses.append(self.go_backward(loss, scale, last=last, retain_graph=retain_graph))

    def go_backward(self, loss: torch.Tensor, scale: float, *, last: bool, retain_graph: bool = False) -> torch.Tensor:
        """For runners: the gradients of ``loss * scale``; returns a copy of the loss, as parts have left it."""
        optimizer = self.training("backward")
        loss = self.final_loss(loss)
        local = self._stays_local(last=last)
        self._dividing = True
        try:
            with optimizer.no_sync() if local else _NOTHING, self._timed("backward"):
                divided = scaled_loss(loss, scale) if scale != 1.0 else loss
                go_backward(
                    optimizer.runtime.backward, divided, optimizer.scale_loss, retain_graph=retain_graph,
                    joins=not optimizer.config.update_in_backward,
                )  # fmt: skip
        finally:
            self._dividing = False
        return loss.detach().clone()  # the user's own may be changed, for a log

    def take_counts(self) -> tuple[int, int]:
        """For runners: samples and tokens of the latest micro-batch that was admitted, which do not count yet."""
        found, self._latest = self._latest, (0, 0)
        return found

    def note_counts(self, counts: Sequence[int]) -> None:
        """For runners: so many samples and tokens are part of this step."""
        self._counts = [before + here for before, here in zip(self._counts, counts, strict=True)]

    def final_loss(self, loss: torch.Tensor, *, ahead: int = 0) -> torch.Tensor:
        """For runners: the loss of a micro-batch, ``ahead`` of the one at hand, as parts have left it."""
        return self._parts.on_loss(loss, self._clock_at(ahead)) if self._parts.changes_loss else loss

    def count_micro_batch(self) -> None:
        """For runners: a micro-batch is over, and its step is not; the clock moves."""
        self._in_step += 1
        self.micro_steps += 1
        self._count()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside communicate at no stage; :meth:`step` is for afterwards."""
        with self.training("no_sync()").no_sync():
            outside, self._locally = self._locally, True
            try:
                yield
            finally:
                self._locally = outside

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro-batch; at the boundary, move the parameters and the learning rate, and clear the
        gradients.

        Args:
            lr_kwargs: arguments of the schedule's ``step``; refused where there is no schedule.
        """
        self.training("step()")
        check_arguments("step()", lr_kwargs, self._schedule)
        self._check_synchronous("step()")
        if self.is_gradient_accumulation_boundary():
            self._check_schedule(lr_kwargs or {})
            self._count()
            self._update(lr_kwargs or {}, micro_steps=1)
        else:
            self.count_micro_batch()

    # -- whole steps --------------------------------------------------------------------------------------------------

    def train_batch(
        self, iterator: Iterator[Any] | None = None, *, lr_kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:  # fmt: skip
        """One whole step on the next ``gradient_accumulation_steps`` micro-batches; the model returns its mean loss.

        Args:
            iterator: of batches: a tuple or list becomes positional arguments of the model, a mapping keyword
                arguments, anything else its one argument. The engine's own data loader, epoch after epoch, if not
                given.
            lr_kwargs: arguments of the schedule's ``step``.

        Returns:
            The loss, averaged over micro-batches and ranks: a float32 scalar tensor, the same on all ranks. A
            collective.
        """
        self.training("train_batch()")
        check_arguments("train_batch()", lr_kwargs, self._schedule)
        self._check_schedule(lr_kwargs or {})
        self._check_synchronous("train_batch()")
        if self._discard:
            self.zero_grad()
        self.check_between_steps("train_batch()")
        if not self.module.training:
            self.module.train()
        n = self._accumulation
        batches = self._own_batches() if iterator is None else iterator
        try:
            self._losses = list(self._runner.accumulate(batches, n, 1.0 / n))
            self._update(lr_kwargs or {})
        except BaseException as error:
            self._discard = True  # later: to drop gradients may wait for ranks that have not failed
            if isinstance(error, NoGraphError) and error.told:
                self._tell_in_step()
            raise
        return self._mean_loss()

    def _tell_in_step(self) -> None:
        """This rank has refused a loss, and comes to the step, where the others are: they are told, or have too."""
        optimizer = self.optimizer
        optimizer.runtime.backward.with_graph = 0  # nothing is updated
        with contextlib.suppress(CollectiveMismatchError):
            optimizer.step(tally=self._tally(), alike={"gradient_accumulation_steps": self._accumulation})

    def _check_synchronous(self, what: str) -> None:
        if self._locally:
            raise ValueError(
                f"It is illegal to call Engine.{what} inside no_sync context manager: {what} inside of no_sync() has "
                "this rank's gradients alone. Call it afterwards."
            )

    def eval_batch(self, batch: Any) -> Any:
        """The model's output for one batch, in evaluation mode and without gradients; nothing is averaged over ranks.

        At stage 3 a collective: all ranks evaluate the same number of batches.
        """
        with evaluating(self.module), torch.no_grad():
            return self._runner.evaluate(batch)

    def loss_of(self, batch: Any) -> torch.Tensor:
        """The loss of one batch of this rank, in evaluation mode and without gradients, of a model that returns it.

        Collective as :meth:`eval_batch`.
        """
        found: torch.Tensor = self.eval_batch(batch)
        return found

    def train(self, mode: bool = True) -> Engine:
        """The model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """The model's evaluation mode."""
        return self.train(False)

    # -- the update ---------------------------------------------------------------------------------------------------

    def _update(self, lr_kwargs: Mapping[str, Any], *, micro_steps: int = 0) -> None:
        """Everything between the last backward of a step and the first forward of the next."""
        self.read_outcome()
        optimizer, clock = self.optimizer, self.clock
        self._parts.before_update(clock)
        scale = optimizer.loss_scale
        with self._scaled_rates(self._parts.lr_factor(clock)), self._timed("update"):
            rates = tuple(self.get_lr())
            optimizer.step(tally=self._tally(), alike={"gradient_accumulation_steps": self._accumulation})
        optimizer.zero_grad()
        self._in_step = 0
        self.global_steps += 1
        self.micro_steps += micro_steps
        self._launch(optimizer, rates, scale, lr_kwargs)

    def _check_schedule(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError, before anything has changed, where the schedule's step needs what nobody gives."""
        schedule, asked = self._schedule, (self._schedule, tuple(given))
        if schedule is None or asked == self._asked:
            return
        try:
            inspect.signature(schedule.step).bind(**given)
        except TypeError as error:
            name = type(schedule).__name__
            raise ValueError(
                f"the step of the schedule {name} cannot be called with {dict(given)}: {error}. Give what it needs to "
                "engine.step(lr_kwargs={...}), after engine(...) and engine.backward(loss)."
            ) from None
        self._asked = asked

    @contextlib.contextmanager
    def _scaled_rates(self, factor: float) -> Iterator[None]:
        groups = self.optimizer.param_groups
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

    # -- what a script asks and says ----------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Micro-batches in one step."""
        return self._accumulation

    @property
    def train_batch_size(self) -> int:
        """Samples in one step, all ranks."""
        return int(self.config.train_micro_batch_size_per_gpu) * self._accumulation * self.batch_ranks

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches in a step, of the same size. All ranks, between two steps.

        Raises:
            ValueError: it is no multiple of the micro-batches of all ranks, or a step is under way.
        """
        from zoo.engine.numbers import whole

        unit = int(self.config.train_micro_batch_size_per_gpu) * self.batch_ranks
        size = whole("set_train_batch_size()", train_batch_size)
        if size < unit or size % unit:
            raise ValueError(
                f"set_train_batch_size({size}); it must be a multiple of {unit}, one micro-batch of "
                f"{self.config.train_micro_batch_size_per_gpu} on each of {self.batch_ranks} ranks."
            )
        self.check_between_steps("set_train_batch_size()")
        self.set_accumulation(size // unit)

    def set_accumulation(self, accumulation: int) -> None:
        """Another number of micro-batches in a step than the configuration's; checkpoints keep it."""
        from zoo.engine.numbers import whole

        self._accumulation, self.accumulation_was_set = whole("set_accumulation()", accumulation), True

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        self.read_outcome()
        return [float(group["lr"]) for group in self.training("get_lr()").param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the latest step's gradient before clipping; None where updates are made in backward."""
        return self.training("get_global_grad_norm()").grad_norm

    def register_state(self, name: str, state: Any) -> None:
        """Save and load ``state`` (with ``state_dict`` and ``load_state_dict``) in checkpoints, under ``name``."""
        if not callable(getattr(state, "state_dict", None)) or not callable(getattr(state, "load_state_dict", None)):
            raise ValueError(
                f"register_state({name!r}, a {type(state).__name__}); it needs state_dict() and load_state_dict(state)."
            )
        if not isinstance(name, str):
            from zoo.engine.numbers import shown

            raise ValueError(f"register_state() got {shown(name)}; a name is a text.")
        if name in self.registered:
            raise ValueError(f"register_state({name!r}, ...): the name is taken by a {type(self.registered[name])}.")
        self.registered[name] = state

    def check_between_steps(self, what: str) -> None:
        """Raise ValueError if there are gradients that no update has used."""
        if self._in_step or (self._optimizer is not None and self._optimizer.holds_gradients):
            raise ValueError(
                f"{what} in the middle of a step, after {self._in_step} of {self._accumulation} micro-batches: there "
                "are gradients that no update has used, and they are not part of a checkpoint. Call it at the "
                "boundary, or engine.zero_grad() first."
            )

    def zero_grad(self) -> None:
        """Drop the gradients of a step that has begun; its micro-batches do not count."""
        self.training("zero_grad()").zero_grad()
        self._discard = False
        self.restart_counts()

    def destroy(self) -> None:
        """Close sinks and parts, and give the model back as an ordinary one. Collective at stage 3."""
        if self._destroyed:
            return
        self._destroyed = True
        with contextlib.ExitStack() as stack:  # all of it, from the last on, whatever raises
            stack.callback(self.sharded.close)
            for close in self._parts.closers():
                stack.callback(close)
            stack.callback(self.feed.close)
            stack.callback(self.read_outcome)
            if self._saver is not None:
                stack.callback(self._saver.close)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _own_batches(self) -> Iterator[Any]:
        from zoo.engine.loader import RepeatingLoader

        if self.dataloader is None:
            raise ValueError(
                "train_batch() needs an iterator of batches, or data given to initialize(training_data=...)."
            )
        serial = getattr(self.dataloader, "serial", None)
        if self._batches is None or serial != self._serial:  # somebody else has gone through it, or moved it
            self._batches = iter(RepeatingLoader(self.dataloader))
        return self._numbered(self._batches)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches, remembering which iteration of the loader they are of."""
        for batch in batches:
            self._serial = getattr(self.dataloader, "serial", None)
            yield batch

    def forget_batches(self) -> None:
        """The loader was moved: the next step begins where it stands."""
        self._batches = None
