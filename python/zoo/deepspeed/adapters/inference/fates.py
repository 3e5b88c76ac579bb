"""What becomes of the fields of ``DeepSpeedInferenceConfig``: refused with the reason, before anything is changed, or
unnecessary, which is said once. All others are carried out by the modules beside this one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig
from zoo.deepspeed.adapters.utilities.logs import warning_once

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
UNNECESSARY = {
    "use_triton": "there are no kernels in Triton; zoo.kernels and torch compute the same.",
    "triton_autotune": "there are no kernels in Triton that would be tuned.",
    "transposed_mode": "kernels read matrices as the model has them.",
}
"""Field → why it changes nothing. ``replace_method`` is no field any more, and is warned of where it is read;
``triangular_masking`` and ``return_tuple`` are what the model's own layers do: an injected layer takes their masks and
returns what they return, which is proved before it is injected."""


def check(settings: DeepSpeedInferenceConfig) -> None:
    """Say what is unnecessary; refuse what cannot be, whatever the model.

    Raises:
        ConfigError: values that contradict each other. NotImplementedError: what zoo does not have.
    """
    for name, why in UNNECESSARY.items():
        if getattr(settings, name):
            warning_once(f"init_inference({name}=True) is unnecessary: {why}")
    tp = settings.tensor_parallel.tp_size if settings.tensor_parallel.enabled else 1
    shared = {"tp_size": tp, "moe.ep_size": settings.moe.ep_size if settings.moe.enabled else 1}
    for name, size in shared.items():
        if settings.enable_cuda_graph and size > 1:
            raise ConfigError(
                f"enable_cuda_graph with {name}={size}: no graph has collectives in it; leave one of them out."
            )
    if settings.enable_cuda_graph and streams(settings):
        raise ConfigError(
            "enable_cuda_graph with weights on NVMe: no graph reads files; leave out one of enable_cuda_graph and zero."
        )
    _check_zero(settings)
    if settings.replace_with_kernel_inject and settings.injection_policy:
        raise ConfigError(
            "Cannot use both user specified injection policy and kernel injection: replace_with_kernel_inject=True "
            "finds the layers by itself; leave out one of injection_policy and replace_with_kernel_inject."
        )
    if settings.injection_policy and settings.injection_policy_tuple:
        raise ConfigError("injection_policy and injection_policy_tuple both name layers; keep one of them.")
    if settings.min_out_tokens > settings.max_out_tokens:
        raise ConfigError(
            f"min_out_tokens={settings.min_out_tokens} and max_out_tokens={settings.max_out_tokens}, which includes "
            "the prompt; raise max_out_tokens."
        )
    _check_quant(settings)


def _check_zero(settings: DeepSpeedInferenceConfig) -> None:
    stage, offload = int(settings.zero.stage or 0), settings.zero.offload_param
    device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    if stage == 0:
        return
    if stage == 3 and device == "nvme":
        if offload is None or offload.nvme_path is None:
            raise ConfigError("zero.offload_param.device is nvme, and nvme_path is not given; name a folder.")
        return
    if stage == 3 and device == "cpu" and get_accelerator().device_name().startswith("cpu"):
        warning_once("init_inference(zero=...): offload_param to the CPU is unnecessary: the model is there.")
        return
    raise NotImplementedError(
        f"init_inference(zero={{'stage': {stage}}}) with offload_param to {device}: weights are streamed from NVMe "
        "alone, with stage 3 and offload_param={'device': 'nvme', 'nvme_path': folder, 'max_in_cpu': numbers kept}. "
        "keep_module_on_host=True leaves the model on the host; tensor_parallel cuts it."
    )


def _check_quant(settings: DeepSpeedInferenceConfig) -> None:
    quant, default = settings.quant, type(settings.quant)()
    weight, packs = quant.weight, settings.dtype is torch.int8
    by_name = bool(weight.post_init_quant)
    if weight.quantized_initialization:
        raise NotImplementedError(
            "quant.weight.quantized_initialization: the model is made already when init_inference gets it; "
            "quant.weight.post_init_quant packs its layers by their names."
        )
    if quant.activation.enabled and quant.activation != default.activation:
        raise NotImplementedError(
            f"quant.activation={quant.activation!r}: activations are multiplied as they are, or, with enabled=True "
            "alone, rounded to 8 bits, symmetric, in blocks of 32. Leave the rest out, or set enabled to False."
        )
    if packs and not (quant.enabled and weight.enabled):
        where = "quant.weight.enabled" if quant.enabled else "quant.enabled"
        raise ConfigError(f"dtype is int8, and {where} is False: one of them is wrong.")
    others = quant.model_copy(update={"weight": weight.model_copy(update={"post_init_quant": {}})})
    if not packs and quant.enabled and others != default and weight.enabled and not _only_off(others, default):
        raise ConfigError(
            f"quant asks for codes otherwise than by default, and dtype is {settings.dtype}: it is for "
            "dtype=torch.int8. quant.weight.post_init_quant packs single layers of a model of any dtype."
        )
    if by_name and not (quant.enabled and weight.enabled):
        where = "quant.weight.enabled" if quant.enabled else "quant.enabled"
        raise ConfigError(f"quant.weight.post_init_quant names layers, and {where} is False: one of them is wrong.")
    if (packs or by_name) and weight.num_bits not in (4, 8):
        raise ConfigError(f"quant.weight.num_bits={weight.num_bits}; codes have 8 or 4 bits.")
    if (packs or by_name) and _saves(settings):
        raise ConfigError("save_mp_checkpoint_path saves weights, and codes are none; save with another dtype before.")


def streams(settings: DeepSpeedInferenceConfig) -> bool:
    """Whether layers are read from NVMe."""
    offload = settings.zero.offload_param
    on_nvme = offload is not None and getattr(offload.device, "value", offload.device) == "nvme"
    return int(settings.zero.stage or 0) == 3 and on_nvme


def check_streamed(model: nn.Module, settings: DeepSpeedInferenceConfig) -> None:
    """Raise what streaming the layers would raise, before anything has changed.

    Raises:
        ConfigError: the model has no layers to stream, they go to a GPU, or the folder cannot be written to.
    """
    from zoo.nn.blocks import find_blocks

    try:
        find_blocks(model, None, "zero")
    except ValueError as error:
        raise ConfigError(
            f"zero streams layers that are in one ModuleList or Sequential, of one class, and {type(model).__name__} "
            "has none. Leave out zero, or stream others with zoo.inference.stream(blocks=...)."
        ) from error
    offload: Any = settings.zero.offload_param
    folder = str(offload.nvme_path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"zero.offload_param.nvme_path={folder!r} is no folder that can be written to; make it.")
    name = get_accelerator().device_name()
    if not name.startswith("cpu") and not settings.keep_module_on_host:
        raise ConfigError(
            f"zero.offload_param.device is nvme, and the model would go to {name}: weights that are streamed are "
            "multiplied on the CPU. Give keep_module_on_host=True, or leave out zero."
        )


def _only_off(given: Any, default: Any) -> bool:
    """Whether all that differs is that something is switched off."""
    off = {"activation": default.activation, "qkv": default.qkv}
    parts = {name: value for name, value in off.items() if not getattr(given, name).enabled}
    return bool(given.model_copy(update=parts) == default)


def _saves(settings: DeepSpeedInferenceConfig) -> bool:
    return bool(settings.save_mp_checkpoint_path or settings.checkpoint_config.save_mp_checkpoint_path)


def check_model(model: Any, settings: DeepSpeedInferenceConfig) -> None:
    """Refuse what is no model to generate with, or one that something else has.

    Raises:
        ConfigError: with what to give instead.
    """
    from zoo.deepspeed.adapters.inference.engine import InferenceEngine

    if not isinstance(model, nn.Module):
        raise ConfigError(f"init_inference(model=...) got a {type(model).__name__}; give it an nn.Module, an instance.")
    classes = {above.__name__ for above in type(model).__mro__}
    if isinstance(model, InferenceEngine) or "DeepSpeedEngine" in classes:
        raise ConfigError(f"init_inference(model=...) got a {type(model).__name__}, which has a model: give .module.")
    if classes & _WRAPPERS:
        raise ConfigError(
            f"init_inference(model=...) got a {type(model).__name__}; give it the model without a wrapper, its .module."
        )
    _check_init(model)
    eighths = [name for name, p in model.named_parameters() if p.is_floating_point() and p.element_size() == 1]
    if eighths:
        raise ConfigError(
            f"{eighths[0]} is {model.get_parameter(eighths[0]).dtype}, numbers that have a scale beside them, and "
            "converting them would lose it. Give the model in fp32, bf16 or fp16; dtype=torch.int8 packs it."
        )
    if "PipelineModule" in classes:
        raise ConfigError(
            "init_inference(model=...) got a PipelineModule, of which each rank has some layers; its engine's "
            "eval_batch computes with it."
        )
    if is_trained(model):
        _check_trained(model, settings)


def is_trained(model: nn.Module) -> bool:
    """Whether an engine that lives has its parameters."""
    return bool(_owners(model))


def _buckets(model: nn.Module) -> dict[str, Any]:
    """Of parameters that are split over ranks, or that an engine has."""
    from zoo.shard.guard import ShardedParameter

    named = model.named_parameters()
    return {name: p._zoo_bucket for name, p in named if isinstance(p, ShardedParameter) and p._zoo_bucket is not None}


def _owners(model: nn.Module) -> list[Any]:
    """What shards its parameters."""
    from zoo.shard.init.parts import InitBucket

    found = [b.owner() for b in _buckets(model).values() if not isinstance(b, InitBucket)]
    return [owner for owner in found if owner is not None]


def _check_init(model: nn.Module) -> None:
    from zoo.shard.init.parts import InitBucket

    split = [name for name, bucket in _buckets(model).items() if isinstance(bucket, InitBucket)]
    if split:
        raise ConfigError(
            f"{split[0]} was made under deepspeed.zero.Init, and each rank has a part of it. Make the model without "
            'it, or under deepspeed.OnDevice(dtype, device="meta") and give checkpoint=; or give it to '
            "deepspeed.initialize at stage 3, whose engine gathers parameters layer by layer."
        )


def _check_trained(model: nn.Module, settings: DeepSpeedInferenceConfig) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    tp, more = settings.tensor_parallel, settings.checkpoint_config
    cut = tp.enabled and (tp.tp_size > 1 or tp.mpu is not None or tp.tp_group is not None)
    changes = [
        *([f"dtype={settings.dtype}"] if dtypes != {settings.dtype} else []),
        *(["tensor_parallel"] if cut else []),
        *(["zero"] if streams(settings) else []),
        *(["moe"] if settings.moe.enabled and settings.moe.ep_size > 1 else []),
        *(["checkpoint"] if settings.checkpoint or more.checkpoint_dir else []),
        *(["quant.weight.post_init_quant"] if settings.quant.weight.post_init_quant else []),
    ]
    if _saves(settings):
        raise ConfigError(
            "save_mp_checkpoint_path of a model that an engine trains: engine.save_checkpoint saves it, and "
            "checkpoint= reads that. Leave it out."
        )
    if changes:
        raise ConfigError(
            f"init_inference(model=...) got a model that an engine trains, in {', '.join(sorted(map(str, dtypes)))}, "
            f"and {' and '.join(changes)} would change it under the optimizer. Give a copy (copy.deepcopy), or the "
            "model after engine.destroy(), or leave that out."
        )
    if any(getattr(getattr(owner, "config", None), "stage", 0) == 3 for owner in _owners(model)):
        raise ConfigError(
            "init_inference(model=...) got a model that an engine trains at stage 3, whose parameters are split: "
            "engine.module generates as it is, and gathers them layer by layer."
        )
