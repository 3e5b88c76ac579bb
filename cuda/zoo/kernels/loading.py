"""The native libraries in this process: loaded when an operation first needs one; else the references run.

There is one for CPUs and one for CUDA, which is asked for when an operation first sees tensors on a GPU and built for
the GPUs that are visible then. ``ZOO_KERNELS=reference`` in the environment asks for the pure-torch references;
``ZOO_KERNELS=native`` makes it an error when a library is not there; without it, or with ``auto``, the references run
then (on the GPU, if the tensors are there) and a warning says why, once. The environment is read when the first
operation runs and not again, because operations on small tensors take less than reading it; :func:`use_mode` changes
the mode later. ``ZOO_KERNELS_ISA=avx2`` (or ``portable``) holds the kernels for CPUs to that instruction set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("zoo.kernels")

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets of the CPU kernels, each including the one before."""

MODES = ("auto", "native", "reference")
"""What ``ZOO_KERNELS`` may be."""

_lock = threading.Lock()
_mode: str | None = None  # None: not asked yet
_library: ctypes.CDLL | None = None
_why_not: str | None = None
_cuda_operations: frozenset[str] | None = None  # those with a kernel for CUDA, once that library is loaded
_why_not_cuda: str | None = None
_classes: Any = None  # the module of classes, once it is loaded
_why_not_classes: str | None = None


def runs(name: str, tensor: torch.Tensor) -> bool:
    """Whether the operation ``zoo::name`` runs natively on tensors like this one; loads what is needed.

    fp64 never does. On CUDA every operation that the CUDA library has a kernel for does.

    Raises:
        ValueError, BuildError: see :func:`native`.
    """
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or tensor.dtype is torch.float64:
        return False
    return native() if kind == "cpu" else native_cuda() and has_cuda_kernel(name)


def mode() -> str:
    """One of :data:`MODES`: what ``ZOO_KERNELS`` was when this was first asked, or what :func:`use_mode` has set.

    Raises:
        ValueError: ``ZOO_KERNELS`` is neither of the three.
    """
    global _mode
    if _mode is None:
        asked = os.environ.get("ZOO_KERNELS") or "auto"
        if asked not in MODES:
            raise ValueError(f"ZOO_KERNELS={asked}; it must be auto, native or reference.")
        _mode = asked
    return _mode


def native() -> bool:
    """Whether the CPU operations run natively here; the first call loads the library, and builds it if need be.

    Raises:
        ValueError: see :func:`mode`.
        BuildError: the mode is "native" and the library cannot be had.
    """
    if (_mode or mode()) == "reference":
        return False
    if _library is not None:
        return True
    _load()
    if _why_not is not None and _mode == "native":
        from zoo.kernels.building import BuildError

        raise BuildError(f"ZOO_KERNELS=native, but {_why_not}")
    return _library is not None


def native_cuda() -> bool:
    """Whether the CUDA operations run natively here; the first call loads the library, and builds it if need be.

    Raises:
        ValueError, BuildError: see :func:`native`.
    """
    if not native():
        return False
    if _cuda_operations is not None:
        return True
    if _why_not_cuda is None:
        _load_cuda()
    if _why_not_cuda is not None and _mode == "native":
        from zoo.kernels.building import BuildError

        raise BuildError(f"ZOO_KERNELS=native, but {_why_not_cuda}")
    return _cuda_operations is not None


def has_cuda_kernel(name: str) -> bool:
    """Whether the operation ``zoo::name`` has a kernel for CUDA in this process; nothing is loaded."""
    return _cuda_operations is not None and name in _cuda_operations


@contextlib.contextmanager
def use_mode(name: str) -> Iterator[None]:
    """Run operations as with ``ZOO_KERNELS=name`` inside the block, in all threads: for tests and measurements.

    Raises:
        ValueError: there is no such mode.
    """
    before = _mode
    set_mode(name)
    try:
        yield
    finally:
        set_mode(before)


def set_mode(name: str | None) -> None:
    """From now on run operations as with ``ZOO_KERNELS=name``; None: as the environment says when next one runs.

    Raises:
        ValueError: there is no such mode.
    """
    global _mode
    if name is not None and name not in MODES:
        raise ValueError(f"mode {name!r}; it must be {', '.join(MODES[:-1])} or {MODES[-1]}.")
    _mode = name


def operations() -> list[str]:
    """The operations that have a kernel for CPUs in this process; nothing is loaded."""
    return _operations_with_kernel("CPU")


def _operations_with_kernel(key: str) -> list[str]:
    names = {full.removeprefix("zoo::").partition(".")[0] for full in torch._C._dispatch_get_all_op_names()
             if full.startswith("zoo::")}  # fmt: skip
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(n for n in names if has(f"zoo::{n}", key) or has(f"zoo::{n}", "CompositeExplicitAutograd"))


def why_not() -> str | None:
    """Why the native library is not used, once that is known."""
    return _why_not


def why_not_cuda() -> str | None:
    """Why the native library for CUDA is not used, once that is known."""
    return _why_not_cuda


def load_cuda(architectures: tuple[int, ...]) -> None:
    """Load the library for these GPUs, built if need be; none of them has to be here (for tests and checks).

    Raises:
        BuildError: it cannot be built, or the CPU library cannot.
        OSError: it cannot be loaded.
    """
    from zoo.kernels.building import BuildError, build_cuda_library

    global _cuda_operations
    if not native():
        raise BuildError(f"the library for CUDA needs the one for CPUs: {_why_not or 'ZOO_KERNELS=reference'}")
    if _cuda_operations is None:
        torch.ops.load_library(str(build_cuda_library(architectures)))  # type: ignore[no-untyped-call]
        _cuda_operations = frozenset(_operations_with_kernel("CUDA"))


