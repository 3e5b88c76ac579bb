"""LoRA of peft on experts (``target_parameters``): every rank has the adapter of all experts and uses its own part.

peft keeps the factors of all experts of a parameter in two matrices, A (E·r, D_in), expert by expert, and B
(D_out, r·E), in which the expert is what varies fastest. They are small, so they stay whole on each rank, with the
names and shapes that peft gives them: adapters load and save at any ``ep_size``. A rank's gradient of them is 0 but for
its own experts, whose tokens have come from all ranks; the mean over the ranks is that of one process.

Legend: E experts, L of them here, r the rank of the factors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from zoo.layout import declare_unit
from zoo.moe.huggingface.experts import ParallelExperts

Tensor = torch.Tensor

WRAPPER = "ParamWrapper"
"""Class of peft that stands around a module with a parameter that has an adapter."""


class ParallelAdapter(nn.Module):
    """A wrapper of peft whose change of the weights is that of this rank's experts."""

    lora_A: Any  # peft's names
    lora_B: Any
    scaling: Any
    _experts: tuple[ParallelExperts]

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """(lhs, rhs, scale): the change of the weights is scale · lhs @ rhs, (L, …)."""
        experts, all_a, all_b = self._experts[0], self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        first, num = experts._dispatch.first, experts._dispatch.num_local
        mine = slice(first, first + num)
        a = all_a.reshape(experts.num_experts, -1, all_a.shape[-1])[mine]
        b = all_b.reshape(all_b.shape[0], -1, experts.num_experts)[..., mine].permute(2, 0, 1)
        dtype = self._weight_dtype()
        lhs, rhs = (a.transpose(1, 2), b.transpose(1, 2)) if experts._preset.transposed else (b, a)
        return lhs.to(dtype), rhs.to(dtype), float(self.scaling[adapter_name])

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """(L, …): what the adapter adds to the weights of this rank's experts."""
        lhs, rhs, scale = self.get_delta_factors(adapter_name)
        return torch.bmm(lhs, rhs) * scale

    def _weight_dtype(self) -> torch.dtype:
        weight: Tensor = next(iter(self._experts[0].parameters()))
        return weight.dtype


@functools.cache
def _class_of(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Parallel{original.__name__}", (ParallelAdapter, original), {"__module__": original.__module__})


def adopt(model: nn.Module) -> None:
    """Adapters around experts that :func:`zoo.moe.parallelise` has just converted."""
    for module in list(model.modules()):
        if not is_wrapper(module):
            continue
        inner: Any = module
        while is_wrapper(inner):
            inner = inner.base_layer
        if not isinstance(inner, ParallelExperts):
            continue
        declare_unit(module)  # it reads the factors and the weights before it calls anything
        if inner.ep_size > 1 and not isinstance(module, ParallelAdapter):
            _check(module, inner)
            cls: Any = type(module)
            module.__class__ = _class_of(cls)
            module.__dict__["_experts"] = (inner,)
            inner._adapted.add(str(module.__dict__["parameter_name"]))


def is_wrapper(module: object) -> bool:
    """Whether it is peft's, around a parameter."""
    return any(cls.__name__ == WRAPPER for cls in type(module).__mro__)


def _check(wrapper: Any, experts: ParallelExperts) -> None:
    for name, factor in wrapper.lora_A.items():
        of_all = factor.weight.shape[0] == wrapper.r[name] * experts.num_experts
        if not of_all:
            raise ValueError(
                f"the adapter {name!r} of {wrapper.parameter_name} has factors of {factor.weight.shape[0]} rows; of "
                f"rank {wrapper.r[name]} for {experts.num_experts} experts they are "
                f"{wrapper.r[name] * experts.num_experts}. Put adapters on before parallelise."
            )
