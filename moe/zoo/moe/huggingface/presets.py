"""Where the experts of a family are: data, one entry each.

Legend: E experts, D hidden size, H intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class ExpertsPreset:
    """A module of experts, called with tokens (T, D), the experts of each (T, k) and their weights (T, k).

    That is how transformers has them from version 5 on: the router is a module of its own and stays as it is, with its
    scores, normalisation, groups and bias; what is described here is what it calls.
    """

    experts: str
    """Name of the module's class, or of one that it derives from."""
    up: str = "gate_up_proj"
    """Parameter of the first map: (E, 2H, D), or (E, H, D) where ``gated`` is false."""
    down: str = "down_proj"
    """Of the second: (E, D, H)."""
    up_bias: str | None = None
    """(E, 2H or H)."""
    down_bias: str | None = None
    """(E, D)."""
    transposed: bool = False
    """The weights are (E, D, 2H) and (E, H, D)."""
    gated: bool = True
    """φ(x G) ⊙ x U, else φ(x U)."""
    activation: str = "act_fn"
    """Attribute of the module: φ."""
    join: str | None = "_apply_gate"
    """Method of the module that makes (R, H) of the (R, 2H) of the first map, where there is one of this name; else its
    first half is the gate."""
    balance_bias: str | None = None
    """Buffer (E,) that is added to scores for choosing only, by its path from the module around the experts."""


PRESETS: tuple[ExpertsPreset, ...] = (
    ExpertsPreset(experts="MixtralExperts"),
    ExpertsPreset(experts="Qwen2MoeExperts"),
    ExpertsPreset(experts="Qwen3MoeExperts"),
    ExpertsPreset(experts="DeepseekV2Experts"),
    ExpertsPreset(experts="DeepseekV3Experts", balance_bias="gate.e_score_correction_bias"),
)
"""Families by name. Other classes of transformers say of themselves what is to be known, and are found by that."""


def name_of_activation(activation: object) -> str | None:
    """Its name among those of :mod:`zoo.moe.experts.grouped`, which are faster than functions; None for others."""
    cls = type(activation)
    if isinstance(activation, nn.GELU) and cls is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if cls.__module__ == "transformers.activations":
        return {"SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}.get(cls.__name__)
    return "silu" if cls is nn.SiLU else "relu" if cls is nn.ReLU else None


def preset_of(module: nn.Module, presets: Iterable[ExpertsPreset] = PRESETS) -> ExpertsPreset | None:
    """What is known of a module: by the names of its classes, or by what it says of itself; None if it has no experts.

    Raises:
        ValueError: it has experts of a kind that is not supported.
    """
    known = {preset.experts: preset for preset in presets}
    for cls in type(module).__mro__:
        if cls.__name__ in known:
            return known[cls.__name__]
    said: dict[str, Any] = module.__dict__
    if not {"has_gate", "has_bias", "is_transposed"} <= said.keys():
        return None
    if said.get("has_post_expert_norm"):
        raise ValueError(
            f"{type(module).__name__} normalises what its experts give; only experts of two maps are supported. Leave "
            "the module out with modules=, or keep it as it is."
        )
    up = "gate_up_proj" if said["has_gate"] else "up_proj"
    return ExpertsPreset(
        experts=type(module).__name__, up=up, up_bias=f"{up}_bias" if said["has_bias"] else None,
        down_bias="down_proj_bias" if said["has_bias"] else None, transposed=said["is_transposed"],
        gated=said["has_gate"],
    )  # fmt: skip
