"""``deepspeed.tp_model_init``, ``set_autotp_mode``: what a program says of tensor parallelism beside the document."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as _dist
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.communication import comm as dist
from zoo.deepspeed.adapters.configuration.data_classes import AUTOTP_MODE
from zoo.deepspeed.adapters.utilities.logs import warning_once

_MODELS: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
_mode = {"training": False}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def set_autotp_mode(training: bool = False) -> None:
    """What :func:`is_autotp_training_mode` says. Nothing else depends on it: layers look at whether there are
    gradients."""
    _mode["training"] = training


def is_autotp_training_mode() -> bool:
    """Whether a program has said so, or called :func:`tp_model_init`."""
    return _mode["training"]


def get_auto_tp_mode() -> AUTOTP_MODE:
    """The same as a value of the enum."""
    return AUTOTP_MODE.TRAINING if _mode["training"] else AUTOTP_MODE.INFERENCE


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: str | dict[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """Remember for ``deepspeed.initialize(model=model)``, which cuts the model, over how many ranks.

    Args:
        tp_size: ranks that have parts of the same layers. dtype: of the parameters; the document may say no other, and
            casts them by ``bf16`` or ``fp16``, without which they stay as they are, with a warning.
        config: a document whose section ``tensor_parallel`` counts where the one of ``initialize`` has none.
        tp_group: of these ranks; by default consecutive ones.

    Returns:
        The model, as it was given.

    Raises:
        ConfigError: something else was said of it before.
    """
    unknown = sorted(set(kwargs) - {"tp_group"})
    size: Any = tp_size
    if unknown or type(size) is not int or size < 1:
        raise ConfigError(
            f"tp_model_init(tp_size={tp_size!r}{''.join(f', {name}=...' for name in unknown)}): tp_size is an integer "
            "from 1 on, and tp_group may be given."
        )
    said = {"tp_size": tp_size, "dtype": dtype, "tp_group": kwargs.get("tp_group"), "config": config}
    before = _MODELS.get(model)
    if before is not None and any(before[key] != said[key] for key in ("tp_size", "dtype")):
        raise ConfigError(
            f"tp_model_init(tp_size={tp_size}, dtype={dtype}) of a model that was given tp_size={before['tp_size']} "
            f"and dtype={before['dtype']} before; call it once."
        )
    _MODELS[model] = said
    set_autotp_mode(True)
    return model


def with_model_init(document: dict[str, Any], model: nn.Module, mpu: Any) -> dict[str, Any]:
    """The document with what :func:`tp_model_init` was told of the model.

    Raises:
        ConfigError: they contradict each other.
    """
    said = _MODELS.get(model)
    if said is None:
        return document
    size, dtype, group = said["tp_size"], said["dtype"], said["tp_group"]
    if group is not None:
        if mpu is not None:
            raise ConfigError("tp_model_init provided tp_group, and initialize got mpu=: leave one of the two out.")
        _check_group(group, size)
    found = copy.copy(document)
    section = dict(found.get("tensor_parallel") or _section_of(said["config"]))
    older = dict(section.get("tp") or {})
    for key, value in (("autotp_size", section.get("autotp_size")), ("tp.tp_size", older.get("tp_size"))):
        if value not in (None, 0, "auto", size):
            raise ConfigError(
                f"tensor_parallel.{key} is {value}, and tp_model_init got tp_size={size}; keep one of them."
            )
    for name, kind in _DTYPES.items():
        asked = document.get(name)
        if isinstance(asked, Mapping) and asked.get("enabled") and dtype is not kind:
            raise ConfigError(f"Conflicting dtype: {name} is enabled, and tp_model_init got dtype={dtype}.")
    cast = any(isinstance(document.get(name), Mapping) and document[name].get("enabled") for name in _DTYPES)
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
    if others and not cast:
        warning_once(
            f"tp_model_init got dtype={dtype}, and the parameters stay {', '.join(sorted(map(str, others)))}: the "
            f"document enables neither bf16 nor fp16, which cast them. Enable one, or call model.to({dtype}) before."
        )
    wanted = section.get("dtype")
    if wanted is not None and _NAMES.get(str(wanted).lower(), wanted) is not dtype:
        raise ConfigError(f"Conflicting dtype: tensor_parallel.dtype is {wanted}, tp_model_init got dtype={dtype}.")
    found["tensor_parallel"] = {**section, "autotp_size": size}
    return found


def _section_of(config: Any) -> Mapping[str, Any]:
    from zoo.deepspeed.adapters.configuration.translation import find_document

    section = find_document(None, config).get("tensor_parallel") if config is not None else None
    return section or {}


def _check_group(group: Any, size: int) -> None:
    if dist.get_world_size(group) != size:
        raise ConfigError(f"tp_model_init got tp_size={size}, and a tp_group of {dist.get_world_size(group)} ranks.")
    ranks = _dist.get_process_group_ranks(group)
    if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        raise ConfigError(
            f"tp_model_init got a tp_group of the ranks {ranks}; consecutive ones are cut so. For others give "
            "initialize an mpu, whose groups may lie in any way."
        )


def get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """The styles of a model of transformers: its configuration's, its class's and its own, each layer once; None
    without. Of a layer that is there with the prefix "model." and without it, the first counts."""
    config = getattr(model, "config", None)
    plans = (getattr(config, "base_model_tp_plan", None), getattr(type(model), "_tp_plan", None),
             vars(model).get("_tp_plan"))  # fmt: skip
    found: dict[str, str] = {}
    for plan in plans:
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            bare = pattern.removeprefix("model.")
            known = {name.removeprefix("model.") for name in found}
            if pattern in found or bare == pattern or bare not in known:
                found[pattern] = style
    return found or None
