"""``offload_host_bytes``: the ranks of a node take host memory from one account."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zoo import io
from zoo.comm import Communicator
from zoo.shard.offload.tiers import OffloadError

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig

PAGE, HUGE_PAGE = 4096, 2 << 20
SLACK = 1.25
"""Of 60 small plans drawn at random 8 ran out under a cap of exactly what they need, 2 with a quarter more."""
_log = logging.getLogger("zoo.zero")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the running kernel: tells machines apart
_IN_MEMORY = Path("/dev/shm")


class HostBudget:
    """The cap of this rank's node, and the account it shares with the other ranks there. Collective over ``comm``.

    Pages stay private to a rank; only their number is shared (:class:`zoo.io.Ledger`), by a file that the lowest rank
    of the node makes and that has no name any more once all have opened it. A rank alone on its node needs none. Where
    the group has k of a node's L ranks (the others belong to groups of other optimizers) its cap is the share k/L.

    Args:
        comm: the ranks of the optimizer. Those of one node are told by ``comm.nodes``; if that is unknown all of them
            are taken to be on one.
        config: offload_host_bytes is given.
        device: where messages between the ranks are made.
        bounce_bytes: what this rank's handle may take for bytes that cannot travel in place; it is left out of the
            account, so that it is always there.

    Raises:
        ValueError: the cap is less than a page for each rank, or the ranks disagree about it or about nodes.
        OffloadError: on all ranks, if the ranks of any node cannot share a file.
    """

    def __init__(self, comm: Communicator, config: ZeroConfig, device: torch.device, *, bounce_bytes: int = 0) -> None:
        if config.offload_host_bytes is None:
            raise AssertionError("a budget without a cap")
        self._comm = comm
        self._nodes = comm.nodes or (0,) * comm.size
        given, on_node = config.offload_host_bytes, _ranks_of_a_node(config)
        counts = {node: self._nodes.count(node) for node in sorted(set(self._nodes))}
        self._caps = {node: given * count // max(count, on_node or 0) for node, count in counts.items()}
        self._bounce_bytes = bounce_bytes
        # Before anything is refused: from here on all ranks decide alike.
        agreed = f"{list(self._nodes)} {self._caps}, of which {bounce_bytes} for bounce buffers of a rank"
        comm.agree("the nodes and their bytes of host memory", agreed, device)
        for node, cap in self._caps.items():
            if cap < (PAGE + bounce_bytes) * counts[node]:
                buffers = f" and {bounce_bytes:,} for its bounce buffers (two blocks for each thread: aio)"
                raise ValueError(
                    f"offload_host_bytes={given:,} is {cap:,} bytes for the {counts[node]} ranks of the group on node "
                    f"{node}; each of them needs a page of {PAGE:,} at least{buffers if bounce_bytes else ''}."
                )
        mine = self._nodes[comm.rank]
        self._members = [r for r, node in enumerate(self._nodes) if node == mine]
        self.capacity_bytes = self._caps[mine] - bounce_bytes * len(self._members)
        """Of the pools of the group's ranks on this node, together."""
        self._shared = max(counts.values()) > 1
        self.ledger = self._share() if self._shared else None

    @property
    def region_bytes(self) -> int:
        """How much a rank takes at a time.

        Regions that are begun and not yet full are what a rank has from the others for nothing: with one for each rank
        that is at most an eighth of the cap. Smaller ones would cost a registration, a page lock and 2 MiB of addresses
        for every few buffers.
        """
        from zoo.io.pool import DEFAULT_REGION_BYTES

        if self.ledger is None:
            return DEFAULT_REGION_BYTES
        part = self.capacity_bytes // (8 * len(self._members))
        whole = HUGE_PAGE if part >= HUGE_PAGE else PAGE
        return min(max(part // whole * whole, PAGE), DEFAULT_REGION_BYTES)

    def check(self, used: int, need: int) -> None:
        """Raise OffloadError on all ranks unless ``need`` bytes more of each fit on every node. Collective."""
        figures: list[tuple[int, int]] = self._comm.all_gather_object((used, need))
        for node, cap in self._caps.items():
            ranks = [figures[r] for r, where in enumerate(self._nodes) if where == node]
            bounce = self._bounce_bytes * len(ranks)
            in_use, more = (sum(column) for column in zip(*ranks, strict=True))
            needed = in_use + more + bounce
            if needed > cap:
                and_bounce = f", bounce buffers {bounce:,}" if bounce else ""
                raise OffloadError(
                    f"offload_host_bytes allows {cap:,} bytes of host memory to the ranks of the group on node {node} "
                    f"({len(ranks)}), which need {needed:,} together: {in_use:,} are in use and the buffers of "
                    f"an update take {more:,} more{and_bounce}. Raise the cap, or lower sub_group_size or the bucket "
                    "sizes, or turn pipeline_read or pipeline_write off, or use fewer ranks on a node."
                )
            safer = in_use + int(SLACK * more) + bounce
            if safer > cap and self._comm.rank == 0:
                _log.warning(
                    "offload_host_bytes leaves %s bytes beside the %s that the ranks on node %s need: buffers of "
                    "different sizes leave gaps, and an update that finds none wide enough fails. %s is safer.",
                    f"{cap - needed:,}", f"{needed:,}", node, f"{safer:,}",
                )  # fmt: skip

    def set_aside(self, pool: io.BufferPool, num_bytes: int) -> None:
        """Take what :meth:`check` has found room for, where ranks share it: nothing that others take is missing later.

        Collective.

        Raises:
            OffloadError: on all ranks, if it is not there: what is in use lies scattered in more than it needs.
        """
        if not self._shared:
            return
        problem = ""
        try:
            pool.set_aside(max(num_bytes, 1))
        except (MemoryError, RuntimeError) as error:
            problem = str(error)
        found = [f"rank {rank}: {said}" for rank, said in enumerate(self._comm.all_gather_object(problem)) if said]
        if found:
            raise OffloadError(f"the buffers of an update could not be taken under offload_host_bytes: {found[0]}")

    # Sharing ---------------------------------------------------------------------------------------------------------

    def _share(self) -> io.Ledger | None:
        folder: Path | None = None
        said = ""
        try:
            if self._comm.rank == self._members[0] and len(self._members) > 1:
                folder, said = self._make()
            # A rank that fails says so: the others are waiting for it.
            heard: str = self._comm.all_gather_object(said)[self._members[0]]
            ledger, problem = self._join(heard) if len(self._members) > 1 else (None, "")
            problems: list[str] = self._comm.all_gather_object(problem)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if found:
            raise OffloadError(
                f"the ranks of a node cannot share the account of offload_host_bytes: {found[0]}. Ranks are taken to "
                f"be on the nodes {list(self._nodes)}: give ranks_per_node= if that is not so. Those of a node need a "
                f"folder for temporary files that all of them see (here {_folder()!r}); ranks_per_node=1 gives each "
                "rank a cap of its own."
            )
        return ledger

    def _make(self) -> tuple[Path | None, str]:
        """The folder of a new file, and three lines for the others: what went wrong, this machine, the file."""
        folder: Path | None = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="zoo-ledger-", dir=_folder()))  # mode 0700
            io.Ledger(folder / "ledger", self.capacity_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            return folder, f"{' '.join(str(error).split())}\n\n"
        return folder, f"\n{_machine()}\n{folder / 'ledger'}"

    def _join(self, heard: str) -> tuple[io.Ledger | None, str]:
        first = self._members[0]
        problem, machine, path = heard.split("\n", 2)
        if problem:
            return None, problem if self._comm.rank == first else ""
        if machine != _machine():
            return None, f"it is on another machine than rank {first}"
        try:
            return io.Ledger(path, self.capacity_bytes), ""
        except (ValueError, RuntimeError) as error:
            return None, str(error)


def _ranks_of_a_node(config: ZeroConfig) -> int | None:
    """Of all groups, as far as they were named."""
    given = config.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if dist.is_initialized():
        given = min(given, dist.get_world_size())
    return given or None


def _folder() -> str:
    # A file in memory is never written to a disk. Otherwise TMPDIR or what the system has.
    return str(_IN_MEMORY) if os.access(_IN_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _machine() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
