"""The axes of a data-parallel group: which ranks split a bucket, which repeat it, which share a node.

Legend: N data-parallel ranks, p ranks of a shard group, L ranks of it on one node, M = p / L nodes that it spans.

    rank = replica · p + node · L + local

A *shard group* is p consecutive ranks, which together hold every chunk once (all N by default; ``mics_shard_size`` in
MiCS; the node for stage 0 with ``hierarchical_all_reduce``). Ranks of the same place in the N/p shard groups are
*replicas*: they hold the same chunk. Inside of a shard group ranks differ by node and by their place on it, wherever a
transfer of two stages is asked for.

Which ranks belong together is said by :class:`Near`. Where only some of the N ranks share a parameter
(``placement/families.py``), those of them that are in one shard group of all ranks are a shard group, and so it is with
nodes and secondary partitions.

Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", section 3.2 (shard groups:
"partition groups" there, "replication groups"); Wang et al. 2023, "ZeRO++", section 3.2 (secondary partition).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.comm import Communicator
from zoo.comm.nodes import ranks_per_node

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig

_log = logging.getLogger("zoo.zero")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Communicators of this rank; all of them count in the log of ``world``."""

    world: Communicator
    """All N ranks."""
    shard: Communicator
    """The p ranks that split what is split."""
    replicas: Communicator
    """The N/p ranks that hold the same chunk as this one."""
    local: Communicator
    """The L ranks of the shard group on this rank's node. This rank alone where no transfer has two stages."""
    across: Communicator
    """The M ranks of the shard group at this rank's place on their nodes; the shard group with ``local`` alone."""
    secondary: Communicator | None = None
    """hpZ: the ranks near each other that split what was gathered in forward."""
    divisor: int = 0
    """Gradients are summed over ``world`` and divided by this: the number of losses, the same for all parameters. A
    layer that has parts on several ranks has seen the tokens of all of them. 0: the size of ``world``."""
    parts: Communicator | None = None
    """The ranks that have other parts of the same parameters; None where there are none."""
    places: tuple[int, ...] | None = None
    """Which chunk each rank of the shard group keeps; None: rank r chunk r. For gathers only."""
    counts: bool = True
    """Of ranks that have the same along axes outside of ``world`` one counts, in checkpoints."""
    spans_layers: bool = False
    """Some ranks of ``world`` have other layers: their backwards do not keep step with those of this one."""
    in_norm: bool = True
    """What it has is added to the norm; of ranks with other layers that have the same parameters only the first do."""

    def share_memory(self) -> None:
        """Let what travels between ranks of one host go through memory that they share. Collective."""
        found = [self.shard, self.local, self.across, *([self.secondary] if self.secondary is not None else [])]
        for comm in {id(comm): comm for comm in found}.values():
            comm.share_memory()

    @property
    def num_losses(self) -> int:
        """What a sum of gradients is divided by."""
        return self.divisor or self.world.size

    @property
    def place(self) -> int:
        """Which chunk this rank keeps."""
        return self.shard.rank if self.places is None else self.places[self.shard.rank]

    @property
    def first_replica(self) -> bool:
        """This rank's shard group is the one from which checkpoints take the state."""
        return self.replicas.rank == 0 and self.counts


@dataclass(frozen=True, kw_only=True)
class Near:
    """Which of N ranks belong together: those with equal labels. Of each rank, in the order of the ranks."""

    shard: Sequence[Hashable]
    """Its shard group."""
    secondary: Sequence[Hashable] | None = None
    """Its secondary partition; None without hpZ."""
    nodes: Sequence[Hashable] | None = None
    """Its node; None where no transfer has two stages, or none is between ranks."""

    def groups(self) -> list[list[int]]:
        """The shard groups; ranks of a node follow one another in them where transfers have two stages."""
        found = _together(range(len(self.shard)), self.shard)
        if self.nodes is None:
            return found
        return [[r for of_node in _together(ranks, self.nodes) for r in of_node] for ranks in found]

    def within(self, group: Sequence[int], labels: Sequence[Hashable]) -> list[list[int]]:
        """Places in a shard group that have one label."""
        return _together(range(len(group)), [labels[rank] for rank in group])


