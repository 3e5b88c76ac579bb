"""Which module an operator belongs to, forward, backward and in recomputation.

Forward, by hooks: a stack of the modules that are being called. Each way through them is a :class:`CallNode`.
Backward, by numbers: autograd numbers its nodes in the order in which they are made, so that the number of the node
that runs says which modules were being called when it was made.
Recomputation is a module that is called while autograd runs, or an operator with gradients switched on there: a
backward of which that is so from its first operator on makes a graph of its own (``create_graph=True``) and is no
recomputation.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from zoo.cost.operators import NOTHING, Work

__all__ = ["CallNode", "Calls", "Pass", "Sums"]

_NO_NUMBER = 2**63


class Pass(Enum):
    """When an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OUTSIDE = "outside"
    """Neither in the model's forward nor in backward: the update, the data."""


class Sums:
    """Work that is added up, operator by operator, without an object for each sum."""

    __slots__ = ("calls", "elementwise", "macs", "masked_macs", "read_bytes", "written_bytes")

    def __init__(self) -> None:
        self.calls = self.macs = self.masked_macs = self.elementwise = self.read_bytes = self.written_bytes = 0

    def add(self, work: Work, read_bytes: int, written_bytes: int) -> None:
        """One operator more, with the bytes that it reads and writes."""
        self.calls += 1
        self.macs += work.macs
        self.masked_macs += work.masked_macs
        self.elementwise += work.elementwise
        self.read_bytes += read_bytes
        self.written_bytes += written_bytes

    @property
    def work(self) -> Work:
        """The sum."""
        return Work(
            macs=self.macs, masked_macs=self.masked_macs, elementwise=self.elementwise, read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
        )  # fmt: skip


class CallNode:
    """A module on one way through the model: the modules that called it, one in the other.

    Attributes:
        module: None for what is above the model.
        parent: None there too.
        sums: of operators that ran in it and in no module below, by pass.
        calls: in forward. seconds: of these calls.
    """

    __slots__ = ("calls", "children", "module", "parent", "seconds", "sums")

    def __init__(self, module: Any = None, parent: CallNode | None = None) -> None:
        self.module, self.parent = module, parent
        self.children: dict[int, CallNode] = {}
        self.sums: dict[Pass, Sums] = {}
        self.calls, self.seconds = 0, 0.0

    def of(self, now: Pass) -> Sums:
        """The sums of a pass, to add to."""
        found = self.sums.get(now)
        if found is None:
            found = self.sums[now] = Sums()
        return found

    def work(self, now: Pass) -> Work:
        """What was done in a pass."""
        found = self.sums.get(now)
        return NOTHING if found is None else found.work

    def child(self, module: Any) -> CallNode:
        """The node of a module that is called from here."""
        found = self.children.get(id(module))
        if found is None:
            found = self.children[id(module)] = CallNode(module, self)
        return found

    def up(self) -> Iterator[CallNode]:
        """This one, and those above it."""
        node: CallNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def walk(self) -> Iterator[CallNode]:
        """This one, and those below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class _Thread:
    """What one thread does: its stack of calls, and from which number of autograd's on which node was on top."""

    def __init__(self, root: CallNode) -> None:
        self.stack: list[list[Any]] = []  # node, when it began, what counting had taken then
        self.numbers: list[int] = []
        self.nodes: list[CallNode] = []
        self.root = root

    @property
    def top(self) -> CallNode:
        found: CallNode = self.stack[-1][0] if self.stack else self.root
        return found

    def mark(self) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self.numbers and self.numbers[-1] == number:
            self.nodes[-1] = self.top
        else:
            self.numbers.append(number)
            self.nodes.append(self.top)

    def made(self, number: int) -> CallNode | None:
        """Which node was on top when autograd's node of that number was made."""
        place = bisect_right(self.numbers, number) - 1
        return self.nodes[place] if place >= 0 else None


