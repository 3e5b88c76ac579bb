"""In which dtype a model computes whose parameters came in another one (``param_dtype``).

The parameter objects become ones of that dtype. What they came with is not lost where rounding changes it: it is what
the fp32 masters of trainable parameters start from, and of frozen ones it is kept beside them
(``roles.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.shard.containers import map_tensors
from zoo.shard.quantised_parameters import is_coded

COMPUTES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What models compute in: parameters of other dtypes (int8, fp8) mean something only to their modules, and stay."""


def check_param_dtype(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype that models do not compute in, and for parameters that fp32 masters would round."""
    if param_dtype is None:
        return
    if param_dtype not in COMPUTES:
        raise ValueError(
            f"param_dtype={param_dtype!r}; allowed are {', '.join(map(str, COMPUTES))}, or None for the dtypes that "
            "the parameters have."
        )
    if param_dtype is torch.float64:
        return
    wide = [name for name, p in model.named_parameters() if p.dtype is torch.float64]
    if wide:
        raise ValueError(
            f"param_dtype={param_dtype} with parameters of torch.float64 ({', '.join(map(repr, wide[:5]))}), whose "
            "masters in fp32 would be rounded. Convert them first (model.float()), or leave param_dtype out."
        )


def compute_dtype(parameter: torch.Tensor, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which ``parameter`` is computed with."""
    if param_dtype is None or parameter.dtype not in COMPUTES or is_coded(parameter):
        return parameter.dtype
    return param_dtype


def rounds(original: torch.dtype, to: torch.dtype) -> bool:
    """Whether a conversion from ``original`` may change a value."""
    return original is not to and torch.promote_types(original, to) is not to


def cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    """A forward pre-hook (``with_kwargs=True``): floating-point tensors among the arguments come in ``dtype``.

    They are looked for in the nested containers that ``torch.utils._pytree`` knows, and in those of
    :func:`zoo.shard.containers.map_tensors`; autograd follows the conversion.
    """
    return partial(_cast, dtype)


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    given, structure = pytree.tree_flatten((args, kwargs))
    cast = [map_tensors(lambda t: t.to(dtype) if t.dtype in COMPUTES else t, value) for value in given]
    if all(map(_same, given, cast)):
        return None  # the containers stay the very objects that were given
    return pytree.tree_unflatten(cast, structure)


def _same(one: Any, other: Any) -> bool:
    return one is other
