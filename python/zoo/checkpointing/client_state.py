"""``client_state``: what a program keeps in a checkpoint beside the training state, each rank its own.

Rank 0's is in the manifest (``meta["client"]``). Where another rank's differs, its JSON is a tensor of bytes among what
that rank alone has, and ``meta["client_ranks"]`` lists these ranks. So ranks that all have the same cost nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.exact import decode, dumps

CLIENT, RANKS, OF_RANK = "client", "client_ranks", "client_state"


class ClientState:
    """One rank's, to be saved.

    Attributes:
        value: as the manifest holds it. digest: equal for equal ones.

    Raises:
        CheckpointError: it is no mapping, or has what a checkpoint cannot hold; it names the place.
    """

    def __init__(self, given: Mapping[str, Any] | None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise CheckpointError(f"client_state is a {type(given).__name__}; it is a mapping, {{'name': value}}")
        self.value = dict(given or {})
        self._text = dumps(self.value, f"meta.{CLIENT}").encode()
        self.digest = hashlib.blake2b(self._text, digest_size=16).digest()

    def of_rank(self) -> dict[str, torch.Tensor]:
        """What a rank of ``client_ranks`` keeps as its own."""
        return {OF_RANK: torch.frombuffer(bytearray(self._text), dtype=torch.uint8)}


def other_ranks(digests: Sequence[bytes]) -> dict[str, list[int]]:
    """For the manifest: the ranks whose state is another one than rank 0's; nothing where there are none."""
    found = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    return {RANKS: found} if found else {}


def client_state_of(found: Any, rank: int) -> dict[str, Any]:
    """What ``rank`` has kept in a checkpoint; what rank 0 has, where the job that wrote it had no such rank.

    Raises:
        CheckpointError: it is damaged.
    """
    if rank not in found.meta.get(RANKS, ()):
        return dict(found.meta.get(CLIENT, {}))
    own = found.rank_state(rank).get(OF_RANK)
    try:
        value = None if own is None else decode(json.loads(bytes(own.numpy())), OF_RANK)
    except ValueError as error:
        raise CheckpointError(f"the client_state of rank {rank} in checkpoint {found.tag!r}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"checkpoint {found.tag!r} lacks the client_state of rank {rank}, which its manifest names"
        )
    return value
