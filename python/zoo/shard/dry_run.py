"""Construction without memory: a plan for any number of ranks, on one process, of a model without values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.comm import DONE, CommsLog, Communicator, Handle


class DryRun(Communicator):
    """Stands for rank ``rank`` of ``size``: its collectives are counted and move nothing.

    Given as ``group=`` to a ZeRO optimizer together with a model on the meta device, it makes an optimizer that cannot
    train, but whose :meth:`~zoo.zero.ZeroOptimizer.forecast` is that of the real one on devices of ``device_type``.
    """

    def __init__(self, size: int, rank: int = 0, *, device_type: str = "cpu") -> None:
        if type(size) is not int or type(rank) is not int or not 0 <= rank < size:
            raise ValueError(
                f"DryRun got size={size!r}, rank={rank!r}; whole numbers with 0 <= rank < size are needed."
            )
        self.group, self.check, self.log = None, False, CommsLog()
        self.rank, self.size, self.backend, self.device_type = rank, size, "dry", device_type
        self._ranks = list(range(size))
        self._begin(owns=False)
        self.know_nodes(None)

    def partition(self, groups: Sequence[Sequence[int]], *, name: str) -> DryRun:
        """As :meth:`zoo.comm.Communicator.partition`."""
        mine = next(list(group) for group in groups if self.rank in group)
        found = DryRun(len(mine), mine.index(self.rank), device_type=self.device_type)
        found.log = self.log
        if self.nodes is not None:
            found.know_nodes([self.nodes[m] for m in mine])
        return found

    def share_memory(self) -> bool:
        """There is none."""
        return False

    def _move(self, *tensors: Any, **options: Any) -> Handle:
        """Nothing is gathered, reduced or sent."""
        return DONE

    all_gather = reduce_scatter = all_to_all = all_reduce = broadcast = _move

    def all_gather_object(self, value: Any) -> list[Any]:
        """All ranks say the same."""
        return [value] * self.size

    def agree(self, what: str, value: str, device: Any = None) -> None:
        """There is nobody to disagree."""


class DryNvmeFile:
    """The size of a file that is not made."""

    def __init__(self, sizes: list[int]) -> None:
        from zoo.shard.offload.scratch import round_up

        self.num_bytes = sum(map(round_up, sizes))

    def drop(self, region: int) -> None:
        """There is nothing in it."""


class DryScratch:
    """Files that are not made, buffers that are not allocated."""

    def __init__(self) -> None:
        self._nvme_files: list[DryNvmeFile] = []

    def nvme_file(self, folder: Path | None, name: str, sizes: list[int]) -> Any:
        """Remembers the size."""
        made = DryNvmeFile(sizes)
        self._nvme_files.append(made)
        return made

    def drop(self, nvme_file: Any) -> None:
        """Forgets the size."""
        self._nvme_files.remove(nvme_file)

    def check_room(self, num_bytes: int) -> None:
        """There is always room."""

    def nvme_bytes(self) -> int:
        """Bytes of all files."""
        return sum(nvme_file.num_bytes for nvme_file in self._nvme_files)

    def close(self) -> None:
        """Nothing is open."""
