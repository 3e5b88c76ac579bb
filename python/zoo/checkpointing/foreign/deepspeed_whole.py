"""DeepSpeed without ZeRO: the optimizer's state is torch's, by the numbers of parameters in its groups.

Which number is which parameter is nowhere in the files. It follows from the order of the model's entries where there is
one group; of a pipeline from the order of layers, of which every stage has the next ones; of experts from the numbers
in the names of their files, of which every rank that has its own has as many. Elsewhere the caller names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.deepspeed_files import Folder, need_dict, need_list
from zoo.checkpointing.foreign.deepspeed_stages import Shapes
from zoo.checkpointing.foreign.pieces import Elements, ForeignCheckpoint, Run
from zoo.checkpointing.foreign.regions import StoredTensor

Names = Sequence[Sequence[str]] | None
_POWERS = {
    "exp_avg": 1, "momentum_buffer": 1, "exp_inf": 1, "grad_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "sum": 2,
    "square_avg": 2,
}  # fmt: skip
"""State → which power of the gradient it is a mean or sum of."""
_TIED = "tied_modules."
_UNSCALED = ((0, 18, 3), (0, 19, 8))
"""First and last version that divides gradients by the loss scale and multiplies no loss with it, without ZeRO in fp16;
0.18.2 multiplies it, and of later ones nothing is known."""


@dataclass(frozen=True)
class _Times:
    """A stored tensor times a number."""

    source: StoredTensor
    factor: float

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def numel(self) -> int:
        return self.source.numel

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        return self.source.read(start, length) * self.factor


@dataclass(frozen=True)
class _Numbered:
    """An optimizer's groups, states by number, and where it has them masters of each group.

    ``scale``: what its gradients were divided by once too often. Later gradients are here what they should be, so
    states are read as those of such gradients: times ``scale``, or its square.
    """

    groups: list[dict[Any, Any]]
    entries: dict[Any, Any]
    masters: list[Any] | None
    scale: float
    what: str

    @classmethod
    def of(cls, model: Mapping[Any, Any], optimizer: Any, what: str) -> _Numbered:
        """Of what a file has under "optimizer"; ``model`` says which version wrote it."""
        outer = need_dict(optimizer, f"the optimizer of {what}")
        inner = need_dict(outer.get("optimizer_state_dict", outer), what)
        groups = [need_dict(group, what) for group in need_list(inner.get("param_groups"), what)]
        masters = outer.get("fp32_groups", outer.get("fp32_groups_flat"))
        scale = outer.get("cur_scale") if masters is not None and _divides_twice(model.get("ds_version")) else None
        usable = type(scale) in (int, float) and 0 < scale < 2.0**63  # type: ignore[operator]
        entries = need_dict(inner.get("state", {}), what)
        own = need_list(masters, what) if masters is not None else None
        return cls(groups, entries, own, float(scale) if usable else 1.0, what)  # type: ignore[arg-type]

    def members(self, number: int) -> list[Any]:
        return need_list(self.groups[number].get("params"), self.what)

    def add(self, found: ForeignCheckpoint, number: int, own: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Masters and states of one group, whose parameters these are; returns name → shape."""
        shapes = {name: tensor.shape for name, tensor in own.items()}
        members = self.members(number)
        held = self.masters[number : number + 1] if self.masters is not None else []
        if len(members) == 1 and len(own) > 1:  # a fused fp16 optimizer: one flat tensor for the group
            self._add_flat(found, shapes, held, need_dict(self.entries.get(members[0], {}), self.what))
            return shapes
        if len(members) != len(own):
            raise CheckpointError(
                f"group {number} of {self.what} has {len(members)} parameters; {len(own)} names were given"
            )
        copies = need_list(held[0], self.what) if held else list(own.values())
        states = [need_dict(self.entries.get(m, {}) if type(m) is int else {}, self.what) for m in members]
        for at, (name, state) in enumerate(zip(own, _with_steps(states), strict=True)):
            if name not in found.shapes:  # else of another stage, which has the same
                self._add_one(found, name, copies[at] if at < len(copies) else None, state, shapes[name])
        return shapes

    def _add_one(
        self, found: ForeignCheckpoint, name: str, master: Any, state: dict[Any, Any], shape: tuple[int, ...]
    ) -> None:
        for role, value in {"parameter": master, **state}.items():
            if isinstance(value, StoredTensor) and value.shape == shape and (shape or role != "step"):
                found.add_whole(name, str(role), self._scaled(role, value))
            elif isinstance(value, StoredTensor) and value.numel == 1:
                found.scalars[f"{role}/{name}"] = float(value.tensor())
            elif type(value) in (int, float) and abs(value) < 2**53:
                found.scalars[f"{role}/{name}"] = value
            elif isinstance(value, StoredTensor) or role == "parameter":
                raise CheckpointError(
                    f"{self.what} has a {role} of {name!r} that does not have its shape {shape}; are groups= right?"
                )

    def _add_flat(
        self, found: ForeignCheckpoint, shapes: dict[str, tuple[int, ...]], held: list[Any], state: dict[Any, Any]
    ) -> None:
        for role, value in {"parameter": held[0] if held else None, **state}.items():
            at = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                if isinstance(value, StoredTensor) and len(value.shape) == 1 and value.numel >= at + numel:
                    found.add(name, str(role), shape, [Run(0, numel, self._scaled(role, value), at)])
                elif isinstance(value, StoredTensor) and not value.shape:
                    found.scalars[f"{role}/{name}"] = float(value.tensor())
                elif type(value) in (int, float) and abs(value) < 2**53:
                    found.scalars[f"{role}/{name}"] = value
                elif role == "parameter" or isinstance(value, StoredTensor):
                    raise CheckpointError(f"{self.what} has a flat {role} that is too short for its group")
                at += numel

    def _scaled(self, role: Any, value: StoredTensor) -> Elements:
        power = _POWERS.get(role, 0) if self.scale != 1.0 else 0
        return _Times(value, self.scale**power) if power else value


