"""What forward keeps for backward: never a weight in another shape or dtype, which would hold it whole in between.

torch's partitioner may keep a transpose or a cast of a weight. Forward keeps the parameter in its place, whose memory
the runtime takes and gives, and backward makes the value again. Which parameters stay whole is the residency policy's
affair (``max_live_parameters``).

It may also compute again in one unit's backward what another unit gave, with parameters that are not here then: what a
unit gives is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from zoo.compile.capture import alias_of, copies, readers, writes
from zoo.compile.plan import GraphPlan, Remade, Step, placeholders, return_values, values_of


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
        if mine and not alias_of(node) and _leaves(node, mine, inside):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _leaves(node: fx.Node, mine: tuple[str, ...], inside: Mapping[fx.Node, tuple[str, ...]]) -> bool:
    """Whether a value, or a view of it, is used outside of these units."""
    return any(
        user in inside and (inside[user][: len(mine)] != mine or (alias_of(user) and _leaves(user, mine, inside)))
        for user in node.users
    )


def keep(graph: fx.GraphModule, plan: GraphPlan) -> fx.GraphModule:
    """See above."""
    (_remake if plan.backward else _keep)(graph.graph, plan)
    return graph


def _keep(graph: fx.Graph, plan: GraphPlan) -> None:
    parameters = plan.parameters(graph)
    inputs, values = written(graph), values_of(graph)
    for i in range(plan.num_returned, len(values)):
        value = values[i]
        if not isinstance(value, fx.Node) or value in parameters:
            continue
        chain = made_of_parameter(value, parameters)
        source: Any = chain[0].args[0] if chain is not None else None
        if chain is not None and source not in inputs:  # of that backward would make something else
            steps = [Step(n.target, n.args[1:], dict(n.kwargs), n.meta) for n in chain]
            plan.remade[value.name] = Remade(source.name, steps, source.meta.get("val"))
            values[i] = source
            plan.say("keep", f"{value.name} is made again from {source.name}")
    return_values(graph, values)
    graph.eliminate_dead_code()


def written(graph: fx.Graph) -> set[fx.Node]:
    """The inputs to which the graph writes, or torch when it has run."""
    described = graph.output_node().meta.get("desc") or ()
    later = [said.mutated_input for said in described if isinstance(said, InputMutationAOTOutput)]
    return {
        place for place in placeholders(graph)
        if place.meta.get("desc") in later or any(map(writes, readers(place)))
    }  # fmt: skip


def made_of_parameter(value: fx.Node, parameters: Any) -> list[fx.Node] | None:
    """The nodes that make ``value`` of a parameter and nothing else; None if it is made otherwise."""
    chain: list[fx.Node] = []
    while value not in parameters:
        inputs = value.all_input_nodes
        if len(inputs) != 1 or not value.args or value.args[0] is not inputs[0]:
            return None
        if not (alias_of(value) or copies(value)):
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
