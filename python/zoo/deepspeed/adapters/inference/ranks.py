"""Ranks that share a model: ``tensor_parallel``, injection policies, ``moe``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from zoo.comm import Communicator
from zoo.config import ConfigError
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig, DeepSpeedTPConfig
from zoo.tensor import Plan, plan_of, plan_of_injection_policy, prove, split
from zoo.tensor.adapters import base_of, with_adapters
from zoo.tensor.layers import part_of

_GROUPS = ("get_model_parallel_group", "get_tensor_model_parallel_group", "get_slice_parallel_group")
_EVERYONE: WeakKeyDictionary[Any, Communicator] = WeakKeyDictionary()
"""By the group of all ranks, so that groups of one size are made once."""
_GRAIN = DeepSpeedTPConfig().tp_grain_size


def ranks_of(settings: DeepSpeedInferenceConfig) -> Communicator | None:
    """The ranks with parts of one model, this one among them; None for a whole one. Collective over the job.

    Those of the mpu, of ``tp_group``, or consecutive ones: a job of more ranks has as many models side by side.

    Raises:
        ConfigError: the job, or the group, has not so many.
    """
    tp = settings.tensor_parallel
    if not tp.enabled:
        return None
    group = _group_of_mpu(tp.mpu) if tp.mpu is not None else tp.tp_group
    if group is not None:
        from zoo.deepspeed.adapters.tensor.layers import comm_of

        comm = comm_of(group)
        allowed = (1, comm.size) if tp.mpu is not None else (comm.size,)  # type: ignore[union-attr]
        if tp.tp_size not in allowed:
            raise ConfigError(
                f"tensor_parallel.tp_size is {tp.tp_size}, and its {'mpu' if tp.mpu is not None else 'tp_group'} has "
                f"{comm.size} ranks; give both one number."  # type: ignore[union-attr]
            )
        return None if comm is None or comm.size == 1 else comm
    if tp.tp_size == 1:
        return None
    return _consecutive(tp.tp_size, "tensor_parallel.tp_size")


def _group_of_mpu(mpu: Any) -> Any:
    ask = next((getattr(mpu, name) for name in _GROUPS if hasattr(mpu, name)), None)
    if ask is None:
        raise ConfigError(f"tensor_parallel.mpu={mpu!r}: a {type(mpu).__name__} without {_GROUPS[0]}().")
    return ask()


def _consecutive(size: int, name: str) -> Communicator:
    world = _world(size, name)
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    everyone = _EVERYONE.setdefault(dist.group.WORLD, Communicator())
    return everyone.partition(groups, name="init_inference")


def _world(size: int, name: str) -> int:
    """Ranks of the job, which is joined; a multiple of ``size``."""
    if not dist.is_initialized():
        from zoo.deepspeed.adapters.root.entry import init_distributed

        init_distributed()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % size:
        raise ConfigError(
            f"{name}={size} in a job of {world} rank{'s' if world > 1 else ''}, which it does not divide; start as "
            f"many as it says, or a multiple: zoo run --ranks {size}."
        )
    return world


def plan_for(model: nn.Module, settings: DeepSpeedInferenceConfig, degree: int) -> Plan | None:
    """How the model is cut: by the injection policy, the model's own ``tensor_plan()``, or its family. None for a whole
    one; a policy is checked there too.

    Raises:
        ValueError: the policy does not fit the model, or no plan is known, or what it makes computes something else.
    """
    policy = settings.injection_policy or settings.injection_policy_tuple
    _, base = base_of(model)
    if policy:
        try:
            plan = plan_of_injection_policy(base, dict(policy) if isinstance(policy, dict) else list(policy))
        except ValueError as error:
            raise ConfigError(f"Injection policy not valid: {error}") from error
    elif degree == 1:
        return None
    else:
        own = getattr(base, "tensor_plan", None)
        plan = own() if callable(own) else plan_of(base)
    if degree > 1 and hasattr(getattr(base, "config", None), "model_type"):
        prove(base, base.config, plan, degree, training=False)
    return with_adapters(plan, model)


def is_cut(model: nn.Module, comm: Communicator | None) -> bool:
    """Whether it has been cut over these ranks before.

    Raises:
        ConfigError: over others.
    """
    parts = (part_of(module) for module in model.modules())
    theirs = next((part.region.comm for part in parts if part is not None), None)
    if theirs is None:
        return False
    if comm is None or tuple(comm.ranks) != tuple(theirs.ranks):
        raise ConfigError(
            f"the model is split over the ranks {list(theirs.ranks)} already, and tensor_parallel asks for "
            f"{1 if comm is None else comm.size}; give a whole model, or tp_size={theirs.size}."
        )
    return True


def cut(model: nn.Module, plan: Plan, comm: Communicator, grain: int) -> None:
    """Leave this rank's part, in place. Collective. Features are dealt in multiples of ``grain``; those of the default
    one at a time, where it does not divide them."""
    try:
        split(model, plan, comm, training=False, grain=grain)
    except ValueError:
        if grain != _GRAIN:
            raise
        split(model, plan, comm, training=False)


def draw_alike(comm: Communicator) -> None:
    """Ranks that share a model draw the same tokens: all take the states of the first one's generators."""
    mine = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    found = comm.broadcast_object([state.tolist() for state in mine] if comm.rank == 0 else None)
    states = [torch.tensor(state, dtype=torch.uint8) for state in found]
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def share_experts(model: nn.Module, settings: DeepSpeedInferenceConfig) -> bool:
    """``moe``: with ``ep_size`` > 1 each rank keeps some experts of each layer, and tokens travel. Collective.

    Layers of ``deepspeed.moe`` have an ``ep_size`` of their own, from when they were made; they find their ranks.

    Returns:
        Whether all ranks of the job share them, so that they generate as long as any of them does.

    Raises:
        ConfigError: the model has other experts than the settings say, or none.
    """
    moe = settings.moe
    if not moe.enabled:
        return False
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "expert_group_name")]
    own = {int(layer.ep_size) for layer in layers}
    if own and moe.ep_size not in {1, *own}:
        raise ConfigError(f"moe.ep_size is {moe.ep_size}, and the MoE layers were made with ep_size={min(own)}.")
    residual = any(getattr(module, "use_residual", False) for module in model.modules())
    if moe.type == "residual" and not residual:
        raise ConfigError("moe.type is 'residual', and no layer of the model has a dense one beside its experts.")
    if own:
        for layer in layers:
            if hasattr(layer, "set_deepspeed_parallelism"):
                layer.set_deepspeed_parallelism()
        return False
    if moe.ep_size == 1 and moe.moe_experts == [1]:
        return False
    from importlib import import_module

    parallel: Any = import_module("zoo.moe.huggingface.parallel")
    _check_number(moe.moe_experts, parallel.experts_of(model))
    if moe.ep_size == 1:
        return False
    parallel.parallelise(model, ep_size=moe.ep_size, mesh=_mesh(settings, model))
    return bool(dist.get_world_size() == moe.ep_size)