def _divides_twice(version: Any) -> bool:
    found = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version) if isinstance(version, str) else None
    return found is not None and _UNSCALED[0] <= tuple(map(int, found.groups())) <= _UNSCALED[1]


def _with_steps(states: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """DeepSpeed's fused Adam counts the steps of a group in the state of its last parameter, and leaves 0 in the
    others: the largest one is that of all."""
    latest = max((s["step"] for s in states if type(s.get("step")) is int), default=0)
    return [{**s, "step": latest} if type(s.get("step")) is int and not s["step"] else s for s in states]


def add_whole_states(
    found: ForeignCheckpoint, folder: Folder, model: dict[Any, Any], names: Names, what: str
) -> Shapes:
    """Masters and states of stage 0, experts among them, by names; returns name → shape of each group's parameters.

    Raises:
        CheckpointError: they cannot be told apart, or do not fit the model's parameters.
    """
    if not isinstance(model.get("optimizer"), dict):
        return []
    held = _Numbered.of(model, model["optimizer"], what)
    entries = need_dict(model.get("module") or {}, what)
    tensors = {n: v for n, v in entries.items() if isinstance(n, str) and isinstance(v, StoredTensor)}
    experts = [number for number, group in enumerate(held.groups) if folder.experts and group.get("moe") is True]
    if names is not None and len(names) != len(held.groups):
        raise CheckpointError(f"{what} has {len(held.groups)} groups of parameters; groups= names {len(names)}")
    dense = [number for number in range(len(held.groups)) if number not in experts]
    own = {number: list(names[number]) for number in dense} if names is not None else _in_order(
        held, dense, tensors, model
    )  # fmt: skip
    shapes: Shapes = []
    for number in range(len(held.groups)):
        if number in experts:
            shapes.append(_add_experts(found, folder, model, number, len(experts), what))
            continue
        missing = [name for name in own[number] if name not in tensors]
        if missing:
            raise CheckpointError(f"{what} has no parameter {missing[0]!r}; groups must hold the model's own names")
        shapes.append(held.add(found, number, {name: tensors[name] for name in own[number]}))
    return shapes


def _in_order(
    held: _Numbered, dense: list[int], tensors: dict[str, StoredTensor], model: dict[Any, Any]
) -> dict[int, list[str]]:
    """The names of the one group of parameters that all ranks have, by the order of the model's entries."""
    buffers = set(map(str, need_list(model.get("buffer_names") or [], held.what)))
    places: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if name not in buffers:  # a tied parameter lies in one place under two names
            places.setdefault((tensor.data.start, tensor.offset, tensor.shape, tensor.numel or name), name)
    order = list(places.values())
    if len(dense) != 1 or len(held.members(dense[0])) not in (len(order), 1):
        raise CheckpointError(
            f"{held.what} was written without ZeRO: its optimizer has its states by numbers, of {len(held.groups)} "
            "groups. Give groups=[[names of the parameters of the first group, in its order], …], or "
            "optimizer_states=False; an engine that cannot know the names takes load_optimizer_states=False"
        )
    return {dense[0]: order}


# -- experts ----------------------------------------------------------------------------------------------------------


def _add_experts(
    found: ForeignCheckpoint, folder: Folder, model: dict[Any, Any], number: int, groups: int, what: str
) -> dict[str, tuple[int, ...]]:
    """The group of experts, from the file of each rank that has some of its own."""
    ranks = sorted(rank for rank, _ in folder.expert_optimizers)
    layers: dict[int, list[int]] = {}
    for layer, expert, _ in sorted(folder.experts):
        layers.setdefault(layer, []).append(expert)
    odd = [layer for layer, experts in layers.items() if not ranks or len(experts) % len(ranks)]
    if ranks != list(range(len(ranks))) or odd or groups != 1:
        raise CheckpointError(
            f"{what} was written without ZeRO and has the states of {groups} groups of experts by numbers, in the "
            f"files of ranks {ranks}; which expert has which is not told there. Take optimizer_states=False (of an "
            "engine load_optimizer_states=False), or write it with ZeRO stage 1 or 2, whose checkpoints name them"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for (rank, _), file in sorted(folder.expert_optimizers.items()):
        held = _Numbered.of(model, file.get("optimizer"), f"{folder.path.name}/expp_rank_{rank}")
        if not number < len(held.groups):
            raise CheckpointError(f"{held.what} has no group {number}, which has the experts in {what}")
        own: dict[str, StoredTensor] = {}
        for layer, experts in layers.items():
            share = len(experts) // len(ranks)
            for expert in experts[rank * share : (rank + 1) * share]:
                entries = next(v for key, v in folder.experts.items() if key[:2] == (layer, expert))
                own |= {k: v for k, v in entries.items() if isinstance(k, str) and isinstance(v, StoredTensor)}
        shapes |= held.add(found, number, own)
    return shapes


# -- pipelines --------------------------------------------------------------------------------------------------------


def add_stages_states(
    found: ForeignCheckpoint, folder: Folder, names: Names, shared: Mapping[str, str]
) -> dict[int, Shapes]:  # fmt: skip
    """The same of a pipeline, whose stages have optimizers of their own; returns stage → name → shape of each group.

    ``names`` holds those of each group of all stages, one stage after the other; what several stages share is named for
    each of them, as "tied_modules.<key>.<name>". Without them ``shared`` says which layers share a module.

    Raises:
        CheckpointError: they cannot be told apart, or do not fit the layers' parameters.
    """
    tensors: dict[str, StoredTensor] = {}
    buffers = {str(name) for model in folder.models.values() for name in model.get("buffer_names") or ()}
    for (number, _), layer in sorted(folder.layers.items()):
        entries = {f"{number}.{name}": v for name, v in layer.items() if isinstance(v, StoredTensor)}
        tensors |= {name: v for name, v in entries.items() if name not in buffers}
    stages = [
        (stage, _Numbered.of(model, model["optimizer"], f"{folder.path.name}/mp_rank_{stage:02d}"))
        for (_, stage), model in sorted(folder.models.items(), key=lambda item: item[0][1])
        if isinstance(model.get("optimizer"), dict)
    ]
    if names is not None:
        left = [list(group) for group in names]
        tensors |= _shared(left, tensors, folder.path.name)
    else:
        layers = _layers_of(tensors, shared)
        left = _in_layers(stages, layers, folder.path.name)
    shapes: dict[int, Shapes] = {}
    for stage, held in stages:
        if len(held.groups) != len(left):
            raise CheckpointError(f"{held.what} has {len(held.groups)} groups of parameters; groups= names {len(left)}")
        shapes[stage] = []
        for number in range(len(left)):
            count = len(held.members(number))
            own, left[number] = left[number][:count], left[number][count:]
            missing = [name for name in own if name not in tensors]
            if missing:
                raise CheckpointError(f"{folder.path.name} has no parameter {missing[0]!r} in its files of layers")
            shapes[stage].append(held.add(found, number, {name: tensors[name] for name in own}))
    if any(left):
        over = next(name for group in left for name in group)
        raise CheckpointError(f"{over!r} is one name more than the optimizers of {folder.path.name} have parameters")
    return shapes


def _layers_of(tensors: dict[str, StoredTensor], shared: Mapping[str, str]) -> dict[int, list[str]]:
    """Number of a layer → names of its parameters; those of shared modules are added to ``tensors``."""
    layers: dict[int, list[str]] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in list(tensors.items()):
        number, _, inner = name.partition(".")
        module = shared.get(f"{number}.")
        if module is None:
            layers.setdefault(int(number), []).append(name)
        else:
            modules.setdefault(module, {}).setdefault(f"{module}{inner}", tensor)
    for begin, module in shared.items():
        layers[int(begin.removesuffix("."))] = list(modules.get(module, {}))
        tensors |= modules.get(module, {})
    return layers


def _in_layers(
    stages: list[tuple[int, _Numbered]], layers: Mapping[int, list[str]], what: str
) -> list[list[str]]:  # fmt: skip
    """The names of the one group of each stage, one stage after the other: those of the next whole layers. A module
    that layers share comes first, and once for each stage."""
    counts = [len(held.members(0)) if len(held.groups) == 1 else -1 for _, held in stages]
    ways = _dealt(counts, [layers[number] for number in sorted(layers)]) if stages else [[]]
    if len(ways) != 1:
        raise CheckpointError(
            f"{what} was written without ZeRO: stages of its pipeline have their states by numbers, and not as many as "
            f"its layers have parameters ({sum(map(len, layers.values()))}), as where stages share a layer. Give "
            "groups=[[names of the parameters of the first group, stage by stage, each in its order], …], or "
            "optimizer_states=False; an engine takes load_optimizer_states=False"
        )
    return ways if stages else []


def _dealt(counts: list[int], layers: list[list[str]]) -> list[list[str]]:
    """The names of all stages one after the other, in every way in which each stage has whole layers with so many."""
    if not counts:
        return [] if layers else [[]]
    found: list[list[str]] = []
    for end in range(len(layers) + 1):
        held = dict.fromkeys(name for layer in layers[:end] for name in layer)
        if len(held) == counts[0]:
            own = sorted(held, key=lambda name: not name.startswith(_TIED))
            found += [[*own, *rest] for rest in _dealt(counts[1:], layers[end:])]
        elif len(held) > counts[0]:
            break
    return [list(way) for way in dict.fromkeys(map(tuple, found))]


def _shared(left: list[list[str]], tensors: dict[str, StoredTensor], what: str) -> dict[str, StoredTensor]:
    """The weights of modules that several layers share: those of a layer that nobody names."""
    named = {name for group in left for name in group}
    found: dict[str, StoredTensor] = {}
    for name in sorted(named - set(tensors)):
        inner = name.split(".", 2)[-1] if name.startswith("tied_modules.") else None
        fits = [v for other, v in tensors.items() if other not in named and other.partition(".")[2] == inner]
        if inner is not None and fits and all(
            v.shape == fits[0].shape and torch.equal(v.tensor(), fits[0].tensor()) for v in fits
        ):  # fmt: skip
            found[name] = fits[0]
        elif inner is not None:
            raise CheckpointError(f"{what} does not say which of its layers is {name!r}: {len(fits)} could be")
    return found
