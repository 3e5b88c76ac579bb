"""The document of ``deepspeed.initialize``: where it is found, and what zoo reads of it."""

from __future__ import annotations

import argparse
import base64
import binascii
import copy
import difflib
import gc
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.config import Config, ConfigError, root_keys
from zoo.config.batch import BATCH_KEYS
from zoo.config.reading import TOO_DEEP, check_values
from zoo.deepspeed.adapters.configuration.plain_values import as_meant
from zoo.deepspeed.adapters.utilities.logs import set_log_level_from_string

_log = logging.getLogger("zoo.deepspeed")
_warned: set[str] = set()

_CARRIED_OUT_HERE = frozenset({"log_level", "managed_gradient_accumulation"})
"""Root keys that zoo's own configuration does not have."""
_COMPONENT = ("type", "params", "legacy_fusion")
"""Keys of a section that names a component."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What :func:`zoo.engine.add_config_arguments` adds, and ``--deepscale`` and ``--deepscale_config``, older names of
    the same, which help does not show. Returns the parser."""
    from zoo.engine import add_config_arguments as add

    add(parser).add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser


def find_document(args: Any, config: Any) -> dict[str, Any]:
    """The configuration as a dict of its own, with values as they are meant (:func:`~.plain_values.as_meant`).

    Raises:
        ConfigError: there is none, there are two, or it cannot be read.
    """
    named = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    given = [source for source in (config, *named) if source is not None]
    if not given:
        raise ConfigError(
            "there is no configuration; give initialize config= (a dict or a path), or args with deepspeed_config."
        )
    if len(given) > 1:
        raise ConfigError(
            "there are several configurations: config= of initialize, deepspeed_config and deepscale_config of args; "
            "give one of them."
        )
    return as_meant(read_document(given[0]))


def read_document(config: Any) -> dict[str, Any]:
    """A dict, the path of a file, or base64, as a dict of its own.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(config, Config):
        raise ConfigError("initialize() of deepspeed takes a dict or a path; zoo.engine.initialize takes a Config.")
    if isinstance(config, Mapping):
        check_values(config, "dict")
        return {key: copy.deepcopy(value) for key, value in config.items()}
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"the configuration is a {type(config).__name__}; give a dict or the path of a file.")
    path = Path(config)
    if _is_file(path):
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
            found = _yaml(text, str(path)) if path.suffix in (".yaml", ".yml") else _json(text, str(path))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 ({error}); convert it.") from None
        except RecursionError:
            raise ConfigError(f"{path} {TOO_DEEP}.") from None
        check_values(found, str(path))
        return found
    try:
        text = base64.urlsafe_b64decode(str(config)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise ConfigError(f"the configuration {str(config)!r} is no file, and no base64 of one.") from None
    return _json(text, "the configuration in base64")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name: base64
        return False


def _yaml(text: str, where: str) -> dict[str, Any]:
    from zoo.config.reading import DocumentError
    from zoo.config.strict_yaml import parse

    try:
        return _object(parse(text), where)
    except DocumentError as error:
        raise ConfigError(f"{where} is no YAML of a configuration: {error}") from None


def _json(text: str, where: str) -> dict[str, Any]:
    """JSON; or HJSON, which has comments and commas at the end, as DeepSpeed reads its files."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
            raise ConfigError(f"{where}: given twice: {', '.join(twice)}. Keep one of them.")
        return found

    try:
        return _object(json.loads(text, object_pairs_hook=once), where)
    except json.JSONDecodeError as error:
        import hjson  # type: ignore[import-untyped]

        try:
            return _object(hjson.loads(text, object_pairs_hook=once), where)
        except hjson.HjsonDecodeError:
            raise ConfigError(f"{where} is no JSON: {error}") from None


