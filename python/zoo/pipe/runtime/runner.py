"""The runner of an engine whose model is a :class:`~zoo.pipe.PipelineModule`."""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo import registry
from zoo.comm import Communicator, raise_together
from zoo.pipe.lowering import Program, lower
from zoo.pipe.module import AXIS, PipelineModule
from zoo.pipe.runtime.batch import Batch, Hooks, expected_from
from zoo.pipe.runtime.channels import Channels, Meta, Name
from zoo.pipe.schedules.inference import forwards
from zoo.pipe.schedules.table import Computation, Kind, Table
from zoo.pipe.trees import flatten
from zoo.pipe.validate import check

__all__ = ["Event", "PipelineRunner"]

_OK, _EMPTY, _SHORT, _FAILED = range(4)
_VERBS = {Kind.BACKWARD: "backward", Kind.INPUT: "backward_inputs", Kind.WEIGHT: "backward_weights"}

KEPT = 256
"""Looks of batches of which it is remembered how their messages look."""


@dataclass(frozen=True)
class Event:
    """A computation that has run: when, in seconds since ``PipelineRunner.began_s``.

    To wait for a message is no part of it.
    """

    computation: Computation
    start_s: float
    end_s: float


@dataclass
class _Plan:
    """What this rank runs for some number of micro-batches."""

    table: Table
    program: Program
    last: dict[int, Computation]  # of each stage of this rank: its last backward


