"""The axes of a data-parallel group: which ranks split a bucket, which repeat it, which share a node.

Legend: N data-parallel ranks, p ranks of a shard group, L ranks of it on one node, M = p / L nodes that it spans.

    rank = replica · p + node · L + local

A *shard group* is p consecutive ranks, which together hold every chunk once (all N by default; ``mics_shard_size`` in
MiCS; the node for stage 0 with ``hierarchical_all_reduce``). Ranks of the same place in the N/p shard groups are
*replicas*: they hold the same chunk. Inside of a shard group ranks differ by node and by their place on it, wherever a
transfer of two stages is asked for.

Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", section 3.2 (shard groups:
"partition groups" there, "replication groups"); Wang et al. 2023, "ZeRO++", section 3.2 (secondary partition).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.comm import Communicator
from zoo.comm.nodes import ranks_per_node

if TYPE_CHECKING:
    from zoo.zero.config import ZeroConfig


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
    """hpZ: the consecutive ranks that split what was gathered in forward."""
    divisor: int = 0
    """Gradients are summed over ``world`` and divided by this: the number of losses, the same for all parameters. A
    layer that has parts on several ranks has seen the tokens of all of them. 0: the size of ``world``."""
    parts: Communicator | None = None
    """The ranks that have other parts of the same parameters; None where there are none."""
    places: tuple[int, ...] | None = None
    """Which chunk each rank of the shard group keeps; None: rank r chunk r. For gathers only."""
    counts: bool = True
    """Of ranks that have the same along axes outside of ``world`` one counts, in checkpoints."""

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


def make_axes(comm: Communicator, config: ZeroConfig) -> Axes:
    """The axes that the options ask for. Collective.

    Raises:
        ValueError: a size that does not divide what it has to, or nodes that are not known or not regular.
    """
    size = _shard_size(comm, config)
    shard = comm.partition([range(k, k + size) for k in range(0, comm.size, size)], name="shard")
    replicas = comm.partition([range(k, comm.size, size) for k in range(size)], name="replicas")
    local, across = shard.partition([[r] for r in range(size)], name="alone"), shard
    if config.mics_hierarchical_params_gather or config.zero_quantized_gradients:
        of_node = _ranks_per_node(shard, config)
        local = shard.partition([range(k, k + of_node) for k in range(0, size, of_node)], name="local")
        across = shard.partition([range(k, size, of_node) for k in range(of_node)], name="across")
    secondary = None
    of_copy = config.zero_hpz_partition_size
    if of_copy > 1:
        if size % of_copy:
            raise ValueError(
                f"zero_hpz_partition_size={of_copy} does not divide the {size} ranks that split the parameters; give "
                "the number of ranks of a node."
            )
        if of_copy < size:  # as large, it would be the same partition once more
            secondary = shard.partition([range(k, k + of_copy) for k in range(0, size, of_copy)], name="secondary")
    return Axes(world=comm, shard=shard, replicas=replicas, local=local, across=across, secondary=secondary)


def _shard_size(comm: Communicator, config: ZeroConfig) -> int:
    if config.hierarchical_all_reduce:
        return _ranks_per_node(comm, config)
    size = config.mics_shard_size
    if size == -1:
        return comm.size
    if comm.size % size:
        divisors = [d for d in range(1, comm.size + 1) if comm.size % d == 0]
        raise ValueError(
            f"mics_shard_size={size} does not divide the {comm.size} data-parallel ranks; allowed are {divisors}, or "
            "-1 for no shard groups."
        )
    return size


def _ranks_per_node(comm: Communicator, config: ZeroConfig) -> int:
    """L of a group whose ranks fill nodes one after the other."""
    if comm.size == 1:
        return 1
    asked = next(
        name
        for name in ("hierarchical_all_reduce", "mics_hierarchical_params_gather", "zero_quantized_gradients")
        if getattr(config, name)
    )
    if comm.nodes is None:
        raise ValueError(
            f"{asked} needs to know which of the {comm.size} ranks share a node: start with torchrun, which sets "
            'LOCAL_WORLD_SIZE, or give ranks_per_node=, or a DeviceMesh of the axes ("node", "local") as group='
        )
    found = ranks_per_node(comm.nodes)
    if found is None:
        raise ValueError(
            f"{asked} needs ranks that fill their nodes one after the other, equally many on each; this group of "
            f"{comm.size} ranks is on the nodes {list(comm.nodes)}. Give ranks_per_node= or mics_shard_size= so that "
            "groups of ranks and nodes fit into one another."
        )
    return found
