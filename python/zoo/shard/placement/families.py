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

The options that make groups within the group (MiCS, hpZ, qgZ, transfers of two stages) say which of the N data-parallel
ranks belong together. With S(d) for the shard group of rank d, the shard group of a family is what its world has of it,
and its secondary partition and its nodes likewise; replicas are the ranks of the same place in the others. What ranks
along a plus axis have is split among them too: those with one d count as one rank, so that ``mics_shard_size=N`` is the
same as none. All these groups have to be equally large wherever the family lives. Where such a group is a rank alone
nothing of the family is split (an expert of its own on each rank of a shard group), and hpZ then keeps all that forward
gathered until backward.

Along the *layer axes* (pipeline stages) ranks have other layers altogether: nothing travels between them but the sum
for the norm. Families differ from stage to stage then, and the groups of all of them are made by all ranks.

A parameter that several stages have (``zoo.layout.declare_tied``: an embedding that is the output layer too) is a
family of its own, ("=key",). Each of these stages splits it as it splits dense ones, and the ranks of the same place in
the others are replicas: the gradient is summed over them too, divided by N, and the first stage's counts in the norm.
It may be a part as well, ("=key", "tensor"): then these are the ranks that have the same part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zoo.comm import Communicator, agree_none_failed
from zoo.comm.groups import of_mesh
from zoo.comm.nodes import node_of_each
from zoo.layout import split_of
from zoo.shard.agreement import CONSTRUCTION, all_ranks
from zoo.shard.placement.axes import Axes, Near, copy_size, form_axes, make_axes, near_by, shard_size

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig

Family = tuple[str, ...]
TIED = "="

