"""A backward in two parts: gradients of the inputs now, those of the weights later.

A node of autograd's graph that leads to an input and, by another of its edges, to weights is a *fork*: a linear layer's
product leads to its input and to its weight. The first part computes

    dL/d(inputs), and what arrives at each fork,

and the second part goes from what arrived at the forks to the weights. A node computes only the gradients that it is
asked for, so no product is computed twice.

    out = x Wᵀ:    first part  dx = dout W;    second part  dW = doutᵀ x

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 (the two parts, there B and W).

What is computed in the first part already: weights that are reached otherwise than by a matrix product (norms and
convolutions read the weight itself in backward, which at ZeRO stage 3 is gone by then, and a function of one's own
computes all of its gradients at once); weights that are put together of others by what reads these (a product of two,
weight_norm): the same; weights that a stage uses twice, or that an output is made of without the inputs, where the
second part of one fork would pass the other use; and all of them where no input gets a gradient, as in the first stage:
nobody waits for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

__all__ = ["Split", "split_backward"]


_PRODUCTS = frozenset({"AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "LinearBackward0"})
"""Names of nodes that compute the gradient of one factor without looking at that factor."""


@dataclass
class _Fork:
    """What arrives at a node: the gradient of each of its outputs."""

    node: Node
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def take(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.gradients = list(gradients)


@dataclass
class _Group:
    """Forks, and the weights that their second part leads to."""

    forks: list[_Fork]
    weights: list[Node]
    """The nodes that accumulate into them."""


@dataclass
class Split:
    """What the first part leaves for the second."""

    groups: list[_Group]
    ready: list[tuple[torch.Tensor, torch.Tensor]]
    """Weights whose gradients are there."""

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each weight with its gradient; those that nothing led to are left out. Once."""
        yield from self.ready
        self.ready = []
        while self.groups:
            group = self.groups.pop(0)
            edges, gradients = [], []
            for fork in group.forks:
                for number, gradient in enumerate(fork.gradients):
                    if gradient is not None:
                        edges.append(GradientEdge(fork.node, number))
                        gradients.append(gradient)
            if not edges:
                continue
            leaves = [GradientEdge(leaf, 0) for leaf in group.weights]
            found = _gradients(edges, leaves, gradients)
            yield from ((_variable(w), g) for w, g in zip(group.weights, found, strict=True) if g is not None)


def split_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], Split]:  # fmt: skip
    """The gradients of ``inputs``, None where nothing led to one, and the rest of the backward.

    Args:
        outputs, gradients: where backward begins.
        inputs: leaves that get gradients. All other leaves are weights, whose gradients may wait.
    """
    own = {id(x) for x in inputs}
    weights = [o.grad_fn is None and id(o) not in own for o in outputs]  # a weight itself is handed on
    direct = [(o, g) for o, g, w in zip(outputs, gradients, weights, strict=True) if w and g is not None]
    gradients = [g for g, w in zip(gradients, weights, strict=True) if not w]
    outputs = [o for o, w in zip(outputs, weights, strict=True) if not w]
    roots = [o.grad_fn for o in outputs if o.grad_fn is not None]
    if not roots:
        return [None] * len(inputs), Split([], direct)
    graph = _Graph(roots, inputs)
    groups, now = graph.groups()
    forks = [fork for group in groups for fork in group.forks]
    hooks = [fork.node.register_prehook(fork.take) for fork in forks]
    leaves = [GradientEdge(leaf, 0) for leaf in now]
    try:
        found = _gradients(outputs, [*inputs, *leaves], gradients, keeps=bool(groups))
    finally:
        for hook in hooks:
            hook.remove()
    ready = direct + [(_variable(w), g) for w, g in zip(now, found[len(inputs) :], strict=True) if g is not None]
    return list(found[: len(inputs)]), Split(groups, ready)


def _gradients(
    outputs: Sequence[Any], leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None], *, keeps: bool = False
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    if not leaves:
        return ()
    return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, retain_graph=keeps)


class _Graph:
    """Autograd's graph below some nodes."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[torch.Tensor]) -> None:
        self._roots = roots
        self._order = _from_the_leaves(roots)
        wanted = {id(x) for x in inputs}
        leaves = {node: id(_variable(node)) for node in self._order if hasattr(node, "variable")}
        self._weights = [node for node, variable in leaves.items() if variable not in wanted]
        self._to_input: set[Node] = set()
        for node in self._order:
            if leaves.get(node) in wanted or any(child in self._to_input for child in _children(node)):
                self._to_input.add(node)

    def groups(self) -> tuple[list[_Group], list[Node]]:
        """Groups whose weights may wait, and the weights that may not."""
        below: dict[Node, frozenset[Node]] = {node: frozenset([node]) for node in self._weights}
        forks: dict[Node, frozenset[Node]] = {}  # what nodes on the inputs' paths lead to beside these
        read: set[Node] = set()  # by what puts them together
        for node in self._order:
            beside = [below[child] for child in _children(node) if child not in self._to_input]
            if node in self._to_input:
                if any(beside):
                    forks[node] = frozenset().union(*beside)
            elif node not in below:
                below[node] = frozenset().union(*beside)
                if below[node] and _reads(node):
                    read |= below[node]
        aside = [below[root] for root in dict.fromkeys(self._roots) if root in below]
        never = read.union(_several(forks), *aside)
        forks = {node: found for node, found in forks.items() if node.name() in _PRODUCTS}
        groups = []
        for node, found in forks.items():
            if found - never:
                groups.append(_Group([_Fork(node)], [w for w in self._weights if w in found - never]))
        waiting = {weight for group in groups for weight in group.weights}
        return groups, [weight for weight in self._weights if weight not in waiting]


def _several(forks: dict[Node, frozenset[Node]]) -> set[Node]:
    """Weights that more than one fork leads to."""
    seen: set[Node] = set()
    found: set[Node] = set()
    for weights in forks.values():
        found |= seen & weights
        seen |= weights
    return found


def _reads(node: Node) -> bool:
    """Whether a node's backward may look at tensors of the forward: it has kept some, or has room for them."""
    return any(name != "_raw_saved_tensors" or getattr(node, name) for name in _kept(type(node)))  # it: of a Function


@functools.lru_cache(maxsize=1024)
def _kept(kind: type) -> tuple[str, ...]:
    """The names of what a node of a kind keeps; they are the kind's, and to list them takes 12 µs."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _variable(node: Node) -> torch.Tensor:
    """What a node accumulates into."""
    found: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return found


def _from_the_leaves(roots: Sequence[Node]) -> list[Node]:
    """All nodes below, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Any]] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack.append((root, iter(_children(root))))
        while stack:
            node, children = stack[-1]
            child = next((c for c in children if c not in seen), None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(_children(child))))
    return order
