"""Mixture of experts: gates, expert layers and expert parallelism.

* :class:`MoE`: the documented layer. :class:`MixtureOfExperts`: any gate, any experts, dropless by default.
* Gates: :class:`Top1Gate`, :class:`Top2Gate`, :class:`TopKGate`, :class:`ExpertChoiceGate`, :class:`LossFreeGate`,
  :class:`GroupLimitedGate`; in the registry under the kind "moe_gate".
* Experts: :class:`GroupedExperts`, one tensor for each matrix; :class:`ModuleExperts`, modules of any kind.
* :func:`parallelise`: expert parallelism and grouped experts for models of Hugging Face; :class:`ExpertsPreset`;
  :func:`whole_state_dict`. :func:`upcycle`: the MLPs of a dense one become experts; :class:`MLPPreset`;
  :func:`balance_loss`.
* :func:`use_mesh`: tell a model of the mesh; :func:`commit_balance`: after an update; an engine does both by itself.
* :func:`split_params_into_different_moe_groups_for_optimizer`, :func:`is_moe_param`, :func:`has_moe_layers`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from zoo.registry import Subpackage

if TYPE_CHECKING:
    from zoo.layout import enter_mesh as use_mesh
    from zoo.moe.experts.grouped import GroupedExperts
    from zoo.moe.experts.modules import ModuleExperts
    from zoo.moe.gates.base import Gate
    from zoo.moe.gates.expert_choice import ExpertChoiceGate
    from zoo.moe.gates.group_limited import GroupLimitedGate
    from zoo.moe.gates.loss_free import LossFreeGate
    from zoo.moe.gates.top1 import Top1Gate
    from zoo.moe.gates.top2 import Top2Gate
    from zoo.moe.gates.topk import TopKGate
    from zoo.moe.groups import (
        has_moe_layers,
        is_moe_param,
        split_params_into_different_moe_groups_for_optimizer,
    )
    from zoo.moe.huggingface.parallel import parallelise
    from zoo.moe.huggingface.presets import PRESETS, ExpertsPreset
    from zoo.moe.huggingface.states import whole_state_dict
    from zoo.moe.huggingface.upcycling import MLP_PRESETS, MLPPreset, UpcycledMLP, balance_loss, upcycle
    from zoo.moe.layer import MoE
    from zoo.moe.mixture import Capacity, Mixed, MixtureOfExperts
    from zoo.moe.part import commit_balance
    from zoo.moe.routing import Routing

_WHERE = {
    "Capacity": "mixture", "ExpertChoiceGate": "gates.expert_choice", "ExpertsPreset": "huggingface.presets",
    "Gate": "gates.base", "GroupLimitedGate": "gates.group_limited", "GroupedExperts": "experts.grouped",
    "LossFreeGate": "gates.loss_free", "MLPPreset": "huggingface.upcycling", "MLP_PRESETS": "huggingface.upcycling",
    "Mixed": "mixture", "MixtureOfExperts": "mixture", "MoE": "layer", "ModuleExperts": "experts.modules",
    "PRESETS": "huggingface.presets", "Routing": "routing", "Top1Gate": "gates.top1", "Top2Gate": "gates.top2",
    "TopKGate": "gates.topk", "UpcycledMLP": "huggingface.upcycling", "balance_loss": "huggingface.upcycling",
    "commit_balance": "part", "has_moe_layers": "groups", "is_moe_param": "groups",
    "parallelise": "huggingface.parallel", "split_params_into_different_moe_groups_for_optimizer": "groups",
    "upcycle": "huggingface.upcycling", "whole_state_dict": "huggingface.states",
}  # fmt: skip
"""The module of each name: torch is imported when one is asked for."""

__all__ = [
    "ABOUT",
    "MLP_PRESETS",
    "PRESETS",
    "Capacity",
    "ExpertChoiceGate",
    "ExpertsPreset",
    "Gate",
    "GroupLimitedGate",
    "GroupedExperts",
    "LossFreeGate",
    "MLPPreset",
    "Mixed",
    "MixtureOfExperts",
    "MoE",
    "ModuleExperts",
    "Routing",
    "Top1Gate",
    "Top2Gate",
    "TopKGate",
    "UpcycledMLP",
    "balance_loss",
    "commit_balance",
    "has_moe_layers",
    "is_moe_param",
    "parallelise",
    "split_params_into_different_moe_groups_for_optimizer",
    "upcycle",
    "use_mesh",
    "whole_state_dict",
]

ABOUT = Subpackage(
    name="moe",
    version=version("zoo-moe"),
    summary="Mixture of experts: gates, expert layers and expert parallelism.",
)
"""What the registry tells about this distribution, under the kind "subpackage"."""


def __getattr__(name: str) -> Any:
    if name == "use_mesh":
        from zoo.layout import enter_mesh

        return enter_mesh
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"zoo.moe.{_WHERE[name]}"), name)
