"""Adapters of peft on a model that is split: LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1), before it is.

y = x W^T + s · (x A^T) B^T. Where W has this rank's rows, B has them too, and A is whole: a way into the region is
between them. Where W has this rank's columns, A has them, its r outputs are summed, and B is whole. So the rule for W
gives those for A and B; nothing but sums of (B, T, r) is sent besides, and adapters of any degree load at any other.

Written against what peft's modules look like; it is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from zoo.tensor.plans import Plan, Rule, matches


def base_of(model: nn.Module) -> tuple[str, nn.Module]:
    """(path, the model that adapters are on); ("", model) for one without.

    Raises:
        ValueError: what was learnt stands beside the model's inputs, not its matrices.
    """
    if not (hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))):
        return "", model
    wrapped: Any = model
    if getattr(wrapped.active_peft_config, "is_prompt_learning", False):
        raise ValueError(f"{type(model).__name__} with learnt prompts has no tensor-parallel plan; LoRA has.")
    base: nn.Module = wrapped.get_base_model()
    return next(path for path, module in model.named_modules() if module is base), base


def home(model: nn.Module, path: str) -> str:
    """Of a layer at ``path``: the module that it lies in, were there no adapters."""
    parent = path.rpartition(".")[0]
    while parent and _is_wrapper(model.get_submodule(parent)):
        parent = parent.rpartition(".")[0]
    return parent


def with_adapters(plan: Plan, model: nn.Module) -> Plan:
    """``plan``, which is of the model below adapters, as one of ``model``, which has them.

    Raises:
        ValueError: a module that the plan cuts has an adapter of another kind.
    """
    prefix, base = base_of(model)
    if base is model:
        return plan
    moved = plan.within(prefix)
    modules = dict(model.named_modules())
    rules: list[Rule] = []
    for rule in moved.rules:
        paths = [path for path in modules if matches(rule.module, path)]
        wrapped = [path for path in paths if _is_wrapper(modules[path])]
        if not wrapped:
            rules.append(rule)
            continue
        rules += [replace(rule, module=path) for path in paths if path not in wrapped]
        for path in wrapped:
            rules += _of_wrapper(path, modules[path], rule, dict(plan.sizes))
    return replace(moved, rules=tuple(rules))


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, nn.ModuleDict) or hasattr(module, "base_layer") or hasattr(module, "original_module")


def _of_wrapper(path: str, module: Any, rule: Rule, sizes: dict[str, int]) -> Iterator[Rule]:
    """Of what peft has put in the place of a module that ``rule`` is about."""
    if hasattr(module, "modules_to_save"):
        yield replace(rule, module=f"{path}.original_module")
        yield from (replace(rule, module=f"{path}.modules_to_save.{name}") for name in module.modules_to_save)
        return
    plain = isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and not hasattr(module, "parameter_name")
    if not plain or len(module.lora_A) == 0 or len(module.lora_embedding_A) or getattr(module, "lora_variant", None):
        raise ValueError(
            f"{path} has an adapter {type(module).__name__} that has no tensor-parallel plan; plain LoRA of linear "
            "layers has, without DoRA and other variants."
        )
    if rule.partial or rule.inside or rule.outputs:
        raise ValueError(f"{path} has an adapter, and a rule that does not deal its rows or columns: {rule}.")
    yield replace(rule, module=f"{path}.base_layer")
    for name in module.lora_A:
        yield replace(rule, module=f"{path}.{'lora_B' if rule.rows else 'lora_A'}.{name}")
        if isinstance(module.lora_dropout[name], nn.Dropout):
            dropped = f"{path}.lora_dropout.{name}"
            if rule.columns and not rule.scatter:
                dims = rule.dims.resolved(sizes, module.in_features, dropped)
                yield Rule(module=dropped, columns=str(dims), cut=rule.cut)
            else:
                yield Rule(module=dropped, partial=True)
