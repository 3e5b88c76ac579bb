"""Parameters that are DTensors: tensor-parallel layers as torch makes them.

Legend: a DTensor has a global shape, a mesh, and a placement for each axis of it: Shard(dim) or Replicate.

What is flattened, split over the data axes, reduced and updated is a DTensor's local part. It takes the DTensor's place
among the parameters of its module as an ordinary ``nn.Parameter``, and says which part of which tensor it is
(``zoo.layout.declare_split``): the axes are those of Shard, the box follows from the placements. Everything else in
``zoo.zero`` treats it as any declared part: names, states, norm, clipping.

The module must still compute with a DTensor. Its class becomes a subclass of it, as ``torch.nn.utils.parametrize``
does, in which ``module.weight`` is ``DTensor.from_local(local part)``. That is a step of autograd: the gradient comes
back as a local tensor, brought to the placements of the parameter first. Modules without DTensors are not touched.

The DTensor object itself looks at the memory of the local part from then on; :meth:`DTensors.give_back` puts it back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.layout import declare_split

_LOOKS = "_zoo_dtensors"
_MESHES: WeakKeyDictionary[Communicator, Any] = WeakKeyDictionary()


def is_dtensor(parameter: Any) -> bool:
    """Whether it is one; importing DTensor takes a second, and where nobody did there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


@dataclass(frozen=True)
class Look:
    """How a local part is seen by its module."""

    dtensor: Any

    def of(self, local: torch.Tensor) -> Any:
        """The DTensor of which ``local`` is this rank's part; autograd follows."""
        like = self.dtensor
        return type(like).from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def part_of(self, value: Any) -> torch.Tensor:
        """This rank's part of a DTensor of any placements, or of a whole tensor."""
        like = self.dtensor
        if not is_dtensor(value):
            for dim, (offset, size) in enumerate(zip(*box_of(like), strict=True)):
                value = value.narrow(dim, offset, size)
            return value  # type: ignore[no-any-return]
        return value.redistribute(like.device_mesh, like.placements).to_local()  # type: ignore[no-any-return]


class HoldsDTensors:
    """The part of a module's class that makes DTensors of its local parts."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, look in self.__dict__[_LOOKS].items():
            if prefix + name in destination:
                destination[prefix + name] = look.of(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, look in self.__dict__[_LOOKS].items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(look.dtensor.shape):
                state_dict[prefix + name] = look.part_of(value)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle is a module with DTensors, as it was.
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        looks = self.__dict__[_LOOKS]
        state = {key: value for key, value in state.items() if key != _LOOKS}
        state["_parameters"] = {
            name: nn.Parameter(looks[name].of(value.detach().clone()), value.requires_grad) if name in looks else value
            for name, value in state["_parameters"].items()
        }
        return _new, (_plain_class(type(self)),), state, *rest


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _plain_class(cls: Any) -> Any:
    return cls.__mro__[2]  # behind the made one and HoldsDTensors


@functools.cache
def _class_with(cls: Any, names: tuple[str, ...]) -> type:
    # One for all modules of a class, so that repeated blocks are still of one class.
    def seen(name: str) -> property:
        return property(lambda self: self.__dict__[_LOOKS][name].of(self._parameters[name]))

    body = {name: seen(name) for name in names} | {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (HoldsDTensors, cls), body)


class DTensors:
    """The DTensor parameters of a model, replaced by their local parts.

    Raises:
        ValueError: (from the constructor, which then leaves the model as it was) there is no mesh, or another one than
            that of a DTensor; or the model is split by ``fully_shard``.
        NotImplementedError: a placement that is neither Shard nor Replicate.
    """

    def __init__(self, model: nn.Module, mesh: Any) -> None:
        self._held: list[tuple[nn.Module, list[str]]] = []
        self._locals: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the DTensor: it, and its local part
        self._originals: dict[int, nn.Parameter] = {}
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []
        for path, module in model.named_modules():
            names = [name for name, p in module._parameters.items() if is_dtensor(p)]
            for name in names:
                _check(f"{path}.{name}" if path else name, module, module._parameters[name], mesh)
            if names:
                self._held.append((module, names))
        for module, names in self._held:
            self._replace(module, names)

    def _replace(self, module: nn.Module, names: list[str]) -> None:
        looks = {}
        for name in names:
            dtensor: Any = module._parameters[name]
            if id(dtensor) not in self._locals:
                local = nn.Parameter(_settled(dtensor.to_local().detach()), dtensor.requires_grad)
                sharded = [i for i, placement in enumerate(dtensor.placements) if placement.is_shard()]
                axes = [dtensor.device_mesh.mesh_dim_names[i] for i in sharded]
                if axes:
                    declare_split(local, axes, shape=tuple(dtensor.shape), offsets=box_of(dtensor)[0])
                self._locals[id(dtensor)] = dtensor, local
                self._originals[id(local)] = dtensor
            looks[name] = Look(dtensor)
            module._parameters[name] = self._locals[id(dtensor)][1]
        module.__dict__[_LOOKS] = looks
        cls: Any = type(module)
        module.__class__ = _class_with(cls, tuple(names))

    def original(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the user knows it as: the DTensor of a local part, any other parameter itself."""
        return self._originals.get(id(parameter), parameter)

    def moved(self) -> None:
        """The local parts have moved to flat buffers: the DTensors look there, and their old memory is free."""
        for dtensor, local in self._locals.values():
            # Detached it has the same version counter, so that writes are seen, and the same storage, which refuses
            # access while it is partitioned.
            with torch._C.DisableTorchFunctionSubclass():
                dtensor._local_tensor = local.detach()  # type: ignore[attr-defined]

    def replace_in(self, groups: Iterable[dict[str, Any]]) -> None:
        """Let parameter groups hold the local parts."""
        if not self._locals:
            return
        for group in groups:
            self._groups.append((group, group["params"]))
            group["params"] = [self._locals[id(p)][1] if id(p) in self._locals else p for p in group["params"]]

    def give_back(self) -> None:
        """The modules hold DTensors again, with the values that their local parts have now."""
        for group, members in self._groups:
            group["params"] = members
        for module, _ in self._held:
            if _LOOKS not in module.__dict__:
                continue
            for name, look in module.__dict__.pop(_LOOKS).items():
                local: Any = module._parameters[name]
                look.dtensor._local_tensor = local.detach()
                look.dtensor.requires_grad_(local.requires_grad)
                module._parameters[name] = look.dtensor
            module.__class__ = _plain_class(type(module))


