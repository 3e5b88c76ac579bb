"""The engine: forward, backward and step with accumulation, and what is told about each step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from zoo.config import Config
from zoo.engine.attachments import Parts
from zoo.engine.batches import OwnBatches, evaluating
from zoo.engine.checkpoint.checkpoints import Checkpoints
from zoo.engine.records import Boundary, Records
from zoo.engine.steps import Passes, Update, rates_of
from zoo.parts import Clock, Runner, StepRecord
from zoo.registry import Registry
from zoo.shard import ShardedModel
from zoo.shard.runtime.without_graph import NoGraphError
from zoo.zero import ZeroOptimizer

if TYPE_CHECKING:
    from zoo.cost import Forecast, Hardware, Software, Transformer
    from zoo.engine.timing import Stopwatch
    from zoo.monitor import Feed

P = ParamSpec("P")
R = TypeVar("R")


def _of(collaborator: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """What a collaborator does, as a method of the engine: with its name, arguments and docstring, written once.

    A function like any other in the class, so that help(), subclasses and type checkers see a method; where another
    object was put in the collaborator's place, it is that one which is called.
    """

    @functools.wraps(method)
    def call(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = getattr(getattr(self, collaborator), method.__name__)(*args, **kwargs)
        return found

    return call


class Engine:
    """A model in training, or in evaluation only (``optimizer`` is None).

    ``loss = engine(x, y)``, ``engine.backward(loss)``, ``engine.step()`` for each micro-batch: parameters move once in
    ``gradient_accumulation_steps`` micro-batches, the *boundary*. Or :meth:`train_batch`, which does one whole step.
    ``loss.backward()`` leaves the same bits as ``engine.backward(loss)``, without a loss in the record: what arrives at
    parameters is divided by the number G of micro-batches, whatever it came through, and nothing on the way is. Where G
    is no power of two that would round otherwise, and is refused; so it is where a part changes the loss.

    Attributes:
        module: the model. config: the configuration. optimizer, dataloader, lr_scheduler: as ``initialize`` returned
        them, each None where there is none.
        comm: the communicator of the data-parallel ranks. mesh: the DeviceMesh of the job, None without one.
        parts: what takes part in training, by name. feed: what takes records to sinks.
        passes, boundary, records, checkpoints: what does the work: forward and backward of a micro-batch; where steps
        end; counts and records; saving and loading. Runners use the first three.
    """

    optimizer: ZeroOptimizer

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
        self.config, self.module, self.comm, self.mesh = config, module, sharded.comm, mesh
        self.optimizer = optimizer  # type: ignore[assignment]
        self._trains, self._destroyed = optimizer is not None, False
        self.sharded, self.batch_ranks, self.batch_rank = sharded, batch_ranks, batch_rank
        self._parts, self.parts, self.feed = parts, parts.all, feed
        first = next(module.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")
        watch: Stopwatch | None = None
        if config.wall_clock_breakdown:
            from zoo.engine.timing import Stopwatch

            watch = Stopwatch()
        self.boundary, self._batches = Boundary(config, optimizer), OwnBatches()
        self.records = Records(
            config=config, sharded=sharded, optimizer=optimizer, boundary=self.boundary, parts=parts, feed=feed,
            watch=watch, device=self.device, batch_ranks=batch_ranks,
        )  # fmt: skip
        self.passes = Passes(
            module, training=self.training, parts=parts, records=self.records, boundary=self.boundary,
            device=self.device, input_dtype=input_dtype, autocast_dtype=autocast_dtype, watch=watch,
        )  # fmt: skip
        self._update = Update(parts=parts, records=self.records, boundary=self.boundary, timed=self.passes.timed)
        self.checkpoints = Checkpoints(
            module, sharded, config=config, optimizer=optimizer, training=self.training,
            records=self.records, boundary=self.boundary, batches=self._batches, parts=self.parts,
        )  # fmt: skip
        if optimizer is not None:
            optimizer.runtime.backward.arriving = self.passes.arriving
        name = getattr(module, "engine_runner", "plain")
        self._runner: Runner = registry.build("runner", name, engine=self)
        if config.asks_for("compile"):
            self.compile()

    def training(self, what: str) -> ZeroOptimizer:
        """The optimizer; raises ValueError where ``what`` cannot be done, without one or after :meth:`destroy`."""
        if self._destroyed:
            raise ValueError(f"{what} after destroy(): this engine is no more. Call initialize again.")
        if self.checkpoints.not_loaded:
            raise ValueError(
                f"{what} of an engine that is not loaded: {self.checkpoints.not_loaded} Load another checkpoint."
            )
        if not self._trains:
            raise ValueError(
                f"{what} of an engine without optimizer, which only evaluates. Give initialize an optimizer, or the "
                "configuration an optimizer section."
            )
        return self.optimizer

    # -- one micro-batch after the other ------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; tensors come to its device. They keep their dtype, but where ``auto_cast`` is on."""
        self.checkpoints.need_weights("forward()")
        trains = self._trains and torch.is_grad_enabled()
        if trains and self.boundary.broken:
            self.zero_grad()
        if trains and self.module.training:
            self._batches.use(args, kwargs)
        return self.passes.forward(args, kwargs, trains=trains)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its step."""
        return self.boundary.reached()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """From now on every micro-batch is the last of its step, or none is; None: every n-th again."""
        self.boundary.fix(is_boundary)

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
            from zoo.engine.numbers import kind_of

            raise ValueError(f"engine.backward got {kind_of(given)}; it takes the mean loss, a tensor of one element.")
        scale = 1.0 / self.boundary.micro_batches if scale_wrt_gas else 1.0
        last = self.boundary.reached()
        self.records.losses.append(self.passes.backward(loss, scale, last=last, retain_graph=retain_graph))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside communicate at no stage; :meth:`step` is for afterwards."""
        with self.training("no_sync()").no_sync(), self.boundary.locally():
            yield

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro-batch; at the boundary, move the parameters and the learning rate, and clear the
        gradients.

        Args:
            lr_kwargs: arguments of the schedule's ``step``; refused where there is no schedule.
        """
        optimizer = self.training("step()")
        self._update.check("step()", lr_kwargs)
        self.boundary.check_synchronous("step()")
        if self.boundary.reached():
            self._update.check_schedule(lr_kwargs)
            self.records.note_counts(self.records.take_counts())
            self._update.run(optimizer, lr_kwargs, micro_steps=1)
        else:
            self.records.count_micro_batch()

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
        optimizer = self.training("train_batch()")
        self._update.check("train_batch()", lr_kwargs)
        self._update.check_schedule(lr_kwargs)
        self.boundary.check_synchronous("train_batch()")
        if self.boundary.broken:
            self.zero_grad()
        self.boundary.check_between_steps("train_batch()")
        if not self.module.training:
            self.module.train()
        n = self.boundary.micro_batches
        batches = self._batches.next_ones() if iterator is None else iterator
        try:
            self.records.losses = list(self._runner.accumulate(batches, n, 1.0 / n))
            self._update.run(optimizer, lr_kwargs)
        except BaseException as error:
            self.boundary.fail()
            if isinstance(error, NoGraphError) and error.told:
                self._update.refuse(optimizer)
            raise
        return self.records.mean_loss()

    def eval_batch(self, batch: Any) -> Any:
        """The model's output for one batch, in evaluation mode and without gradients; nothing is averaged over ranks.

        At stage 3 a collective: all ranks evaluate the same number of batches.
        """
        self.checkpoints.need_weights("eval_batch()")
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

    # -- what a script asks and says ----------------------------------------------------------------------------------

    @property
    def accumulation(self) -> int:
        """Micro-batches in one step."""
        return self.boundary.micro_batches

    @property
    def train_batch_size(self) -> int:
        """Samples in one step, all ranks."""
        if self.config.asks_for("elasticity"):  # shares may be uneven: no product
            return int(self.config.train_batch_size)
        return int(self.config.train_micro_batch_size_per_gpu) * self.boundary.micro_batches * self.batch_ranks

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches in a step, of the same size. All ranks, between two steps.

        Raises:
            ValueError: it is no multiple of the micro-batches of all ranks, or a step is under way.
        """
        from zoo.engine.numbers import whole

        if self.config.asks_for("elasticity"):
            raise ValueError(
                "set_train_batch_size() of an elastic job, whose loader deals shares of "
                f"{self.config.train_batch_size}; change train_batch_size, and initialize anew."
            )
        unit = int(self.config.train_micro_batch_size_per_gpu) * self.batch_ranks
        size = whole("set_train_batch_size()", train_batch_size)
        if size < unit or size % unit:
            raise ValueError(
                f"set_train_batch_size({size}); it must be a multiple of {unit}, one micro-batch of "
                f"{self.config.train_micro_batch_size_per_gpu} on each of {self.batch_ranks} ranks."
            )
        self.boundary.check_between_steps("set_train_batch_size()")
        self.boundary.change(size // unit)

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        self.records.read_outcome()
        return list(rates_of(self.training("get_lr()")))

    def get_global_grad_norm(self) -> float | None:
        """The norm of the latest step's gradient before clipping; None where updates are made in backward."""
        return self.training("get_global_grad_norm()").grad_norm

    def forecast(
        self, num_micro_batches: int | None = None, *, hardware: str | Hardware | None = None,
        software: str | Software = "eager", seq: int | None = None, transformer: Transformer | None = None,
    ) -> Forecast:  # fmt: skip
        """What a step will cost this rank: bytes that it holds, sends and moves, and seconds where hardware is given.

        Bytes come from the plan of the gathers and reductions that the runtime makes; for a pipeline that of its
        schedule, whose messages are counted as "send". They are exact after two steps that were like the next one;
        before the first, units are taken to be called one after the other, and messages are not known. Left out are the
        numbers of the record that ranks exchange once a step, of a pipeline those on which it agrees too, and what
        layers of the model send themselves.

        Seconds are those of a transformer of that shape (:func:`zoo.cost.step_time`).

        Args:
            num_micro_batches: of a step; by default ``gradient_accumulation_steps``.
            hardware: by name ("h100"), a file, or what :func:`zoo.cost.read_hardware` returned.
            software: by name, eager or lean, or its numbers.
            seq: tokens of a sequence; by default those of the batches so far.
            transformer: the model's shape; by default it is read from ``model.config``, as models of transformers have
                one.

        Raises:
            ValueError: the engine has no optimizer; or seconds are asked for, and the shape is not known, or of what
                the job does they cannot be forecast (experts, offloading, further axes of the mesh).
        """
        from zoo.engine.forecasting import forecast_of

        return forecast_of(
            self, self._runner, num_micro_batches, hardware=hardware, software=software, seq=seq,
            transformer=transformer,
        )  # fmt: skip

    @property
    def global_steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self.records.global_steps

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self.records.global_steps = value

    @property
    def micro_steps(self) -> int:
        """Micro-batches of all steps."""
        return self.records.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.records.micro_steps = value

    @property
    def record(self) -> StepRecord | None:
        """The latest step's; None before the first. Waits for the device where the step has not."""
        return self.records.record

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradient was not finite."""
        return self.records.skipped_steps

    @property
    def global_samples(self) -> int:
        """Of all steps and ranks."""
        return self.records.global_samples

    @property
    def global_tokens(self) -> int:
        """Of all steps and ranks."""
        return self.records.global_tokens

    @property
    def clock(self) -> Clock:
        """Where training stands; the same on all ranks."""
        return self.records.clock

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule, None without one; it has seen the latest step."""
        self.records.read_outcome()
        return self.records.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.records.schedule = schedule

    @property
    def dataloader(self) -> Any:
        """What ``initialize`` returned; :meth:`train_batch` takes its batches from it."""
        return self._batches.loader

    @dataloader.setter
    def dataloader(self, loader: Any) -> None:
        self._batches.loader = loader
        self._batches.forget()
        self._batches.follow()

    report = _of("records", Records.report)
    request_stop = _of("records", Records.request_stop)

    def compile(
        self, backend: Any = None, *, whole: bool | None = None, schedule: Any = None, **options: Any
    ) -> None:  # fmt: skip
        """Compile the model by torch.compile, at every stage, at any time; what is not said is as in the section
        ``compile``.

        Unit by unit what gathers and reduces runs between the graphs, and equal units (the blocks of a model) have one;
        other parts of the model run as they are. As a whole all of that is inside of one graph, where the model can be
        one (:func:`zoo.compile.compile_whole`).

        Args:
            backend, options: as of ``torch.compile``; of a whole graph "inductor" or "aot_eager".
            whole: one graph. schedule: of its passes, see :func:`zoo.compile.validate_schedule`.

        Raises:
            ValueError: there are no such options, or no such backend; a schedule without a whole graph; or see
                :func:`zoo.compile.compile_whole`.
        """
        from zoo.compile.config import check_backend, wrong_arguments

        section = self.config.compile
        where = "compile.backend = {!r}" if backend is None else "engine.compile(backend={!r})"
        backend = section.backend if backend is None else backend
        options = {**section.kwargs, **options}
        for wrong in wrong_arguments(options, "engine.compile()"):
            raise ValueError(f"{wrong}.")
        check_backend(backend, where.format(backend))
        if not (section.deepcompile if whole is None else whole):
            if schedule is not None:
                raise ValueError(
                    "engine.compile(schedule=) without whole=True or compile.deepcompile: passes run over the graph of "
                    "all of the model."
                )
            self.sharded.runtime.compiled.compile_units(backend=backend, **options)
            return
        from zoo.compile.contract import DEFAULT
        from zoo.compile.whole import compile_whole

        schedule = section.schedule if schedule is None else schedule
        schedule = [(0, [*DEFAULT, *(section.passes or ())])] if schedule is None else schedule
        self.sharded.runtime.contexts.count_by(self.records.num_updates)
        compile_whole(self.sharded, backend, schedule=schedule, **options)

    def zero_grad(self) -> None:
        """Drop the gradients of a step that has begun; its micro-batches do not count, but for one whose backward is to
        come."""
        self.training("zero_grad()").zero_grad()
        self.records.restart_step()

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
            stack.callback(self.records.read_outcome)
            stack.callback(self.checkpoints.close)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    save_checkpoint = _of("checkpoints", Checkpoints.save_checkpoint)
    wait_for_checkpoint = _of("checkpoints", Checkpoints.wait_for_checkpoint)
    load_checkpoint = _of("checkpoints", Checkpoints.load_checkpoint)
    save_16bit_model = _of("checkpoints", Checkpoints.save_16bit_model)
    module_state_dict = _of("checkpoints", Checkpoints.module_state_dict)
    load_module_state_dict = _of("checkpoints", Checkpoints.load_module_state_dict)
    register_state = _of("checkpoints", Checkpoints.register_state)