class Calls:
    """The tree of calls of a model, while it is watched.

    Attributes:
        root: above the model.
    """

    def __init__(self) -> None:
        self.root = CallNode()
        self._threads: dict[int, _Thread] = {}
        self._forward: _Thread | None = None  # the thread whose graph is run backward
        self._tasks: dict[int, tuple[bool, _Thread | None]] = {}  # backward → makes a graph, whose nodes they are

    # -- modules ------------------------------------------------------------------------------------------------------

    def enter(self, module: Any) -> None:
        """A module is called; :meth:`begin` says when."""
        thread = self._thread()
        parent = thread.top
        if torch._C._current_autograd_node() is None:
            if not thread.stack:
                self._begin_forward(thread)
        elif not thread.stack:
            parent = self._again(module)
        node = parent.child(module)
        thread.stack.append([node, 0.0, 0.0])
        thread.mark()

    def begin(self, overhead_s: float) -> None:
        """The module that was entered last begins now; counting has taken so long until now."""
        self._thread().stack[-1][1:] = time.perf_counter(), overhead_s

    def leave(self, module: Any, now: float, overhead_s: float) -> None:
        """The call has ended at ``now``, also by an exception; calls in it that have not said so end too."""
        thread = self._thread()
        stack = thread.stack
        if not stack or (stack[-1][0].module is not module and all(one[0].module is not module for one in stack)):
            return
        while True:
            node, begun, before = stack.pop()
            if node.module is module:
                break
        if torch._C._current_autograd_node() is None:
            node.calls += 1
            node.seconds += max(now - begun - (overhead_s - before), 0.0)
        thread.mark()

    def _begin_forward(self, thread: _Thread) -> None:
        self._forward = thread
        for other in self._threads.values():
            if other is not thread:  # numbers of a device's thread are those of the backward that is over
                other.numbers.clear()
                other.nodes.clear()
        self._tasks.clear()

    def _again(self, module: Any) -> CallNode:
        """Below which node a module is called again: the one that called it in forward."""
        owner = self._owner()
        for node in owner.up():
            if node.module is module and node.parent is not None:
                return node.parent
            if id(module) in node.children:
                return node
        for node in self.root.walk():
            if node.module is module and node.parent is not None:
                return node.parent
        return owner

    # -- operators ----------------------------------------------------------------------------------------------------

    def place(self) -> tuple[CallNode, Pass]:
        """Where the operator that runs now belongs."""
        thread = self._thread()
        if torch._C._current_autograd_node() is None:
            return (thread.top, Pass.FORWARD) if thread.stack else (self.root, Pass.OUTSIDE)
        makes_graph = self._task()[0]
        if thread.stack:
            return thread.top, Pass.RECOMPUTATION
        again = torch.is_grad_enabled() and not makes_graph
        return self._owner(), Pass.RECOMPUTATION if again else Pass.BACKWARD

    def _owner(self) -> CallNode:
        node: Any = torch._C._current_autograd_node()
        thread = self._task()[1]
        number = int(node._sequence_nr())
        # What adds to the gradient of a parameter has the largest number there is, and belongs to no call.
        found = None if thread is None or not 0 <= number < _NO_NUMBER else thread.made(number)
        return self.root if found is None else found

    def _task(self) -> tuple[bool, _Thread | None]:
        """Of the backward that runs: whether it makes a graph, and which thread has made the nodes that it runs.

        One that begins within a recomputation runs the nodes that this has made, on its own thread.
        """
        number = torch._C._current_graph_task_id()
        found = self._tasks.get(number)
        if found is None:
            thread = self._thread()
            maker = thread if thread.numbers and thread is not self._forward else self._forward
            found = self._tasks[number] = torch.is_grad_enabled(), maker
        return found

    def _thread(self) -> _Thread:
        number = threading.get_ident()
        found = self._threads.get(number)
        if found is None:
            found = self._threads[number] = _Thread(self.root)
        return found
