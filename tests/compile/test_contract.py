"""Passes by name, contracts and schedules; what the checker finds in a graph that a pass has broken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.models import Model, Shape, batch

from zoo.compile import (
    PassContract,
    PassError,
    check,
    compile_pass,
    compile_whole,
    register_compile_pass,
    validate_schedule,
)
from zoo.compile.ops import ACCUMULATE, BACK, ENTER, LEAVE
from zoo.zero import ZeroOptimizer


def _nothing(graph: Any, plan: Any) -> Any:
    return graph


def _other(graph: Any, plan: Any) -> Any:
    return graph


@pytest.fixture
def named() -> None:
    register_compile_pass("needs_events", _nothing, PassContract(requires=frozenset({"events"})))
    register_compile_pass("other", _other, PassContract(conflicts=frozenset({"needs_events"})))


SCHEDULES: dict[str, tuple[Any, str]] = {
    "unknown": ([(0, ["nowhere"])], "there is no pass 'nowhere': known are "),
    "function": ([(0, [print])], "there is no pass print"),
    "order": ([(0, ["place", "keep"])], "'place' needs kept, which no pass before it adds: there is none"),
    "later": ([(0, ["keep", "place"]), (3, ["needs_events"])], "'needs_events' needs events"),
    "conflict": ([(0, ["keep", "place", "needs_events", "other"])], "'needs_events' and 'other' cannot be"),
    "symmetric": ([(0, ["other", "keep", "place", "needs_events"])], "'other' and 'needs_events' cannot be"),
    "twice": ([(0, ["keep", "place", "keep"])], "'keep' comes twice"),
    "steps": ([(0, ["keep"]), (0, ["keep"])], "0 is not in order"),
    "true": ([(True, ["keep"])], "True is not in order"),
    "first": ([(1, ["keep"])], "begins with step 0"),
    "empty": ([], "begins with step 0"),
    "nothing to run": ([(0, [])], "step 0 are none, and none of them adds events"),
    "no events": ([(0, ["keep", "place"]), (2, ["keep"])], "step 2 are keep, and none of them adds events"),
    "negative": ([(-1, ["keep", "place"])], "-1 is not in order"),
    "fraction": ([(0.0, ["keep", "place"])], "0.0 is not in order"),
    "one name": ([(0, "place")], r"no such pair"),
    "no pairs": ([("keep", "place", "other")], r"no such pair"),
    "mapping": ({0: ["keep", "place"]}, "and no dict"),
    "text": ("place", "and no str"),
    "none": (None, "and no NoneType"),
}


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("what", SCHEDULES)
def test_a_schedule_that_cannot_run_is_refused(what: str) -> None:
    schedule, said = SCHEDULES[what]
    with pytest.raises(ValueError, match=said):
        validate_schedule(schedule)


@pytest.mark.usefixtures("named")
def test_a_schedule_has_passes_by_name_or_function() -> None:
    first, second = validate_schedule([(0, ["keep", "place"]), (4, ["keep", "place", _nothing])])
    assert [p.name for p in first[1]] == ["keep", "place"]
    assert (second[0], [p.name for p in second[1]]) == (4, ["keep", "place", "needs_events"])
    assert compile_pass(_other).name == "other"
    with pytest.raises(ValueError, match="cannot preserve speed; it is some of bits"):
        PassContract(preserves=frozenset({"speed"}))
    with pytest.raises(ValueError, match="identifier"):
        register_compile_pass("no name", _nothing)
    with pytest.raises(TypeError, match="is a int"):
        register_compile_pass("number", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="contract of the pass 'other' is a dict"):
        register_compile_pass("other", _other, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give a set of names"):
        PassContract(requires="events")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PassContract\(adds=\{5\}\): give a set of names"):
        PassContract(adds={5})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the name of a pass is an identifier, not 5"):
        register_compile_pass(5, _nothing)  # type: ignore[arg-type]
    assert PassContract(requires=["events"]).requires == {"events"}  # type: ignore[arg-type]


def test_a_function_with_two_names_is_given_by_one_of_them() -> None:
    def twofold(graph: Any, plan: Any) -> Any:
        return graph

    register_compile_pass("one_of_two", twofold)
    assert compile_pass(twofold).name == "one_of_two"
    register_compile_pass("other_of_two", twofold)
    with pytest.raises(ValueError, match="one_of_two, other_of_two: give the one"):
        compile_pass(twofold)
    assert compile_pass("other_of_two").name == "other_of_two"


def _nodes(graph: Any, *targets: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if node.target in targets]


def _leaves_early(graph: Any, plan: Any) -> None:
    """A unit ends where it begins."""
    leave = _nodes(graph, LEAVE)[1]
    enter = next(n for n in _nodes(graph, ENTER) if n.args[2] == leave.args[2])
    enter.append(leave)


def _swaps(graph: Any, plan: Any) -> None:
    """Two units begin in the other order."""
    one, other = _nodes(graph, ENTER)[1:3]
    one.args, other.args = (*one.args[:2], other.args[2]), (*other.args[:2], one.args[2])


def _forgets(graph: Any, plan: Any) -> None:
    """Backward does not come to a call."""
    graph.graph.erase_node(_nodes(graph, BACK)[0])


def _late(graph: Any, plan: Any) -> None:
    """A gradient is taken at the end."""
    output = next(iter(reversed(graph.graph.nodes)))
    first = next(n for n in _nodes(graph, ACCUMULATE) if n.args[2] == max(m.args[2] for m in _nodes(graph, ACCUMULATE)))
    output.prepend(first)


def _reads_late(graph: Any, plan: Any) -> None:
    """A weight is read after everything."""
    output = next(iter(reversed(graph.graph.nodes)))
    place = next(n for n, (bucket, _) in plan.parameters(graph.graph).items() if "blocks" in bucket.label)
    with graph.graph.inserting_before(output):
        graph.graph.call_function(torch.ops.aten.sum.default, (place,))


def _enters_twice(graph: Any, plan: Any) -> None:
    """A unit begins twice."""
    enter = _nodes(graph, ENTER)[1]
    with graph.graph.inserting_after(enter):
        graph.graph.call_function(ENTER, enter.args)


def _writes_to_nothing(graph: Any, plan: Any) -> None:
    """A compiler may move reads over an event, and so use what is not here."""
    enter = _nodes(graph, ENTER)[1]
    enter.args = enter.args[0], [], enter.args[2]


def _unordered(graph: Any, plan: Any) -> None:
    """A compiler may take a gradient when its bucket is gone."""
    taken, place = _nodes(graph, ACCUMULATE)[0], next(iter(graph.graph.nodes))
    taken.args = place, *taken.args[1:]


def _loses(graph: Any, plan: Any) -> None:
    """A gradient is not taken."""
    graph.graph.erase_node(_nodes(graph, ACCUMULATE)[0])


def _counts_twice(graph: Any, plan: Any) -> None:
    """A gradient is taken twice."""
    taken = _nodes(graph, ACCUMULATE)[0]
    with graph.graph.inserting_after(taken):
        graph.graph.call_function(ACCUMULATE, taken.args)


def _for_another(graph: Any, plan: Any) -> None:
    """A gradient is taken for another parameter."""
    taken = _nodes(graph, ACCUMULATE)[0]
    taken.args = *taken.args[:2], 999, taken.args[3]


def _early(graph: Any, plan: Any) -> None:
    """A gradient is taken before backward is at its bucket."""
    taken = _nodes(graph, ACCUMULATE)[-1]
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    with graph.graph.inserting_before(first):
        made = graph.graph.call_function(torch.ops.aten.zeros.default, ([1],))
    first.prepend(taken)
    taken.args = taken.args[0], made, *taken.args[2:]


def _returns(graph: Any, plan: Any) -> None:
    """A gradient is taken, and autograd gets it as well."""
    taken = _nodes(graph, ACCUMULATE)[0]
    number = next(
        n for n, (bucket, slot) in plan.captured.inputs.items() if (bucket.index, slot) == tuple(taken.args[2:])
    )
    output = next(iter(reversed(graph.graph.nodes)))
    values = list(output.args[0])
    values[number] = taken.args[1]
    output.args = (tuple(values),)


def _returns_less(graph: Any, plan: Any) -> None:
    """A value is missing."""
    output = next(iter(reversed(graph.graph.nodes)))
    output.args = (output.args[0][:-1],)


def _other_inputs(graph: Any, plan: Any) -> None:
    """Parameters come in another order."""
    first, second = [node for node in graph.graph.nodes if node.op == "placeholder"][:2]
    second.append(first)


@pytest.fixture(scope="module")
def graphs() -> dict[bool, tuple[Any, Any]]:
    """Of forward and of backward: a graph after zoo's passes, and its plan."""
    found = {}

    def keeps(graph: Any, plan: Any) -> Any:
        check(graph, plan)
        found[plan.backward] = copy.deepcopy(graph), plan
        return graph

    register_compile_pass("kept_in_tests", keeps)
    torch._dynamo.reset()
    model = Model(Shape(blocks=1))
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
    compile_whole(optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place", "kept_in_tests"])])
    optimizer.backward(model(batch(0, 0))["loss"])
    return found


FORWARD = (_leaves_early, _swaps, _reads_late, _enters_twice, _writes_to_nothing, _returns_less, _other_inputs)
BACKWARD = (_forgets, _late, _unordered, _loses, _counts_twice, _for_another, _early, _returns, _returns_less)


@pytest.mark.matrix
@pytest.mark.parametrize(("breaks", "backward"), [(b, False) for b in FORWARD] + [(b, True) for b in BACKWARD])
def test_the_checker_finds_what_a_pass_has_broken(
    breaks: Any, backward: bool, graphs: dict[bool, tuple[Any, Any]]
) -> None:
    graph, plan = graphs[backward]
    plan.backward, graph = backward, copy.deepcopy(graph)
    check(graph, plan)
    breaks(graph, plan)
    with pytest.raises(PassError):
        check(graph, plan)


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("breaks", [_loses, _counts_twice, _forgets])
def test_a_graph_that_a_pass_has_broken_is_not_used(breaks: Any, stage: int) -> None:
    """Without the check the first two train with other numbers, in silence."""

    def broken(graph: Any, plan: Any) -> Any:
        if plan.backward:
            breaks(graph, plan)
        return graph

    register_compile_pass("broken_in_tests", broken)

    def losses(schedule: Any) -> tuple[list[float], Any]:
        torch._dynamo.reset()
        model = Model(Shape(blocks=1))
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=0.5, param_persistence_threshold=0)
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=schedule) if schedule else None
        found = []
        for step in range(2):
            loss = model(batch(step, 0))["loss"]
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found, whole

    found, whole = losses([(0, ["keep", "place", "broken_in_tests"])])
    assert found == losses(None)[0]
    assert "the pass 'broken_in_tests' has broken the graph: " in whole.reasons[True, True]


@pytest.mark.dear
def test_a_report_says_which_pass_changes_bits() -> None:
    register_compile_pass("rounds_in_tests", _nothing, PassContract(preserves=frozenset({"starts", "whole_bytes"})))
    torch._dynamo.reset()
    model = Model(Shape(blocks=1))
    optimizer = ZeroOptimizer(model, stage=0, lr=0.1)
    whole = compile_whole(optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place", "rounds_in_tests"])])
    with torch.no_grad():
        model(batch(0, 0))
    told = [line for line in whole.report().splitlines() if line.endswith("not the same bits")]
    assert [line.split(":")[0].strip() for line in told] == ["rounds_in_tests"]
