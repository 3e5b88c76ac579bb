"""What a restricted unpickler makes of classes and functions: inert records, never the things themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.regions import StoredTensor

MAX_DEPTH = 100


class Named:
    """A class or a function that a pickle names. It is a pair of words: nothing was looked up by it."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Named({str(self)!r})"


class Record:
    """What a pickle makes with a class or function: its name, what it was given, and the state it got afterwards.

    Attributes:
        kind: the name, as "module.name".
        known: whether it is on the list of what checkpoints have; the others are listed as foreign.
        args: what it was called with.
        state: what it was given as its ``__dict__`` or by ``__setstate__``, None if nothing.
        items, pairs: what was appended to it or set in it, as to a list or dict.
    """

    __slots__ = ("args", "items", "kind", "known", "pairs", "state")

    def __init__(self, kind: str, args: tuple[Any, ...], known: bool) -> None:
        self.kind, self.args, self.known = kind, args, known
        self.state: Any = None
        self.items: Sequence[Any] = ()
        self.pairs: Sequence[tuple[Any, Any]] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes by name, as far as its state is such."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (__dict__, slots)
            state = {**_texts(state[0]), **_texts(state[1])}
        return _texts(state)

    def __repr__(self) -> str:
        return f"Record({self.kind!r})"


def _texts(value: Any) -> dict[str, Any]:
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, dict) else {}


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain(value: Any, what: str, *, budget: int = 100_000) -> Any:
    """``value`` with its tensors read and its known records as dicts: plain values of Python and torch.

    What was made of unknown classes is left out where it is in a dict or list, as is anything that contains itself.

    Args:
        what: names it in errors.
        budget: how many values it may have, those that are in several places counted each time.

    Raises:
        CheckpointError: it is nested more than 100 deep, or has more values.
    """
    left = [budget]
    return _plain(value, what, 0, left)


class _Unknown(Exception):
    """What is here is of a class that is not on the list."""


def _plain(value: Any, what: str, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise CheckpointError(f"{what} is nested too deeply, contains itself, or has more values than a file says")
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if isinstance(value, StoredTensor):
        left[0] -= value.numel // 64
        if left[0] < 0:
            raise CheckpointError(f"{what} has larger tensors than belong to a description")
        return value.tensor()
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return _container(value, what, depth, left)
    if isinstance(value, Record):
        if not value.known:
            raise _Unknown
        if value.kind == "numpy":
            return value.state
        return _container(value.fields, what, depth, left)
    raise _Unknown


def _container(value: Any, what: str, depth: int, left: list[int]) -> Any:
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            try:
                pairs.append((_plain(key, what, depth + 1, left), _plain(item, what, depth + 1, left)))
            except _Unknown:
                continue
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    items = []
    for item in value:
        try:
            items.append(_plain(item, what, depth + 1, left))
        except _Unknown:
            continue
    kind = type(value) if type(value) in (list, tuple, set, frozenset) else list
    return kind(items)