def _load_cuda() -> None:
    with _lock:
        if _cuda_operations is None and _why_not_cuda is None:
            _load_cuda_once()


def _load_cuda_once() -> None:
    from zoo.kernels.building import BuildError

    global _why_not_cuda
    try:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        if not capabilities:
            raise BuildError("torch sees no GPU to build for.")
        load_cuda(tuple(sorted(10 * major + minor for major, minor in capabilities)))
    except (BuildError, OSError) as error:
        _why_not_cuda = str(error)
        logger.warning(
            "the native operations for CUDA cannot be used, so the slower references in plain torch run on the GPU "
            "instead: %s",
            _why_not_cuda,
        )


def _load() -> None:
    with _lock:
        if _library is None and _why_not is None:
            _load_once()


def _load_once() -> None:
    from zoo.kernels.building import BuildError

    global _library, _why_not
    try:
        library = _open_library()
        library.zoo_use_isa.argtypes = [ctypes.c_int32]
        _hold(library)
    except (BuildError, OSError) as error:
        _why_not = str(error)
        logger.warning(
            "the native operations cannot be used, so the slower references in plain torch run instead: %s", _why_not
        )
        return
    from zoo.kernels import operators

    operators.register()
    _library = library  # only now: other threads look at it without the lock, and need the gradients


def _hold(library: ctypes.CDLL) -> None:
    """Hold the kernels to the instruction set of ``ZOO_KERNELS_ISA``, where that is given."""
    asked = os.environ.get("ZOO_KERNELS_ISA")
    if not asked:
        return
    here = ISAS[: int(library.zoo_best_isa()) + 1]
    if asked not in here:
        raise ValueError(f"ZOO_KERNELS_ISA={asked}; this processor runs {', '.join(here)}.")
    library.zoo_use_isa(ISAS.index(asked))


def _open_library() -> ctypes.CDLL:
    """That of the wheel where it has one that fits, else one that is compiled here.

    Raises:
        BuildError, OSError: neither can be had.
    """
    from zoo.kernels.building import build, built_ahead, cpu_plan

    sanitize = os.environ.get("ZOO_KERNELS_SANITIZE") == "1"
    ahead = None if sanitize else built_ahead()
    if ahead is not None:
        try:
            return _open(ahead)
        except OSError as error:
            logger.info("the library that came with zoo-kernels does not load here, so one is compiled: %s", error)
    return _open(build(cpu_plan(sanitize=sanitize)))


def _open(path: Path) -> ctypes.CDLL:
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    return ctypes.CDLL(str(path))


def native_function(name: str, *arguments: type[ctypes._SimpleCData[Any]]) -> Callable[..., int] | None:
    """A function of the CPU library that takes ``arguments``, addresses or numbers; None where there is no library.

    Raises:
        ValueError, BuildError: see :func:`native`.
    """
    if not native() or _library is None:
        return None
    function: ctypes._NamedFuncPointer = getattr(_library, name)
    function.argtypes = arguments
    return function


def classes() -> Any:
    """The module of what kernels offer to Python as classes, built if need be; None where it cannot be had, or the CPU
    operations do not run natively.

    Raises:
        ValueError, BuildError: see :func:`native`.
    """
    if not native():
        return None
    if _classes is None and _why_not_classes is None:
        _load_classes()
    if _why_not_classes is not None and _mode == "native":
        from zoo.kernels.building import BuildError

        raise BuildError(f"ZOO_KERNELS=native, but {_why_not_classes}")
    return _classes


def loaded_classes() -> Any:
    """The module of :func:`classes` where it is loaded by now, else None."""
    return _classes


def address_of(name: str) -> int:
    """What a function of the CPU library without arguments returns, as an address.

    Raises:
        AssertionError: no library is loaded.
    """
    if _library is None:
        raise AssertionError(f"{name} is asked for before the CPU library is loaded")
    function: ctypes._NamedFuncPointer = getattr(_library, name)
    function.restype = ctypes.c_void_p
    return int(function())


def _load_classes() -> None:
    with _lock:
        if _classes is None and _why_not_classes is None:
            _load_classes_once()


def _load_classes_once() -> None:
    from zoo.kernels.building import BuildError

    global _classes, _why_not_classes
    try:
        _classes = _open_classes()
    except (BuildError, ImportError) as error:
        _why_not_classes = str(error)
        logger.warning(
            "updates and layers cannot be prepared once, so every step hands its tensors over again, which takes "
            "longer where they are many and small: %s",
            _why_not_classes,
        )


def _open_classes() -> Any:
    from zoo.kernels.building import build, built_ahead, python_plan

    sanitize = os.environ.get("ZOO_KERNELS_SANITIZE") == "1"
    ahead = None if sanitize else built_ahead(python=True)
    if ahead is not None:
        try:
            return _import(ahead)
        except ImportError as error:
            logger.info("the module that came with zoo-kernels does not load here, so one is compiled: %s", error)
    return _import(build(python_plan(sanitize=sanitize)))


def _import(path: Path) -> Any:
    from zoo.kernels.building import PYTHON_MODULE

    loader = ExtensionFileLoader(PYTHON_MODULE, str(path))
    spec = importlib.util.spec_from_loader(PYTHON_MODULE, loader)
    if spec is None:
        raise AssertionError(f"there is no module in {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


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
