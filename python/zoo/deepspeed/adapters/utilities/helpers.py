"""Small things of ``deepspeed.utils``: tensors on a device, ranges for profilers, numbers of cores, attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator


class ActivationFuncType(IntEnum):
    """Kinds of activation functions."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


class NormType(IntEnum):
    """Kinds of normalisation."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a path: "layers.0.weight"."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at a path."""
    path, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, path) if path else model, last, module)


def convert_conv1d_to_linear(model: Any, convert_type: type[Any]) -> Any:
    """Put a Linear in the place of each layer of this type, in the model, which is given back: transformers' ``Conv1D``
    of GPT-2, whose weight is (in, out) and whose bias is the Linear's."""
    inner = getattr(model, "module", model)
    for name, layer in list(inner.named_modules()):
        if name and isinstance(layer, convert_type):
            rows, columns = layer.weight.shape
            linear = torch.nn.Linear(
                rows, columns, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype
            )
            linear.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous(), layer.weight.requires_grad)
            linear.bias = layer.bias
            recursive_setattr(inner, name, linear.train(layer.training))
    return model


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` inside of a range with its name, which NVIDIA's profilers show."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        here: Any = get_accelerator()
        here.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            here.range_pop()

    return wrapped


def parse_range(rng: str) -> range:
    """ "2-4" → ``range(2, 5)``, "3" → ``range(3, 4)``.

    Raises:
        ValueError: it is neither.
    """
    first, dash, last = rng.partition("-")
    numbers = (first, last) if dash else (first, first)
    if not all(n.strip().isdigit() for n in numbers) or int(numbers[0]) > int(numbers[1]):
        raise ValueError(f"{rng!r} is no range; write a number, or two with a dash, the smaller first, as in '2-4'.")
    return range(int(numbers[0]), int(numbers[1]) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """ "0,2-4,6" → ``[0, 2, 3, 4, 6]``.

    Raises:
        ValueError: a part is no range, or not above the one before it.
    """
    found: list[int] = []
    for part in range_str.split(","):
        numbers = parse_range(part)
        if found and numbers[0] <= found[-1]:
            raise ValueError(f"{range_str!r} has {part!r} after {found[-1]}; ranges rise and do not overlap.")
        found.extend(numbers)
    return found


_MAKERS: tuple[Any, ...] = (torch.empty, torch.zeros, torch.ones, torch.full)
_NEW: Any = torch._C.TensorBase.__new__


class _Made(TorchFunctionMode):
    """What the four makers give is on a device, and in a dtype where it is of floating point. Nothing else changes:
    constructors compute with torch.arange or torch.linspace, which need values."""

    def __init__(self, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKERS:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return self.cast(func(*args, **kwargs))

    def cast(self, made: torch.Tensor) -> torch.Tensor:
        """In the dtype, if it is of floating point."""
        return made.to(self.dtype) if made.is_floating_point() else made

    def new(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.Tensor(2, 3)``, which no mode sees."""
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if cls is not torch.Tensor or kwargs or not all(isinstance(n, int) for n in sizes):
            return _NEW(cls, *args, **kwargs)
        return self.cast(torch.empty(tuple(sizes), dtype=torch.get_default_dtype(), device=self.device))


class OnDevice:
    """``with OnDevice(dtype=torch.float16, device="meta"): model = Model()``: what ``torch.empty``, ``zeros``,
    ``ones``, ``full`` and ``torch.Tensor(sizes)`` make inside, and so the parameters of modules, is on this device, in
    this dtype if it is of floating point. ``enabled=False``: nothing changes."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside: list[tuple[_Made, Any]] = []

    def __enter__(self) -> None:
        if not self.enabled:
            return
        mode = _Made(self.dtype, self.device)
        self._inside.append((mode, torch.Tensor.__dict__.get("__new__")))
        mode.__enter__()  # type: ignore[no-untyped-call]
        # No named argument: operations on meta import torch._dynamo, which compares this signature with one of its own.
        torch.Tensor.__new__ = lambda *args, **kwargs: mode.new(*args, **kwargs)  # type: ignore[method-assign]

    def __exit__(self, *exception: Any) -> None:
        if not self.enabled:
            return
        mode, before = self._inside.pop()
        if before is None:
            del torch.Tensor.__new__
        else:
            torch.Tensor.__new__ = before  # type: ignore[method-assign]
        mode.__exit__(*exception)  # type: ignore[no-untyped-call]


def _of_mpu(what: str, kinds: tuple[str, ...], absent: Any) -> Callable[..., Any]:
    def ask(mpu: Any = None) -> Any:
        for kind in kinds:
            method = getattr(mpu, f"get_{kind}_{what}", None)
            if method is not None:
                return method()
        return absent

    ask.__doc__ = f"``get_{kinds[0]}_{what}()`` of an mpu, or its older names; {absent} without."
    return ask


_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPE = ("pipeline_model_parallel", "pipe_parallel")
bwc_tensor_model_parallel_rank = _of_mpu("rank", _TENSOR, 0)
bwc_tensor_model_parallel_world_size = _of_mpu("world_size", _TENSOR, 1)
bwc_tensor_model_parallel_group = _of_mpu("group", _TENSOR, None)
bwc_pipeline_parallel_world_size = _of_mpu("world_size", _PIPE, 1)
bwc_pipeline_parallel_group = _of_mpu("group", _PIPE, None)
