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


@pytest.mark.parametrize("breaks", [_leaves_early, _swaps, _forgets, _late, _reads_late])
def test_the_checker_finds_what_a_pass_has_broken(breaks: Any, graphs: dict[bool, tuple[Any, Any]]) -> None:
    backward = breaks in (_forgets, _late)
    graph, plan = graphs[backward]
    plan.backward, graph = backward, copy.deepcopy(graph)
    check(graph, plan)
    breaks(graph, plan)
    with pytest.raises(PassError):
        check(graph, plan)
