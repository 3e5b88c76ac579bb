"""A restricted unpickler: reads the values of a pickle, and neither imports nor calls what it names.

A pickle is a program for a small stack machine (CPython, ``Lib/pickletools.py``, describes every instruction). This is
that machine without its two dangerous parts: a global becomes a pair of words, :class:`Named`, without looking anything
up; and calling one (REDUCE, NEWOBJ, BUILD) looks it up in the table of :mod:`zoo.checkpointing.foreign.known`, whose
functions are this package's own. What is not in that table becomes an inert :class:`Record` and is listed.
It is no subclass of ``pickle.Unpickler``, which calls whatever it is handed.

What it refuses, before it allocates: strings and numbers longer than the file, instructions of protocol 0 and 1 that no
checkpoint has, extension codes, buffers outside of the file, integers of more than 1,024 bits, keys of dicts that are
no simple values, marks within more than 1,000 others, and more containers and copies than a pickle of its length could
describe properly (a container costs it some bytes; thousands of empty sets and nothing else are refused too). So
memory is at most some 64 bytes for each byte of the pickle, and tensors are not read at all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.known import KNOWN, RECORD_COST, STAND_INS, SimpleKey, Values
from zoo.checkpointing.foreign.records import Named, Record

_MAX_INT_BYTES = 128
_MAX_KEY_VALUES = 64
_MAX_MARKS = 1000


@dataclass(frozen=True, slots=True)
class Unknown:
    """A global of a pickle that is on no list: its name, and the byte of the pickle at which it was named first."""

    name: str
    at: int


@dataclass
class Unpickled:
    """The value of a pickle, where it ended, and the globals that nobody knows."""

    value: Any
    end: int
    unknown: list[Unknown] = field(default_factory=list)


def unpickle(raw: bytes, what: str, *, persistent: Callable[[Any], Any] | None = None, start: int = 0) -> Unpickled:
    """The value of the pickle that begins at ``raw[start]``.

    Args:
        what: names the pickle in errors.
        persistent: what a persistent id (a storage of torch) stands for; without it they are refused.

    Raises:
        CheckpointError: it is no whole pickle, or holds what is described above.
    """
    machine = _Machine(raw, start, what, persistent)
    try:
        return machine.run()
    except CheckpointError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError, OverflowError) as error:
        # What these are in detail is of no use to anybody: the pickle does not fit together.
        raise CheckpointError(f"{what} is damaged at byte {machine.at}: {type(error).__name__}: {error}") from None


class _Machine:
    """One pickle that is being read."""

    def __init__(self, raw: bytes, start: int, what: str, persistent: Callable[[Any], Any] | None) -> None:
        self.raw, self.at, self.what = raw, start, what
        self.persistent = persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []
        self.scattered: dict[int, Any] = {}  # of the memo, what did not come in order
        self.globals: dict[tuple[str, str], Named] = {}
        self.unknown: list[Unknown] = []
        self.values = Values(len(raw) - start, what)

    def run(self) -> Unpickled:
        raw, size = self.raw, len(self.raw)
        while self.at < size:
            code = raw[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1 or self.below:
                    raise CheckpointError(f"{self.what} ends with {len(self.stack)} values instead of one")
                return Unpickled(self.stack.pop(), self.at, self.unknown)
            step = _STEPS.get(code)
            if step is None:
                raise CheckpointError(
                    f"{self.what} has the instruction {code:#04x} at byte {self.at - 1}, which no checkpoint needs"
                )
            step(self)
        raise CheckpointError(f"{self.what} ends in the middle of a pickle")

    # -- bytes --------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.raw):
            raise CheckpointError(f"{self.what} says {count} bytes at byte {self.at}, and has {len(self.raw)} in all")
        self.at += count
        return self.raw[self.at - count : self.at]

    def number(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def line(self) -> str:
        end = self.raw.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise CheckpointError(f"{self.what} has a name of more than 1,024 bytes at byte {self.at}")
        text = self.raw[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def integer(self, count: int) -> int:
        if count > _MAX_INT_BYTES:
            raise CheckpointError(f"{self.what} has an integer of {count} bytes at byte {self.at}")
        return int.from_bytes(self.take(count), "little", signed=True)

    # -- stack --------------------------------------------------------------------------------------------------------

    def pop_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self.below.pop()
        return found

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > 1024:
            raise CheckpointError(f"{self.what} names a global by what is no name, at byte {self.at}")
        if (module, name) in STAND_INS:
            self.stack.append(STAND_INS[module, name])
            return
        if (module, name) not in self.globals:
            self.globals[module, name] = Named(module, name)
            if (module, name) not in KNOWN:
                self.unknown.append(Unknown(f"{module}.{name}", self.at))
        self.stack.append(self.globals[module, name])

    def call(self, function: Any, args: Any) -> Any:
        if not isinstance(args, tuple):
            raise CheckpointError(f"{self.what} calls something with what is no tuple, at byte {self.at}")
        if isinstance(function, Named):
            known = KNOWN.get((function.module, function.name))
            if known is not None:
                return known(self.values, function, args)
            self.values.charge(len(args) + RECORD_COST)
            return Record(str(function), args, known=False)
        if isinstance(function, Record):  # what came of an unknown function
            self.values.charge(RECORD_COST)
            return Record(function.kind, args, known=False)
        raise CheckpointError(f"{self.what} calls a {type(function).__name__}, at byte {self.at}")

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            self.values.build(target, state)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            target.items = _longer(target.items, items)
        elif type(target) is list:
            target += items
        else:
            raise CheckpointError(f"{self.what} appends to a {type(target).__name__}, at byte {self.at}")

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if len(items) % 2:
            raise CheckpointError(f"{self.what} has a key without a value at byte {self.at}")
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, Record):
            target.pairs = _longer(target.pairs, list(pairs))
        elif isinstance(target, dict):
            target.update((self.key(key), value) for key, value in pairs)
        else:
            raise CheckpointError(f"{self.what} sets items of a {type(target).__name__}, at byte {self.at}")

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, set):
            raise CheckpointError(f"{self.what} adds to a {type(target).__name__}, at byte {self.at}")
        target.update(map(self.key, items))

    def key(self, value: Any) -> Any:
        """``value`` if hashing it takes no time and no depth."""
        kind = type(value)
        if kind is str or (kind is int and abs(value) < 2**60):  # larger ones may all have one hash
            return value
        if not SimpleKey.check(value, [_MAX_KEY_VALUES], 0):
            raise CheckpointError(f"{self.what} has a {kind.__name__} as a key at byte {self.at}")
        return value

    def remember(self, number: int) -> None:
        if number == len(self.memo):
            self.memo.append(self.stack[-1])
        elif number < len(self.memo):
            self.memo[number] = self.stack[-1]
        else:
            self.scattered[number] = self.stack[-1]

    def recall(self, number: int) -> None:
        if number < len(self.memo):
            self.stack.append(self.memo[number])
        elif number in self.scattered:
            self.stack.append(self.scattered[number])
        else:
            raise CheckpointError(f"{self.what} recalls value {number}, which was never kept, at byte {self.at}")

    def paid(self, cost: int, value: Any) -> Any:
        """``value``, which a pickle that says it properly takes more than ``cost`` bytes for."""
        self.values.charge(cost)
        return value

    def stand_for(self, identity: Any) -> Any:
        if self.persistent is None:
            raise CheckpointError(f"{self.what} refers to something outside of it, at byte {self.at}")
        return self.persistent(identity)


def _longer(values: Sequence[Any], more: list[Any]) -> list[Any]:
    """A list of both, the same one where there is one."""
    found = values if isinstance(values, list) else list(values)
    found += more
    return found


_Step = Callable[[_Machine], Any]


def _push(make: Callable[[_Machine], Any]) -> _Step:
    def step(m: _Machine) -> None:
        value = make(m)  # which may change what the stack is
        m.stack.append(value)

    return step


def _text(m: _Machine, form: str) -> str:
    return m.take(m.number(form)).decode("utf-8", "surrogatepass")


def _old_text(m: _Machine, form: str) -> str:
    return m.take(m.number(form)).decode("latin-1")  # str of Python 2, which is bytes


def _protocol(m: _Machine) -> None:
    found = m.number("<B")
    if not 2 <= found <= 5:
        raise CheckpointError(f"{m.what} has protocol {found}; 2 to 5 are read")


def _frame(m: _Machine) -> None:
    if m.at + 8 + m.number("<Q") > len(m.raw) + 8:
        raise CheckpointError(f"{m.what} has a frame longer than itself")


def _mark(m: _Machine) -> None:
    if len(m.below) >= _MAX_MARKS:
        raise CheckpointError(f"{m.what} is nested more than {_MAX_MARKS} deep at byte {m.at}")
    m.below.append(m.stack)
    m.stack = []


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


def _tuple(count: int) -> _Step:
    def step(m: _Machine) -> None:
        if len(m.stack) < count:
            raise CheckpointError(f"{m.what} makes a tuple of more values than there are, at byte {m.at}")
        m.values.charge(2 if count == 1 else 1)
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _reduce(m: _Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _new(m: _Machine, keywords: bool) -> None:
    if keywords and m.stack.pop() != {}:
        raise CheckpointError(f"{m.what} makes an object with keywords at byte {m.at}; no checkpoint does")
    _reduce(m)


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.name(module, name)


def _dict(m: _Machine) -> None:
    items = m.pop_mark()
    m.stack.append({})
    m.set_items(items)


_STEPS: dict[int, _Step] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _mark,
    ord("0"): _pop,
    ord("1"): lambda m: m.pop_mark(),
    ord("2"): _push(lambda m: m.stack[-1]),
    # values
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: m.number("<i")),
    ord("K"): _push(lambda m: m.number("<B")),
    ord("M"): _push(lambda m: m.number("<H")),
    0x8A: _push(lambda m: m.integer(m.number("<B"))),
    0x8B: _push(lambda m: m.integer(m.number("<I"))),
    ord("G"): _push(lambda m: m.number(">d")),
    ord("U"): _push(lambda m: _old_text(m, "<B")),
    ord("T"): _push(lambda m: _old_text(m, "<I")),
    0x8C: _push(lambda m: _text(m, "<B")),
    ord("X"): _push(lambda m: _text(m, "<I")),
    0x8D: _push(lambda m: _text(m, "<Q")),
    ord("C"): _push(lambda m: m.take(m.number("<B"))),
    ord("B"): _push(lambda m: m.take(m.number("<I"))),
    0x8E: _push(lambda m: m.take(m.number("<Q"))),
    0x96: _push(lambda m: m.take(m.number("<Q"))),
    # containers
    ord("]"): _push(lambda m: m.paid(1, [])),
    ord("}"): _push(lambda m: m.paid(2, {})),
    0x8F: _push(lambda m: m.paid(4, set())),
    ord(")"): _push(lambda m: ()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): _push(lambda m: tuple(m.pop_mark())),
    ord("l"): _push(lambda m: m.pop_mark()),
    ord("d"): _dict,
    0x91: _push(lambda m: m.paid(5, frozenset(map(m.key, m.pop_mark())))),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.pop_mark()),
    ord("s"): lambda m: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    0x90: lambda m: m.add(m.pop_mark()),
    # memo
    ord("q"): lambda m: m.remember(m.number("<B")),
    ord("r"): lambda m: m.remember(m.number("<I")),
    0x94: lambda m: m.remember(len(m.memo) + len(m.scattered)),
    ord("h"): lambda m: m.recall(m.number("<B")),
    ord("j"): lambda m: m.recall(m.number("<I")),
    # names and what is made with them
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: lambda m: _new(m, keywords=False),
    0x92: lambda m: _new(m, keywords=True),
    ord("b"): lambda m: m.build(),
    ord("Q"): _push(lambda m: m.stand_for(m.stack.pop())),
}
"""Instruction → what it does. Instructions that are not here are refused."""
