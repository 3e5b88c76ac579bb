"""Families of parameters: those whose parts lie along the same axes of the mesh travel between the same ranks.

Legend: mesh axes are atoms with names; D the *data axes*, over which losses are averaged, N their ranks; S the axes
along which a parameter is a part (``zoo.layout.declare_split``): () for dense ones, ("expert",) for experts,
("tensor",) for tensor parallelism.

A family S is split and summed over D without S. Every sum is divided by N, whatever the family: tokens of all ranks of
S have come to an expert by its own all-to-all, so the gradient it sees is already a sum over them. Ranks along the axes
of S have other parts, which count together in the norm; ranks along axes in neither D nor S have the same parameter
and the same gradient, and one of them counts in checkpoints.

A parameter may also be the same along an axis that is no data axis, with a part of its gradient on each rank
(``zoo.layout.declare_partial``: experts where tensor-parallel ranks have sent shares of the same tokens). Such an axis
is written with a plus in S, ("+tensor", "expert"), and counts as one over which the family is summed and split.

Along the *layer axes* (pipeline stages) ranks have other layers altogether: nothing travels between them but the sum
for the norm. Families differ from stage to stage then, and the groups of all of them are made by all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zoo.comm import Communicator
from zoo.layout import split_of
from zoo.zero.placement.axes import Axes, make_axes

if TYPE_CHECKING:
    from zoo.zero.config import ZeroConfig

Family = tuple[str, ...]


def data_communicator(
    mesh: Any, data_axes: Sequence[str] | None, layer_axes: Sequence[str] = (), *, check: bool
) -> Communicator:
    """All ranks over which losses are averaged. Collective over the mesh.

    Raises:
        ValueError: no axes are given, or such as the mesh does not have, or one for two purposes.
    """
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not names:
        raise ValueError("mesh= takes a DeviceMesh with names: init_device_mesh(..., mesh_dim_names=(...)).")
    for what, axes in (("data_axes", data_axes), ("layer_axes", layer_axes)):
        if isinstance(axes, str):
            raise ValueError(f"{what}={axes!r} is one string; give a tuple of names of axes: {what}=({axes!r},).")
    if not data_axes or any(axis not in names for axis in data_axes):
        raise ValueError(
            f"data_axes={data_axes!r} with a mesh of the axes {names}; name the axes over which losses are averaged."
        )
    if any(axis not in names or axis in data_axes for axis in layer_axes):
        raise ValueError(
            f"layer_axes={tuple(layer_axes)!r} with data_axes={tuple(data_axes)!r} and a mesh of the axes {names}; "
            "name the axes along which ranks have other layers (pipeline stages), which are no data axes."
        )
    return Communicator.of_axes(mesh, data_axes, check=check)


def layers_communicator(mesh: Any, layer_axes: Sequence[str], comm: Communicator) -> Communicator | None:
    """The ranks with the other layers, at this rank's place; None where it has them all. Collective over the mesh."""
    if not layer_axes:
        return None
    found = Communicator.of_axes(mesh, layer_axes, log=comm.log, check=comm.check)
    return found if found.size > 1 else None


def make_families(
    comm: Communicator, mesh: Any, data_axes: Sequence[str], parameters: Iterable[tuple[str, Any]], config: ZeroConfig,
    *, layer_axes: Sequence[str] = (), layers: Communicator | None = None,
) -> dict[Family, Axes]:  # fmt: skip
    """The axes of each family of ``parameters``, by its sorted axes; that of dense ones, (), is always there.

    Collective over the mesh, on whose ranks the same families exist, but for those of other ``layers``.

    Raises:
        ValueError: a parameter is a part along an axis that is not there.
        NotImplementedError: an option that only dense parameters have, next to other ones.
    """
    dense = make_axes(comm, config)
    wanted: dict[Family, str] = {}
    for name, parameter in parameters:
        wanted.setdefault(family_of(parameter), name)
    others = sorted(set(wanted) - {()})
    if mesh is None:
        if others:
            raise ValueError(
                f"parameter {wanted[others[0]]!r} is a part along the axes {others[0]}, and there is no mesh. Give "
                "mesh=DeviceMesh and data_axes=(...)."
            )
        return {(): dense}
    names = tuple(mesh.mesh_dim_names)
    places = dict(zip(names, mesh.get_coordinate(), strict=True))
    here = {axis: place for axis, place in places.items() if axis not in layer_axes}
    found: dict[Family, Axes] = {(): replace(dense, counts=_counts(here, data_axes, ()))}
    for family in others:
        unknown = [axis for axis in map(_plain, family) if axis not in here]
        if unknown:
            besides = f" besides the layer_axes {tuple(layer_axes)}" if layer_axes else ""
            raise ValueError(
                f"parameter {wanted[family]!r} is a part along {', '.join(map(repr, unknown))}; the mesh has the axes "
                f"{tuple(here)}{besides}."
            )
        _check_options(wanted[family], config)
    everywhere = others if layers is None else sorted({f for there in layers.all_gather_object(others) for f in there})
    for family in everywhere:
        made = _family(comm, mesh, data_axes, family, here)
        if family in wanted:
            found[family] = made
    return found


def family_of(parameter: Any) -> Family:
    """Of one parameter."""
    split = split_of(parameter)
    return tuple(sorted([*split.axes, *(f"+{axis}" for axis in split.partial)]))


def _plain(axis: str) -> str:
    return axis.removeprefix("+")


def _family(comm: Communicator, mesh: Any, data_axes: Sequence[str], family: Family, here: Mapping[str, int]) -> Axes:
    apart = [axis for axis in family if not axis.startswith("+")]
    added = [_plain(axis) for axis in family if axis.startswith("+")]
    within = [axis for axis in mesh.mesh_dim_names if (axis in data_axes and axis not in apart) or axis in added]
    world = comm
    if within != list(data_axes):
        world = (
            Communicator.of_axes(mesh, within, log=comm.log, check=comm.check)
            if within else comm.partition([[rank] for rank in range(comm.size)], name="alone")
        )  # fmt: skip
    alone = world.partition([[rank] for rank in range(world.size)], name="alone")
    parts = Communicator.of_axes(mesh, apart, log=comm.log, check=comm.check) if apart else None
    return Axes(
        world=world, shard=world, replicas=alone, local=alone, across=world, divisor=comm.size, parts=parts,
        counts=_counts(here, data_axes, family),
    )  # fmt: skip


def _counts(here: Mapping[str, int], data_axes: Sequence[str], family: Family) -> bool:
    of_family = {_plain(axis) for axis in family}
    return all(place == 0 for axis, place in here.items() if axis not in data_axes and axis not in of_family)


def _check_options(name: str, config: ZeroConfig) -> None:
    asked = {
        "mics_shard_size": config.mics_shard_size != -1,
        "zero_hpz_partition_size": config.zero_hpz_partition_size > 1,
        "zero_quantized_gradients": config.zero_quantized_gradients,
        "mics_hierarchical_params_gather": config.mics_hierarchical_params_gather,
        "hierarchical_all_reduce": config.hierarchical_all_reduce,
    }
    for option in (option for option, on in asked.items() if on):
        raise NotImplementedError(
            f"{option} with {name!r}, which is a part along other mesh axes: groups within groups are there for dense "
            "parameters only. Leave the option out."
        )