# What says how large the groups of each kind are.
_OPTIONS = {"shard": "mics_shard_size", "secondary": "zero_hpz_partition_size", "nodes": "ranks_per_node"}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who has the model: ``data``, over which losses are averaged, ``layers`` with the other layers at this rank's
    place (None where it has them all), and ``everyone``."""

    data: Communicator
    layers: Communicator | None
    everyone: Communicator
    mesh: Any
    data_axes: tuple[str, ...]
    layer_axes: tuple[str, ...]

    def along(self, axes: Sequence[str], *, nodes: Any = None) -> Communicator:
        """The ranks along some axes of the mesh from this one, counted and checked as ``data`` is. Collective."""
        return Communicator.of_axes(self.mesh, axes, log=self.data.log, check=self.data.check, nodes=nodes)


def check_ranks(group: Any, mesh: Any, data_axes: Any, layer_axes: Any) -> None:
    """Raise ValueError for a group and a mesh, axes without a mesh, such as it does not have, or one for two ends."""
    if mesh is None:
        if layer_axes or data_axes:
            given = f"layer_axes={tuple(layer_axes)!r}" if layer_axes else f"data_axes={data_axes!r}"
            raise ValueError(f"{given} without a mesh: give mesh=DeviceMesh and data_axes=.")
        return
    if group is not None:
        raise ValueError("group= and mesh= say the same thing in two ways; give one of them.")
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


def ranks_of(
    group: Any, mesh: Any, data_axes: Sequence[str] | None, layer_axes: Sequence[str], *, check: bool,
    nodes: Any,
) -> Ranks:  # fmt: skip
    """From what a constructor was given, which was checked. Collective over the mesh, or over what makes a communicator
    of ``group``."""
    if mesh is not None:
        agree_none_failed(all_ranks(None, mesh), CONSTRUCTION)  # before groups are made
        comm = Communicator.of_axes(mesh, data_axes or (), check=check)
    else:
        comm = group if isinstance(group, Communicator) else Communicator(group, check=check, nodes=nodes)
    found = Ranks(
        data=comm, layers=None, everyone=comm, mesh=mesh, data_axes=tuple(data_axes or ()),
        layer_axes=tuple(layer_axes),
    )  # fmt: skip
    layers = found.along(layer_axes) if layer_axes else None
    if mesh is not None and mesh.size() != comm.size:
        found = replace(found, everyone=found.along(mesh.mesh_dim_names))
    if (comm is group or mesh is not None) and nodes is not None:
        comm.know_nodes(nodes)
    return replace(found, layers=layers if layers is not None and layers.size > 1 else None)


def make_families(
    ranks: Ranks, parameters: Iterable[tuple[str, Any]], config: ZeroConfig
) -> dict[Family, Axes]:  # fmt: skip
    """The axes of each family of ``parameters``, by its sorted axes; that of dense ones, (), is always there.

    Collective over the mesh, on whose ranks the same families exist, but for those of other layers.

    Raises:
        ValueError: a parameter is a part along an axis that is not there, or the sizes of groups do not fit it.
    """
    comm, mesh, layers = ranks.data, ranks.mesh, ranks.layers
    dense = make_axes(comm, config)
    wanted: dict[Family, str] = {}
    trained: dict[Family, list[bool]] = {}
    for name, parameter in parameters:
        wanted.setdefault(family_of(parameter), name)
        trained.setdefault(family_of(parameter), []).append(parameter.requires_grad)
    wanted.pop((), None)
    ties = {family for family in wanted if family[0].startswith(TIED)}
    if layers is None:  # this rank has all layers
        for family in ties:
            wanted.setdefault(family[1:], wanted.pop(family))
        wanted.pop((), None)
    if mesh is None:
        for family, name in sorted(wanted.items()):
            raise ValueError(
                f"parameter {name!r} is a part along the axes {family}, and there is no mesh. Give mesh=DeviceMesh and "
                "data_axes=(...)."
            )
        return {(): dense, **dict.fromkeys(ties, dense)}
    on_layers = layers.all_gather_object(wanted) if layers is not None else []
    if layers is not None:
        _check_trained(layers.all_gather_object({family: trained[family] for family in ties}), wanted)
    everywhere = dict(wanted)  # what a stage refuses all of them refuse
    for there in on_layers:
        everywhere = {**there, **everywhere}
    tied = {family: everywhere.pop(family) for family in sorted(everywhere) if family[0].startswith(TIED)}
    coordinates = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    here = {axis: place for axis, place in coordinates.items() if axis not in ranks.layer_axes}
    for family in sorted(everywhere):
        _check_axes(family, everywhere[family], here, ranks.layer_axes)
    worlds = {family: _worlds(ranks, family) for family in sorted(everywhere)}
    everyone = [_worlds(ranks, ()), *worlds.values()]
    for family, of_family in worlds.items():
        _check_regular(everywhere[family], of_family, everyone, comm.size, config)
    found: dict[Family, Axes] = {(): replace(dense, counts=_counts(here, ranks.data_axes, ()))}
    for family, of_family in worlds.items():
        made = _family(ranks, family, of_family, config, counts=_counts(here, ranks.data_axes, family))
        if family in wanted:
            found[family] = made
    if layers is None:
        return {**found, **{family: found[family[1:]] for family in ties}}
    for family in sorted(tied):
        _check_axes(family[1:], tied[family], here, ranks.layer_axes)
        _check_tie(family, tied[family], ranks.data_axes)
    for family in tied:
        holders = [number for number, there in enumerate(on_layers) if family in there]
        of_tied = _tied(ranks, holders, config)
        if apart := family[1:]:
            of_tied = replace(of_tied, parts=ranks.along(apart, nodes=config.ranks_per_node))
        if family in wanted:
            found[family] = replace(
                of_tied,
                counts=_counts(here, ranks.data_axes, family[1:]),
                spans_layers=len(holders) > 1,
                in_norm=layers.rank == holders[0],
            )
    return found


def _tied(ranks: Ranks, holders: Sequence[int], config: ZeroConfig) -> Axes:
    """The axes of what the stages ``holders`` have in common; on other stages those of the rest. Collective."""
    both = ranks.along([*ranks.layer_axes, *ranks.data_axes])
    stages, numbers = ({rank: n for group in of_mesh(ranks.mesh, axes) for n, rank in enumerate(group)}
                       for axes in (ranks.layer_axes, ranks.data_axes))  # fmt: skip
    have: list[list[int]] = [[], []]
    for place, rank in enumerate(both.ranks):
        have[stages[rank] not in holders].append(place)
    world = both.partition([group for group in have if group], name="tied")
    nodes = node_of_each(config.ranks_per_node, world.ranks)
    near = near_by([numbers[rank] for rank in world.ranks], nodes, ranks.data.size, config)

    def apart(labels: Sequence[Hashable] | None) -> list[Hashable] | None:
        return labels if labels is None else [(stages[r], label) for r, label in zip(world.ranks, labels, strict=True)]

    near = replace(near, shard=apart(near.shard) or (), secondary=apart(near.secondary))
    return form_axes(world, near, divisor=ranks.data.size)


def family_of(parameter: Any) -> Family:
    """Of one parameter."""
    split = split_of(parameter)
    if split.tied:
        if split.partial:
            raise ValueError(
                f"a parameter that is tied to other layers as {split.tied!r} has a part of its gradient on each rank "
                f"along {split.partial}; tie parameters that are whole, or parts along an axis."
            )
        return (f"{TIED}{split.tied}", *sorted(split.axes))
    return tuple(sorted([*split.axes, *(f"+{axis}" for axis in split.partial)]))


def _check_tie(family: Family, name: str, data_axes: Sequence[str]) -> None:
    """Raise ValueError for parts along a data axis, whose ranks would have to be replicas too."""
    of_data = [axis for axis in family[1:] if axis in data_axes]
    if of_data:
        raise ValueError(
            f"parameter {name!r} is tied to other layers as {family[0].removeprefix(TIED)!r} and a part along "
            f"{', '.join(map(repr, of_data))}, over which losses are averaged; what is tied is whole along data axes."
        )


def _check_trained(on_layers: Sequence[Mapping[Family, Sequence[bool]]], names: Mapping[Family, str]) -> None:
    """Raise ValueError on all ranks where stages differ in what of a tied module is trained."""
    first: dict[Family, Sequence[bool]] = {}
    for there in on_layers:
        for family, trained in there.items():
            if first.setdefault(family, trained) != trained:
                named = f" ({names[family]!r})" if family in names else ""
                raise ValueError(
                    f"what is tied as {family[0].removeprefix(TIED)!r}{named} is trained on some of the stages that "
                    "have it, and frozen on others; set requires_grad alike on all of them."
                )


def _plain(axis: str) -> str:
    return axis.removeprefix("+")


def _check_axes(family: Family, name: str, here: Mapping[str, int], layer_axes: Sequence[str]) -> None:
    unknown = [axis for axis in map(_plain, family) if axis not in here]
    if unknown:
        besides = f" besides the layer_axes {tuple(layer_axes)}" if layer_axes else ""
        raise ValueError(
            f"parameter {name!r} is a part along {', '.join(map(repr, unknown))}; the mesh has the axes "
            f"{tuple(here)}{besides}."
        )


@dataclass(frozen=True, kw_only=True)
class _Worlds:
    """The ranks between which one family travels, everywhere on the mesh."""

    within: list[str]
    """The axes along which they lie."""
    ranks: list[list[int]]
    """The global ranks of each world."""
    numbers: Mapping[int, int]
    """Of each global rank: its place among its data-parallel ranks."""
    adds: bool
    """Along some of the axes each rank has a summand of the gradient."""

    def near(self, num_ranks: int, config: ZeroConfig, ranks: Sequence[int]) -> Near:
        """Which ranks of one of the worlds belong together."""
        nodes = node_of_each(config.ranks_per_node, ranks)
        return near_by([self.numbers[rank] for rank in ranks], nodes, num_ranks, config, on_nodes=self.adds)

    def sizes(self, num_ranks: int, config: ZeroConfig) -> dict[str, set[int]]:
        """Of the groups of each kind, in all worlds."""
        found: dict[str, set[int]] = {"shard": set(), "secondary": set(), "nodes": set()}
        for near in (self.near(num_ranks, config, ranks) for ranks in self.ranks):
            for group in near.groups():
                found["shard"].add(len(group))
                for kind, labels in (("secondary", near.secondary), ("nodes", near.nodes)):
                    found[kind] |= {len(part) for part in near.within(group, labels)} if labels is not None else set()
        return found


def _worlds(ranks: Ranks, family: Family) -> _Worlds:
    mesh, data_axes = ranks.mesh, ranks.data_axes
    apart = [axis for axis in family if not axis.startswith("+")]
    added = [_plain(axis) for axis in family if axis.startswith("+")]
    within = [axis for axis in mesh.mesh_dim_names if (axis in data_axes and axis not in apart) or axis in added]
    worlds = of_mesh(mesh, within) if within else [[rank] for rank in mesh.mesh.flatten().tolist()]
    numbers = {rank: number for group in of_mesh(mesh, data_axes) for number, rank in enumerate(group)}
    return _Worlds(within=within, ranks=worlds, numbers=numbers, adds=bool(added))


def _family(ranks: Ranks, family: Family, worlds: _Worlds, config: ZeroConfig, *, counts: bool) -> Axes:
    comm, nodes = ranks.data, config.ranks_per_node
    world = comm
    if worlds.within != list(ranks.data_axes):
        alone = not worlds.within
        world = (
            comm.partition([[rank] for rank in range(comm.size)], name="alone") if alone
            else ranks.along(worlds.within, nodes=nodes)
        )  # fmt: skip
    apart = [axis for axis in family if not axis.startswith("+")]
    parts = ranks.along(apart, nodes=nodes) if apart else None
    near = worlds.near(comm.size, config, world.ranks)
    return form_axes(world, near, divisor=comm.size, parts=parts, counts=counts)


def _counts(here: Mapping[str, int], data_axes: Sequence[str], family: Family) -> bool:
    of_family = {_plain(axis) for axis in family}
    return all(place == 0 for axis, place in here.items() if axis not in data_axes and axis not in of_family)


def _check_regular(name: str, worlds: _Worlds, families: Sequence[_Worlds], num_ranks: int, config: ZeroConfig) -> None:
    """Raise ValueError on all ranks unless the groups of the parameter ``name`` are equally large everywhere."""
    wrong = next(((kind, found) for kind, found in worlds.sizes(num_ranks, config).items() if len(found) > 1), None)
    if wrong is None:
        return
    kind, found = wrong
    option = "ranks_per_node" if kind == "shard" and config.hierarchical_all_reduce else _OPTIONS[kind]
    highest = sum(map(len, worlds.ranks)) if option == "ranks_per_node" else num_ranks

    def fits(size: int) -> bool:
        other = config.model_copy(update={option: size})
        group = shard_size(num_ranks, other)
        if num_ranks % group or group % max(copy_size(num_ranks, other), 1):
            return False
        return all(len(sizes) <= 1 for of in families for sizes in of.sizes(num_ranks, other).values())

    fitting = [size for size in range(1, highest + 1) if highest % size == 0 and fits(size)]
    given = getattr(config, option)
    asked = f"{option}={given}" if given is not None else "LOCAL_WORLD_SIZE"
    raise ValueError(
        f"{asked} makes groups of which {' or '.join(map(str, sorted(found)))} ranks have the same part of {name!r}, "
        f"which is a part along other mesh axes, and they have to be equally many in all groups; {option} may be "
        f"{', '.join(map(str, fitting))}."
    )
