"""The plan of a model of transformers: what its family in zoo says, or the styles that it ships, read as rules.

A style (``colwise``, ``rowwise``, …) says that features are dealt, and not which of them belong to one head. What is
missing is found by names (``q_proj``), by the configuration's numbers of heads, and by attributes of the attention
module that hold these numbers. What a name cannot say is for the proof to find (:mod:`zoo.tensor.proof`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from zoo import registry
from zoo.tensor.adapters import base_of, with_adapters
from zoo.tensor.plans import Count, Plan, Rule, matches, wildcards

KIND = "tensor_family"
"""Of the registry: ``model_type`` → ``plan(config)``."""
_LATENTS = ("kv_lora_rank", "qk_rope_head_dim")
"""Sizes of a configuration: what heads are made of, and the rotary key that all of them read."""
QUERIES = frozenset({"q", "q_b_proj", "q_lin", "q_proj", "query", "query_proj", "wq"})
KEYS = frozenset({"k", "k_lin", "k_proj", "key", "key_proj", "v", "v_lin", "v_proj", "value", "value_proj", "wk", "wv"})
_COUNTERS = {
    "num_heads": "head", "num_attention_heads": "head", "n_heads": "head", "n_head": "head", "n_rep": "query",
    "num_key_value_heads": "kv", "num_kv_heads": "kv", "num_key_value_groups": "query",
}  # fmt: skip
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_PLAIN = frozenset({"replicate", "local_params"})
"""Styles that cut nothing of their own."""


def plan_of(model: nn.Module) -> Plan:
    """How the parameters of ``model``, one of transformers, lie over ranks; with its head or without, and with LoRA.

    Raises:
        ValueError: the family is refused, or nothing is known of the model.
    """
    _, base = base_of(model)
    if base is not model:
        return with_adapters(plan_of(base), model)
    config = getattr(model, "config", None)
    name = getattr(config, "model_type", None)
    if not name:
        raise ValueError(
            f"{type(model).__name__} has no configuration with a model_type, so that no plan is known for it; give one "
            "(zoo.tensor.Plan)."
        )
    if name in registry.names(KIND):
        plan = fitted(registry.get(KIND, name)(config), model)
        if not plan.rules:
            raise ValueError(
                f"{type(model).__name__} has the model_type {name!r}, and no module where the plan of that family has "
                "them: split it before it is wrapped, or give a plan (zoo.tensor.Plan)."
            )
        return plan
    return of_styles(model) if getattr(model, "tp_plan", None) else guessed(model)


def guessed(model: nn.Module) -> Plan:
    """What a small model of the same class shows (:func:`zoo.tensor.guess`), with the sizes of this one.

    Raises:
        ValueError: nothing can be guessed, or what is guessed is wrong.
    """
    from zoo.tensor.guess import guess_run
    from zoo.tensor.proof import computations, random_model
    from zoo.tensor.shrinking import shrunken

    config: Any = model.config
    told = (
        f"{type(model).__name__} is of no family that zoo knows ({', '.join(registry.names(KIND))}) and ships no "
        "tensor-parallel plan"
    )
    try:
        heads = config.num_attention_heads
        sizes = {"head": heads, "kv": getattr(config, "num_key_value_heads", None) or heads, "vocab": config.vocab_size}
        small = shrunken(config, Plan(name="", sizes=tuple(sizes.items())), 2)
        whole = random_model(type(model), small.config)
        first = computations(whole)[0][1]
        found = fitted(guess_run(whole, lambda model: first(model, {})), model)
    except Exception as error:
        raise ValueError(f"{told}, and none could be guessed ({error}). Give one (zoo.tensor.Plan).") from error
    sizes["dim"] = getattr(config, "head_dim", None) or config.hidden_size // heads
    return replace(found, sizes=tuple((name, sizes[name]) for name, _ in found.sizes))


def fitted(plan: Plan, model: nn.Module) -> Plan:
    """The same for ``model``, which may lack a head, an encoder or a decoder, be the module that heads call, or have it
    under another name or one more."""
    paths = [path for path, _ in model.named_modules()]
    prefix = getattr(model, "base_model_prefix", "") + "."

    def names(pattern: str) -> tuple[str, ...]:
        return pattern, pattern.removeprefix(prefix), prefix + pattern.partition(".")[2], prefix + pattern

    def fit(item: Any) -> Any:
        for pattern in names(item.module):
            if any(matches(pattern, path) for path in paths):
                return replace(item, module=pattern)
        first = item.module.removeprefix(prefix).split(".")[0]
        head = isinstance(item, Rule) and item.gather
        base = item.module.startswith(prefix) and any(path == prefix[:-1] for path in paths)
        return item if (base or first in paths) and not head else None

    rules, counts, takes = (
        tuple(found for item in items if (found := fit(item)) is not None)
        for items in (plan.rules, plan.counts, plan.takes)
    )
    layers = next((pattern for pattern in names(plan.layers) if _any(pattern, paths)), "")
    return replace(plan, rules=rules, counts=counts, takes=takes, layers=layers)


def of_styles(model: nn.Module) -> Plan:
    """The plan of the styles that a model of transformers ships (``tp_plan``).

    Raises:
        ValueError: it ships none, or one that no rule can say.
    """
    styles = {wildcards(path): style for path, style in (getattr(model, "tp_plan", None) or {}).items()}
    modules = dict(model.named_modules())
    there = {path: style for path, style in styles.items() if _any(path, modules) or _is_parameter(path, model)}
    name = type(model).__name__
    if not there:
        raise ValueError(
            f"{name} is of no family that zoo knows ({', '.join(registry.names(KIND))}) and ships no tensor-parallel "
            "plan; give one (zoo.tensor.Plan)."
        )
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    words = _vocabulary(model, modules, config.vocab_size)
    dealt = [path for path, style in there.items() if style not in _GATHERED]
    attentions = {path.rpartition(".")[0] for path in dealt if path.rpartition(".")[2] in QUERIES}
    ends = {rule.module for rule in words} | _ends(model, modules)
    experts = [path for path, style in there.items() if style == "moe_tp_experts"]
    inside = {path for path in there if path.rpartition(".")[0] in experts}
    rules: list[Rule | None] = [_experts(path, there, name) for path in experts]
    rules += [_rule(path, there[path], attentions, name) for path in there if path not in {*experts, *inside, *ends}]
    if not any(rules):
        raise ValueError(
            f"{name} is of no family that zoo knows and ships tensor-parallel styles for its vocabulary alone; give a "
            "plan (zoo.tensor.Plan)."
        )
    counts = [count for at in sorted(attentions) for count in _counts(at, modules, heads, kv)]
    return Plan(
        name=f"styles of {config.model_type}",
        sizes=(("head", heads), ("kv", kv), ("vocab", config.vocab_size), *_latents(config, there.values())),
        rules=(*words, *(rule for rule in rules if rule is not None)),
        counts=tuple(counts),
        layers=next((path[: path.index("*") + 1] for path in there if "*" in path), ""),
    )


def _rule(path: str, style: str, attentions: Iterable[str], model: str) -> Rule | None:
    """Of one style; None where nothing is cut."""
    if style in _PLAIN:
        return None
    parent, _, name = path.rpartition(".")
    within = parent in attentions
    inner = "head dim" if within else "inner"
    if within and name == "kv_b_proj" and style == "colwise":  # keys and values of each query head
        return Rule(module=path, rows="head dim", cut="head")
    if within and style == "colwise" and name not in QUERIES | KEYS:
        raise ValueError(
            f"{model} ships the style colwise for {path}, within attention, and its name does not say which rows are a "
            "head's; give a plan (zoo.tensor.Plan)."
        )
    known: dict[str, Callable[[], Rule]] = {
        "colwise": lambda: _rows(path, name),
        "packed_colwise": lambda: Rule(module=path, rows="part=2 inner", cut="inner"),
        "colwise_gather_output": lambda: Rule(module=path, rows="out", cut="out", gather=True),
        "rowwise": lambda: Rule(module=path, columns=inner, cut=inner.split()[0]),
        "packed_rowwise": lambda: Rule(module=path, columns="part=2 inner", cut="inner"),
        "rowwise_split_input": lambda: Rule(module=path, columns="inner", cut="inner", scatter=True),
        "embedding_rowwise": lambda: Rule(module=path, rows="vocab", cut="vocab"),
        "replicated_with_grad_allreduce": lambda: Rule(module=path, partial=True),
        "mla_kv_a_proj": lambda: Rule(module=path, outputs=f"({' '.join(_LATENTS)})", cut=_LATENTS[-1]),
    }
    known |= {"colwise_rep": known["colwise_gather_output"], "rowwise_rep": known["rowwise_split_input"]}
    if style not in known:
        raise ValueError(
            f"{model} ships the style {style!r} for {path}, which rules cannot say; they can say "
            f"{', '.join(sorted({*known, *_PLAIN}))}. Give a plan (zoo.tensor.Plan)."
        )
    return known[style]()


def _experts(module: str, styles: Mapping[str, str], model: str) -> Rule:
    """Of experts whose matrices are parameters (E, rows, columns) of one module."""
    known = {
        "colwise": (-2, "inner"), "packed_colwise": (-2, "part=2 inner"),
        "rowwise": (-1, "inner"), "packed_rowwise": (-1, "part=2 inner"),
    }  # fmt: skip
    found = []
    for path, style in styles.items():
        if path.rpartition(".")[0] != module:
            continue
        if style not in known:
            raise ValueError(
                f"{model} ships the style {style!r} for {path}, within experts, where rules can say "
                f"{', '.join(sorted(known))}. Give a plan (zoo.tensor.Plan)."
            )
        found.append((path.rpartition(".")[2], *known[style]))
    return Rule(module=module, inside=tuple(found), cut="inner")


def _latents(config: Any, styles: Iterable[str]) -> list[tuple[str, int]]:
    """Sizes of what the first matrix of latent attention makes, where there is one."""
    return [(name, getattr(config, name)) for name in _LATENTS] if "mla_kv_a_proj" in styles else []


def _rows(path: str, name: str) -> Rule:
    dim = "head" if name in QUERIES else "kv" if name in KEYS else ""
    return Rule(module=path, rows=f"{dim} dim" if dim else "inner", cut=dim or "inner")


def _ends(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Paths of the embedding and the head of ``model``."""
    both = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    return {path for path, module in modules.items() if any(module is end for end in both)}