class PipelineRunner:
    """Carries the table of a schedule out: each batch through the stages, on all ranks of the pipeline.

    In the order of the table: forwards and backwards of this rank's stages within one window of the model
    (``zoo.zero``), so that stage 3 gathers weights once for several micro-batches as far as its budget goes, and
    messages to and from the neighbours beside them. Gradients are reduced in the last backward of a batch, or in each.

    Attributes:
        timeline: the computations of the latest batch, where ``times`` is set. began_s: its zero, as
            ``time.perf_counter`` of this rank; ranks of one Linux machine have this clock in common.
        additional_losses: means of the latest batch by name, of this rank's stages.
    """

    def __init__(self, *, engine: Any) -> None:
        module = engine.module
        if not isinstance(module, PipelineModule):
            raise ValueError(f"the pipeline runner got a {type(module).__name__}; the model is a PipelineModule.")
        self._engine, self._module = engine, module
        self._config = getattr(engine.config, "pipeline", None)
        with raise_together(engine.sharded.everyone if module.num_stages > 1 else None, "initialize"):
            self._schedule = self._fitting_schedule()
        self.times = False
        self.timeline: list[Event] = []
        self.began_s = 0.0
        self.additional_losses: dict[str, float] = {}
        self.batch_fn: Callable[[Any], Any] | None = None
        self._plans: dict[tuple[int, bool], _Plan] = {}
        self._metas: dict[tuple[int, bool], dict[Name, Meta]] = {}
        self._channels: Channels | None = None
        self._num_channels = 0
        self._pipe: Communicator | None = None
        self._everyone: Communicator | None = None
        self._fits = module.num_stages == 1 or not module.is_first_stage or not self._option("check_shapes", True)
        self._adds_losses = False  # some rank's stages have additional losses
        if module.num_stages > 1:
            self._pipe, self._everyone = _communicators(engine)

    def _fitting_schedule(self) -> Any:
        module = self._module
        stages = self._option("stages", None)
        if isinstance(stages, int) and stages != module.num_stages:
            raise ValueError(f"pipeline.stages = {stages}, and the model was cut for {module.num_stages} stages.")
        self._follow_checkpointing()
        schedule = self._chosen_schedule()
        placed = tuple(schedule.placement(module.num_stages))
        if placed != module.rank_of:
            raise ValueError(
                f"the schedule of the section pipeline has its stages on the ranks {placed}, and the model was cut for "
                f"{module.rank_of}: give PipelineModule(schedule=...) the same schedule."
            )
        return schedule

    # What the engine calls -------------------------------------------------------------------------------------------

    def accumulate(self, batches: Iterator[Any] | None, n: int, scale: float) -> Sequence[Any]:
        """See :class:`zoo.parts.Runner`. Collective over all ranks of the job.

        Raises:
            StopIteration: no rank has a micro-batch left.
            ValueError: some ranks have fewer than they need, and which.
        """
        engine = self._engine
        plan = self._plan(n, trains=True)
        loaded, metas, headers = self._load(batches, n, trains=True, labels=True)
        optimizer = engine.optimizer
        try:
            with engine.sharded.window(max_bytes=self._option("max_bytes", None)) as window:
                window.in_parts = any(
                    s.computation is not None and s.computation.kind is Kind.INPUT for s in plan.program
                )
                hooks = Hooks(
                    window=window, accumulate=engine.sharded.accumulate, computing=engine.passes.computing,
                    final_loss=lambda loss, m: engine.passes.final_loss(loss, ahead=m),
                    scale=scale * float(optimizer.loss_scale), reduce=self._reduces(plan),
                    timed=self._timing(),
                )  # fmt: skip
                batch = self._batch(hooks, loaded, metas)
                self._run(batch, plan, headers)
            engine.sharded.reduce()
        except BaseException as error:
            self._fail(error)
            raise
        for _ in range(n):
            engine.records.count_micro_batch()
        self._report(batch)
        return [batch.losses[m] for m in sorted(batch.losses)]

    def evaluate(self, batch: Any) -> Any:
        """The output of the last stage for one micro-batch there, None elsewhere. Collective over all ranks."""
        outputs, _ = self.forward(iter([batch]), 1, outputs=True, losses=False)
        return outputs[0] if outputs else None

    def forward(
        self, batches: Iterator[Any] | None, n: int, *, outputs: bool, losses: bool = True
    ) -> tuple[list[Any], list[torch.Tensor]]:  # fmt: skip
        """The outputs and losses (if asked for) of n micro-batches, on the last stage. No gradients. Collective."""
        plan = self._plan(n, trains=False)
        loaded, metas, headers = self._load(batches, n, trains=False, labels=losses)
        hooks = Hooks(
            window=None, computing=self._engine.passes.computing, final_loss=lambda loss, m: loss,
            reduce=lambda c: False, timed=self._timing(),
        )  # fmt: skip
        batch = self._batch(hooks, loaded, metas, keeps=outputs, computes_loss=losses)
        try:
            with torch.no_grad():
                self._run(batch, plan, headers)
        except BaseException as error:
            self._fail(error)
            raise
        return [batch.outputs[m] for m in sorted(batch.outputs)], [batch.losses[m] for m in sorted(batch.losses)]

    def drives(self, n: int) -> list[dict[str, Any]]:
        """What a training batch of n micro-batches does to the window of this rank's model, in order: arguments of
        :class:`zoo.zero.Drive`."""
        plan = self._plan(n, trains=True)
        reduces = self._reduces(plan)
        found: list[dict[str, Any]] = []
        for step in plan.program:
            c = step.computation
            if c is None:
                continue
            key = c.stage, c.micro_batch
            if c.kind is Kind.FORWARD:
                found.append({"verb": "forward", "key": key, "like": key, "modules": self._module.names_of(c.stage)})
            else:
                found.append({"verb": _VERBS[c.kind], "key": key, "reduce": reduces(c)})
        return found

    def sent_bytes(self, n: int) -> int | None:
        """Bytes of activations and gradients that this rank sends in a training batch of n micro-batches that looks
        like the latest one; None as long as there was none."""
        known = [metas for (_, trains), metas in self._metas.items() if trains]
        if not known and self._module.num_stages > 1:
            return None
        total = 0
        for step in self._plan(n, trains=True).program:
            for transfer in step.transfers:
                if transfer.sends:
                    stage = transfer.stage - (transfer.what == "gradient")
                    meta = known[-1].get(("activation", stage, transfer.micro_batch))
                    if meta is None:
                        return None
                    total += meta.num_bytes(gradients=transfer.what == "gradient")
        return total

    def forget_shapes(self) -> None:
        """What is known of the shapes of activations is forgotten. On all ranks."""
        self._metas.clear()

    def broadcast(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the last stage, on all pipeline ranks. Collective over these."""
        if self._pipe is not None:
            self._pipe.broadcast(value, src=self._module.rank_of[-1]).wait()
        return value

    def close(self) -> None:
        """Destroy the channels. On all pipeline ranks."""
        if self._channels is not None:
            self._channels.close()
            self._channels = None

    # Inside ----------------------------------------------------------------------------------------------------------

    def _option(self, name: str, default: Any) -> Any:
        return getattr(self._config, name, default)

    def _reduces(self, plan: _Plan) -> Callable[[Computation], bool]:
        """Whether a backward reduces: the last one of a batch, or each that gives gradients of weights."""
        each = self._option("reduce", "once") == "each"
        last = plan.last[max(plan.last, key=lambda s: self._place(plan, s))]
        return lambda c: c.kind is not Kind.INPUT and (each or c == last)

    @staticmethod
    def _place(plan: _Plan, stage: int) -> int:
        return next(i for i, step in enumerate(plan.program) if step.computation == plan.last[stage])

    def _plan(self, n: int, *, trains: bool) -> _Plan:
        found = self._plans.get((n, trains))
        if found is None:
            module = self._module
            table = self._schedule.build(module.num_stages, n) if trains else forwards(module.rank_of, n)
            programs = lower(table)
            check(table)
            program = programs[module.stage_id]
            closing = (Kind.BACKWARD, Kind.WEIGHT)
            last = {
                step.computation.stage: step.computation for step in program
                if step.computation is not None and step.computation.kind in closing
            }  # fmt: skip
            found = self._plans[n, trains] = _Plan(table, program, last)
        return found

    def _follow_checkpointing(self) -> None:
        """What the section says of activations, in place of what the model says."""
        if interval := self._option("activation_checkpoint_interval", 0):
            self._module.activation_checkpoint_interval = interval
        if self._option("use_reentrant", True) is False:
            self._module.activation_checkpoint_func = registry.get("activation_checkpoint", "non_reentrant")

    def _chosen_schedule(self) -> Any:
        choice = self._option("schedule", None)
        if choice is None:
            own = self._module.schedule  # which may ask what is kept for backward
            return self._module.adapted(own) if self._option("activation_checkpoint_interval", 0) else own
        return self._module.adapted(registry.build("pipe_schedule", choice.type, choice.params))

    def _batch(self, hooks: Hooks, loaded: Any, metas: dict[Name, Meta], **more: bool) -> Batch:
        engine, module = self._engine, self._module
        ranks, done = engine.batch_ranks, engine.micro_steps
        return Batch(
            module, self._open_channels(), hooks, micro_batches=loaded, metas=metas, device=engine.device,
            offset=done * ranks + engine.batch_rank, stride=ranks, **more,
        )  # fmt: skip

    def _run(self, batch: Batch, plan: _Plan, headers: bool) -> None:
        if self._channels is not None:
            self._channels.begin(expected_from(plan.program), batch.meta_of, headers=headers)
        batch.run(plan.program)

    def _open_channels(self) -> Channels | None:
        if self._pipe is None:
            return None
        if self._channels is None:
            ranks = self._module.rank_of
            edges = [edge for a, b in itertools.pairwise(ranks) if a != b for edge in ((a, b), (b, a))]
            self._channels = Channels(self._pipe, edges, self._engine.device, self._num_channels)
        return self._channels

    def _close_channels(self) -> None:
        channels, self._channels = self._channels, None
        self._metas.clear()
        if channels is not None:
            channels.abandon()

    def _timing(self) -> Callable[[Computation], Any] | None:
        if not self.times:
            return None
        self.timeline, self.began_s = [], time.perf_counter()
        begun = self.began_s

        @contextlib.contextmanager
        def timed(computation: Computation) -> Iterator[None]:
            start = time.perf_counter()
            yield
            self.timeline.append(Event(computation, start - begun, time.perf_counter() - begun))

        return timed

    def _fail(self, error: BaseException) -> None:
        """A batch ended with an exception: the others are told, and what is in flight is lost."""
        if self._pipe is None:
            return
        self._pipe.report_failure(error)
        self._close_channels()

    # Data ------------------------------------------------------------------------------------------------------------

    def _load(
        self, batches: Iterator[Any] | None, n: int, *, trains: bool, labels: bool
    ) -> tuple[Any, dict[Name, Meta], bool]:  # fmt: skip
        """The micro-batches (None where no stage needs them), what is known of messages, and whether headers travel.

        All ranks agree on whether all of them have their data; and those of a pipeline on what the data look like.
        """
        engine, module = self._engine, self._module
        needed = module.is_first_stage or module.is_last_stage
        if not needed and getattr(batches, "empty", False):
            batches = None
        loaded: list[tuple[Any, Any]] = []
        counted = [0, 0]
        error: BaseException | None = None
        status = _OK
        signature = 0
        try:
            if batches is None and needed:
                which = "first" if module.is_first_stage else "last"
                raise ValueError(f"the {which} stage of a pipeline needs batches, and this rank got none.")
            for m in range(n):
                if batches is None:
                    break
                loaded.append(self._admit(next(batches), m, trains, labels))
                counted = [a + b for a, b in zip(counted, engine.records.take_counts(), strict=True)]
            if loaded and not self._fits:
                self._check_fit(loaded[0][0])
            signature = zlib.crc32(repr([_looks(inputs) for inputs, _ in loaded]).encode()) if loaded else 0
        except StopIteration:
            status = _SHORT if loaded else _EMPTY
        except Exception as raised:
            status, error = _FAILED, raised
        if self._everyone is not None:
            status, signature, counted = self._exchange(status, signature, counted, n, len(loaded), error)
        elif error is not None:
            raise error
        if status == _EMPTY:
            raise StopIteration(
                f"the data ended before a batch of {n} micro-batches, on all ranks; nothing was done. Take as many "
                "steps as there are batches, or give an iterator that begins anew (zoo.engine.RepeatingLoader)."
            )
        if status == _SHORT:
            raise ValueError(f"the data ended after {len(loaded)} of {n} micro-batches of this batch.")
        if trains:
            engine.records.note_counts(counted)
        key = hash((signature, n, module.training)), trains
        found = None if self._option("dynamic_shapes", False) else self._metas.pop(key, None)
        self._metas[key] = {} if found is None else found  # the latest one, on all ranks
        if len(self._metas) > KEPT:
            del self._metas[next(iter(self._metas))]
        return loaded if needed else None, self._metas[key], found is None

    def _check_fit(self, x: Any) -> None:
        """Raise ValueError where the layers do not fit each other, before the first batch is sent through them."""
        text = self._module.misfit(x)
        if text is not None:
            raise ValueError(text)
        self._fits = True
        self._module.forget_outlines()

    def _admit(self, batch: Any, m: int, trains: bool, labels: bool) -> tuple[Any, Any]:
        if self.batch_fn is not None:
            batch = self.batch_fn(batch)
        if not isinstance(batch, tuple | list):
            batch = (batch,)
        args, kwargs = self._engine.passes.admit(tuple(batch), {}, trains=trains, ahead=m)
        if kwargs:
            raise ValueError(
                f"engine parts gave the keyword arguments {', '.join(kwargs)}; layers of a pipeline take one argument."
            )
        if self._module.loss_fn is None:
            return (args[0] if len(args) == 1 else args), None
        if len(args) == 1 and isinstance(args[0], dict) and "labels" in args[0]:
            given = dict(args[0])
            return given, given.pop("labels")
        if len(args) == 1 and not labels:
            return args[0], None
        if len(args) != 2:
            raise ValueError(
                f"a batch of {len(args)} parts; with a loss_fn it is (inputs, labels), or a dict with 'labels'. "
                "set_batch_fn brings others to that form."
            )
        return args[0], args[1]

    def _exchange(
        self, status: int, signature: int, counted: list[int], n: int, num_loaded: int, error: BaseException | None
    ) -> tuple[int, int, list[int]]:
        """What all ranks say of their data; raises on all of them where one has none."""
        everyone = self._everyone
        if everyone is None:
            raise AssertionError("an exchange without other ranks.")
        device = self._engine.device
        mine = torch.tensor(
            [
                status,
                signature,
                *counted,
                num_loaded,
                self._adds_losses,
                self._num_channels,
                self._channels is not None,
            ],
            dtype=torch.int64,
            device=device,
        )
        found = mine.new_empty(everyone.size * mine.numel())
        everyone.all_gather(found, mine, label="data of a batch").wait()
        rows = found.view(everyone.size, -1).tolist()
        if not all(row[7] for row in rows):  # at first, and where a batch failed on some ranks
            self._close_channels()
            self._num_channels = 1 + max(row[6] for row in rows)
        failed = [i for i, row in enumerate(rows) if row[0] == _FAILED]
        if failed:
            said = everyone.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            text = "; ".join(f"rank {everyone.ranks[i]} says {said[i]}" for i in failed)
            raise RuntimeError(f"nothing of this batch was sent: {text}")
        pulling = [row for row in rows if row[4] or row[0] != _OK]
        if pulling and all(row[0] == _EMPTY for row in pulling):
            return _EMPTY, 0, counted
        short = {everyone.ranks[i]: row[4] for i, row in enumerate(rows) if row[0] in (_SHORT, _EMPTY)}
        if short:
            text = ", ".join(f"rank {rank} has {num}" for rank, num in short.items())
            raise ValueError(
                f"the data ended in the middle of a batch of {n} micro-batches a rank: {text}. Leave the last, smaller "
                "batch out (drop_last), or go on with the next epoch (RepeatingLoader)."
            )
        self._adds_losses = any(row[5] for row in rows)  # those of the batch before
        first = rows[self._first_row]
        return _OK, first[1], first[2:4]

    @property
    def _first_row(self) -> int:
        """Where the rank with the first stage of this pipeline is among all."""
        if self._pipe is None or self._everyone is None:
            return 0
        return list(self._everyone.ranks).index(self._pipe.ranks[self._module.rank_of[0]])

    def _report(self, batch: Batch) -> None:
        """Means of additional losses over micro-batches, layers and the ranks that have them."""
        mine: dict[str, tuple[float, int]] = {}
        found: dict[str, list[torch.Tensor]] = {}
        for attached in batch.attached:
            for name, values in attached.values.items():
                found.setdefault(name, []).extend(value.reshape(()).float() for value in values)
        for name, values in found.items():
            mine[name] = float(torch.stack(values).sum()), len(values)
        for name, value in (self._module.get_additional_losses() or {}).items():
            mine[name] = float(value), 1
        everywhere = [mine]
        if self._everyone is not None:
            begins, self._adds_losses = self._adds_losses, bool(mine)
            everywhere = self._everyone.all_gather_object(mine) if begins else []
        self.additional_losses = {}
        for name in sorted({name for there in everywhere for name in there}):
            sums, counts = zip(*(there[name] for there in everywhere if name in there), strict=True)
            self.additional_losses[name] = sum(sums) / sum(counts)
            self._engine.report(f"pipeline/{name}", self.additional_losses[name])


def _communicators(engine: Any) -> tuple[Communicator, Communicator]:
    """The ranks of this pipeline, and all of them."""
    if engine.mesh is None:
        raise ValueError(
            "a pipeline of several stages needs a mesh with an axis 'pipe': initialize makes it from the model's "
            'topology, or from the configuration: {"mesh": {"axes": {"pipe": 2, "data": -1}}}.'
        )
    return Communicator.of_axes(engine.mesh, [AXIS], log=engine.comm.log), engine.sharded.everyone


def _looks(inputs: Any) -> Any:
    tensors, outline = flatten(inputs, "the inputs of a batch")
    return outline, [(tuple(t.shape), str(t.dtype)) for t in tensors]
