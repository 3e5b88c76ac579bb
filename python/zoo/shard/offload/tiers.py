"""Which tier each bucket's state lives in, and what goes wrong there."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from zoo.shard.offload.config import OffloadOptimizerConfig, OffloadParamConfig


class OffloadError(RuntimeError):
    """Offloaded state cannot be placed, read or written; the message says where, and what to do."""


class Tier(enum.Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


_OF = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


def plan_tiers(
    shards: Sequence[tuple[int, bool, bool]],
    parameters: OffloadParamConfig,
    optimizer: OffloadOptimizerConfig,
) -> list[tuple[Tier, Tier]]:
    """The tiers of the parameters and of the optimizer states of each bucket, in the order of the buckets.

    Args:
        shards: of each bucket the elements of a rank's shard, whether it is partitioned, whether it is trainable.

    The first buckets go to the slower tier: forward needs them last of all after a step, and the last ones, which
    backward begins with, stay near. ``ratio`` counts elements of trainable shards, ``max_in_cpu`` of partitioned ones;
    a bucket is never split between tiers.
    """
    trainable = sum(n for n, _, trains in shards if trains)
    to_offload = optimizer.ratio * trainable
    partitioned = sum(n for n, split, _ in shards if split)
    to_nvme = partitioned - parameters.max_in_cpu if parameters.device == "nvme" else partitioned
    found = []
    states_so_far = parameters_so_far = 0
    for n, split, trains in shards:
        kept, states = Tier.DEVICE, Tier.DEVICE
        if split:
            kept = _OF[parameters.device]
            if kept is Tier.NVME and parameters_so_far >= to_nvme:
                kept = Tier.HOST
            parameters_so_far += n
        if trains:
            if states_so_far < to_offload:
                states = _OF[optimizer.device]
            states_so_far += n
        found.append((kept, states))
    return found
