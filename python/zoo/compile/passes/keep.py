"""What forward keeps for backward: never a weight in another shape or dtype, which would hold it whole in between.

torch's partitioner may keep a transpose or a cast of a weight. Forward keeps the parameter in its place, whose memory
the runtime takes and gives, and backward makes the value again. Which parameters stay whole is the residency policy's
affair (``max_live_parameters``).

It may also compute again in one unit's backward what another unit gave, with parameters that are not here then: what a
unit gives is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zoo.compile.capture import alias_of
from zoo.compile.plan import GraphPlan, Remade, Step, placeholders, return_values, values_of

_CASTS: frozenset[Any] = frozenset(
    {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default, torch.ops.aten.clone.default}
)


def keep_between_units(joint: fx.GraphModule, plan: GraphPlan) -> None:
    """In the graph of forward and backward together: nothing that one unit gives another is computed again."""
    units = plan.captured.units
    inside: dict[fx.Node, tuple[str, ...]] = {}
    forward: dict[fx.Node, None] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if "tangents" not in node.name:
                forward[node] = None
        elif node.op != "output" and all(used in forward for used in node.all_input_nodes):
            forward[node] = None
            inside[node] = tuple(key for key in node.meta.get("nn_module_stack") or () if key in units)
    for node, mine in inside.items():
        leaves = any(user in inside and inside[user][: len(mine)] != mine for user in node.users)
        if mine and leaves and not alias_of(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def keep(graph: fx.GraphModule, plan: GraphPlan) -> fx.GraphModule:
    """See above."""
    (_remake if plan.backward else _keep)(graph.graph, plan)
    return graph


def _keep(graph: fx.Graph, plan: GraphPlan) -> None:
    parameters = plan.parameters(graph)
    values = values_of(graph)
    for i in range(plan.num_returned, len(values)):
        value = values[i]
        if not isinstance(value, fx.Node) or value in parameters:
            continue
        chain = made_of_parameter(value, parameters)
        if chain is not None:
            source: Any = chain[0].args[0]
            steps = [Step(n.target, n.args[1:], dict(n.kwargs), n.meta) for n in chain]
            plan.remade[value.name] = Remade(source.name, steps, source.meta.get("val"))
            values[i] = source
            plan.say("keep", f"{value.name} is made again from {source.name}")
    return_values(graph, values)
    graph.eliminate_dead_code()


def made_of_parameter(value: fx.Node, parameters: Any) -> list[fx.Node] | None:
    """The nodes that make ``value`` of a parameter and nothing else; None if it is made otherwise."""
    chain: list[fx.Node] = []
    while value not in parameters:
        inputs = value.all_input_nodes
        if len(inputs) != 1 or not value.args or value.args[0] is not inputs[0]:
            return None
        if not (alias_of(value) or value.target in _CASTS):
            return None
        chain.append(value)
        value = inputs[0]
    return chain[::-1]


def _remake(graph: fx.Graph, plan: GraphPlan) -> None:
    for place in list(placeholders(graph)):
        if place.name not in plan.remade or not place.users:
            continue
        place.meta["val"] = plan.remade[place.name].value
        users = set(place.users)
        made: fx.Node = place
        with graph.inserting_before(next(node for node in graph.nodes if node in users)):
            for step in plan.remade[place.name].steps:
                made = graph.call_function(step.target, (made, *step.args), step.kwargs)
                made.meta = dict(step.meta)
        for user in users:
            user.replace_input_with(place, made)
