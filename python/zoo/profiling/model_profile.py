"""The profile of one call of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.profiling import strings
from zoo.profiling.profiler import FlopsProfiler

__all__ = ["get_model_profile"]

_MODES = ("forward", "generate")


def get_model_profile(
    model: nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] | None = (),
    kwargs: Mapping[str, Any] | None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1,
    top_modules: int = 1, warm_up: int = 1, as_string: bool = True, output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None, mode: str = "forward",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(FLOPs, multiply-accumulates, parameters) of one forward, or generation, of a model in evaluation mode.

    The model is called ``warm_up`` times, once to count, and once more for seconds in which nothing is counted; a model
    on meta once, to count. Its training mode is put back. Gradients are as the caller has them.

    Args:
        input_shape: of a tensor of ones, on the device and of the dtype of the model's first floating-point parameter,
            which is its only argument.
        args, kwargs: arguments of the model instead.
        print_profile, detailed, module_depth, top_modules, output_file: see
            :meth:`~zoo.profiling.FlopsProfiler.print_model_profile`.
        warm_up: calls before it is measured.
        as_string: return strings, such as "1.5 G", "756 MMACs", "11.2 M".
        ignore_modules: classes of modules that are not looked at by themselves.
        mode: "forward", or "generate" for ``model.generate(...)``.

    Raises:
        ValueError: no module, no arguments, a shape that is none, or an unknown mode.
    """
    profiler = FlopsProfiler(model)
    args, kwargs = _arguments(model, input_shape, args, kwargs)
    call = _call(model, args, kwargs, mode)
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        real = _is_real(model)
        for _ in range(warm_up if real else 0):
            call()
        profiler.start_profile(ignore_list=ignore_modules)
        call()
        profiler.stop_profile()
        if real:
            profiler.measure_seconds(call)
        profiler.end_profile()
    finally:
        profiler.end_profile()
        for module, was in training:
            module.training = was
    if print_profile:
        profiler.print_model_profile(
            profile_step=warm_up, module_depth=module_depth, top_modules=top_modules, detailed=detailed,
            output_file=output_file,
        )  # fmt: skip
    flops, macs, params = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
    if not as_string:
        return flops, macs, params
    return strings.number_to_string(flops), strings.macs_to_string(macs), strings.params_to_string(params)


def _arguments(
    model: nn.Module, input_shape: Sequence[int] | None, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    by_place: Any = args
    by_name: Any = kwargs or {}
    if isinstance(by_place, torch.Tensor) or not isinstance(by_name, Mapping):
        raise ValueError(
            f"get_model_profile() got args of {type(args).__name__} and kwargs of {type(kwargs).__name__}; args is a "
            "list of what the model is called with, [tensor], and kwargs a dict."
        )
    if input_shape is None:
        if not args and not kwargs:
            raise ValueError(
                "get_model_profile() needs input_shape, or args and kwargs: what the model is called with."
            )
        return args or (), kwargs or {}
    given: Any = input_shape
    sizes: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else ()
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
        raise ValueError(f"input_shape={input_shape!r}; it is a tuple of sizes, such as (batch, 3, 224, 224).")
    if args:
        raise ValueError("get_model_profile() got input_shape and args; a tensor of input_shape is the only argument.")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    return (torch.ones(sizes, dtype=like.dtype, device=like.device),), kwargs or {}


def _call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: str) -> Callable[[], Any]:
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r}; allowed are {' and '.join(map(repr, _MODES))}.")
    if mode == "generate" and not hasattr(model, "generate"):
        raise ValueError(f"mode='generate' of a {type(model).__name__}, which has no method generate().")
    called = model if mode == "forward" else model.generate
    return lambda: called(*args, **kwargs)


def _is_real(model: nn.Module) -> bool:
    return all(p.device.type != "meta" for p in model.parameters())