def _together(ranks: Sequence[int], labels: Sequence[Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for rank in ranks:
        found.setdefault(labels[rank], []).append(rank)
    return list(found.values())


def near_by(
    numbers: Sequence[int], nodes: Sequence[int] | None, num_ranks: int, config: ZeroConfig, *, on_nodes: bool = False
) -> Near:
    """Which ranks belong together by the options; they are ``numbers`` of the ``num_ranks`` data-parallel ones.

    Args:
        numbers: of each rank; several may have the same one, and belong together then.
        nodes: of each rank; None if nobody knows.
        on_nodes: a secondary partition ends with the node, where nodes are known.

    Raises:
        ValueError: nodes are needed, and not known.
    """
    size, of_copy = shard_size(num_ranks, config), copy_size(num_ranks, config)
    shard: list[Hashable] = [k // size for k in numbers]
    if config.hierarchical_all_reduce:
        shard = _known(nodes, len(numbers), config)
    staged = config.mics_hierarchical_params_gather or config.zero_quantized_gradients
    copies: list[Hashable] = [k // of_copy for k in numbers] if of_copy > 1 else []
    if copies and on_nodes and nodes is not None:
        copies = list(zip(copies, nodes, strict=True))
    return Near(
        shard=shard,
        secondary=copies or None,
        nodes=_known(nodes, len(numbers), config) if staged and len(set(shard)) < len(shard) else None,
    )


def make_axes(comm: Communicator, config: ZeroConfig) -> Axes:
    """The axes of all data-parallel ranks that the options ask for. Collective.

    Raises:
        ValueError: a size that does not divide what it has to, or nodes that are not known or not regular.
    """
    _check_sizes(comm.size, config)
    near = near_by(range(comm.size), comm.nodes, comm.size, config)
    if config.hierarchical_all_reduce:
        _check_nodes(comm.nodes, comm.size, config)
    if near.nodes is not None:
        for group in near.groups():
            _check_nodes([near.nodes[rank] for rank in sorted(group)], len(group), config)
    return form_axes(comm, near)


def form_axes(
    world: Communicator, near: Near, *, divisor: int = 0, parts: Communicator | None = None, counts: bool = True
) -> Axes:
    """The axes of ranks of which ``near`` says who belongs together, in groups of equal sizes. Collective.

    Args:
        divisor, parts, counts: see :class:`Axes`.
    """
    groups = near.groups()
    shard = world.partition(groups, name="shard")
    replicas = world.partition([list(same) for same in zip(*groups, strict=True)], name="replicas")
    mine = next(group for group in groups if world.rank in group)
    local, across = shard.partition([[r] for r in range(shard.size)], name="alone"), shard
    if near.nodes is not None:
        of_node = near.within(mine, near.nodes)
        local = shard.partition(of_node, name="local")
        across = shard.partition([list(same) for same in zip(*of_node, strict=True)], name="across")
    secondary = None
    if near.secondary is not None:
        copies = near.within(mine, near.secondary)
        if len(copies) > 1:  # as large, it would be the same partition once more
            secondary = shard.partition(copies, name="secondary")
    return Axes(
        world=world, shard=shard, replicas=replicas, local=local, across=across, secondary=secondary, divisor=divisor,
        parts=parts, counts=counts,
    )  # fmt: skip


def shard_size(num_ranks: int, config: ZeroConfig) -> int:
    """p, where nodes do not decide."""
    return num_ranks if config.mics_shard_size == -1 else config.mics_shard_size


def copy_size(num_ranks: int, config: ZeroConfig) -> int:
    """Ranks that split what forward gathered (hpZ): no more than those that split the parameters."""
    return min(config.zero_hpz_partition_size, shard_size(num_ranks, config))


def _check_sizes(num_ranks: int, config: ZeroConfig) -> None:
    size = shard_size(num_ranks, config)
    if num_ranks % size:
        divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
        raise ValueError(
            f"mics_shard_size={size} does not divide the {num_ranks} data-parallel ranks; allowed are {divisors}, or "
            "-1 for no shard groups."
        )
    of_copy = copy_size(num_ranks, config)
    if of_copy < config.zero_hpz_partition_size:
        _log.info("zero_hpz_partition_size=%d of %d ranks: all of them.", config.zero_hpz_partition_size, size)
    if of_copy > 1 and size % of_copy:
        raise ValueError(
            f"zero_hpz_partition_size={of_copy} does not divide the {size} ranks that split the parameters; give "
            "the number of ranks of a node."
        )


def _asked(config: ZeroConfig) -> str:
    names = ("hierarchical_all_reduce", "mics_hierarchical_params_gather", "zero_quantized_gradients")
    return next(name for name in names if getattr(config, name))


def _known(nodes: Sequence[int] | None, num_ranks: int, config: ZeroConfig) -> list[Hashable]:
    if num_ranks == 1:
        return [0]
    if nodes is None:
        raise ValueError(
            f"{_asked(config)} needs to know which of the {num_ranks} ranks share a node: start with torchrun, which "
            'sets LOCAL_WORLD_SIZE, or give ranks_per_node=, or a DeviceMesh of the axes ("node", "local") as group='
        )
    return list(nodes)


def _check_nodes(nodes: Sequence[Hashable] | None, num_ranks: int, config: ZeroConfig) -> None:
    """Raise ValueError unless ranks fill their nodes one after the other, equally many on each."""
    if num_ranks > 1 and nodes is not None and ranks_per_node(nodes) is None:
        raise ValueError(
            f"{_asked(config)} needs ranks that fill their nodes one after the other, equally many on each; this group "
            f"of {num_ranks} ranks is on the nodes {list(nodes)}. Give ranks_per_node= or mics_shard_size= so that "
            "groups of ranks and nodes fit into one another."
        )
