"""In which dtypes a model computes, and its gradients are added up.

Where that is another dtype than the one in which its parameters came (``Precision.param``), the parameter objects
become ones of that dtype. What they came with is not lost where rounding changes it: it is what the fp32 masters of
trainable parameters start from, and of frozen ones it is kept beside them (``roles.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.shard.containers import map_tensors
from zoo.shard.quantised_parameters import is_coded

COMPUTES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What models compute in: parameters of other dtypes (int8, fp8) mean something only to their modules, and stay."""


_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which dtypes a model computes, and its gradients are kept and sent.

    Attributes:
        param: dtype that the model computes in, e.g. ``torch.bfloat16`` for a model in fp32: its parameters get this
            dtype; fp32 masters start from the exact values. None for the dtypes in which they came.
        accumulate: dtype in which a rank keeps gradients and adds up those of several backwards, e.g. ``torch.float32``
            under parameters in bf16; None for the parameters' own.
        reduce: dtype in which gradients are sent and added over ranks; None for that in which they are kept.
        cast_inputs: with ``param``, floating-point tensors among the arguments of the model's forward are cast.
        predivide: divide gradients by this before they are added up over the N ranks, by N / predivide afterwards; at
            most N, so that ``math.inf`` divides by all of it first. For sums of 16-bit gradients that would overflow.
        gather: by name, in which dtype a parameter travels to forward and backward where it is partitioned (stage 3),
            as :func:`zoo.compile.use_dtypes` finds them of a model under autocast; the others in their own. What is
            used is rounded to it, evaluations included; shards, gradients and updates are not.
    """

    param: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_inputs: bool = True
    predivide: float = 1.0
    gather: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def inputs(self) -> torch.dtype | None:
        """To which arguments of the model's forward are cast; None where they stay."""
        return self.param if self.cast_inputs else None

    def check(self, model: nn.Module) -> None:
        """Raise ValueError for what no model is computed or summed in, and for parameters that masters would round."""
        allowed = ", ".join(map(str, _SUMMED))
        if self.reduce not in (None, *_SUMMED):
            raise ValueError(
                f"Precision(reduce={self.reduce!r}); gradients are sent and added in one of {allowed}, or None for "
                "their own."
            )
        if self.accumulate not in (None, *_SUMMED):
            raise ValueError(
                f"Precision(accumulate={self.accumulate!r}); the gradients of several backwards are added up in one "
                f"of {allowed}, or None for the parameters' own."
            )
        given: Any = self.predivide
        if not isinstance(given, (int, float)) or not given >= 1.0:
            raise ValueError(
                f"Precision(predivide={given!r}); gradients are divided by a number from 1 to the number of ranks."
            )
        self._check_gather(model)
        if self.param not in (None, *COMPUTES):
            raise ValueError(
                f"Precision(param={self.param!r}); allowed are {', '.join(map(str, COMPUTES))}, or None for the dtypes "
                "that the parameters have."
            )
        wide = [name for name, p in model.named_parameters() if p.dtype is torch.float64]
        if self.param not in (None, torch.float64) and wide:
            raise ValueError(
                f"Precision(param={self.param}) with parameters of torch.float64 ({', '.join(map(repr, wide[:5]))}), "
                "whose masters in fp32 would be rounded. Convert them first (model.float()), or leave param out."
            )

    def _check_gather(self, model: nn.Module) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, dtype in self.gather.items():
            if name not in named:
                raise ValueError(f"Precision(gather={{{name!r}: …}}): the model has no such parameter.")
            if dtype not in COMPUTES or not named[name].dtype.is_floating_point:
                raise ValueError(
                    f"Precision(gather={{{name!r}: {dtype}}}) of a parameter of {named[name].dtype}; what is gathered "
                    f"so is of a dtype that models compute in, as {', '.join(map(str, COMPUTES))}."
                )
            own = compute_dtype(named[name], self.param)
            if dtype is not own and dtype.itemsize >= own.itemsize:
                raise ValueError(
                    f"Precision(gather={{{name!r}: {dtype}}}) of a parameter that is computed with as {own}: it would "
                    "travel in no fewer bytes. Leave it out."
                )


def resolve_precision(precision: Any) -> Precision:
    """``precision=`` of a constructor, None for the usual one.

    Raises:
        ValueError: it is something else.
    """
    if precision is None:
        return Precision()
    if not isinstance(precision, Precision):
        raise ValueError(f"precision={precision!r}; it takes a zoo.zero.Precision(param=torch.bfloat16, ...), or None.")
    return precision


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
    if all(map(is_, given, cast)):
        return None  # the containers stay the very objects that were given
    return pytree.tree_unflatten(cast, structure)
