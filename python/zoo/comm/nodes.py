"""Which ranks of a group share a node: what decides whether bytes cross the slow network."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from zoo.layout import Mesh

NODE, LOCAL = "node", "local"
Nodes = int | Mesh | Sequence[int] | None


def node_of_each(nodes: Nodes, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The node of each rank of a group, None if nobody knows.

    Args:
        nodes: ranks of a node, filled in the order of the global ranks; a :class:`~zoo.layout.Mesh` over the group's
            ranks with an axis "node"; the node of each rank of the group; or None: the environment variable
            LOCAL_WORLD_SIZE, which torchrun sets, says how many ranks a node has.
        ranks: the global ranks of the group, in its order.

    Raises:
        ValueError: it does not describe this group.
    """
    if nodes is None:
        given = os.environ.get("LOCAL_WORLD_SIZE")
        if not given:
            return None
        nodes = int(given)
    if isinstance(nodes, Mesh):
        if NODE not in nodes.axes or nodes.world_size != len(ranks):
            raise ValueError(
                f"nodes={nodes} describes {nodes.world_size} ranks; it takes a mesh of this group's {len(ranks)} ranks "
                f'with an axis "{NODE}", as Mesh(("{NODE}", "{LOCAL}"), (number of nodes, ranks of a node)).'
            )
        axis = nodes.axes.index(NODE)
        return tuple(nodes.coordinates(r)[axis] for r in range(len(ranks)))
    if isinstance(nodes, int):
        if nodes < 1:
            raise ValueError(f"{nodes} ranks of a node; there is at least 1.")
        return tuple(r // nodes for r in ranks)
    listed: Any = nodes
    nodes = listed.tolist() if hasattr(nodes, "tolist") else nodes  # elements of a tensor are no keys: each is its own
    if not isinstance(nodes, Sequence):
        raise ValueError(f"nodes={nodes!r}; it takes the node of each rank, or how many ranks a node has.")
    if len(nodes) != len(ranks):
        raise ValueError(f"nodes has {len(nodes)} entries for a group of {len(ranks)} ranks; it takes one for each.")
    return tuple(nodes)


def ranks_per_node(nodes: Sequence[Hashable]) -> int | None:
    """L where the ranks of each node follow one another and every node has L of them, None elsewhere."""
    sizes = set(Counter(nodes).values())
    num_changes = sum(a != b for a, b in itertools.pairwise(nodes))
    return sizes.pop() if len(sizes) == 1 and num_changes == len(set(nodes)) - 1 else None


def ranks_of(mesh: Any) -> list[int] | None:
    """The global ranks of a DeviceMesh of the axes ("node", "local"), in its order; None for any other mesh."""
    return list(mesh.mesh.flatten().tolist()) if tuple(mesh.mesh_dim_names or ()) == (NODE, LOCAL) else None
