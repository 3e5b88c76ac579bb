"""``deepspeed.utils.z3_leaf_module``: modules that ZeRO stage 3 gathers whole, because the data decide what they use.

For zoo that is a declared unit (:func:`zoo.layout.declare_unit`), to be set before ``initialize``: all that is in it is
gathered together, so that ranks which use different children do not wait for each other. Its parameters have the
attribute ``ds_z3_leaf_module``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from zoo.deepspeed.adapters.configuration.sections import DEFAULT_LEAF_MODULE_CLASSES, DeepSpeedZeroLeafModuleConfig
from zoo.layout import declare_unit, is_unit, withdraw_unit

_log = logging.getLogger("zoo.deepspeed")


def _check_model(what: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{what} got {model!r}, a {type(model).__name__}, as its model; give it an nn.Module.")


def _check_list(what: str, given: Any, example: str) -> None:
    if isinstance(given, (str, bytes, type)) or not isinstance(given, Iterable):
        raise ValueError(f"{what} is {given!r}, a {type(given).__name__}; give a list, as {example}.")


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this very module was set."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter is in a module that was set."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Those in the model that were set."""
    _check_model("get_z3_leaf_modules", model)
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set this very module, or take that back."""
    _check_model("set_z3_leaf_module", model)
    if flag and not z3_leaf_module(model):
        model.__dict__["_z3_declared_itself"] = is_unit(model)
        declare_unit(model)
    elif not flag and z3_leaf_module(model) and not model.__dict__.pop("_z3_declared_itself", False):
        withdraw_unit(model)
    model._z3_leaf = flag  # type: ignore[assignment]
    for parameter in model.parameters():
        if flag:
            parameter.ds_z3_leaf_module = model  # type: ignore[attr-defined]
        else:
            vars(parameter).pop("ds_z3_leaf_module", None)


def _is_of(module: nn.Module, classes: Sequence[type | str]) -> bool:
    cls = type(module)
    names = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return any(c in names if isinstance(c, str) else isinstance(module, c) for c in classes)


def _by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, strict: bool) -> list[nn.Module]:
    given: Sequence[Any] = classes
    _check_model("set_z3_leaf_modules", model)
    _check_list("leaf_module_classes", classes, "[MixtralSparseMoeBlock]")
    wrong = [c for c in given if not isinstance(c, (type, str))]
    if wrong:
        raise AssertionError(f"leaf_module_classes has {wrong[0]!r} in it; it is a list of classes and their names.")
    found = [module for module in reversed(list(model.modules())) if _is_of(module, classes)]
    if not found and strict:
        raise ValueError(
            f"the model, a {type(model).__name__}, has no module of {', '.join(map(str, classes)) or 'no class at all'}"
            "; raise_if_not_found=False lets that pass."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Set all modules of these classes: classes, their names, or "package.module.Name"; gives them.

    Raises:
        ValueError: there is none. AssertionError: something in the list is no class and no name.
    """
    return _by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take back what :func:`set_z3_leaf_modules` does."""
    return _by_class(model, leaf_module_classes, False, raise_if_not_found)


def _by_path(
    model: nn.Module, wanted: Iterable[str], flag: bool, strict: bool, fits: Any, what: str
) -> tuple[list[nn.Module], list[str]]:
    _check_model("set_z3_leaf_modules", model)
    _check_list("the names of leaf modules", wanted, "['model.layers.0.mlp']")
    found: list[nn.Module] = []
    missing: list[str] = []
    for name in wanted:
        here = [module for path, module in model.named_modules() if fits(path, name)]
        found += [module for module in here if module not in found]
        if not here:
            missing.append(name)
    if missing and strict:
        raise ValueError(
            f"the model, a {type(model).__name__}, has no module {what} {', '.join(map(repr, missing))}; "
            "raise_if_not_found=False lets that pass."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Set the modules at these paths, as ``named_modules`` has them; gives (them, paths that are not there).

    Raises:
        ValueError: a path is not there, unless ``raise_if_not_found`` is False; nothing is set then.
    """
    return _by_path(model, module_names, flag, raise_if_not_found, lambda path, name: path == name, "named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As :func:`set_z3_leaf_modules_by_name`, by the ends of paths."""
    return _by_path(
        model, module_name_suffixes, flag, raise_if_not_found, lambda path, end: path.endswith(end), "that ends with"
    )


def apply_zero_leaf_module_config(
    model: nn.Module, leaf_cfg: DeepSpeedZeroLeafModuleConfig | Mapping[str, Any] | None
) -> list[nn.Module]:
    """Set what ``zero_optimization.leaf_module`` names, and give it; ``initialize`` does so. None: nothing is set.

    Unless the section has classes of its own, those are transformers' blocks of experts. What the model does not have
    is warned of, the classes of the default excepted.
    """
    if leaf_cfg is None:
        return []
    given: Any = leaf_cfg
    if isinstance(given, Mapping) and (odd := [key for key in given if not isinstance(key, str)]):
        raise ValueError(f"leaf_module has the key {odd[0]!r}; its keys are classes, names, name_suffixes.")
    wanted = leaf_cfg if isinstance(leaf_cfg, DeepSpeedZeroLeafModuleConfig) else None
    wanted = wanted or DeepSpeedZeroLeafModuleConfig.model_validate(leaf_cfg)
    found = set_z3_leaf_modules(model, wanted.classes, raise_if_not_found=False)
    by_name, no_name = set_z3_leaf_modules_by_name(model, wanted.names, raise_if_not_found=False)
    by_end, no_end = set_z3_leaf_modules_by_suffix(model, wanted.name_suffixes, raise_if_not_found=False)
    none_of = wanted.classes if not found and wanted.classes != DEFAULT_LEAF_MODULE_CLASSES else []
    for key, missing in (("classes", none_of), ("names", no_name), ("name_suffixes", no_end)):
        if missing:
            _log.warning(
                "zero_optimization.leaf_module.%s: the model, a %s, has no module of %s.",
                key, type(model).__name__, ", ".join(map(repr, missing)),
            )  # fmt: skip
    return list(dict.fromkeys([*found, *by_name, *by_end]))
