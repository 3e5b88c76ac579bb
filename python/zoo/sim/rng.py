"""Random number generators belong to a process; here each rank gets its own by swapping states at baton passes."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from zoo.sim._guards import quiet

__all__ = ["RngStates"]


class RngStates:
    """The states of torch's CPU generator, python's ``random`` and (if imported already) numpy's global generator.

    A part that has not changed since it was put in place keeps its identity, and putting in place what is there
    already does nothing: programs that draw no numbers pay for three reads and compares at each pass, no writes.
    """

    __slots__ = ("numpy", "python", "torch")

    def __init__(self, torch_state: torch.Tensor, python_state: tuple[Any, ...], numpy_state: tuple[Any, ...] | None):
        self.torch = torch_state
        self.python = python_state
        self.numpy = numpy_state

    @classmethod
    def capture(cls, installed: RngStates | None = None) -> RngStates:
        """Read the states; parts equal to those of ``installed`` are shared with it."""
        with quiet():
            torch_state = torch.default_generator.get_state()
            unchanged = installed is not None and torch.equal(torch_state, installed.torch)
        python_state = random.getstate()
        numpy = sys.modules.get("numpy")
        numpy_state = None if numpy is None else numpy.random.get_state()
        if installed is not None:
            if unchanged:
                torch_state = installed.torch
            if python_state == installed.python:
                python_state = installed.python
            if _same_numpy(numpy_state, installed.numpy):
                numpy_state = installed.numpy
        return cls(torch_state, python_state, numpy_state)

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