def _object(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        what = "empty" if found is None else f"a {type(found).__name__}"
        raise ConfigError(f"{where} is {what}; a configuration is an object.")
    return found


# -- what zoo reads of it ---------------------------------------------------------------------------------------------


def translated(
    document: Mapping[str, Any], *, drop_optimizer: bool = False, pipeline: bool = True, by_mpu: bool = False
) -> dict[str, Any]:  # fmt: skip
    """The document for ``zoo.engine.initialize``.

    Args:
        drop_optimizer: the program has given an optimizer.
        pipeline: the model is one; otherwise the section ``pipeline`` says nothing.
        by_mpu: an mpu says which ranks share sequences.

    Raises:
        ConfigError: keys that exclude each other, or the model.
    """
    managed = document.get("managed_gradient_accumulation", True)
    if managed not in (True, False):
        raise ConfigError(f"managed_gradient_accumulation = {managed!r}; allowed are true and false.")
    if pipeline and not managed:
        raise ConfigError(
            "managed_gradient_accumulation=false is not supported with pipeline parallelism: there train_batch() takes "
            "all micro-batches of a step, and no step() ends one earlier. Leave it out."
        )
    given = {k: v for k, v in document.items() if k not in _CARRIED_OUT_HERE and (v != "auto" or k in BATCH_KEYS)}
    found = {key: _filled(key, value) for key, value in given.items()}
    for key in sorted(set(found) - root_keys()):
        if key not in _warned:
            _log.warning("the configuration has the root key %r, which neither zoo nor DeepSpeed knows.", key)
            _warned.add(key)
        del found[key]
    found = as_meant(found)
    if "elasticity" in found:
        import torch.distributed as dist

        from zoo.deepspeed.adapters.utilities.elasticity import with_elastic_batch

        found = with_elastic_batch(found, dist.get_world_size() if dist.is_initialized() else 1)
    aio = found.get("aio")
    if isinstance(aio, Mapping) and type(aio.get("block_size")) is int and aio["block_size"] > 0:
        found["aio"] = {**aio, "block_size": -(-aio["block_size"] // 4096) * 4096}  # whole pages, as aio_handle
    saved = found.get("activation_checkpointing")
    if isinstance(saved, Mapping) and saved.get("number_checkpoints") == 0:
        found["activation_checkpointing"] = {**saved, "number_checkpoints": None}
    zero = _zero(found)
    if not (isinstance(zero, Mapping) and zero.get("update_in_backward")):  # a key of zoo alone, which cannot clip
        found.setdefault("gradient_clipping", 1.0)  # DeepSpeed clips to 1 unless told otherwise
    clip = found.get("gradient_clipping")
    if isinstance(clip, (int, float)) and clip < 0:  # as 0: DeepSpeed clips to norms above it
        found["gradient_clipping"] = 0.0
    every = found.setdefault("steps_per_print", None)
    if every in (0, "inf") or (isinstance(every, float) and math.isinf(every)):
        found["steps_per_print"] = None
    found.pop("disable_python_gc", None)  # see carry_out
    generates = found.get("hybrid_engine")
    if isinstance(generates, Mapping) and generates.get("enabled") is True:
        # DeepSpeedHybridEngine reads it from the document; zoo's engine would say that it has no effect.
        found["hybrid_engine"] = {k: v for k, v in generates.items() if k != "inference_tp_size"}
    experts = found.get("expert_parallel")
    if isinstance(experts, Mapping) and experts.get("enabled") is True:
        from zoo.deepspeed.adapters.configuration.expert_parallel import moe_section

        if found.get("moe"):
            raise ConfigError("expert_parallel and moe say the same thing in two ways; leave one of them out.")
        found["moe"] = moe_section(found.pop("expert_parallel"))
    if not pipeline:
        found.pop("pipeline", None)
    if drop_optimizer and found.pop("optimizer", None) is not None:
        _log.warning("initialize() got an optimizer; the configuration's section optimizer is not used.")
    for key in ("optimizer", "scheduler"):
        _only_components(found, key)
    _torch_adams_decay(found)
    if found.get("prescale_gradients"):
        found.pop("gradient_predivide_factor", None)  # without effect then, in both
    if "gradient_allreduce_op" in found:
        found["gradient_allreduce_op"] = "mean"  # a sum is the mean times the ranks: see gradient_allreduce_op()
    shared = found.pop("sequence_parallel_size", 1)
    if isinstance(shared, int) and shared > 1 and not by_mpu:
        if found.get("mesh") is None:
            found["mesh"] = {"axes": {"data": -1, "sequence": shared}}
        mesh = found["mesh"]
        axes = mesh.get("axes") if isinstance(mesh, Mapping) else None
        if not isinstance(axes, Mapping) or axes.get("sequence") != shared:
            raise ConfigError(
                f"sequence_parallel_size is {shared}, and the section mesh has the axes {axes}: give the axis "
                f'"sequence" there, of the size {shared}, or leave one of the two out.'
            )
    return found


def gradient_allreduce_op(document: Mapping[str, Any]) -> str:
    """How gradients of ranks become one: "mean" or "sum".

    Raises:
        ConfigError: another word, or a sum where DeepSpeed has none.
    """
    given = document.get("gradient_allreduce_op", "mean")
    found = given.lower() if isinstance(given, str) else given
    if found not in ("mean", "sum"):
        raise ConfigError(f"Invalid gradient_allreduce_op {given!r}; allowed are mean and sum.")
    zero = document.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    compiles = document.get("compile")
    refused = {
        "ZeRO stage 3": zero.get("stage") in (3, "3"),
        "ZenFlow": zero.get("zenflow") is not None,
        "DeepCompile": isinstance(compiles, Mapping) and bool(compiles.get("deepcompile")),
    }
    for what, asked in refused.items():
        if found == "sum" and asked:
            raise ConfigError(f'gradient_allreduce_op "sum" is not supported with {what}; leave one of the two out.')
    return str(found)


def _only_components(found: dict[str, Any], name: str) -> None:
    """DeepSpeed reads nothing beside ``type`` and ``params`` there, and takes anything. What is written as if it were
    one of the two stays, and is an error; options that were meant to be in ``params`` are warned of and left out."""
    section = found.get(name)
    if not isinstance(section, Mapping):
        return
    if name == "scheduler" and section.get("type") is None and not section.get("params"):
        del found[name]  # no schedule
        return
    if section.get("params", ()) is None:
        section = found[name] = {**section, "params": {}}
    if name == "optimizer" and "legacy_fusion" in section:  # of DeepSpeed's fp16 wrapper alone
        section = found[name] = {key: value for key, value in section.items() if key != "legacy_fusion"}
    for key in section:
        if key not in _COMPONENT and not difflib.get_close_matches(str(key), _COMPONENT):
            if f"{name}.{key}" not in _warned:
                _log.warning("%s.%s says nothing there: options are in %s.params.", name, key, name)
                _warned.add(f"{name}.{key}")
            found[name] = {item: value for item, value in found[name].items() if item != key}


def _torch_adams_decay(found: dict[str, Any]) -> None:
    """``torch_adam`` without ``weight_decay`` is torch's AdamW with its own default, unless adam_w_mode is off."""
    section = found.get("optimizer")
    if not isinstance(section, Mapping) or not isinstance(section.get("params"), Mapping):
        return
    name, params = str(section.get("type")).lower(), section["params"]
    decoupled = name == "adamw" or (name == "adam" and params.get("adam_w_mode", True))
    if params.get("torch_adam") and decoupled and "weight_decay" not in params:
        found["optimizer"] = {**section, "params": {**params, "weight_decay": 0.01}}


def _filled(key: str, value: Any) -> Any:
    """A section without its values "auto", which count as not given; options of components are their own business."""
    if not isinstance(value, Mapping) or key in ("optimizer", "scheduler", *BATCH_KEYS):
        return value
    return {name: _filled(name, item) for name, item in value.items() if item != "auto"}


def _zero(found: dict[str, Any]) -> Any:
    """The section ``zero_optimization``, in the form that zoo takes; it is put into ``found``."""
    zero = found.get("zero_optimization")
    if isinstance(zero, Mapping) and isinstance(zero.get("stage"), str) and zero["stage"].isdigit():
        zero = {**zero, "stage": int(zero["stage"])}
    if isinstance(zero, bool):  # of the first versions: stage 1, or none
        zero = found["zero_optimization"] = {"stage": int(zero)}
    if not isinstance(zero, Mapping):
        return zero
    if "leaf_module" in zero:  # declared on the model
        zero = {key: value for key, value in zero.items() if key != "leaf_module"}
    zero = found["zero_optimization"] = {key: value for key, value in zero.items() if not _is_idle(key, value, zero)}
    return zero


_STAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "offload_optimizer": ((1, 2, 3), "nothing is offloaded"),
    "cpu_offload": ((1, 2, 3), "nothing is offloaded"),
    "offload_param": ((3,), "parameters leave at stage 3 only"),
    "cpu_offload_param": ((3,), "parameters leave at stage 3 only"),
    "zero_hpz_partition_size": ((3,), "parameters are partitioned at stage 3 only"),
    "zero_quantized_weights": ((3,), "parameters are gathered at stage 3 only"),
    "zero_quantized_nontrainable_weights": ((3,), "parameters are gathered at stage 3 only"),
    "zero_quantized_gradients": ((3,), "gradients travel as they are below stage 3"),
}
"""Keys that DeepSpeed does not look at in other stages: those in which they count, and what to say elsewhere."""


def _is_idle(key: str, value: Any, zero: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed takes a key and does nothing about it here; where it asks for something, that is told."""
    stage, nothing = zero.get("stage", 0), ""
    if key == "save_muon_momentum_buffer_in_memory" and not _is_on_nvme(zero.get("offload_optimizer")):
        nothing = "no states are on NVMe"
    elif key in _STAGES and (stage is None or (stage in (0, 1, 2, 3) and stage not in _STAGES[key][0])):
        nothing = _STAGES[key][1]
    if nothing and _asks(value):
        where = f"at stage {stage}" if stage else "without a stage of ZeRO"
        _log.warning("zero_optimization.%s %s: %s.", key, where, nothing)
    return bool(nothing)


def _asks(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("device") not in (None, "none")
    return value is True or (isinstance(value, (int, float)) and value > 1)


def _is_on_nvme(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("device") == "nvme"


def carry_out(document: Mapping[str, Any]) -> None:
    """Root keys that say something about the process: ``log_level``, ``disable_python_gc``.

    Raises:
        ValueError: no such level.
    """
    if document.get("log_level") is not None:
        set_log_level_from_string(document["log_level"])
    if document.get("disable_python_gc"):
        gc.disable()
