"""A configuration of transformers made small, with the same pattern of heads: what a plan is proved on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zoo.tensor.families.pieces import has_experts
from zoo.tensor.plans import Plan
from zoo.tensor.shares import HEAD, KV

_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer")
_INNER = (
    "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "n_inner", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
_FIXED: Mapping[str, int] = {
    "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32, "sliding_window": 3, "window_size": 3,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "rotary_dim": 4, "first_k_dense_replace": 1,
}  # fmt: skip
"""At most these, where a configuration has them."""
_ROPE = frozenset({"rope_theta", "partial_rotary_factor"})
"""What stays of rotary embeddings: they are alike for all heads."""


@dataclass(frozen=True)
class Small:
    """``config``, and ``plan`` with the sizes that it has now."""

    config: Any
    plan: Plan


def shrunken(config: Any, plan: Plan, degree: int, grain: int = 1) -> Small:
    """A copy of ``config`` with few layers, one of each kind at least, small widths and few heads.

    There are as many queries to each head of keys and values as before, and the degree divides numbers of heads where
    it did; it divides neither hidden features nor the vocabulary.

    Raises:
        ValueError: the plan's heads are not those of the configuration, or a size of the plan is not known in it.
    """
    if config.get_text_config() is not config:
        raise ValueError(
            f"{type(config).__name__} is made of several configurations, which are not shrunken together; prove a plan "
            "of the text model by itself, with config.get_text_config()."
        )
    known = dict(plan.sizes)
    heads = known.get(HEAD, config.num_attention_heads)
    if heads != config.num_attention_heads:
        raise ValueError(
            f"plan {plan.name!r} has {heads} query heads, and the configuration has {config.num_attention_heads}."
        )
    before = copy.deepcopy(config)
    small = copy.deepcopy(config)
    num, kv = few(heads, known.get(KV, heads), degree)
    dim = 8 if _partial(config) >= 0.25 else 32
    _layers(small)
    sizes = {"hidden_size": num * dim, "head_dim": dim, "d_kv": dim, "num_attention_heads": num}
    sizes["vocab_size"] = grain * (degree * -(-16 // degree) + 1)
    grains = degree + 1 if degree > 1 else 2
    sizes |= {name: grain * (grains + number * degree) for number, name in enumerate(_INNER)}
    fixed = {name: getattr(config, name, None) for name in _FIXED}
    sizes |= {name: min(_FIXED[name], value) for name, value in fixed.items() if value is not None}
    for name in ("num_key_value_heads", "num_kv_heads"):
        sizes[name] = kv if getattr(config, name, None) == known.get(KV) else num
    if getattr(config, "word_embed_proj_dim", None) is not None:
        same = config.word_embed_proj_dim == config.hidden_size
        sizes["word_embed_proj_dim"] = sizes["hidden_size"] if same else sizes["hidden_size"] // 2
    for name, value in sizes.items():
        follows = isinstance(getattr(type(small), name, None), property)
        if getattr(small, name, None) is not None and not follows:
            setattr(small, name, value)
    if getattr(small, "qk_rope_head_dim", None) is not None:
        small.head_dim, small.qk_head_dim = small.qk_rope_head_dim, small.qk_nope_head_dim + small.qk_rope_head_dim
    _other(small, sizes["vocab_size"])
    return Small(small, _resized(plan, {HEAD: num, KV: kv, "vocab": sizes["vocab_size"], "dim": dim}, before, small))


def few(num: int, num_kv: int, degree: int) -> tuple[int, int]:
    """The fewest (H', K') with H' / K' = H / K that the degree divides, or does not, as it does H and K."""
    each = num // num_kv

    def pattern(kv: int) -> tuple[bool, ...]:
        return each * kv % degree == 0, kv % degree == 0, degree % kv == 0

    for kv in range(1, num_kv):
        if each * kv >= degree and pattern(kv) == pattern(num_kv):
            return each * kv, kv
    return num, num_kv


def _layers(config: Any) -> None:
    """Two layers or more: one of each kind that lists of layers tell apart, four at most."""
    number = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == number and number > 1
    }
    experts = [has_experts(config, layer) for layer in range(number)]
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(number):
        kinds.setdefault((str(experts[layer]), *(str(value[layer]) for value in lists.values())), layer)
    chosen = sorted({*list(kinds.values())[:4], *range(min(number, 2))})
    if getattr(config, "mlp_only_layers", None) is not None:
        config.mlp_only_layers = [at for at, layer in enumerate(chosen) if not experts[layer]]
        config.decoder_sparse_step = 1
    for name, value in lists.items():
        setattr(config, name, [value[layer] for layer in chosen])
    for name in _LAYERS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(len(chosen), getattr(config, name)))


def _partial(config: Any) -> float:
    """The least share of a head's features that rotate."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return min(float(one.get("partial_rotary_factor") or 1.0) for one in each)


def _other(config: Any, vocab: int) -> None:
    """What follows from small sizes, and what would leave fp64 or need a device."""
    rope = getattr(config, "rope_parameters", None)
    if rope:
        nested = all(isinstance(value, dict) for value in rope.values())
        plain = {name: _plain(value) for name, value in rope.items()} if nested else _plain(rope)
        config.rope_parameters = plain
    for name in list(vars(config)):
        if name.endswith("_token_id"):
            value = getattr(config, name)
            value = value[0] if isinstance(value, list) and value else value
            setattr(config, name, value if value is None else min(value, vocab - 1))
    if config.pad_token_id is None:  # classifiers look for the last token that is no padding
        config.pad_token_id = vocab - 1
    for name in ("quantization_config", "dtype"):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    if getattr(config, "reorder_and_upcast_attn", False):
        config.reorder_and_upcast_attn = False
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config._attn_implementation = None  # what the class takes by itself; others need a device
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", **{name: value for name, value in rope.items() if name in _ROPE}}


def _resized(plan: Plan, sizes: Mapping[str, int], before: Any, small: Any) -> Plan:
    known = vars(before)
    found = []
    for name, value in plan.sizes:
        new = {sizes[name]} if name in sizes else {getattr(small, name)} if hasattr(small, name) else set()
        if not new:
            new = {getattr(small, key) for key, old in known.items() if type(old) is int and old == value}
        if len(new) != 1:
            raise ValueError(
                f"plan {plan.name!r} has {name}={value}, which is no size of the configuration "
                f"{type(before).__name__}, or several that differ; leave it out where it is what is left of a matrix."
            )
        found.append((name, new.pop()))
    return replace(plan, sizes=tuple(found))
