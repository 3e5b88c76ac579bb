"""A model that runs as one graph, where it can."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from zoo.comm import Communicator, RankFailedError, agree_none_failed
from zoo.compile.backend import Backend, alive, compile_graph
from zoo.compile.capture import NotWholeError, capture
from zoo.compile.config import wrong_arguments
from zoo.compile.contract import DEFAULT, Registered, Schedule, validate_schedule
from zoo.compile.ops import executing, mark
from zoo.compile.options import settings_of
from zoo.compile.plan import GraphPlan
from zoo.parts.hooks import HIDDEN, is_own_hook

if TYPE_CHECKING:
    from zoo.shard.runtime.contexts import Context
    from zoo.shard.runtime.hooks import Runtime
    from zoo.shard.sharded import ShardedModel

_log = logging.getLogger("zoo.compile")
_graph_task = torch._C._current_graph_task_id
TRIES = 3
"""Calls that may be no graph and be tried again."""
_ENGINE, *_OTHERS = (f"{Path(__file__).parents[1]}/{name}/" for name in ("engine", "shard", "compile"))
_UNTOLD = (_ENGINE, *_OTHERS, str(Path(torch.__file__).parent))
"""Where a reason is not looked for: whoever reads it did not write that."""
_LEVELS = ("debug", "info", "warning", "error", "critical", "log")


class WholeGraph:
    """Stands where ``module.compile()`` puts the compiled call.

    What cannot be a graph is carried by the hooks, with the reason in the log, once. Ranks decide that alone: they
    issue the same collectives either way. With ``fullgraph=True`` they agree before the first of them.

    Args:
        runtime: of the model. model: all of it. backend: makes code of the graphs.
        schedule: which passes run over them, from which update on; see :func:`~zoo.compile.validate_schedule`.
        options: of ``torch.compile``: ``dynamic``, ``mode``, ``options``, ``fullgraph``.
        comm: the ranks that are told where, with ``fullgraph=True``, a call is no graph on one of them.

    Attributes:
        reasons: why calls were not whole graphs, by whether the model trained and whether gradients were asked for.
        plans: of the graphs that there are.
        on_segment: is called where a graph begins and after each event: its plan, whether it is that of backward, and
            the number of the segment that comes now (:mod:`zoo.compile.profile`). None: nobody is told.
    """

    def __init__(
        self, runtime: Runtime, model: nn.Module, *, backend: Backend = "inductor",
        schedule: Schedule = ((0, DEFAULT),), options: Mapping[str, Any] | None = None,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.runtime, self._model, self._backend = runtime, model, backend
        self._options, self._schedule = dict(options or {}), validate_schedule(schedule)
        for wrong in wrong_arguments(self._options, "compile_whole()"):
            raise ValueError(f"{wrong}.")
        self._must = self._options.pop("fullgraph", False)
        self._comm, self._agreed = comm if self._must else None, True
        self._settings = settings_of(backend, self._options.pop("mode", None), self._options.pop("options", None))
        self.reasons: dict[tuple[bool, bool], str] = {}
        self.plans: list[GraphPlan] = []
        self.on_segment: Callable[[GraphPlan, bool, int], None] | None = None
        self._refused = 0  # times that something was no graph and may be one later
        self._order = torch.zeros(1, dtype=torch.int64)
        # By context: of each graph that ran in it, the numbers that calls have there.
        self._calls: weakref.WeakKeyDictionary[Context, list[dict[int, int]]] = weakref.WeakKeyDictionary()
        self._tracing: dict[str, Any] = {
            # A graph ends where a model logs: what it says in a graph is left out.
            "ignore_logger_methods": {log for name, log in vars(logging.Logger).items() if name.startswith(_LEVELS)},
            "skip_nnmodule_hook_guards": False,  # hooks that come later are seen
        }
        self._use(self._schedule[0][1])
        runtime.compiled.use_whole_graph(self, mark)

    def _use(self, passes: tuple[Registered, ...]) -> None:
        """From now on these run: torch compiles anew."""
        self._passes = passes
        make = weakref.WeakMethod(self._make)  # torch keeps every backend for good

        def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:  # another object each time
            return alive(make)(passes, graph, inputs)

        self._compiled = torch.compile(_call_of(self._model), backend=backend, fullgraph=True, **self._options)

    def _make(self, passes: Sequence[Registered], graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = GraphPlan(capture(graph, inputs, self.runtime))
        run = weakref.WeakMethod(self._run)
        made = compile_graph(
            graph, inputs, plan, backend=self._backend, passes=passes, settings=self._settings,
            run=lambda *args, backward: alive(run)(*args, backward=backward),
        )  # fmt: skip
        self.plans.append(plan)
        return made

    @torch.compiler.disable(reason=HIDDEN)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        if _graph_task() != -1 or torch.compiler.is_compiling() or torch._dynamo.config.disable:
            return self._by_hooks(args, kwargs)
        if len(self._schedule) > 1:
            updates = self.runtime.contexts.num_updates()
            passes = next(p for step, p in reversed(self._schedule) if step <= updates)
            if passes is not self._passes:
                self._use(passes)
                self.reasons.clear()  # these may be of what ran before
        mode = self._model.training, torch.is_grad_enabled()
        self._agreed = not self._communicates(gradients=mode[1])
        if mode not in self.reasons and (why := self._why_not(gradients=mode[1])) is not None:
            self._note(mode, NotWholeError(why))
        if mode in self.reasons:
            self._agree()
            return self._by_hooks(args, kwargs)
        if (cast := self.runtime.cast_inputs) is not None:
            args, kwargs = cast(self._model, args, kwargs) or (args, kwargs)
        try:
            with self.runtime.compiled.in_whole_graph(), torch._dynamo.config.patch(**self._tracing):
                output = self._compiled(*args, **kwargs)
        except BaseException as error:
            of_others = isinstance(error, RankFailedError)
            if self.runtime.compiled.ran or of_others or not isinstance(error, Exception):
                self._agree(error)
                self.runtime.abandon_graph(error)
                raise
            refused = error  # torch could not trace it: it says so by exceptions of any class
        else:
            self._agree()  # torch may have run the model as it is
            self.runtime.end_graph(output)
            return output
        if self._must:
            self._note(mode, refused)
            self._agree()
            return self._by_hooks(args, kwargs)
        output = self._by_hooks(args, kwargs)  # a mistake in this very call is raised by it, as what it is
        self._note(mode, refused)
        return output

    def _communicates(self, *, gradients: bool) -> bool:
        """Whether other ranks may wait for this one in this call or in its backward."""
        return self._comm is not None and (gradients or any(b.partitioned for b in self.runtime.buckets))

    def _agree(self, error: BaseException | None = None) -> None:
        """Once in a call that must be a graph: go on only if it is one on all ranks, or may be carried by hooks."""
        if not self._agreed:
            self._agreed = True
            agree_none_failed(self._comm, "a call that must be a whole graph", error)

    def _why_not(self, *, gradients: bool) -> str | None:
        """What of this call no graph could do."""
        first = next(iter(self._model._forward_pre_hooks.values()), None)
        if self.runtime.cast_inputs is not None and first is not None and not is_own_hook(first):
            return "a forward pre-hook of the model gets its inputs before they are cast"  # a graph gets them cast
        if not gradients:
            return None
        if getattr(self.runtime.window, "in_parts", False):
            return "its backward comes in two parts (a pipeline's schedule), and that of a graph has one"
        if self.runtime.demand is not None:
            return "ignore_unused_parameters=False: a graph gives parameters that are not used gradients of zeros"
        if (watched := self.runtime.compiled.watched_gradient()) is not None:
            return f"a hook waits for the gradient of {watched!r}"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # They would get parameters that are released.
            return "hooks on what autograd saves (save_on_cpu, saved_tensors_hooks) would get parameters as well"
        return None

    def report(self) -> str:
        """Of each graph: the calls of units in it, what is gathered in them, what each pass made of it; and why what is
        no graph is none."""
        lines = []
        for plan in self.plans:
            captured = plan.captured
            buckets = dict.fromkeys(b for call in captured.calls for b in call.buckets if b.partitioned)
            lines.append(
                f"{'training' if captured.trains else 'without gradients'}: {len(captured.calls)} calls of units, "
                f"{len(captured.inputs)} parameters, {len(buckets)} bucket(s) of {sum(b.num_bytes for b in buckets):,} "
                "bytes that are gathered"
            )
            lines += [f"  {name}: {said}" for name, words in plan.report.items() for said in words]
        lines += [f"no graph {_said(mode)}: {why}" for mode, why in self.reasons.items()]
        return "\n".join(lines) or "nothing has run yet"

    def _by_hooks(self, args: Any, kwargs: Any) -> Any:
        return self._model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _note(self, mode: tuple[bool, bool], error: BaseException) -> None:
        """Why a call is no graph; RuntimeError if it must be one, unless others may be."""
        cause = getattr(error, "inner_exception", error)
        if isinstance(cause, NotWholeError) and cause.again and self._refused < TRIES:
            self._refused += 1
            self._use(self._passes)
            return
        if isinstance(cause, torch._dynamo.exc.FailOnRecompileLimitHit):
            cause = NotWholeError(
                f"torch.compile made {torch._dynamo.config.recompile_limit} graphs of it already "
                "(torch._dynamo.config.recompile_limit). For inputs of many lengths dynamic=True makes one; a number "
                "that a module has and changes at each call is a tensor better. torch's log says what was new"
            )
        why, stack = str(cause).partition("\n")[0] or type(cause).__name__, getattr(error, "real_stack", None) or ()
        if HIDDEN in str(cause) or any(frame.filename.startswith(_ENGINE) for frame in stack):
            why = "it calls another model of zoo's (a teacher, say), which runs by itself, as a graph if it is compiled"
        if stack:
            at = next((frame for frame in reversed(stack) if not frame.filename.startswith(_UNTOLD)), stack[-1])
            why += f" ({at.filename}:{at.lineno}, {at.name})"
        said = f"{type(self._model).__name__} is no whole graph {_said(mode)}"
        if self._must:
            told = RuntimeError(
                f"{said}: {why}. It was compiled with fullgraph=True; without that the hooks carry such calls."
            )
            self._agree(told)
            raise told from error
        self.reasons[mode] = why
        _log.warning("%s, and runs as if it was not compiled: %s", said, why)

    # While a graph runs ----------------------------------------------------------------------------------------------

    def _run(self, plan: GraphPlan, compiled: Callable[[list[Any]], Any], values: list[Any], *, backward: bool) -> Any:
        if not backward:
            self._check(plan, values)
            self._agree()
        values.append(self._order)
        execution = (_Backward if backward else _Forward)(self, plan)
        with executing(execution), self.runtime.compiled.in_whole_graph() if backward else nullcontext():
            return compiled(values)

    def _check(self, plan: GraphPlan, values: Sequence[Any]) -> None:
        """A graph is that of these parameters."""
        if any(call.buckets != call.unit.recorded for call in plan.captured.calls):
            raise NotWholeError("which parameters its units use is not what it was", again=True)
        for number, (bucket, slot) in plan.captured.inputs.items():
            if values[number].untyped_storage()._cdata != bucket.parameters.full.untyped_storage()._cdata:
                raise RuntimeError(
                    f"the graph of this model was made with the parameter {bucket.called(slot)!r}, and another one is "
                    "in its place now: call compile_whole (or engine.compile) again after a model has changed."
                )


class _Execution:
    """A graph runs: at its events the runtime does what it does in hooks."""

    backward: ClassVar[bool]

    def __init__(self, whole: WholeGraph, plan: GraphPlan) -> None:
        self._whole, self._runtime, self._plan = whole, whole.runtime, plan
        self._segment = -1
        self._begin_segment()

    def _begin_segment(self) -> None:
        self._segment += 1
        if self._whole.on_segment is not None:
            self._whole.on_segment(self._plan, self.backward, self._segment)

    def turn(self, event: str, call: int) -> None:
        getattr(self, event)(call)
        self._begin_segment()


class _Forward(_Execution):
    """A forward graph runs."""

    backward = False

    def __init__(self, whole: WholeGraph, plan: GraphPlan) -> None:
        self._numbers: dict[int, int] = {}
        super().__init__(whole, plan)

    def enter_(self, call: int) -> None:
        captured = self._plan.captured
        with torch.set_grad_enabled(captured.trains):  # torch runs the graph of a forward without
            context = self._runtime.enter_in_graph(captured.calls[call].unit)
        if call == 0 and context is not None:
            self._whole._calls.setdefault(context, []).append(self._numbers)

    def leave_(self, call: int) -> None:
        made = self._plan.captured.calls[call]
        with torch.set_grad_enabled(made.grad):
            self._numbers[call] = self._runtime.leave_in_graph(made.unit, called=made.called)

    def accumulate(self, gradient: torch.Tensor, bucket: int, slot: int) -> None:
        raise AssertionError("a gradient in a forward graph.")


class _Backward(_Execution):
    """A backward graph runs."""

    backward = True

    def __init__(self, whole: WholeGraph, plan: GraphPlan) -> None:
        super().__init__(whole, plan)
        self._runtime.backward.walk.read_last = plan.read_last
        context = self._runtime.backward.walk.at
        if context is None or context not in whole._calls:
            raise RuntimeError(
                "a backward graph runs outside of a backward through the model's output, or with create_graph=True, "
                "which goes through no whole graph: compile the model's units (engine.compile()), or nothing."
            )
        if not self._runtime.backward.walk.accumulates and self._runtime.backward.returns_gradients():
            raise RuntimeError(
                "torch.autograd.grad of parameters through a whole graph: it takes their gradients to where the "
                "optimizer has them. Use loss.backward() and p.grad, or compile the model's units (engine.compile()), "
                "or nothing."
            )
        self._context = context
        at = self._context.cursor  # the call of the model itself, in whose backward this is
        self._numbers = next(n for n in reversed(whole._calls[self._context]) if max(n.values(), default=-1) < at)
        self._others = self._runtime.backward.left_alone()

    def back_(self, call: int) -> None:
        self._runtime.backward.on_output_grad(self._context, self._numbers[call], None)

    def accumulate(self, gradient: torch.Tensor, bucket: int, slot: int) -> None:
        if (bucket, slot) not in self._others:
            self._runtime.add_in_graph(self._runtime.buckets[bucket], slot, gradient)


def compile_whole(
    sharded: ShardedModel, backend: Backend = "inductor", *, schedule: Schedule = ((0, DEFAULT),), **options: Any
) -> WholeGraph:
    """Run a model as one graph from now on, at every stage, where it can be one.

    Ranks need not agree: those whose model is no whole graph, or is compiled later, begin the same communication. But
    for ``fullgraph=True``, which all ranks give or none.

    Args:
        sharded: ``optimizer.sharded`` of a ZeRO optimizer, or a :class:`~zoo.shard.ShardedModel`.
        backend: "inductor", or "aot_eager", which runs the graphs as they are.
        schedule: which passes run over the graphs, from which update of the parameters on.
        options: of ``torch.compile``. With ``fullgraph=True`` a call that is no graph raises RuntimeError instead of
            being carried by the hooks; but for the first calls (at most ``TRIES``) in which these learn what a unit
            uses. Where it is none on one rank, the others raise RankFailedError, a RuntimeError too, which says why:
            each call that communicates, with gradients or of parameters that are split, begins with one exchange of 8
            bytes. A call without gradients below stage 3 raises alone.

    Raises:
        ValueError: there is no such backend, or an option of it is none, or is zoo's own; the schedule is none; the
            ranks go their own ways (``divergent``). TypeError: what is given is no such model.
    """
    if not (hasattr(sharded, "votes") and hasattr(sharded, "runtime")):
        raise TypeError(
            f"compile_whole() of a {type(sharded).__name__}: give optimizer.sharded of a ZeRO optimizer, or a "
            "ShardedModel."
        )
    if backend not in ("inductor", "aot_eager"):
        raise ValueError(f'a whole graph has the backend "inductor" or "aot_eager", not {backend!r}.')
    if sharded.votes is not None:
        raise ValueError(
            "a whole graph of a model whose ranks go their own ways (divergent=True): they vote on each gather. "
            "Compile its units: engine.compile(), or module.compile() of each."
        )
    return WholeGraph(
        sharded.runtime, sharded.module, backend=backend, schedule=schedule, options=options, comm=sharded.comm
    )


def _said(mode: tuple[bool, bool]) -> str:
    """Which calls are meant."""
    return f"in {'training' if mode[0] else 'evaluation'} with{'' if mode[1] else 'out'} gradients"


def _call_of(model: nn.Module) -> Callable[..., Any]:
    """The call of a model, which torch traces as a function of its own: the number of graphs is limited for each code
    object, and models of one process are not to share it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace()
    return call