def _vocabulary(model: nn.Module, modules: Mapping[str, nn.Module], vocab: int) -> list[Rule]:
    """Rules for the embedding and the head; none for what stays whole because of its class, which a warning says."""
    found = []
    for path in sorted(_ends(model, modules)):
        module = modules[path]
        linear = type(module) is nn.Linear
        if not (linear or isinstance(module, nn.Embedding)) or module.weight.shape[0] != vocab:  # type: ignore[index]
            warnings.warn(
                f"{path} is a {type(module).__name__} and no table of {vocab} words, so that the vocabulary of "
                f"{type(model).__name__} stays whole on every rank.",
                stacklevel=4,
            )
            return []
        found.append(Rule(module=path, rows="vocab", cut="vocab", gather=linear))
    return found


def _counts(at: str, modules: Mapping[str, nn.Module], heads: int, kv: int) -> list[Count]:
    """Attributes of the attention modules ``at`` that hold numbers of heads."""
    module = next(module for path, module in modules.items() if matches(at, path))
    values = {"head": heads, "kv": kv, "query": heads // kv}
    found = []
    for name, dims in _COUNTERS.items():
        value = getattr(module, name, None)
        if value is None:
            continue
        if value != values[dims]:
            raise ValueError(
                f"{at}.{name} is {value}, and the configuration has {heads} heads, {kv} of keys and values; give a "
                "plan (zoo.tensor.Plan)."
            )
        found.append(Count(module=at, attribute=name, dims=dims))
    return found


def _any(pattern: str, paths: Iterable[str]) -> bool:
    return any(matches(pattern, path) for path in paths)


def _is_parameter(path: str, model: nn.Module) -> bool:
    return any(matches(path, name) for name, _ in model.named_parameters())
