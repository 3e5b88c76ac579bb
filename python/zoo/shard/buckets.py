"""Buckets: parameters that share one flat buffer and travel in one collective.

Legend: p ranks of a shard group (all N ranks unless options say otherwise, see ``placement/axes.py``), P elements of a
bucket's flat buffer (padding included), n = P / p the length of a shard.

A bucket's layout does not depend on the ZeRO stage, so that every stage sums and updates the same chunks in the same
order and all stages compute the same bits. What the stage decides are the :class:`Placements`: which of a bucket's
buffers exist whole on every rank and which only as the rank's shard.

Here is what a bucket is; what it holds is in two files of their own, ``parameters.py`` and
``gradients.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from zoo.cost.collectives import Hop
from zoo.layout import Split, split_of
from zoo.shard.collectives.routes import Packer, Routes
from zoo.shard.gradients import BucketGradients
from zoo.shard.guard import cannot_convert
from zoo.shard.memory import Memory
from zoo.shard.offload.tiers import Tier
from zoo.shard.parameters import BucketParameters, leave_ordinary
from zoo.shard.placement.packing import BucketSpec, layout_of
from zoo.shard.placement.placements import Placements
from zoo.shard.roles import GRADIENT, ORIGINAL, PARAMETER, RoleBuffer, States, Store

if TYPE_CHECKING:
    from zoo.shard.offload.scratch import Scratch

GONE = "no longer in the model: "
"""Before the name that a parameter had at construction, where the model does not have it any more."""


class Bucket:
    """One bucket on this rank: its plan, and who uses it now.

    Attributes:
        index: its place among the buckets of the optimizer, the same on every rank.
        spec: which parameters, in which order.
        placements: where its parameters, gradients and optimizer states live.
        routes: how its bytes travel.
        shard_group: the p ranks that split it.
        num_chunks: p; the layout is cut into one chunk for each rank of the shard group at every stage.
        place: which chunk this rank keeps.
        layout: where each parameter lies in the flat buffer.
        own_range: [start, stop) of this rank's chunk in it.
        kept_range: of the values that this rank answers for, in the dtype in which they are kept.
        updated_chunks: those that this rank's optimizer updates.
        roles: what this rank keeps of it, by role: "parameter", "original" and "gradient" where there is one.
        scratch: buffers of offloaded state; None without.
        states: the roles that an optimizer keeps of it; None without one.
        stores: by role, the file of those that may live on NVMe; the region is the index.
        keep_norms: the norm of a gradient is kept when the gradient leaves the device.
        device: of the flat buffers.
        num_bytes: of the flat buffer of the parameters. mean_bytes: the same, but of parts that ranks along other axes
            have too the mean of all: what is decided by it is decided alike there.
        num_gradient_bytes: of that of their gradients.
        partitioned: the parameters are whole only between gather and release.
        on_cpu: there is no other device. updates_off_device: parameters are on another device than the CPU, their
            optimizer states are not.
        memory: of what comes and goes in every step.
        executor: gathers, releases and reduces it (:class:`zoo.shard.runtime.executor.Executor`, which knows buckets).
        source: where this rank's parameters are already, so that nothing is communicated; None: the values of rank 0.
        label: for messages: the units whose parameters these are. refusal: what is said to whoever touches the memory
            of its parameters while that is gone.
        gone: what parameters that the model does not have any more are called (:meth:`logical`).
        owner: returns the ``ShardedModel`` it belongs to, or before that what ``Init`` has; None where that is gone.
        in_turn: gathers it after what other ranks need first, where they need other gathers; None where all need the
            same.
        on_refused: called with the slot of a refused parameter that was touched; True if it is whole now.
        leases: number of contexts (``runtime/contexts.py``) that still have to come back to this bucket in backward.
        active: number of running forwards of units that use it.
        context_serial: of the latest context that recorded it.
        parameters: their buffers.
        gradients: the gradients' buffers; None for frozen parameters.
    """

    parameter_class: ClassVar[type | None] = None
    """Of its parameters; None: they have one that no other bucket's have."""
    touched: ClassVar[str] = (
        "a parameter of {label} (or a view of one) was touched while it is partitioned (ZeRO stage 3): only inside its "
        "unit's forward and backward is it whole."
    )
    """What is wrong with that, of the bucket that {label} names."""

    def __init__(
        self, index: int, spec: BucketSpec, placements: Placements, routes: Routes, memory: Memory, *,
        scratch: Scratch | None = None, stores: Mapping[str, Store] | None = None, keep_norms: bool = False,
        executor: Any, source: RoleBuffer | None = None,
    ) -> None:  # fmt: skip
        self.executor = executor
        self.index, self.spec, self.placements, self.routes = index, spec, placements, routes
        self.shard_group, self.place, self.memory = routes.axes.shard, routes.axes.place, memory
        self.scratch, self.stores, self.keep_norms = scratch, stores or {}, keep_norms
        self.roles: dict[str, RoleBuffer] = {}
        self.states: States | None = None
        self.layout = layout_of(spec, self.shard_group.size)
        self.num_chunks = self.shard_group.size
        self.own_range = self.layout.shard_range(self.place, self.num_chunks)
        states_split = placements.states.is_split
        self.kept_range = self.own_range if states_split else (0, self.layout.size)
        self.updated_chunks: Sequence[int] = (self.place,) if states_split else range(self.num_chunks)
        self._slots = {name: slot for slot, name in enumerate(spec.names)}
        self.device = spec.parameters[0].device
        device_type = self.device.type
        planned = getattr(self.shard_group, "device_type", "cpu")
        self.on_cpu = (planned if device_type == "meta" else device_type) == "cpu"
        self.updates_off_device = placements.states.tier is not Tier.DEVICE and not self.on_cpu
        self.num_bytes = self.layout.size * spec.dtype.itemsize
        self.mean_bytes = spec.mean_numel * spec.dtype.itemsize if spec.axes else self.num_bytes
        self.num_gradient_bytes = self.layout.size * spec.gradient_dtype.itemsize
        self.partitioned = placements.parameters.is_split
        self._called = list(spec.names)
        self.gone: frozenset[str] = frozenset()
        self._name(spec.units)
        self.owner: Callable[[], Any] = _nobody
        self.on_refused: Callable[[Bucket, int], bool] | None = None
        self.in_turn: Callable[[Bucket], None] | None = None
        self.apart: Callable[[], bool] = _never  # ranks that repeat it have other values, and meet again
        self.leases, self.active, self.context_serial = 0, 0, -1
        self.read_whole = False  # since the latest update, outside of forward and backward
        self.parameters = BucketParameters(self, source)
        try:
            self.gradients = BucketGradients(self) if spec.trainable else None
        except BaseException:
            leave_ordinary(self)
            raise

    def use_routes(self, routes: Routes) -> None:
        """Travel so from now on; nothing is gathered or under way, and ``choice.py`` has looked at them."""
        packs, self.routes = routes.pack is not self.routes.pack, routes
        if packs:
            shard = self.parameters.shard
            values = shard.read().clone()
            shard.drop()
            shard.pack = routes.pack
            shard.set(values)

    def take_external(self, slot: int) -> bool:
        """A parameter was touched while it is refused: whether a running forward takes it."""
        return self.on_refused is not None and self.on_refused(self, slot)

    def assign(self, slot: int, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """What ``parameter.data = value`` does: the values are copied to wherever the parameter lives.

        Raises:
            ValueError: ``value`` has another shape, dtype or device.
        """
        if value is parameter:
            return
        name, tensor = self.called(slot), self.layout.tensors[slot]
        if tuple(value.shape) != tuple(tensor.shape):
            raise ValueError(
                f"parameter {name!r} has shape {tuple(tensor.shape)}, and was given a tensor of shape "
                f"{tuple(value.shape)}: under a ZeRO optimizer shapes stay."
            )
        if (value.dtype, value.device) != (self.spec.dtype, self.device):
            raise ValueError(cannot_convert(name, parameter, value))
        owner = self.owner()
        if owner is None:
            raise RuntimeError(
                f"the optimizer of the parameter {name!r} does not exist any more: the model runs, and keeps the "
                "values that it has. Keep the optimizer as long as its model, or close() it before it goes: "
                "the model is an "
                "ordinary one then."
            )
        owner.writes.change(self, slot, value)

    def check_gradient(self, slot: int, gradient: torch.Tensor) -> None:
        """Raise ValueError unless ``gradient`` can be added to that of a parameter."""
        name = self.called(slot)
        if self.gradients is None:
            raise ValueError(f"accumulate() got the parameter {name!r}, which is frozen and has no gradient.")
        wanted = (tuple(self.layout.tensors[slot].shape), self.spec.dtype, self.device)
        if (tuple(gradient.shape), gradient.dtype, gradient.device) != wanted:
            raise ValueError(
                f"accumulate() got a gradient of shape {tuple(gradient.shape)}, {gradient.dtype}, on "
                f"{gradient.device} for {name!r}, which has shape {wanted[0]}, {wanted[1]}, on {wanted[2]}."
            )

    def end(self) -> None:
        """Nothing is kept any more: neither whole nor this rank's shard. It cannot be used again."""
        self.parameters.drop()
        del self.parameters  # the two hold one another, and files and buffers, until the garbage is collected

    def note_gradient(self) -> None:
        """A gradient was assigned: it is this rank's, to be reduced with those of the others."""
        owner = self.owner()
        if owner is not None:
            owner.runtime.note_unreduced()

    def agree(self, what: str, value: str) -> None:
        """Raise on all ranks unless all of them pass the same."""
        self.shard_group.agree(what, value, self.device)

    # Names: buckets know a parameter by the one that it had at construction, everybody else by the one of now.

    def renamed(self, names: Mapping[int, str], logical: Callable[[str], str], units: Mapping[str, str]) -> None:
        """The model has changed.

        Args:
            names: by identity, the name of each parameter of the model. logical: what a name is in the whole model.
            units: by the name that they had at construction, the names of units.
        """
        gone = set()
        for slot, (key, parameter) in enumerate(zip(self.spec.names, self.spec.parameters, strict=True)):
            name = names.get(id(parameter))
            if name is None:
                gone.add(GONE + key)
                self.spec.logical[key] = GONE + key
            else:
                self._called[slot] = parameter._zoo_name = name  # type: ignore[attr-defined]
                self.spec.logical[key] = logical(name)
        self.gone = frozenset(gone)
        self._name([units.get(unit, unit) for unit in self.spec.units])

    def _name(self, units: Sequence[str]) -> None:
        self.label = _label(units)
        # Made here, because a gather needs them each time.
        self.refusal, self.label_of_gathers = self.touched.format(label=self.label), f"parameters of {self.label}"

    def called(self, slot: int) -> str:
        """For messages: the name of a parameter in this rank's model as it is now; the latest, where it is gone."""
        members = getattr(self.owner(), "members", None)
        if members is not None:
            members.look()
        return self._called[slot]

    def named(self) -> Iterator[tuple[int, str]]:
        """(slot, name in this rank's model) of each parameter that the model still has, as of the latest look."""
        for slot, key in enumerate(self.spec.names):
            if self.logical(key)[0] not in self.gone:
                yield slot, self._called[slot]

    def in_model(self) -> list[str]:
        """The names in the whole model of the parameters that the model still has, as of the latest look."""
        return [name for name in (self.logical(key)[0] for key in self.spec.names) if name not in self.gone]

    def logical(self, name: str) -> tuple[str, Split]:
        """What the parameter that construction found as ``name`` is called in the whole model, as of the latest look,
        and which part of it this rank's is. One that the model does not have any more is called one of ``gone``."""
        return self.spec.logical.get(name, name), split_of(self.spec.parameters[self._slots[name]])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape on this rank of the parameter that construction found as ``name``."""
        return self.layout.tensors[self._slots[name]].shape

    # Chunks ----------------------------------------------------------------------------------------------------------

    def owns(self, chunk: int) -> bool:
        """Whether checkpoints take this chunk from this rank."""
        return chunk == self.place and self.routes.axes.first_replica

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a flat (P,) buffer: one view for each parameter, in its shape."""
        return [
            flat[offset : offset + tensor.numel].view(tensor.shape)
            for tensor, offset in zip(self.layout.tensors, self.layout.offsets, strict=True)
        ]

    # Roles -----------------------------------------------------------------------------------------------------------

    @property
    def exact(self) -> RoleBuffer:
        """The role with the values of the parameters as exact as they are kept without an optimizer."""
        return self.roles.get(ORIGINAL) or self.roles[PARAMETER]

    def values(self) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's exact values, piece by piece: where it begins in the flat buffer, and elements. Go to the end."""
        if self.states is not None and self.spec.trainable:
            for first, roles in self.states.read(self):
                yield first, roles[PARAMETER]
        else:
            yield self.exact.first, self.exact.read()

    def check_writable(self) -> None:
        """Before parameters are given new values.

        Raises:
            RuntimeError: each rank has values of its own now. ValueError: the optimizer that keeps them is gone.
        """
        if self.states is not None and self.spec.trainable:
            self.states.check_writable()

    def new_shard(self) -> RoleBuffer:
        """For this rank's part of partitioned parameters."""
        tier = self.placements.parameters.tier
        return self._new_role(PARAMETER, *self.own_range, self.spec.dtype, tier, self.routes.pack)

    def new_originals(self) -> RoleBuffer:
        """For the values that this rank's parameters came with: where the masters will live that start from them, or
        where frozen parameters do."""
        placements = self.placements
        tier = placements.states.tier if self.spec.trainable else placements.parameters.tier
        return self._new_role(ORIGINAL, *self.kept_range, self.spec.original, tier)

    def new_gradient(self) -> RoleBuffer:
        """For this rank's part of the reduced gradient."""
        tier = self.placements.gradients.tier
        if tier is Tier.NVME and GRADIENT not in self.stores:  # it is used up before backward ends
            tier = Tier.HOST
        if tier is Tier.HOST and not (self.updates_off_device and self.placements.gradients.is_split):
            tier = Tier.DEVICE
        return self._new_role(GRADIENT, *self.own_range, self.spec.gradient_dtype, tier)

    def _new_role(
        self, role: str, first: int, stop: int, dtype: torch.dtype, tier: Tier, pack: Packer | None = None
    ) -> RoleBuffer:  # fmt: skip
        # Masters are no buffers of offloading, and there are enough of those for the states alone.
        scratch = None if role == ORIGINAL and self.spec.trainable else self.scratch
        return RoleBuffer(
            stop - first, dtype, self.device, first=first, tier=tier, pack=pack, scratch=scratch,
            store=self.stores.get(role), region=self.index,
        )  # fmt: skip

    @property
    def gradients_on_nvme(self) -> bool:
        """Reduced gradients live on NVMe."""
        return self.gradients is not None and self.gradients.role.tier is Tier.NVME

    @property
    def is_here(self) -> bool:
        """No other rank is needed to have its parameters whole, as they came."""
        came = self.spec.original is self.spec.dtype
        return self.shard_group.size == 1 or not (self.partitioned or (self.placements.states.is_split and not came))

    @property
    def parameters_on_nvme(self) -> bool:
        """This rank's parameters live on NVMe."""
        return self.partitioned and self.placements.parameters.tier is Tier.NVME

    # Forecasts -------------------------------------------------------------------------------------------------------

    def gather_hops(self, *, again: bool) -> list[Hop]:
        """The collectives of one gather of a partitioned bucket; ``again``: after a release in the same pass."""
        route = self.routes.pack or self.routes.gather
        if again and self.routes.secondary is not None:
            route = self.routes.secondary
        return route.hops(self.layout.size, self.spec.dtype.itemsize)

    def secondary_bytes(self) -> int:
        """Bytes that a release in forward leaves behind for backward."""
        secondary = self.placements.secondary
        group = secondary.split if secondary is not None else None
        return self.num_bytes // group.size if group is not None else 0

    def shard_bytes(self) -> int:
        """Bytes of parameters that this rank keeps, in whatever tier."""
        if not self.partitioned:
            return self.num_bytes
        return self.routes.shard_bytes(self.layout.size // self.num_chunks, self.spec.dtype.itemsize)

    def original_bytes(self) -> int:
        """Bytes of what frozen parameters came with, where it is kept beside them, in whatever tier."""
        if self.spec.trainable or not self.spec.keeps_originals:
            return 0
        low, high = self.kept_range
        return (high - low) * self.spec.original.itemsize

    def kept_bytes(self) -> int:
        """Bytes of parameters that stay in this rank's memory whatever runs."""
        return 0 if self.parameters_on_nvme else self.shard_bytes() + self.original_bytes()

    def gradient_bytes(self) -> int:
        """Bytes of gradients that stay between backward and the next one, in whatever tier; 0 for frozen parameters."""
        if not self.spec.trainable:
            return 0
        if not self.placements.gradients.is_split:
            return self.num_gradient_bytes
        return self.num_gradient_bytes // self.num_chunks if self.placements.keep_gradients else 0

    def reduce_hops(self, reduce_dtype: torch.dtype | None, *, times: int = 1) -> list[Hop]:
        """The collectives of a step for a trainable bucket, reduced ``times`` times, beside gathers."""
        hops = self.routes.reduce.hops(self.layout.size, (reduce_dtype or self.spec.gradient_dtype).itemsize) * times
        if not self.placements.states.is_split:  # the mean gradient
            if self.routes.reduces_whole:
                return hops
            hops += [Hop("all_gather", self.shard_group, self.num_gradient_bytes)] * times
        elif not self.partitioned:  # the new parameters
            hops.append(Hop("all_gather", self.shard_group, self.num_bytes))
        return hops


def _nobody() -> None:
    return None


def _never() -> bool:
    return False


def _label(units: Sequence[str]) -> str:
    return ", ".join(repr(u) if u else "the model itself" for u in dict.fromkeys(units))


def table_of(buckets: Sequence[Bucket]) -> str:
    """One line a bucket: what it is, what of it is here now, and where it lives when it is not."""
    rows = [
        f"{'bucket':>6}  {'elements':>12}  {'parameters':<12}{'gradients':<14}{'leases':>6}{'in use':>7}  "
        "units  (where parameters; gradients; states live)"
    ]
    for bucket in buckets:
        parameters = bucket.parameters
        here = "unsharded" if parameters.live else parameters.presence.value
        here = here if bucket.partitioned else "whole"
        gradients = bucket.gradients
        state = "none" if gradients is None else "reduced" if gradients.reduced else gradients.phase.value
        rows.append(
            f"{bucket.index:>6}  {bucket.layout.size:>12,}  {here:<12}{state:<14}{bucket.leases:>6}"
            f"{bucket.active:>7}  {bucket.label}  ({bucket.placements})"
        )
    return "\n".join(rows)


def bucket_of(parameter: Any) -> Bucket | None:
    """That a parameter is in under an optimizer, or in a model that is split without one; None for any other, those of
    ``Init`` that nobody has taken over too."""
    bucket: Bucket | None = getattr(parameter, "_zoo_bucket", None)
    return bucket if bucket is not None and bucket.parameter_class is None else None