def _settled(local: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's own class; parts may come as ones that wait for a collective when they are used."""
    if type(local) is torch.Tensor:
        return local
    return torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local)


def box_of(dtensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of this rank's part: each Shard cuts what those before it left into ceil(n/k) at a time."""
    offsets, sizes = [0] * dtensor.ndim, list(dtensor.shape)
    place = dtensor.device_mesh.get_coordinate()
    for axis, placement in enumerate(dtensor.placements):
        if placement.is_shard():
            dim, num = placement.dim % dtensor.ndim, dtensor.device_mesh.size(axis)
            chunk = -(-sizes[dim] // num)
            start = min(place[axis] * chunk, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _check(name: str, module: nn.Module, dtensor: Any, mesh: Any) -> None:
    axes, placements = tuple(dtensor.device_mesh.mesh_dim_names or ()), dtensor.placements
    if mesh is None:
        raise ValueError(
            f"parameter {name!r} is a DTensor ({', '.join(map(str, placements))}), and there is no mesh. Give the "
            "DeviceMesh of the whole job, mesh=, of whose axes it uses some, and data_axes=(...)."
        )
    if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
        raise ValueError(
            f"parameter {name!r} is split by fully_shard, which does what the ZeRO stages do. Take one of the two."
        )
    names, here = tuple(mesh.mesh_dim_names), mesh.get_coordinate()
    there = dict(zip(axes, dtensor.device_mesh.get_coordinate() or (), strict=False))
    if not axes or any(axis not in names or here[names.index(axis)] != there.get(axis) for axis in axes):
        raise ValueError(
            f"parameter {name!r} is a DTensor on a mesh of the axes {axes or 'without names'}, where this rank is at "
            f"{there}; mesh= has {dict(zip(names, here, strict=True))}. Cut the former out of the latter: "
            "mesh['tensor']."
        )
    plain = all(type(p).__name__ in ("Shard", "Replicate") for p in placements)
    if not plain or box_of(dtensor)[1] != tuple(dtensor.to_local().shape):
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor of shape {tuple(dtensor.shape)} with the placements "
            f"{', '.join(map(repr, placements))}; there are Shard and Replicate, cut as distribute_tensor does."
        )


# A rank's rows of a tensor: of n rows split over p ranks rank r has [r·k, (r+1)·k), k = ceil(n / p).


def mesh_of(comm: Communicator, device_type: str) -> Any:
    """The ranks of ``comm`` as a DeviceMesh of one axis, over the same process group."""
    from torch.distributed.device_mesh import DeviceMesh

    if comm not in _MESHES:
        group: Any = comm.group if comm.group is not None else torch.distributed.group.WORLD
        _MESHES[comm] = DeviceMesh.from_group(group, device_type)
    return _MESHES[comm]


def rows_of(whole: torch.Tensor, comm: Communicator | None, device: torch.device) -> torch.Tensor:
    """A copy of this rank's rows of ``whole``, as a DTensor over ``comm``; of what has no rows to split all of it.

    Args:
        comm: None for all of it.
        device: of the copy.
    """
    if comm is None or comm.size == 1 or not whole.numel() or not whole.dim():
        return whole.to(device, copy=True)
    from torch.distributed.tensor import DTensor, Shard

    each = -(-whole.shape[0] // comm.size)
    local = whole[comm.rank * each : (comm.rank + 1) * each].to(device, copy=True)
    made: torch.Tensor = DTensor.from_local(
        local, mesh_of(comm, whole.device.type), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
