"""Plans from injection policies: of the layers of a kind of module, the names of those that are row-parallel.

    {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")}

In each module of that class the named linear layers are row-parallel, and all others are column-parallel: the notation
of DeepSpeed's ``injection_policy``. A name is the end of a path, as ``o_proj`` of ``self_attn.o_proj``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zoo.tensor.plans import Plan
from zoo.tensor.reading import listed
from zoo.tensor.ways import Way, family_of, plan_of_ways

WHOLE = frozenset({"gate", "kv_a_proj_with_mqa", "q_a_proj", "router", "shared_expert_gate"})
"""Linear layers that choose experts or make latents: every rank needs all of their outputs."""
_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear", "FalconLinear", "Conv1D")

Policy = Mapping[Any, Any]
"""Class of a module, or its name → names, or one."""


def plan_of_injection_policy(model: nn.Module, policy: Policy | Sequence[str]) -> Plan:
    """The plan of ``policy`` for a model.

    Args:
        model: whole; on any device.
        policy: class of a module, or its name → names of row-parallel layers in it. Names alone are for the class of
            the modules in a list (``nn.ModuleList``, ``nn.Sequential``) that have layers with all of these names.

    Raises:
        ValueError: no module of the class is there, or none of its layers has one of the names, or no rule can be made
            of a layer.
    """
    _check(policy)
    family = family_of(model)
    classes: Policy = policy if isinstance(policy, Mapping) else _of_names(model, policy)
    ways: dict[str, Way] = {}
    for kind, given in classes.items():
        names = [name.strip(".") for name in ([given] if isinstance(given, str) else given)]
        within = _modules(model, kind)
        if not within:
            found = sorted({type(module).__name__ for _, module in model.named_modules()})
            raise ValueError(
                f"the injection policy is for {_name(kind)}, and {type(model).__name__} has no such module; it has "
                f"{', '.join(found[:12])}."
            )
        used: set[str] = set()
        for path, module in within:
            ways |= _ways_within(path, module, names, used, family)
        if missing := [name for name in names if name not in used]:
            raise ValueError(
                f"the injection policy names {', '.join(missing)}, and no linear layer of {_name(kind)} is named so; "
                f"it has {', '.join(name for name, m in within[0][1].named_modules() if _is_linear(m))}."
            )
    return plan_of_ways(model, ways, "injection policy")


def _check(policy: Any) -> None:
    """Raise ValueError for what is no policy, or says nothing."""
    each = list(policy.values()) if isinstance(policy, Mapping) else [policy]
    names = [
        [given] if isinstance(given, str) and isinstance(policy, Mapping) else listed("an injection policy", given)
        for given in each
    ]
    empty = not names or any(not of_one for of_one in names)
    if empty or any(not isinstance(name, str) or not name.strip(".") for of_one in names for name in of_one):
        raise ValueError(
            f"the injection policy is {policy!r}; it takes names of row-parallel layers, ['o_proj', 'down_proj'], or "
            "such names by the class of a module."
        )


def _ways_within(
    path: str, module: nn.Module, names: Iterable[str], used: set[str], family: Plan | None
) -> dict[str, Way]:  # fmt: skip
    """Of the layers in one module; what the family leaves whole, routers for one, stays whole."""
    found: dict[str, Way] = {}
    for inner, layer in module.named_modules():
        full = f"{path}.{inner}" if path else inner
        rule = family.rule_of(full) if family is not None else None
        known = rule is not None and bool(rule.rows or rule.columns)
        if isinstance(layer, nn.Embedding):
            if not known:
                raise ValueError(
                    f"{full} is an embedding within {type(module).__name__}, and a policy does not say which of its "
                    "features are whose. Give a plan (zoo.tensor.Plan)."
                )
            found[full] = Way(kind="column")
        elif inner and _is_linear(layer):
            fits = [name for name in names if _ends_with(inner, name)]
            used.update(fits)
            if fits or (known if family is not None else inner.rpartition(".")[2] not in WHOLE):
                found[full] = Way(kind="row" if fits else "column")
    return found


def _of_names(model: nn.Module, names: Sequence[str]) -> Policy:
    wanted = [name.strip(".") for name in names]
    for module in model.modules():
        paths: dict[type[nn.Module], list[str]] = {}  # layers of one class may have other ones, such as experts
        for child in module.children() if isinstance(module, (nn.ModuleList, nn.Sequential)) else ():
            paths.setdefault(type(child), []).extend(p for p, layer in child.named_modules() if _is_linear(layer))
        for kind, found in paths.items():
            if wanted and all(any(_ends_with(path, name) for path in found) for name in wanted):
                return {kind: wanted}
    raise ValueError(
        f"the injection policy names {', '.join(names) or 'nothing'}, and {type(model).__name__} has no list of "
        "modules whose layers have all of these names. Name the class: {LlamaDecoderLayer: (...)}."
    )


def _modules(model: nn.Module, kind: type[nn.Module] | str) -> list[tuple[str, nn.Module]]:
    if isinstance(kind, type) and not issubclass(kind, nn.Module):
        raise ValueError(
            f"the injection policy is for {kind.__name__}, which is no module: policies that put kernels in are not "
            "for splitting. Name the class of the layers: {LlamaDecoderLayer: (...)}."
        )
    return [
        (path, module)
        for path, module in model.named_modules()
        if (type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind))
    ]


def _name(kind: type[nn.Module] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in _LINEAR
