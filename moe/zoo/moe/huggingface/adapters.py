"""LoRA of peft on experts (``target_parameters``): every rank has the adapter of all experts and uses its own part.

peft keeps the factors of all experts of a parameter in two matrices, A (E·r, D_in), expert by expert, and B
(D_out, r·E), in which the expert is what varies fastest. They are small, so they stay whole on each rank, with the
names and shapes that peft gives them: adapters load and save at any ``ep_size``. A rank's gradient of them is 0 but for
its own experts, whose tokens have come from all ranks; the mean over the ranks is that of one process. The product of
the factors, which is as large as all experts are, is never made.

Legend: E experts, L of them here, r the rank of the factors, D_in and D_out of the parameter's map.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zoo.layout import declare_unit
from zoo.moe.huggingface.experts import ParallelExperts

Tensor = torch.Tensor

WRAPPER = "ParamWrapper"
"""Class of peft that stands around a module with a parameter that has an adapter."""


class ParallelAdapter(nn.Module):
    """A wrapper of peft of which the experts apply the factors themselves."""

    lora_A: Any  # peft's names
    lora_B: Any
    scaling: Any
    parameter_name: str
    _did_swap_in_out_features: bool
    _experts: tuple[ParallelExperts]

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """What peft's forward calls around that of what it wraps."""
        experts = self._experts[0]
        experts._low_rank[self.parameter_name] = [self._factors(n) for n in active_adapters if n in self.lora_A]
        try:
            yield
        finally:
            experts._low_rank.pop(self.parameter_name)

    def _factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """(L, D_in, r), (L, r, D_out) and what their product is multiplied by."""
        lhs, rhs, scale = self.get_delta_factors(adapter_name)
        if self._experts[0]._preset.transposed:
            return lhs, rhs, scale
        return rhs.transpose(1, 2), lhs.transpose(1, 2), scale

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """(lhs, rhs, scale): the weights of this rank's experts change by scale · lhs @ rhs."""
        experts, all_a, all_b = self._experts[0], self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        mine = slice(experts.first, experts.first + experts.num_local)
        a = all_a.reshape(experts.num_experts, -1, all_a.shape[-1])[mine]
        b = all_b.reshape(all_b.shape[0], -1, experts.num_experts)[..., mine].permute(2, 0, 1)
        lhs, rhs = (b, a) if self._did_swap_in_out_features else (a.transpose(1, 2), b.transpose(1, 2))
        return lhs, rhs, float(self.scaling[adapter_name])

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """What the weights of this rank's experts change by: for peft's ``merge`` and ``unmerge``."""
        lhs, rhs, scale = self.get_delta_factors(adapter_name)
        return (torch.bmm(lhs, rhs) * scale).to(getattr(self._experts[0], self.parameter_name).dtype)


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
        declare_unit(module)  # it reads the factors before it calls anything
        if not isinstance(module, ParallelAdapter):
            _check(module, inner)
            cls: Any = type(module)
            module.__class__ = _class_of(cls)
            module.__dict__["_experts"] = (inner,)


def is_wrapper(module: object) -> bool:
    """Whether it is peft's, around a parameter."""
    return any(cls.__name__ == WRAPPER for cls in type(module).__mro__)


def _check(wrapper: Any, experts: ParallelExperts) -> None:
    weights = (experts._preset.up, experts._preset.down)
    if wrapper.parameter_name not in weights:
        raise ValueError(
            f"an adapter of {wrapper.parameter_name} of {type(experts).__name__}; adapters of experts are of "
            f"{' and '.join(weights)}. Leave the others out of target_parameters."
        )
    for name, factor in wrapper.lora_A.items():
        rows = wrapper.r[name] * experts.num_experts
        if factor.weight.shape[0] != rows:
            raise ValueError(
                f"the adapter {name!r} of {wrapper.parameter_name} has factors of {factor.weight.shape[0]} rows; of "
                f"rank {wrapper.r[name]} for {experts.num_experts} experts they have {rows}. Put adapters on before "
                "parallelise."
            )