def _check_number(said: list[int], found: list[Any]) -> None:
    numbers = {int(n) for _, module, _ in found if (n := _experts_of(module)) is not None}
    if said != [1] and numbers and not numbers <= set(said):
        raise ConfigError(
            f"moe.moe_experts is {said}, and the layers of the model have {', '.join(map(str, sorted(numbers)))} "
            "experts; give that, or leave it out."
        )
    if said != [1] and not found:
        raise ConfigError(f"moe.moe_experts is {said}, and no experts were found in the model; leave it out.")


def _experts_of(module: Any) -> int | None:
    found = getattr(module, "num_experts", None)
    return found if found is not None else len(module) if isinstance(module, nn.ModuleList) else None


def _mesh(settings: DeepSpeedInferenceConfig, model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    moe = settings.moe
    if settings.tensor_parallel.enabled and settings.tensor_parallel.tp_size > 1:
        raise NotImplementedError(
            f"moe.ep_size={moe.ep_size} with tp_size={settings.tensor_parallel.tp_size}: ranks share either experts or "
            "all layers here. Leave one of them at 1."
        )
    world = _world(moe.ep_size, "moe.ep_size")
    rank, size = dist.get_rank(), moe.ep_size
    first = rank // size * size
    given: tuple[tuple[str, Any, list[int]], ...] = (
        ("ep_group", moe.ep_group, list(range(first, first + size))),
        ("ep_mp_group", moe.ep_mp_group, [rank]),
    )
    for name, group, expected in given:
        if group is not None and sorted(dist.get_process_group_ranks(group)) != expected:
            raise ConfigError(
                f"moe.{name} has other ranks than {expected}; consecutive ones share experts. Leave it out."
            )
    device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    return init_device_mesh(device, (world // size, size), mesh_dim_names=("data", "expert"))
