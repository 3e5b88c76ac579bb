"""Steps that are not waited for, on the CPU; and what catches a look at a tensor's values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.zero import ZeroOptimizer
from zoo.zero.update.alike import Outcome

_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item", "_unique2", "masked_select")
_METHODS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "cpu")


class Late(ZeroOptimizer):
    """Reads what a step came to when somebody asks, as on a GPU."""

    _reads_late = True


class LookedAtError(AssertionError):
    """The host looked at a value: on a GPU it would wait."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _READS:
            raise LookedAtError(f"{func} of {[a for a in args if isinstance(a, torch.Tensor)]}")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS:
            raise LookedAtError(f"{func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_is_read() -> Iterator[None]:
    """Inside of it a look at a tensor's values is an error; those of the CPU that are no tensors' do not count."""
    with _Operations(), _Methods():
        yield


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """The outcomes that are read from now on, each once; a look at them is allowed."""
    found: list[Outcome] = []
    read = Outcome.read

    def counting(self: Outcome) -> Any:
        found.append(self)
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return read(self)

    monkeypatch.setattr(Outcome, "read", counting)
    return found
