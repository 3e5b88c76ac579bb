"""The backend that torch.compile is given: torch traces and differentiates, passes rewrite, a compiler of torch makes
code."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from zoo.compile.capture import NotWholeError
from zoo.compile.checking import PassError, check
from zoo.compile.contract import EVENTS_ADDED, Registered
from zoo.compile.passes.keep import keep_between_units
from zoo.compile.passes.pin import PINS, lower_events
from zoo.compile.plan import GraphPlan, placeholders, values_of
from zoo.compile.profile import profile
from zoo.compile.report import look

Backend = Literal["inductor", "aot_eager"]
T = TypeVar("T")


def alive(reference: Callable[[], T | None]) -> T:
    """What a weak reference refers to.

    What is compiled for a function is kept by its code, where Python's collector of cycles does not look. So it refers
    to nothing strongly that the model is part of.
    """
    found = reference()
    if found is None:
        raise RuntimeError("a graph of zoo.compile runs whose model is not there any more.")
    return found


Run = Callable[..., Any]
"""Runs a compiled graph: (plan, compiled, values, backward=) → ``compiled(values)``, with what belongs around it."""


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    plan: GraphPlan,
    *,
    backend: Backend,
    passes: Sequence[Registered],
    run: Run, settings: Mapping[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """Code for a traced model.

    Args:
        graph, inputs: as torch.compile gives them. plan: of it, which the caller keeps as long as the code runs.
        backend: what makes code of the rewritten graphs. passes: over the forward and the backward graph.
        run: is called in the place of each.
        settings: of inductor.
    """
    maker = _Maker(plan, passes, run, settings, len(inputs))
    # What torch remembers of whole compilations would run no pass. It remembers graphs, after the passes.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        if backend == "inductor":
            made: Callable[..., Any] = maker.inductor(graph, inputs)
        else:
            made = maker.eager(graph, inputs)
    return made


class _Maker:
    """Makes code of the graphs of one traced model."""

    def __init__(
        self, plan: GraphPlan, passes: Sequence[Registered], run: Run, settings: Mapping[str, Any], num_inputs: int
    ) -> None:  # fmt: skip
        self._plan_of, self._passes, self._run, self._settings = weakref.ref(plan), passes, run, settings
        self._num_inputs = num_inputs
        self._rewritten: dict[bool, fx.GraphModule] = {}  # by whether it is that of backward

    @property
    def _plan(self) -> GraphPlan:
        return alive(self._plan_of)

    def eager(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Graphs that run as they are."""
        from torch._dynamo.backends.common import aot_autograd

        def compiler(backward: bool) -> Callable[..., Any]:
            def compiled(part: fx.GraphModule, given: Sequence[Any]) -> Any:
                rewritten, _ = self._rewrite(part, given, backward=backward)
                return self._running(lambda values: rewritten.forward(*values), backward)

            return compiled

        made = aot_autograd(
            fw_compiler=compiler(False), bw_compiler=compiler(True), inference_compiler=compiler(False),
            partition_fn=self.partition,
        )  # fmt: skip
        return made(graph, list(inputs))

    def inductor(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Code of inductor."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        lower_events()

        def inner(part: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
            backward = bool(options.get("is_backward"))
            rewritten, given = self._rewrite(part, given, backward=backward)
            return self._running(compile_fx_inner(rewritten, given, **options), backward)

        pins = {**self._settings, **PINS, "custom_partitioner_fn": _partitioner(self.partition)}
        return compile_fx(graph, list(inputs), inner_compile=inner, config_patches=pins)

    def partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """The graphs of forward and backward, and the same rewritten: what cannot be, is known before anything runs.

        torch goes on with the first ones: it looks at them for what needs gradients.
        """
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        keep_between_units(joint, self._plan)
        made = min_cut_rematerialization_partition(joint, inputs, **options)
        for part, backward in zip(made, (False, True), strict=True):
            if not backward:
                self._name_inputs(part.graph)
                self._plan.num_returned = options["num_fwd_outputs"]
            self._rewritten[backward] = self._passed(copy.deepcopy(part), backward=backward)
        return made

    def _name_inputs(self, graph: fx.Graph) -> None:
        self._plan.names = [node.name for node in placeholders(graph)]
        if len(self._plan.names) != self._num_inputs:
            raise NotWholeError("inputs of it share memory, and it writes to them")

    def _rewrite(self, part: fx.GraphModule, given: Sequence[Any], *, backward: bool) -> Any:
        """The rewritten graph, and what it is called with."""
        rewritten = self._rewritten.pop(backward, None)
        if rewritten is None:  # without gradients
            self._name_inputs(part.graph)
            self._plan.num_returned = len(values_of(part.graph))
            rewritten = self._passed(part, backward=False)
        # Which values the caller gets, in whose strides: inductor has said it of torch's own graph.
        rewritten.graph.output_node().meta |= part.graph.output_node().meta
        mode = torch._guards.detect_fake_mode(list(given))
        order = torch.zeros(1, dtype=torch.int64)
        order = order if mode is None else mode.from_tensor(order)
        for node in placeholders(rewritten.graph):
            node.meta.setdefault("val", order)
        remade = self._plan.remade if backward else {}
        names = [node.name for node in placeholders(rewritten.graph)]
        if backward:
            _keep_memory(names, remade)
        given = [remade[name].value if name in remade else value for name, value in zip(names, given, strict=False)]
        return rewritten, [*given, order]

    def _passed(self, part: fx.GraphModule, *, backward: bool) -> fx.GraphModule:
        self._plan.backward = backward
        self._plan.ends[backward] = [node.name for node in placeholders(part.graph)], len(values_of(part.graph))
        before, has_events = look(part, self._plan), False
        for apply in self._passes:
            has_events = has_events or EVENTS_ADDED in apply.contract.adds
            part = self._applied(apply, part, checked=has_events)
            after = look(part, self._plan)
            said = f"{'backward' if backward else 'forward'}: {before.until(after)}"
            self._plan.say(apply.name, said if "bits" in apply.contract.preserves else f"{said}, not the same bits")
            before = after
        self._plan.segments[backward] = profile(part, self._plan)
        for node in part.graph.nodes:
            node.meta.pop("mutation_region_id", None)  # what torch remembers of where no events were
        part.recompile()
        return part

    def _applied(self, what: Registered, part: fx.GraphModule, *, checked: bool) -> fx.GraphModule:
        """The graph that a pass makes. One that it has broken would compute something else, or wait for ever."""
        try:
            made = what.apply(part, self._plan)
        except NotWholeError:
            raise
        except Exception as error:
            raise NotWholeError(f"the pass {what.name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(made, fx.GraphModule):
            raise NotWholeError(f"the pass {what.name!r} returned a {type(made).__name__}; it returns the graph")
        try:
            if checked:
                check(made, self._plan)
        except PassError as error:
            raise NotWholeError(f"the pass {what.name!r} has broken the graph: {error}") from error
        return made

    def _running(self, compiled: Callable[[list[Any]], Any], backward: bool) -> Any:
        carry_out, plan = self._run, self._plan_of

        def run(values: list[Any]) -> Any:
            return carry_out(alive(plan), compiled, values, backward=backward)

        run._boxed_call = True  # type: ignore[attr-defined]  # as torch calls it: with a list, which may be emptied
        return run


def _keep_memory(inputs: Sequence[str], remade: Collection[str]) -> None:
    """Code of a backward graph may write its results over values that nobody needs any more. Some are parameters now,
    of which torch does not know."""
    context = torch._guards.TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    if known is not None and known.bw_donated_idxs:
        known.bw_donated_idxs = [number for number in known.bw_donated_idxs if inputs[number] not in remade]


def _partitioner(partition: Callable[..., Any]) -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        """Code is remembered by the graphs that come out, whoever made them."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return "zoo.compile 2"  # another number where code that is remembered would be wrong

        def __reduce__(self) -> Any:
            return str, (self.uuid(),)

    return Partitioner()
