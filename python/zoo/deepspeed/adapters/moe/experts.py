"""``deepspeed.moe``: the layer, and whose parameters are experts.

``zoo.moe`` is a plug-in: it is asked for when this module is imported, which is when a program asks for a name of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zoo.deepspeed.adapters.communication import groups
from zoo.layout import enter_mesh

_moe: Any = import_module("zoo.moe")
_Layer: Any = _moe.MoE


class _Latest:
    """What a forward gave; a copy of the layer, and a pickle of it, has none."""

    def __init__(self, l_aux: torch.Tensor | None = None, exp_counts: torch.Tensor | None = None) -> None:
        self.l_aux, self.exp_counts = l_aux, exp_counts

    def __deepcopy__(self, memo: Any) -> _Latest:
        return _Latest()

    def __reduce__(self) -> Any:
        return _Latest, ()


class _View:
    """Something of a layer under DeepSpeed's names, to be read; what it has besides is that of ``behind``."""

    def __init__(self, behind: Any, **named: Any) -> None:
        self.__dict__.update(named, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        if "_behind" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._behind, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"deepspeed_moe...{name} = {value!r}: the layer would not see it. Make the layer with what it is to have."
        )


def _inner(layer: Any) -> _View:
    """``layer.deepspeed_moe``: ``gate``, ``experts``, ``ep_size``, ``num_local_experts``, and what the latest forward
    gave: ``l_aux`` and ``exp_counts``."""
    return _View(
        layer, gate=_View(layer.gate, wg=layer.gate, **layer.asked),
        experts=_View(layer.experts, deepspeed_experts=layer.experts.list, num_local_experts=layer.num_local_experts),
        ep_group_name=layer.expert_group_name, l_aux=layer.latest.l_aux, exp_counts=layer.latest.exp_counts,
    )  # fmt: skip


def _without_bias(expert: nn.Module, given: Any, output: Any) -> Any:
    """Megatron's layers return (output, bias), of which DeepSpeed takes the first."""
    return output[0] if isinstance(output, tuple) else output


class MoE(_Layer):  # type: ignore[misc]
    """:class:`zoo.moe.MoE` with the attributes that programs read. Of an expert that returns a tuple it takes the first
    member.

    Attributes:
        ep_size, expert_group_name, num_local_experts, use_residual: as DeepSpeed has them.
        asked: the arguments that are the gate's. latest: ``l_aux`` and ``exp_counts`` of the latest forward.
        foreign_names: what parameters are called in DeepSpeed's checkpoints, which are read so.
    """

    foreign_names: ClassVar[Mapping[str, str]] = {
        "deepspeed_moe.gate.wg.": "gate.", "deepspeed_moe.experts.deepspeed_experts.": "experts.list.",
        "mlp.": "shared.",
    }  # fmt: skip

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, k: int = 1,
        capacity_factor: float = 1.0, eval_capacity_factor: float = 1.0, min_capacity: int = 4,
        use_residual: bool = False, noisy_gate_policy: str | None = None, drop_tokens: bool = True,
        use_rts: bool = True, use_tutel: bool = False, enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(expert, nn.Module):
            raise ValueError(
                f"MoE got a {type(expert).__name__} as its expert; give a module, of which it makes copies."
            )
        own = copy.deepcopy(expert)  # the caller's module stays as it is
        own.register_forward_hook(_without_bias)
        super().__init__(
            hidden_size, own, num_experts, ep_size, k, capacity_factor, eval_capacity_factor, min_capacity,
            use_residual, noisy_gate_policy, drop_tokens, use_rts, use_tutel, enable_expert_tensor_parallelism,
            top2_2nd_expert_sampling,
        )  # fmt: skip
        self.latest = _Latest()
        self.asked = {
            "k": k, "capacity_factor": capacity_factor, "eval_capacity_factor": eval_capacity_factor,
            "min_capacity": min_capacity, "drop_tokens": drop_tokens, "noisy_gate_policy": noisy_gate_policy,
            "use_rts": use_rts, "top2_2nd_expert_sampling": top2_2nd_expert_sampling,
        }  # fmt: skip
        self.ep_size, self.use_residual = ep_size, use_residual
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_local_experts = num_experts // ep_size
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        for parameter in self.expert_parameters():
            parameter.allreduce, parameter.group_name = False, self.expert_group_name

    @property
    def deepspeed_moe(self) -> _View:
        """What gates, sends and computes: this layer itself, under the names that it has in DeepSpeed, to be read."""
        return _inner(self)

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> Any:
        """(output, l_aux, exp_counts)."""
        found = super().forward(hidden_states, used_token)
        self.latest = _Latest(found[1], found[2])
        return found

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Find the ranks that share the experts, for a layer that runs without an engine; ``initialize`` does it by
        itself. A collective of the job, which calls it before a forward.

        Raises:
            ValueError: another order of ranks is asked for.
        """
        if self.ep_size > 1 and dist.is_initialized() and self.expert_ranks is None:
            groups._create_expert_and_data_parallel(self.ep_size, use_data_before_expert_parallel_)
            enter_mesh(self, groups._expert_meshes()[self.ep_size])
        elif use_data_before_expert_parallel_:
            groups.refuse_other_order()


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it belongs to an expert of a layer, or was marked by ``param.allreduce = False``."""
    return getattr(param, "allreduce", True) is False or bool(_moe.is_moe_param(param))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are mixtures of experts in it, and the number of experts of the first one (0 without)."""
    found: tuple[bool, int] = _moe.has_moe_layers(m)
    return found


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:  # fmt: skip
    """(those of no expert, those of experts)."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
    """The gradients that there are, of both kinds."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = 178956971
) -> list[dict[str, Any]]:  # fmt: skip
    """Each group without its expert parameters; then groups of these alone, with the options of their group.

    Args:
        param_groups: a group, or a list or tuple of groups. They stay as they are.
        max_group_size: elements of a group of experts at most; a larger parameter has one of its own. None: no limit.

    Returns:
        New groups. Those of experts have "moe" (True) and as "name" that of the ranks that share them.

    Raises:
        ValueError: something else than groups.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}; give a dict, or a list of them.")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    shared, experts = [], []
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f'parameter group {number} is {group!r}; a group is {{"params": [...], "lr": ...}}.')
        given = group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        shared.append({**group, "params": [p for p in members if not is_moe_param(_parameter(p))]})
        by_name: dict[str, list[Any]] = {}
        for member in members:
            if is_moe_param(_parameter(member)):
                by_name.setdefault(getattr(_parameter(member), "group_name", "experts"), []).append(member)
        for name, own in by_name.items():
            experts += [{**group, "name": name, "moe": True, "params": part} for part in _cut(own, max_group_size)]
    return shared + experts


def _cut(members: list[Any], limit: float | None) -> list[list[Any]]:
    parts: list[list[Any]] = []
    size = 0
    for member in members:
        count = _parameter(member).numel()
        if not parts or (limit is not None and size + count > limit):
            parts.append([])
            size = 0
        parts[-1].append(member)
        size += count
    return parts


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether it is a group of experts."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters, or groups of which none is of experts yet, with experts in groups of their own.

    Raises:
        TypeError: an element is neither a parameter nor a group.
    """
    for given in model_parameters:
        if not isinstance(given, (torch.Tensor, dict)):
            raise TypeError(f"configure_moe_param_groups got a {type(given).__name__}; it takes parameters or groups.")
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})


def _parameter(given: Any) -> Any:
    return given[1] if isinstance(given, tuple) else given
