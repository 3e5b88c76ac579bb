"""Going on after a failure: only if it happened on all ranks, at the same place of their programs.

A rank that catches an exception and goes on would have its next collectives answered by those that the other ranks are
still in. So it leaves word of the failure first (which those ranks find when their waits end), and before it goes on
all ranks must have failed, after the same number of collectives. This takes the store of the job, and no collective.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from zoo.comm import failures
from zoo.comm.groups import timeout_of

if TYPE_CHECKING:
    from zoo.comm.communicator import Communicator


class Recovery:
    """What became of the failures of one communicator's ranks. All ranks construct theirs in the same order.

    Attributes:
        pending: what this rank failed with and has not settled yet; empty for nothing.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._number, self.pending = comm, 0, ""
        self._broken: failures.RankFailedError | None = None
        store = failures._store()
        made = "zoo/recovery/" + ".".join(map(str, comm.ranks))
        self._key = f"{made}/{store.add(f'{made}/{comm.rank}', 1)}" if store is not None else ""

    def failed(self, error: BaseException) -> None:
        """This rank has failed in the midst of collectives. Waits for nobody."""
        if self.pending or not self._key:
            return
        self.pending = failures.sentence_of(error)
        if not isinstance(error, failures.RankFailedError):  # that one is another rank's
            failures.report(error)

    def agree_on(self, error: BaseException | None, device: torch.device) -> str:
        """Where all ranks come in any case: whether one of them has failed since the latest such place. A collective.

        Of an interrupt, or after a failure in the midst of collectives, only word is left: others may wait elsewhere.

        Returns:
            The sentence of each rank that failed, empty if none did; then all ranks may go on.
        """
        if error is not None and (self.pending or not isinstance(error, Exception)):
            self.failed(error)
            return self.pending
        if self._comm.size == 1:
            return ""
        flag = torch.tensor([float(error is not None)], device=device)
        self._comm.all_reduce(flag, "max").wait()
        if not bool(flag):
            return ""
        told = self._comm.all_gather_object(failures.sentence_of(error) if error is not None else "")
        return "; ".join(f"rank {rank} failed with {text}" for rank, text in enumerate(told) if text)

    def settle(self) -> None:
        """Before the next collective: wait until all ranks have failed, if this one has.

        Raises:
            RankFailedError: some did not, within the timeout of the group, or at another place; now and ever after.
        """
        if self._broken is not None:
            raise self._broken
        if not self.pending:
            return
        store, rank, told = failures._store(), self._comm.rank, self.pending
        self._number += 1
        keys = [f"{self._key}/{self._number}/{r}" for r in range(self._comm.size)]
        store.set(keys[rank], json.dumps([self._comm.log.num_issued, told]))
        try:
            timeout = timeout_of(self._comm.group)
            store.wait(keys, timeout) if timeout is not None else store.wait(keys)
        except RuntimeError as error:  # the store's own class of it is one
            others = tuple(r for r, key in enumerate(keys) if not store.check([key]))
            self._break(f"rank {rank} failed alone, without rank(s) {_names(others)}: {told}", others, error)
        found = [json.loads(store.get(key)) for key in keys]
        if len({count for count, _ in found}) > 1:
            sentences = "; ".join(f"rank {r} with {text}" for r, (_, text) in enumerate(found))
            self._break(f"the ranks failed at different places: {sentences}", tuple(range(len(keys))), None)
        self.pending = ""
        failures.withdraw()

    def _break(self, why: str, ranks: tuple[int, ...], cause: Exception | None) -> None:
        self._broken = failures.RankFailedError(
            f"{why}. What the ranks send each other would be mixed up from now on: end the job, and go on from the "
            "latest checkpoint.", ranks,
        )  # fmt: skip
        raise self._broken from cause


def _names(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
