"""``deepspeed.runtime.compiler``: what torch.compile traces, and what not. Every torch that zoo takes has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from zoo.deepspeed.adapters.utilities.versions import required_torch_version

F = TypeVar("F", bound=Callable[..., Any])


def is_compile_supported() -> bool:
    """Whether torch.compile is there."""
    return True


def is_compiling() -> bool:
    """Whether this runs in the tracing of a compiler."""
    return torch.compiler.is_compiling()


def disable(func: F) -> F:
    """``func``, which no compiler traces."""
    disabled: F = torch.compiler.disable(func)  # type: ignore[no-untyped-call]
    return disabled


lazy_disable = disable


def dummy_decorator(func: F) -> F:
    """``func`` as it is."""
    return func


def enable(min_version: str | Callable[..., Any] | None = None) -> Any:
    """A decorator that leaves a function to the compiler where torch is at least ``min_version`` ("2.7.0"; None: any).

    ``@enable`` and ``@enable("2.7.0")`` are both meant; an older torch runs the function without compiling it.
    """
    if callable(min_version):
        return min_version
    if min_version is None or required_torch_version(min_version=min_version):
        return dummy_decorator
    return disable


@contextlib.contextmanager
def compiled_autograd(enabled: bool, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Compile backward in the block, by ``torch.compile(**kwargs)``, if ``enabled`` and nothing traces already."""
    if not enabled or is_compiling():
        yield
        return
    from torch._dynamo.compiled_autograd import _enable

    with _enable(torch.compile(**kwargs)):
        yield
