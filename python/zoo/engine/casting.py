"""The types that parameters and buffers of a model get before it is partitioned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.config.core import DataTypes

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cast(model: nn.Module, dtype: torch.dtype | None, buffer_dtype: torch.dtype | None, section: DataTypes) -> None:
    """Parameters become ``dtype``; buffers keep theirs, because what is computed once in float32 (frequencies of rotary
    embeddings, biases of a router) is not what it was after a cast.

    Args:
        model: changed in place.
        dtype: of parameters; None: they keep theirs.
        buffer_dtype: of floating-point buffers; None: they keep theirs, but for statistics of BatchNorm.
        section: whose ``keep_in_fp32_modules`` names buffers that are float32 under a 16-bit ``dtype``.
    """
    if dtype is not None:
        _cast_parameters(model, dtype)
    kept = set(_kept(model, dtype, section.keep_in_fp32_modules)) if dtype is not None else set()
    for module, name, path in _buffers(model):
        buffer = module._buffers[name]
        if buffer is None or buffer.dtype not in _FLOATS:
            continue
        wanted = torch.float32 if path in kept else buffer_dtype
        if wanted is not None and buffer.dtype != wanted:
            buffer.data = buffer.data.to(wanted)


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    # Kernels of BatchNorm on CPUs take one type for weights and statistics.
    kept = [(m, dict(m._buffers)) for m in model.modules() if m._buffers and not isinstance(m, _NormBase)]
    # to(dtype) would make real numbers of complex ones.
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
    for module, buffers in kept:
        module._buffers.update(buffers)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, the buffer's name there, its full name)."""
    for prefix, module in model.named_modules():
        for name in module._buffers:
            yield module, name, f"{prefix}.{name}" if prefix else name


def _kept(model: nn.Module, dtype: torch.dtype, names: str | list[str]) -> Iterator[str]:
    """Full names of the buffers that stay in float32."""
    patterns = set(_listed(model, dtype) if isinstance(names, str) else map(_pattern, names))
    if not patterns:
        return
    asked = re.compile("|".join(sorted(patterns)))
    yield from (path for _, _, path in _buffers(model) if asked.search(path))


def _listed(model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """What models of transformers say themselves, at any depth: ``_keep_in_fp32_modules`` counts under fp16 alone."""
    for prefix, module in model.named_modules():
        names = list(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            names += getattr(module, "_keep_in_fp32_modules", None) or ()
        within = rf"^{re.escape(prefix)}\..*" if prefix else ""
        yield from (within + _pattern(name) for name in names)


def _pattern(name: str) -> str:
    return ".*".join(map(re.escape, name.split("*")))
