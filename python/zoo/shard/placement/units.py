"""Units: the modules whose parameters are gathered and reduced together, and who owns which parameter.

A unit is a module; its parameters are needed from the start of its forward to the end, and again in its backward. Units
may contain units. A parameter belongs to the innermost unit that contains every module holding it, so a tied weight
belongs to a unit that is open during all of its uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zoo.layout import is_unit
from zoo.shard.dtensors import is_dtensor
from zoo.shard.quantised_parameters import is_coded

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

UnitChoice = Sequence[type[nn.Module] | nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(eq=False)
class UnitSpec:
    """One unit: its module, the module's path in the model, and the parameters it owns, by their first full name."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def find_units(model: nn.Module, choice: UnitChoice | None = None) -> list[UnitSpec]:
    """The units of a model in the order of ``named_modules``; the first is the model itself.

    Args:
        choice: classes and modules, or a predicate ``(path, module) -> bool``, naming the units. By default: repeated
            blocks (children of a container of which there are at least two of one class), and outside of them every
            module that holds parameters directly.

    The elements of a list that says so (``elements_are_units``: :class:`zoo.nn.UnitList`), and modules that declare it
    (:func:`zoo.layout.declare_unit`), are units in any case; nothing inside of the latter is.

    Every parameter is owned by exactly one unit; units that own nothing are left out, except the model itself, whose
    forward marks where a pass begins and ends.

    Raises:
        ValueError: a chosen module is not part of the model, or has no forward of its own that would be called.
    """
    chosen = _chosen(model, choice) if choice is not None else _default(model)
    for path, module in model.named_modules():
        if getattr(module, "elements_are_units", False):
            chosen |= {f"{path}.{name}" if path else name for name, _ in module.named_children()}
    for path, module in model.named_modules():
        if path and is_unit(module):
            chosen = {name for name in chosen if not name.startswith(f"{path}.")} | {path}
    units = {name: UnitSpec(name, module) for name, module in model.named_modules() if name == "" or name in chosen}
    for name, (parameter, holders) in _holders(model).items():
        units[_owner(holders, units)].parameters[name] = parameter
    return [u for u in units.values() if u.parameters or u.name == ""]


def _default(model: nn.Module) -> set[str]:
    chosen: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        container = isinstance(module, _CONTAINERS)
        classes = Counter(type(child) for child in module.children())
        if not container and path and any(True for _ in module.parameters(recurse=False)):
            chosen.add(path)
            if isinstance(module, nn.MultiheadAttention):
                return  # it uses the parameters of its children itself, without calling them
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if is_unit(child, whole=False):
                chosen.add(child_path)
                continue
            repeated = container and classes[type(child)] > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if repeated and any(True for _ in child.parameters()):
                chosen.add(child_path)
            else:
                visit(child_path, child)

    visit("", model)
    return chosen


def _chosen(model: nn.Module, choice: UnitChoice) -> set[str]:
    modules = dict(model.named_modules())
    given: Any = choice
    if isinstance(given, (str, type, nn.Module)) or not (callable(given) or isinstance(given, Iterable)):
        raise ValueError(
            f"units={given!r} is a {type(given).__name__}; allowed are a list of classes and modules, or a predicate "
            "(path, module) -> bool."
        )
    if callable(choice) and not isinstance(choice, Sequence):
        names = {name for name, module in modules.items() if name and choice(name, module)}
    else:
        given = list(given)  # which may be gone through once
        classes = tuple(c for c in given if isinstance(c, type))
        objects = {id(c) for c in given if isinstance(c, nn.Module)}
        names = {n for n, m in modules.items() if n and (isinstance(m, classes) or id(m) in objects)}
        foreign = objects - {id(m) for m in modules.values()}
        if foreign:
            raise ValueError(f"units= names {len(foreign)} module(s) that are not part of the model.")
        wrong: list[Any] = [c for c in given if not isinstance(c, (type, nn.Module))]
        if wrong:
            raise ValueError(f"units= has {wrong[0]!r} in it; its members are classes and modules of the model.")
        if given and not names and not isinstance(model, classes) and id(model) not in objects:
            listed = ", ".join(c.__name__ for c in classes)
            raise ValueError(f"units=[{listed}] matches no module of the model; units=[] makes it one unit.")
    for name in names:
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"units= chose {name!r}, a {type(modules[name]).__name__}: it is never called itself, so its "
                "parameters would never be gathered. Choose its elements."
            )
    return names


