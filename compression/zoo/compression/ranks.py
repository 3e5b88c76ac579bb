"""Which ranks have to do with a transform: those that have parts of its tensor, those that have the same and see other
data, and those that have a tied one in another layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo.comm import Communicator, gather_object
from zoo.compression.technique import Shared, Transform


class Ranks:
    """The ranks of one job, for the transforms of a model.

    Args:
        everyone: all of them.
        mesh: with named axes; None: all have the same and see different data.
        data_axes: along which losses are averaged. layer_axes: along which ranks have other layers.
    """

    def __init__(
        self, everyone: Communicator, mesh: Any = None, data_axes: Sequence[str] = (), layer_axes: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self.everyone, self._mesh, self.layer_axes = everyone, mesh, tuple(layer_axes)
        self._data = tuple(data_axes)
        names = () if mesh is None else tuple(mesh.mesh_dim_names)
        sizes = {name: mesh.size(i) for i, name in enumerate(names)}
        self._same = tuple(name for name in names if name not in self.layer_axes)
        self.num_data = everyone.size if mesh is None else math.prod(sizes[name] for name in self._data)
        self._names = names
        self._comms: dict[tuple[str, ...], Communicator] = {}
        self._ties: dict[str, Communicator] = {}
        self._owner: Mapping[str, int] = {}

    @classmethod
    def of_mesh(cls, mesh: Any, data_axes: Sequence[str], layer_axes: Sequence[str] = ()) -> Ranks:
        """All of a mesh. Collective."""
        return cls(Communicator.of_axes(mesh, mesh.mesh_dim_names), mesh, data_axes, layer_axes)

    def settle(self, transforms: Sequence[Transform], shared: Iterable[Shared] = ()) -> None:
        """Make the groups that transforms need, and tell them. Collective, before anything is sharded.

        Raises:
            ValueError: a weight is split along axes that there are not.
        """
        if self._mesh is not None:
            needed = {axes for t in transforms for axes in (self._seeing(t), self._adding(t), self._parts(t))}
            needed = {axes for axes in needed if axes and set(axes) <= set(self._names)}
            for axes in sorted({axes for there in self.everyone.all_gather_object(needed) for axes in there}):
                self._comms[axes] = Communicator.of_axes(self._mesh, axes)
            self._check_learned(transforms)
            self._tie(transforms)
        for transform in transforms:
            parts, place = self._parts(transform), transform.place
            if place.box is not None and place.box.sizes == place.shape and self._mesh is None:
                parts, transform.place = (), replace(place, along=())
            if parts and parts not in self._comms:
                raise ValueError(
                    f"{transform.site.group}: {transform.site.name} is split along the mesh axes {', '.join(parts)}, "
                    "and there is no mesh. Name the axes in the section mesh of the configuration."
                )
            if parts:
                transform.place = replace(transform.place, comm=self._comms[parts])
        self._own(transforms)
        for one in shared:
            one.ranks = self if self.parted else None
        for transform in transforms:
            transform.placed()

    def _check_learned(self, transforms: Sequence[Transform]) -> None:
        """Raise ValueError, on all ranks, where ranks with other experts would train other numbers of scores."""
        learning = [t for t in transforms if t.place.apart and not t.place.along and t.learned]
        mine = sorted((t.site.group, name, tuple(value.shape)) for t in learning for name, value in t.learned.items())
        stage = tuple(self._mesh.get_local_rank(axis) for axis in self.layer_axes)
        names = [t.site.name for t in learning]
        first: dict[tuple[int, ...], list[Any]] = {}
        for place, there, told in self.everyone.all_gather_object((stage, mine, names)):
            if first.setdefault(place, there) != there:
                raise ValueError(
                    f"{(there or first[place])[0][0]}: its patterns mean {', '.join(told) or 'nothing'} on one rank, "
                    "and other experts, or another number of them, on another. Scores are learned there, and ranks "
                    "train equally many: let the patterns mean the same of each expert."
                )

    def _tie(self, transforms: Sequence[Transform]) -> None:
        """Groups of the stages that have the same transforms, of tied layers. Collective."""
        if not self.layer_axes:
            return
        layers = Communicator.of_axes(self._mesh, self.layer_axes)
        has: dict[str, list[int]] = {}
        for rank, keys in enumerate(layers.all_gather_object([t.key for t in transforms])):
            for key in keys:
                has.setdefault(key, []).append(rank)
        comms: dict[tuple[int, ...], Communicator] = {}
        for stages in sorted({tuple(stages) for stages in has.values() if len(stages) > 1}):
            rest = [rank for rank in range(layers.size) if rank not in stages]
            comms[stages] = layers.partition([list(stages), *([rest] if rest else [])], name=f"tied {stages}")
        self._ties = {t.key: comms[tuple(has[t.key])] for t in transforms if len(has[t.key]) > 1}

    def _own(self, transforms: Sequence[Transform]) -> None:
        """Who tells of a transform that several ranks have: the first of them. Collective where there is a mesh."""
        if self._mesh is None:
            return
        first: dict[str, int] = {}
        mine = [transform.key for transform in transforms]
        everywhere = self.everyone.all_gather_object(mine)
        for rank, keys in enumerate(everywhere):
            for key in keys:
                first.setdefault(key, rank)
        if any(set(keys) != set(everywhere[0]) for keys in everywhere):
            self._owner = first

    @property
    def parted(self) -> bool:
        """Whether ranks have transforms that others do not have. The same on all of them."""
        return bool(self._owner)

    @property
    def keys(self) -> set[str]:
        """Of all transforms of all ranks, where ranks have other ones."""
        return set(self._owner)

    def owns(self, key: str) -> bool:
        """Whether this rank is the first that has this transform."""
        return not self._owner or self._owner[key] == self.everyone.rank

    def gather(self, states: dict[str, Any]) -> dict[str, Any]:
        """The states of all transforms by key, on rank 0; elsewhere this rank's. Collective where ranks have other
        transforms."""
        if not self.parted:
            return states
        everywhere = gather_object(self.everyone, {key: state for key, state in states.items() if self.owns(key)})
        return states if everywhere is None else {key: state for there in everywhere for key, state in there.items()}

    def seeing(self, transform: Transform) -> Communicator | None:
        """The ranks that have the same tensor there; their data may differ. None: this one alone."""
        return self.everyone if self._mesh is None else self._comms.get(self._seeing(transform))

    def adding(self, transform: Transform) -> Communicator | None:
        """The ranks whose gradients of that tensor are summands of one, but for those with other layers."""
        return self.everyone if self._mesh is None else self._comms.get(self._adding(transform))

    def tied(self, transform: Transform) -> Communicator | None:
        """The ranks with other layers that have it too, because they have a tied layer; None: no others."""
        return self._ties.get(transform.key)

    def _seeing(self, transform: Transform) -> tuple[str, ...]:
        return tuple(name for name in self._same if name not in transform.place.apart)

    def _adding(self, transform: Transform) -> tuple[str, ...]:
        adds = {*self._data, *transform.place.partial} - set(transform.place.apart)
        return tuple(name for name in self._names if name in adds)

    def _parts(self, transform: Transform) -> tuple[str, ...]:
        along = transform.place.along
        return tuple(name for name in self._names if name in along) if set(along) <= set(self._names) else along
