"""The dispatch mode that sees every operator, and what it keeps: work by module, pass and operator."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.cost.operators import NOTHING, Work
from zoo.profiling.formulas.call import Call, fakes, is_real
from zoo.profiling.formulas.table import Kind, bytes_of, kind_of

__all__ = ["OperatorCounter", "Sink"]

Sink = Callable[[str, Work, Work, tuple[int, int], bool], None]
"""Called with the operator's name, what it does, what it does again (its own recomputation, apart), the bytes that it
reads and writes, and whether values were computed (and not shapes only)."""

_DISABLED = torch._C._disabled_torch_dispatch_impl


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``sink`` what each operator does that runs while it is active, forward and backward.

    Operators that torch makes of others are taken apart, tensor subclasses do so themselves: what is counted is what
    runs on this rank.

    Attributes:
        not_counted: how often an operator ran that has no formula, by name.
        overhead_s: what counting itself took.
        detour_s: how much longer an operator takes that torch asks Python about, on top of that.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing compiled runs while this is active; to be hidden from the compiler would import all of it."""
        return False

    def __init__(self, sink: Sink, before: Callable[[], None]) -> None:
        """before: called before each operator runs, outside of what is timed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink, self._before = sink, before
        self.not_counted: Tally[str] = Tally()
        self.overhead_s, self.detour_s = 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and say what it does."""
        kwargs = kwargs or {}
        begin = time.perf_counter()
        if types and any(_takes_apart(kind) for kind in types):
            return NotImplemented
        found = kind_of(func)
        if found is Kind.MADE_OF_OTHERS:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if found is Kind.VIEW:
            self.overhead_s += time.perf_counter() - begin + self.detour_s
            return func(*args, **kwargs)
        self._before()
        started = time.perf_counter()
        out = func(*args, **kwargs)
        ended = time.perf_counter()
        self._count(found, Call(func, args, kwargs, out))
        self.overhead_s += time.perf_counter() - ended + started - begin + self.detour_s
        return out

    def _count(self, found: Any, call: Call) -> None:
        if found is Kind.UNKNOWN or found is Kind.MADE_OF_OTHERS:
            self.not_counted[call.name] += 1
            work, again = NOTHING, NOTHING
        elif found is Kind.MOVES:
            work, again = NOTHING, NOTHING
        else:
            try:
                counted = found(call)
            except Exception:  # another signature than the formula knows: the program goes on, and the list says so
                self.not_counted[call.name] += 1
                counted = NOTHING
            work, again = counted if isinstance(counted, tuple) else (counted, NOTHING)
        computed = all(is_real(t) for t in call.outputs)
        self._sink(call.name, work, again, bytes_of(work, call), computed)

    def leave(self) -> None:
        """Be active no more, whatever was made active after it: that stays so."""
        above: list[Any] = []
        plain: Any = TorchDispatchMode  # takes off and puts on, with what torch notes of it, and nothing of a subclass
        while (top := modes._get_current_dispatch_mode()) is not None and top is not self:
            above.append(top)
            plain.__exit__(top, None, None, None)
        if top is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for one in reversed(above):
            plain.__enter__(one)


def _takes_apart(kind: type) -> bool:
    """Whether a class of tensors turns operators into others on tensors of its own, which come here then."""
    if issubclass(kind, fakes()):
        return False
    return kind.__torch_dispatch__ is not _DISABLED  # type: ignore[attr-defined]