def _holders(model: nn.Module) -> dict[str, tuple[nn.Parameter, list[str]]]:
    # By the parameter's first name: the parameter, and the paths of all modules that hold it.
    first: dict[int, str] = {}
    held: dict[str, tuple[nn.Parameter, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{leaf}" if path else leaf
            name = first.setdefault(id(parameter), full)
            held.setdefault(name, (parameter, []))[1].append(path)
    return held


def _owner(holders: Iterable[str], units: dict[str, UnitSpec]) -> str:
    chains = [_enclosing(path, units) for path in holders]
    common = [unit for unit in chains[0] if all(unit in chain for chain in chains[1:])]
    return common[0]


def _enclosing(path: str, units: dict[str, UnitSpec]) -> list[str]:
    # The units that contain the module at `path`, innermost first; the model itself comes last.
    parts = path.split(".") if path else []
    candidates = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
    return [c for c in candidates if c in units] + [""]


def _way_out(kind: type) -> str:
    """What else to do about parameters of this class, as a sentence; empty where nothing is known."""
    if not kind.__module__.startswith("torchao.float8"):
        return ""
    return (
        " torchao wraps weights so for the all-gather of FSDP2; convert with Float8LinearConfig("
        "enable_fsdp_float8_all_gather=False), or in the YAML of Accelerate: fp8_config: {backend: AO, "
        "enable_fsdp_float8_all_gather: false}."
    )


def check_parameters(model: nn.Module, *, dry: bool = False) -> None:
    """Raise ValueError for parameters that cannot be laid in flat buffers, naming them."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is {model!r}, a {type(model).__name__}; give an nn.Module that was made.")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "construction under torch.inference_mode(): its tensors take part in no backward, ever. Construct outside "
            "of it; torch.no_grad() is fine."
        )
    devices: Counter[torch.device] = Counter()
    for name, parameter in model.named_parameters():
        plain = getattr(type(parameter), "_zoo_adoptable", type(parameter) is nn.Parameter)
        if not plain and not is_dtensor(parameter) and (_in_bucket(parameter) or not is_coded(parameter)):
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__}; the ZeRO optimizers work on plain nn.Parameter, "
                "and on frozen ones of another class that have memory of their own (Params4bit of bitsandbytes). "
                "Construct the optimizer from the original model, once, and before any other wrapper; where a ZeRO "
                "optimizer has it already, close() that one first." + _way_out(type(parameter))
            )
        if parameter.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode(), and takes part in no backward. Build the "
                "model outside of it."
            )
        if parameter.layout is not torch.strided or parameter.is_complex() or parameter.is_quantized:
            raise ValueError(
                f"parameter {name!r} is {parameter.layout} of {parameter.dtype}; only dense real ones work."
            )
        if parameter.device.type == "meta" and not dry:
            raise ValueError(
                f"parameter {name!r} is on the meta device: it has no values yet. Materialise the model first."
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(f"parameter {name!r} of {parameter.dtype} requires a gradient; only floating point can.")
        devices[parameter.device] += 1
    if len(devices) > 1:
        raise ValueError(
            f"the parameters live on {len(devices)} devices ({', '.join(map(str, devices))}); move them to one."
        )
    if not devices:
        raise ValueError("the model has no parameters.")
    _check_apart({name: p for name, p in model.named_parameters() if p.numel() and p.device.type != "meta"})


def _in_bucket(parameter: nn.Parameter) -> bool:
    return hasattr(type(parameter), "_zoo_bucket")


def _check_apart(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if two parameters have an element in common: in flat buffers each has memory of its own."""
    plain = [(*_extent(p), name) for name, p in parameters.items() if type(p) is nn.Parameter]  # Init sees to its own
    reaching: list[tuple[int, str]] = []  # where those end that reach beyond the start of the next one
    for start, stop, name in sorted(plain):
        reaching = [(end, other) for end, other in reaching if end > start]
        for _, other in reaching:
            if _overlap(parameters[other], parameters[name]):
                first, second = (n for n in parameters if n in (name, other))
                raise ValueError(
                    f"parameters {first!r} and {second!r} share memory, and are two nn.Parameter: under a ZeRO "
                    "optimizer each would get memory of its own. To tie them make them the same nn.Parameter object "
                    "(a.weight = b.weight); to keep them apart clone one of them."
                )
        reaching.append((stop, name))


def _extent(parameter: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return start, start + (last + 1) * parameter.itemsize


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, of which one begins before the other ends, have an element in common."""
    if all(stop - start == t.nbytes for t in (a, b) for start, stop in [_extent(t)]):
        return True  # neither has gaps
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(size) * (stride * tensor.itemsize)
    return found.reshape(-1)
