"""Rules of thumb for the memory that ZeRO-2 and ZeRO-3 need, from the number of parameters alone.

They size hardware before there is anything to run, and count model states only: no activations, no temporaries. What a
constructed optimizer of zoo will really hold is :meth:`zoo.zero.ZeroOptimizer.forecast`.

Symbols: Ψ parameters (shared ones once), L parameters of the largest layer, g GPUs on a node, n nodes, N = g n, f
``additional_buffer_factor``. Training is mixed precision with Adam: 2 bytes a parameter in 16 bits, and 16 in fp32
(parameter, gradient, momentum, variance); a model is made on the CPU of every process in fp32, 4 bytes. CPU bytes are
of one node, GPU bytes of one GPU.

ZeRO-2, by ``offload_optimizer``:

====  ==================  =============
      CPU                 GPU
====  ==================  =============
cpu   f Ψ max(4g, 16)     2Ψ
none  f Ψ 4g              4Ψ + 16Ψ/N
====  ==================  =============

ZeRO-3, by ``offload_param`` and ``offload_optimizer``; 4L is the largest layer gathered with its gradient. With
``zero_init`` parameters are partitioned while the model is made; without, every process makes the whole model first:

==========  ===================  ====================  ==============
            CPU, zero_init       CPU, without          GPU
==========  ===================  ====================  ==============
cpu, cpu    f Ψ 18/n             f Ψ max(4g, 18/n)     4L
none, cpu   f Ψ 16/n             f Ψ max(4g, 16/n)     4L + 2Ψ/N
none, none  f L 4g               f Ψ 4g                4L + 18Ψ/N
==========  ===================  ====================  ==============

The tables print GB of 2**30 bytes. Source: the memory requirements page of the DeepSpeed documentation, whose formulas
and printed figures agree. One departure: it counts shared parameters once by address, here it is by object, because
parameters on the meta device have no address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol

_GB = 2**30


class Counted(Protocol):
    """What is asked of a model, such as a ``torch.nn.Module``: its parameters, each once, and its modules."""

    def parameters(self, recurse: bool = True) -> Iterable[Any]:
        """Its own and those of modules within, or its own alone; each has ``numel()``."""

    def modules(self) -> Iterable[Any]:
        """Itself and all within."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes of model states under ``options``: on one node's CPUs (``cpu_bytes``) and on one GPU (``gpu_bytes``)."""

    options: Mapping[str, str | int]
    cpu_bytes: int
    gpu_bytes: int


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    *,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    offload_optimizer: str = "cpu",
    additional_buffer_factor: float = 1.5,
) -> MemoryNeeds:
    """One row of the ZeRO-2 table (formulas: the module's docstring).

    Raises:
        ValueError: a count below 1, a factor below 1, or an ``offload_optimizer`` other than "cpu" and "none".
    """
    _check(total_params, 1, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _check_tier("offload_optimizer", offload_optimizer)
    g = num_gpus_per_node
    if offload_optimizer == "cpu":
        cpu, gpu = max(4 * g, 16) * total_params, 2 * total_params
    else:
        cpu, gpu = 4 * g * total_params, 4 * total_params + 16 * total_params / (g * num_nodes)
    return MemoryNeeds(
        options={"offload_optimizer": offload_optimizer},
        cpu_bytes=int(cpu * additional_buffer_factor),
        gpu_bytes=int(gpu),
    )


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    *,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    offload_param: str = "cpu",
    offload_optimizer: str = "cpu",
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> MemoryNeeds:
    """One row of the ZeRO-3 table (formulas: the module's docstring).

    Raises:
        ValueError: a count below 1, a factor below 1, a tier other than "cpu" and "none", or parameters that are
            offloaded while the optimizer is not, for which there is no rule.
    """
    _check(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    _check_tier("offload_param", offload_param)
    _check_tier("offload_optimizer", offload_optimizer)
    if offload_param == "cpu" and offload_optimizer == "none":
        raise ValueError(
            "offload_param='cpu' with offload_optimizer='none': there is a rule for both on the CPU, for the optimizer "
            "alone, and for neither. Give offload_optimizer='cpu' as well."
        )
    g, world = num_gpus_per_node, num_gpus_per_node * num_nodes
    making = 4 * g  # bytes a parameter while every process of a node makes the model in fp32
    gathered = 4 * largest_layer_params
    if offload_optimizer == "none":
        staying, gpu = 0.0, gathered + 18 * total_params / world
        cpu = making * (largest_layer_params if zero_init else total_params)
    else:
        staying = (18 if offload_param == "cpu" else 16) / num_nodes
        gpu = gathered + (0 if offload_param == "cpu" else 2 * total_params / world)
        cpu = (staying if zero_init else max(making, staying)) * total_params
    return MemoryNeeds(
        options={"offload_param": offload_param, "offload_optimizer": offload_optimizer, "zero_init": int(zero_init)},
        cpu_bytes=int(cpu * additional_buffer_factor),
        gpu_bytes=int(gpu),
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """Print what ZeRO-2 needs for a model of this size, with and without offload; returns the rows.

    Args:
        total_params: Ψ, such as 2851e6.
        num_gpus_per_node, num_nodes: the hardware.
        additional_buffer_factor: a margin on CPU memory.
    """
    needs = partial(estimate_zero2_model_states_mem_needs, total_params)
    rules = [{"offload_optimizer": offload} for offload in ("cpu", "none")]
    sizes = f"{_millions(total_params)} total params"
    return _rows(needs, rules, sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: Counted, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """:func:`estimate_zero2_model_states_mem_needs_all_cold` for a model that exists, if only on the meta device."""
    total, _ = count_params(model)
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[MemoryNeeds]:
    """Print what ZeRO-3 needs for a model of this size, under every rule of the table; returns the rows.

    Args:
        total_params: Ψ, such as 2851e6.
        largest_layer_params: L, parameters that one module holds itself, such as 32e6.
        num_gpus_per_node, num_nodes: the hardware.
        additional_buffer_factor: a margin on CPU memory.
    """
    needs = partial(estimate_zero3_model_states_mem_needs, total_params, largest_layer_params)
    rules = [
        {"offload_param": param, "offload_optimizer": optimizer, "zero_init": zero_init}
        for param, optimizer in (("cpu", "cpu"), ("none", "cpu"), ("none", "none"))
        for zero_init in (True, False)
    ]
    sizes = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    return _rows(needs, rules, sizes, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Counted, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """:func:`estimate_zero3_model_states_mem_needs_all_cold` for a model that exists, if only on the meta device."""
    total, largest = count_params(model)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def count_params(model: Counted) -> tuple[int, int]:
    """(Ψ, L): parameters of a model, shared ones once, and the most that one of its modules holds itself."""
    layers = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(p.numel() for p in model.parameters()), max(layers)


def _check(total: float, largest: float, gpus: int, nodes: int, factor: float) -> None:
    given = {
        "total_params": total,
        "largest_layer_params": largest,
        "num_gpus_per_node": gpus,
        "num_nodes": nodes,
        "additional_buffer_factor": factor,
    }
    for name, value in given.items():
        if not isinstance(value, Real) or not 1 <= value < 2**1000:
            raise ValueError(f"{name}={value!r}; it must be a number of at least 1.")
    if largest > total:
        raise ValueError(f"largest_layer_params={largest:g} is more than total_params={total:g}; it is a part of them.")


def _check_tier(name: str, tier: str) -> None:
    if tier not in ("cpu", "none"):
        raise ValueError(f"{name}={tier!r}; the rules know 'cpu' and 'none'.")


def _millions(count: float) -> str:
    return f"{int(count / 1e6)}M"


def _rows(
    needs: Callable[..., MemoryNeeds], rules: Sequence[Mapping[str, Any]], sizes: str, gpus: int, nodes: int,
    factor: float,
) -> list[MemoryNeeds]:  # fmt: skip
    """What is needed under each of the rules, printed."""
    rows = [needs(num_gpus_per_node=gpus, num_nodes=nodes, additional_buffer_factor=factor, **rule) for rule in rules]
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.",
        f"SW: Model with {sizes}.",
        f"{'per CPU':>10} | {'per GPU':>9} | Options",
    ]
    for row in rows:
        options = ", ".join(f"{name}={value:<4}" for name, value in row.options.items()).rstrip()
        lines.append(f"{row.cpu_bytes / _GB:>8.2f}GB | {row.gpu_bytes / _GB:>7.2f}GB | {options}")
    sys.stdout.write("\n".join(lines) + "\n")
    return rows
