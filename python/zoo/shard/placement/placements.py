"""Where each role of a bucket lives, and the features that decide it.

A bucket has three roles: its parameters between their uses, its reduced gradients, and its optimizer states. Each has a
:class:`Placement`. A feature is a function here that returns placements: a stage says which roles are split, shard
groups (MiCS, HSDP) among which ranks, hpZ keeps a second copy, offloading chooses tiers, and quantised parameters are
kept as int8.

Rajbhandari et al. 2020, "ZeRO", section 5 (stages); Zhang et al. 2022, "MiCS", section 3.2; Wang et al. 2023, "ZeRO++",
section 3.2 (secondary partition).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from zoo.comm import Communicator
from zoo.shard.offload.tiers import Tier, plan_tiers
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.packing import BucketSpec, layout_of

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the P elements of one role of a bucket live.

    Attributes:
        split: the p ranks of which each keeps one chunk of n = P / p elements; None: this rank keeps all P.
        repeat: the ranks that keep the same elements as this one.
        tier: the kind of memory.
        packed: kept as int8 with scales (``collectives/quantised.py``), not in the dtype of the bucket.
        is_split: ``split`` is not None.
    """

    split: Communicator | None
    repeat: Communicator
    tier: Tier = Tier.DEVICE
    packed: bool = False
    is_split: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_split", self.split is not None)

    def __str__(self) -> str:
        part = f"1/{self.split.size}" if self.split is not None else "whole"
        times = f" x{self.repeat.size}" if self.repeat.size > 1 else ""
        return f"{part}{times} {self.tier.value}{' int8' if self.packed else ''}"


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Of one bucket.

    Attributes:
        parameters: between their uses.
        gradients: reduced ones. Before that each rank has its own, whole.
        states: what the optimizer keeps, masters included. Which of the last two frozen parameters have is nothing.
        secondary: hpZ: what is left of gathered parameters between forward and backward.
        keep_gradients: reduced gradients stay until ``zero_grad``; otherwise each until its update, before backward
            ends.
    """

    parameters: Placement
    gradients: Placement
    states: Placement
    secondary: Placement | None = None
    keep_gradients: bool = True

    def __str__(self) -> str:
        return f"{self.parameters}; {self.gradients}; {self.states}"


def by_stage(stage: int, axes: Axes) -> Placements:
    """The four ZeRO stages: what is split over the shard group of ``axes``, and repeated over its replicas.

    ==========  ==========  =========  ======
    stage       parameters  gradients  states
    ==========  ==========  =========  ======
    0           whole       whole      whole
    1           whole       whole      split
    2           whole       split      split
    3           split       split      split
    ==========  ==========  =========  ======

    The shard group has all ranks (ZeRO), or some of them (MiCS at stage 3, HSDP at stages 1 and 2).
    """
    whole = Placement(split=None, repeat=axes.world)
    split = Placement(split=axes.shard, repeat=axes.replicas)
    return Placements(
        parameters=split if stage >= 3 else whole,
        gradients=split if stage >= 2 else whole,
        states=split if stage >= 1 else whole,
    )


def resident(placements: Placements, axes: Axes) -> Placements:
    """The parameters are whole on every rank, whatever the stage: they are too small to be worth a gather."""
    whole = Placement(split=None, repeat=axes.world)
    return replace(placements, parameters=whole, secondary=None)


def with_secondary(placements: Placements, axes: Axes) -> Placements:
    """hpZ: forward leaves a part of what it gathered to the ranks of a node, from which backward gathers."""
    if axes.secondary is None or not placements.parameters.is_split:
        return placements
    return replace(placements, secondary=Placement(split=axes.secondary, repeat=axes.world))


def updated_in_backward(placements: Placements) -> Placements:
    """Each reduced gradient is used up before backward ends."""
    return replace(placements, keep_gradients=False)


def packed(placements: Placements) -> Placements:
    """The parameters are kept as int8 with scales."""
    return replace(placements, parameters=replace(placements.parameters, packed=True))


def on_tiers(placements: Placements, parameters: Tier, states: Tier) -> Placements:
    """Offloading. Reduced gradients follow the states where they are split, and stay on the device otherwise."""
    gradients = states if placements.gradients.is_split else Tier.DEVICE
    return replace(
        placements,
        parameters=replace(placements.parameters, tier=parameters),
        gradients=replace(placements.gradients, tier=gradients),
        states=replace(placements.states, tier=states),
    )


def place(plan: Sequence[BucketSpec], families: Mapping[tuple[str, ...], Axes], config: ZeroConfig) -> list[Placements]:
    """The placements of each bucket that the options ask for, all of it on the device; :func:`offload` comes last, as
    it depends on how large shards are."""
    found = []
    for spec in plan:
        axes = families[spec.axes]
        placements = by_stage(config.stage, axes)
        if spec.resident:
            placements = resident(placements, axes)
        placements = with_secondary(placements, axes)
        if config.update_in_backward:
            placements = updated_in_backward(placements)
        can_be_packed = not spec.trainable and not spec.coded and placements.parameters.is_split
        if config.zero_quantized_nontrainable_weights and can_be_packed:
            placements = packed(placements)
        found.append(placements)
    return found


def offload(
    plan: Sequence[BucketSpec], placements: Sequence[Placements], num_chunks: Sequence[int],
    config: ZeroConfig,
) -> list[Placements]:  # fmt: skip
    """The placements of the buckets, which are cut into so many chunks, with the tiers that the options ask for."""
    parameters, optimizer = config.offload_param, config.offload_optimizer
    if parameters.device == "none" and optimizer.device == "none":
        return list(placements)
    shards = [
        (layout_of(spec, count).size // count, placed.parameters.is_split, spec.trainable)
        for spec, placed, count in zip(plan, placements, num_chunks, strict=True)
    ]
    tiers = plan_tiers(shards, parameters, optimizer)
    return [on_tiers(placed, *where) for placed, where in zip(placements, tiers, strict=True)]
