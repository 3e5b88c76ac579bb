"""What a compiled graph asks of the runtime, as operations of torch.

``enter_`` and ``leave_`` stand where a unit's forward begins and ends, ``back_`` where backward comes to a call of it,
and ``accumulate`` takes the gradient of one parameter. They call what the hooks of an uncompiled model call
(:class:`zoo.shard.runtime.hooks.Runtime`): who gathers, releases and reduces when is decided there, once.

All of them write, as torch sees it, to ``order``, so that none is left out and none comes before another one; and to
the parameters that come or go, so that nothing reads these at another time. Those are inputs of the graph, whose memory
nobody uses for anything else. By the underscore at the end of a name torch's passes know what no fusion may cross; it
may cross ``accumulate``.

``mark`` is in the graph that torch traces, and in no other one: hooks of units leave it there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

LIBRARY: Any = torch.library.Library("zoo_compile", "FRAGMENT")  # type: ignore[no-untyped-call]
_EVENTS = "enter_", "leave_", "back_"
for _event in _EVENTS:
    LIBRARY.define(f"{_event}(Tensor(a!) order, Tensor(b!)[] values, int call) -> ()")
LIBRARY.define("accumulate(Tensor(a!) order, Tensor gradient, int bucket, int slot) -> ()")
LIBRARY.define("mark(Tensor[] outputs, int unit, bool begins, bool grad, bool known) -> ()")


class Execution(Protocol):
    """One execution of a graph on this rank."""

    def turn(self, event: str, call: int) -> None:
        """The forward of this call of a unit begins ("enter_"): what it uses is here afterwards; or it is over
        ("leave_"); or the backward of this call is next ("back_")."""

    def accumulate(self, gradient: torch.Tensor, bucket: int, slot: int) -> None:
        """Add to the gradient of a parameter."""


class _Running(threading.local):
    """Each thread runs graphs of its own: backward may have another one than forward."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []


_RUNNING = _Running()


class executing:
    """The operations of graphs that run inside belong to ``execution``."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def __enter__(self) -> None:
        _RUNNING.executions.append(self._execution)

    def __exit__(self, *_: object) -> None:
        _RUNNING.executions.pop()


def _now() -> Execution:
    if not _RUNNING.executions:
        raise RuntimeError(
            "a graph of zoo.compile runs outside of its model: it gathers nothing by itself. Call the model."
        )
    return _RUNNING.executions[-1]


def _turn(event: str, order: torch.Tensor, values: Sequence[torch.Tensor], call: int) -> None:
    _now().turn(event, call)


def _accumulate(order: torch.Tensor, gradient: torch.Tensor, bucket: int, slot: int) -> None:
    _now().accumulate(gradient, bucket, slot)


def _fake(*_: object) -> None:
    """Nothing comes of them."""


for _name in (*_EVENTS, "accumulate"):
    _carry_out = partial(_turn, _name) if _name in _EVENTS else _accumulate
    for _key in ("CPU", "CUDA", "SparseCPU", "SparseCUDA"):  # the gradient of a table may be sparse
        LIBRARY.impl(_name, _carry_out, _key)
    torch.library.register_fake(f"zoo_compile::{_name}", _fake, lib=LIBRARY)

torch.library.register_fake("zoo_compile::mark", _fake, lib=LIBRARY)
MARK = torch.ops.zoo_compile.mark.default
torch.fx.node.has_side_effect(MARK)


def mark(unit: int, begins: bool, output: Any) -> None:
    """torch traces a model, and has come to where the forward of this unit begins or ends, with what it returns."""
    outputs = _tensors(output)
    known = outputs is not None
    torch.ops.zoo_compile.mark.default(outputs if known else [], unit, begins, torch.is_grad_enabled(), known)


def _tensors(value: Any) -> list[Any] | None:
    """Those in it; None if it is something that torch would have to look into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or type(value) in (bool, int, float, str):
        return []
    if type(value) not in (tuple, list, dict):
        return None
    found: list[Any] = []
    for item in value.values() if type(value) is dict else value:
        inner = _tensors(item)
        if inner is None:
            return None
        found += inner
    return found


ENTER, LEAVE, BACK, ACCUMULATE = (
    torch.ops.zoo_compile.enter_.default, torch.ops.zoo_compile.leave_.default, torch.ops.zoo_compile.back_.default,
    torch.ops.zoo_compile.accumulate.default,
)  # fmt: skip
EVENTS = frozenset({ENTER, LEAVE, BACK})
