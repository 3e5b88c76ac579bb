"""What the autograd call that is running will do: the engine is asked, before it has got there.

A graph task is one call of ``backward()`` or ``torch.autograd.grad``. The engine knows from its start which nodes it
will execute; all of this may be called inside of one only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from zoo.shard.buckets import Bucket
from zoo.shard.parameters import accumulators

_graph_task = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class Task:
    """Lives as long as the graph task in which it was made, whether that ends well or not."""

    __slots__ = ("__weakref__", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Bucket, list[Any]] = {}


def follow(on_end: Callable[[], None] | None = None) -> weakref.ref[Task]:
    """A task for what runs now; ``on_end`` is called at its end, unless that is an exception."""
    task = Task()

    def end(task: Task = task) -> None:
        if on_end is not None:
            on_end()

    Variable._execution_engine.queue_callback(end)
    return weakref.ref(task)


class GraphTasks:
    """Asks for the parameters of these buckets.

    What it has asked for is remembered in the task. A node keeps its parameter, which Python's collector of cycles
    cannot see: a model whose nodes were kept between backwards would never be freed.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = [b for b in reversed(buckets) if b.gradients is not None]
        self._task: Callable[[], Task | None] = lambda: None

    def follow(self, on_end: Callable[[], None]) -> Callable[[], Task | None]:
        """The task that runs is the one to ask about."""
        self._task = follow(on_end)
        return self._task

    def _of(self, bucket: Bucket) -> list[Any]:
        """What accumulates into the parameters of ``bucket``."""
        task = self._task()
        nodes = task.nodes.get(bucket) if task is not None else None
        if nodes is None:
            nodes = accumulators(bucket.spec.parameters)
            if task is not None:
                task.nodes[bucket] = nodes
        return nodes

    def _first_of(self, bucket: Bucket) -> list[Any]:
        """What accumulates into the first of them: to make all nodes takes longer than all questions."""
        task = self._task()
        if task is None or bucket in task.nodes:
            return []
        return accumulators(bucket.spec.parameters[:1])

    def adds(self) -> bool | None:
        """Whether it adds to the gradient of some parameter on this rank; None where torch says that the gradient of
        some parameter is returned."""
        for bucket in self._buckets:
            # Outside of what is caught: whatever goes wrong here is a fault. The first parameter tells most often.
            for find in (self._first_of, self._of):
                nodes = find(bucket)
                try:
                    if any(map(_will_execute, nodes)):
                        return True
                except RuntimeError:
                    return None
        return False

    def accumulates(self) -> bool:
        """Whether it is of the kind that adds to gradients of parameters, as ``loss.backward()`` is."""
        adds = self.adds()
        if adds is not False:
            return bool(adds)
        # None of them: a loss that leads to no parameter on this rank, or a call for other tensors.
        if not any(p.requires_grad for b in self._buckets if b.spec.trainable for p in b.spec.parameters):
            return False  # all are frozen for a while: this is about something else
        leaves = _leaves(torch._C._current_autograd_node())
        try:
            return all(map(_will_execute, leaves))
        except RuntimeError:
            return False

    def left_alone(self) -> frozenset[tuple[int, int]]:
        """Bucket and slot of parameters that require a gradient, to which it does not add."""
        found = set()
        for bucket in self._buckets:
            slots = [slot for slot, p in enumerate(bucket.spec.parameters) if p.requires_grad]
            for slot, node in zip(slots, self._of(bucket), strict=True):
                if not _will_execute(node):
                    found.add((bucket.index, slot))
        return frozenset(found)

    def adds_to_units(self, bucket: Bucket, units: Collection[str]) -> bool:
        """Whether it adds to the gradient of some parameter of ``bucket`` that is one of these units'."""
        begins = tuple(f"{unit}." for unit in units)
        named = zip(bucket.spec.names, bucket.spec.parameters, strict=True)
        return any(map(_will_execute, accumulators([p for name, p in named if name.startswith(begins)])))

    def adds_to(self, bucket: Bucket) -> bool:
        """Whether it adds to the gradient of some parameter of ``bucket``."""
        return any(map(_will_execute, self._first_of(bucket))) or any(map(_will_execute, self._of(bucket)))


def _leaves(node: Any) -> list[Any]:
    """The nodes below ``node`` that accumulate into leaves."""
    found, seen, waiting = [], set(), [node]
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        below = [function for function, _ in at.next_functions]
        if not below and hasattr(at, "variable"):
            found.append(at)
        waiting.extend(below)
    return found


_MULTIPLIED: dict[tuple[int, str], tuple[Callable[[], Any], float]] = {}
"""Graph task and why → something as long as it runs, and by how much its loss was multiplied."""
_NOTING = threading.Lock()  # hooks run on threads of the devices, and several models may go backward at once


def note_multiplied(why: str, factor: float, alive: Callable[[], Any] | None = None) -> None:
    """In a hook on a loss: it was multiplied, which optimizers that share its backward want to know."""
    alive = alive or follow()
    with _NOTING:
        for key in [key for key, (runs, _) in _MULTIPLIED.items() if runs() is None]:
            del _MULTIPLIED[key]
        _MULTIPLIED[_graph_task(), why] = alive, factor


def multiplied(why: str) -> float:
    """By how much the loss was of which a backward runs."""
    with _NOTING:
        return _MULTIPLIED.get((_graph_task(), why), (None, 1.0))[1]
