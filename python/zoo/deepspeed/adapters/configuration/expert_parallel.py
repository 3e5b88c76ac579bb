"""The section ``expert_parallel`` of a document (AutoEP) as the section ``moe`` of zoo-moe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.config import Config, ConfigError
from zoo.config.fates import fates_of
from zoo.registry import nearest

_SAME = ("async_split_plan", "combine_impl", "disable_triton_grouped_mm", "preset_model", "score_apply",
         "use_grouped_mm", "validate_folding_routing")  # fmt: skip
"""Say how experts are found and computed, and change no number."""
_ROUTER = ("load_balance_coeff", "num_expert_groups", "num_limited_groups", "route_norm", "route_scale",
           "routed_scaling_factor", "score_func", "top_k")  # fmt: skip


def moe_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """What the section of zoo-moe says then.

    Raises:
        ConfigError: keys that nobody knows; that describe experts by names; that say what the model's router says; or
            experts that tensor-parallel ranks cut, which they share whole.
    """
    known = fates_of(Config)["expert_parallel"].keys
    for key, value in section.items():
        if key not in known and key not in (*_SAME, "shared_experts_gate_pattern"):
            close = nearest(str(key), list(known))
            raise ConfigError(f"expert_parallel.{key}: unknown key{f'; perhaps {close!r}' if close else ''}.")
        default = known[key].default if key in known else None
        if key in (*_SAME, "enabled", "autoep_size") or value in (None, "auto", default):
            continue
        if key in _ROUTER:
            raise ConfigError(
                f"expert_parallel.{key} is {value!r}: tokens are routed by the model's own router, whose configuration "
                "says it. Leave it out."
            )
        if key == "expert_tensor_parallel_size":
            raise ConfigError(
                f"expert_parallel.{key} is {value!r}: tensor-parallel ranks share an expert's tokens, and have it "
                "whole. Leave it out."
            )
        raise ConfigError(
            f"expert_parallel.{key} is {value!r}: experts are found by themselves, and others are described in the "
            'section moe: {"moe": {"enabled": true, "ep_size": ..., "presets": [{"experts": <its class>}]}}.'
        )
    size = section.get("autoep_size", 1)
    if type(size) is not int or size < 1:
        raise ConfigError(f"expert_parallel.autoep_size is {size!r}; it is an integer from 1 on.")
    return {"enabled": True, "ep_size": size}
