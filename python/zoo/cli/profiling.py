"""``zoo profile MODEL``: what each module of a model computes, also of a model that is too large for this machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.profiling import FlopsProfiler, Profile, flame_page

__all__ = ["profile_of"]

Call = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]
_FORM = "a folder of a model of transformers, its config.json, or MODULE:FUNCTION, such as my_package.models:small"


def profile_of(
    model: str, *, shape: str | None, batch: int, seq: int, backward: bool, meta: bool, peak_tflops: float | None,
) -> FlopsProfiler:  # fmt: skip
    """The profiler of one forward, and one backward.

    Args:
        model: where it is from; see the command. shape: of a tensor of ones, "8,3,224,224".
        batch, seq: sequences, and tokens of each, of a model of transformers.
        meta: without values, as models of transformers always are here.

    Raises:
        ValueError: what the user can fix.
    """
    import torch

    path = Path(model)
    if path.exists():
        net, args, kwargs = _of_transformers(path, batch, seq)
    else:
        with torch.device("meta" if meta else "cpu"):
            net, args, kwargs = call_of_function(model, shape)
    profiler = FlopsProfiler(net, peak_flops_per_s=None if peak_tflops is None else peak_tflops * 1e12)
    profiler.start_profile()
    try:
        with torch.set_grad_enabled(backward):
            out = output_of(net, args, kwargs)
            if backward:
                first_tensor(out).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        profiler.end_profile()
    return profiler


def _of_transformers(path: Path, batch: int, seq: int) -> Call:
    """On meta, with its attention written out: what fuses it looks at the values of masks."""
    import torch

    from zoo.cli.tensor import empty_model

    net = empty_model(path, attn_implementation="eager")
    with torch.device("meta"):
        ids, ones = torch.zeros(batch, seq, dtype=torch.int64), torch.ones(batch, seq, dtype=torch.int64)
        places = torch.arange(seq).unsqueeze(0)
    plain = {"input_ids": ids, **({"decoder_input_ids": ids} if net.config.is_encoder_decoder else {})}
    # Models that make masks look at values of what they are not given; others take no positions, or no cache.
    told = {"attention_mask": ones, "position_ids": places}
    for more in ({}, told, {**told, "use_cache": False}):
        try:
            with torch.no_grad():
                net(**plain, **more)
        except (RuntimeError, TypeError) as error:
            why = error
        else:
            return net, (), {**plain, **more}
    raise ValueError(f"{type(net).__name__} cannot be called without values: {why}.")


def function_of(name: str) -> Any:
    """What MODULE:FUNCTION names, found from the working directory or where packages are.

    Raises:
        ValueError: it is not of that form, or there is none.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"{name!r} is no model; it is {_FORM}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ValueError(f"there is no module {module!r}; {name!r} is not {_FORM}.") from None
    except AttributeError as error:
        if error.name != function:
            raise
        raise ValueError(f"the module {module} has no {function!r}.") from None


def call_of_function(name: str, shape: str | None) -> Call:
    """The model that MODULE:FUNCTION returns, and what it is called with.

    Args:
        shape: of a tensor of ones, "8,3,224,224"; None where the function says it.

    Raises:
        ValueError: what the user can fix.
    """
    import torch

    make = function_of(name)
    try:
        made = make()
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    net, *rest = made if isinstance(made, tuple) else (made,)
    args: Any = rest[0] if rest and rest[0] is not None else ()
    kwargs: Any = rest[1] if len(rest) > 1 and rest[1] is not None else {}
    if not isinstance(net, nn.Module) or len(rest) > 2:
        what = f"a {type(net).__name__}" if not rest else f"a tuple of {len(made)}, the first a {type(net).__name__}"
        raise ValueError(f"{name} returned {what}; it returns a model, or (model, args, kwargs).")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ValueError(
            f"{name} returned {_described(args)} as args and {_described(kwargs)} as kwargs of its model; args are a "
            "tuple, such as (tensor,), and kwargs a dict."
        )
    if shape is not None:
        args = (torch.ones(_sizes(shape)),)
    if not args and not kwargs:
        raise ValueError(
            f"{name} says not what its model is called with: give --shape, or return (model, args, kwargs)."
        )
    return net, args, kwargs


def _sizes(shape: str) -> tuple[int, ...]:
    parts = shape.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape {shape!r}; it is sizes with commas between them, such as 8,3,224,224.")
    return tuple(map(int, parts))


def output_of(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a model returns.

    Raises:
        ValueError: it cannot be called with these.
    """
    try:
        return net(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        given = [*map(_described, args), *(f"{name}: {_described(value)}" for name, value in kwargs.items())]
        why = (str(error) or "no message").splitlines()[0]
        raise ValueError(
            f"the model cannot be called with {', '.join(given)}: {type(error).__name__}: {why}"
        ) from error


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {','.join(map(str, value.shape)) or 'one value'}"
    return f"a {type(value).__name__}"


def first_tensor(out: Any) -> Tensor:
    """The tensor to go backward from.

    Raises:
        ValueError: there is none.
    """
    values: list[Any] = [out] if isinstance(out, Tensor) else []
    values += list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, (tuple, list)) else []
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value.abs() if value.is_complex() else value
    raise ValueError(
        f"the model returns a {type(out).__name__}, without a tensor that has a gradient: there is no backward of it."
    )


def write(profile: Profile, json_file: Path | None, flame_file: Path | None) -> None:
    """Files that were asked for."""
    if json_file is not None:
        profile.to_json(json_file)
    if flame_file is not None:
        flame_page(profile, flame_file)
