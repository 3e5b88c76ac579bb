"""The native library in this process: loaded when an operation first needs it; where it cannot be, the reference runs.

``ZOO_KERNELS=reference`` in the environment asks for the pure-torch references; ``ZOO_KERNELS=native`` makes it an
error when the library is not there; without it, or with ``auto``, the references run then and a warning says why, once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator

from zoo.kernels.building import BuildError, build, cpu_plan

logger = logging.getLogger("zoo.kernels")

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets of the CPU kernels, each including the one before."""

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_why_not: str | None = None


def native() -> bool:
    """Whether the CPU operations run natively here; the first call loads the library, and builds it if need be.

    Raises:
        ValueError: ``ZOO_KERNELS`` is neither of the three.
        BuildError: ``ZOO_KERNELS=native`` and the library cannot be had.
    """
    mode = os.environ.get("ZOO_KERNELS") or "auto"
    if mode == "reference":
        return False
    if _library is not None:
        return True
    if mode not in ("auto", "native"):
        raise ValueError(f"ZOO_KERNELS={mode}; it must be auto, native or reference.")
    _load()
    if _why_not is not None and mode == "native":
        raise BuildError(f"ZOO_KERNELS=native, but {_why_not}")
    return _library is not None


def why_not() -> str | None:
    """Why the native library is not used, once that is known."""
    return _why_not


def _load() -> None:
    with _lock:
        if _library is None and _why_not is None:
            _load_once()


def _load_once() -> None:
    global _library, _why_not
    import torch

    try:
        path = build(cpu_plan(sanitize=os.environ.get("ZOO_KERNELS_SANITIZE") == "1"))
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        _library = ctypes.CDLL(str(path))
        _library.zoo_use_isa.argtypes = [ctypes.c_int32]
    except (BuildError, OSError) as error:
        _why_not = str(error)
        logger.warning(
            "the native operations cannot be used, so the slower references in plain torch run instead: %s", _why_not
        )
        return
    from zoo.kernels import differentiable, fakes

    fakes.register()
    differentiable.register()


def isas() -> tuple[str, ...]:
    """The instruction sets that this processor runs, of those that there are kernels for; () without native kernels."""
    if not native() or _library is None:
        return ()
    return ISAS[: int(_library.zoo_best_isa()) + 1]


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run the CPU kernels with this instruction set inside the block, in all threads: for tests and measurements.

    Raises:
        ValueError: this processor does not run it, or there are no native kernels here.
    """
    if name not in isas() or _library is None:
        raise ValueError(f"instruction set {name!r} cannot be used here; available: {', '.join(isas()) or 'none'}.")
    before = int(_library.zoo_isa())
    _library.zoo_use_isa(ISAS.index(name))
    try:
        yield
    finally:
        _library.zoo_use_isa(before)
