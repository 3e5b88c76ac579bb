"""Random number generators belong to a process; here each rank gets its own by swapping states at baton passes."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from typing import Any

import torch

from zoo.sim._guards import quiet

__all__ = ["RngStates"]


class RngStates:
    """The states of torch's CPU generator, python's ``random`` and (if imported already) numpy's global generator.

    A part that has not changed since it was put in place keeps its identity, and putting in place what is there
    already does nothing. Programs that draw no numbers pay little at each pass: reading the state of python's
    generator and of numpy's takes some 80 us, so that their memory is looked at first, and a state is read only where
    that has changed.
    """

    __slots__ = ("memory", "numpy", "python", "torch")

    def __init__(
        self, torch_state: torch.Tensor, python_state: tuple[Any, ...], numpy_state: tuple[Any, ...] | None,
        memory: tuple[Any, Any],
    ) -> None:  # fmt: skip
        self.torch = torch_state
        self.python = python_state
        self.numpy = numpy_state
        self.memory = memory
        """Of python's and numpy's generator, at the time; ``None`` where it says nothing."""

    @classmethod
    def capture(cls, installed: RngStates | None = None) -> RngStates:
        """Read the states; parts equal to those of ``installed`` are shared with it."""
        with quiet():
            torch_state = torch.default_generator.get_state()
            if installed is not None and torch.equal(torch_state, installed.torch):
                torch_state = installed.torch
        memory = _memory_of_python(), _memory_of_numpy()
        python, numpy = (None, None) if installed is None else (installed.python, installed.numpy)
        seen = (None, None) if installed is None else installed.memory
        if python is None or memory[0] is None or memory[0] != seen[0]:
            python_state = random.getstate()
            python = python if python_state == python else python_state
        if numpy is None or memory[1] is None or memory[1] != seen[1]:
            numpy_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
            numpy = numpy if _same_numpy(numpy_state, numpy) else numpy_state
        return cls(torch_state, python, numpy, memory)

    def install(self, installed: RngStates | None = None) -> None:
        """Put the states in place; ``installed`` tells what is there now, to skip the parts that are the same."""
        if installed is None or self.torch is not installed.torch:
            with quiet():
                torch.default_generator.set_state(self.torch)
        if installed is None or self.python is not installed.python:
            random.setstate(self.python)
        if self.numpy is not None and (installed is None or self.numpy is not installed.numpy):
            sys.modules["numpy"].random.set_state(self.numpy)


def _same_numpy(left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> bool:
    if left is None or right is None:
        return left is right
    return left[2:] == right[2:] and left[0] == right[0] and bool((left[1] == right[1]).all())


# -- memory of generators: equal bytes are the same state, other bytes may be ------------------------------------------


def _memory(generator: object, kind: type) -> bytes:
    """The C struct of a ``kind`` behind the header of its object."""
    header = object.__basicsize__
    return ctypes.string_at(id(generator) + header, kind.__basicsize__ - header)


def _memory_of_python() -> Any:
    """Everything that ``random`` draws from; ``None`` where that cannot be seen."""
    generator: Any = getattr(random, "_inst", None)
    if type(generator) is not random.Random or not _python_shows():
        return None
    return _memory(generator, _struct()), getattr(generator, "gauss_next", None)


def _struct() -> Any:
    """The class in C that ``random.Random`` is made from."""
    return random.Random.__base__


def _memory_of_numpy() -> Any:
    """Everything that ``numpy.random`` draws from; ``None`` where that cannot be seen, or where numpy is not there.

    Its ``RandomState`` holds the normal number that is left of two and the bit generator, which holds the rest.
    """
    numpy: Any = sys.modules.get("numpy")
    state = getattr(getattr(getattr(numpy, "random", None), "mtrand", None), "_rand", None)
    if state is None or type(state) is not numpy.random.RandomState or not _numpy_shows():
        return None
    source = getattr(state, "_bit_generator", None)
    if type(source) is not numpy.random.MT19937:
        return None
    return _memory(state, type(state)), _memory(source, type(source))


@functools.cache
def _python_shows() -> bool:
    """Whether this Python's generator has its state in its object: tried out, with one of our own."""
    own = random.Random(1)
    kind = _struct()
    start, before = own.getstate(), _memory(own, kind)
    own.random()
    after = _memory(own, kind)
    own.setstate(start)
    return after != before and _memory(own, kind) == before


@functools.cache
def _numpy_shows() -> bool:
    """The same of numpy's: of the bit generator, and of the normal number that is left of two."""
    numpy = sys.modules["numpy"]
    source = numpy.random.MT19937(1)
    own = numpy.random.RandomState(source)
    seen = [(_memory(own, type(own)), _memory(source, type(source)))]
    for _ in range(2):
        own.standard_normal()
        seen.append((_memory(own, type(own)), _memory(source, type(source))))
    return seen[0][1] != seen[1][1] == seen[2][1] and seen[0][0] != seen[1][0] != seen[2][0]
