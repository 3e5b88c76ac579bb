"""The process groups of a topology: what model code and checkpoints call the ``mpu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.pipe.topology import PipeDataParallelTopology, ProcessTopology

__all__ = ["PipelineParallelGrid"]


class PipelineParallelGrid:
    """Where this rank stands in a topology, and its process groups.

    *pipe*: ranks with the other stages of the same replica. *data*: ranks with the same stage and tensor slice that
    see other samples. *slice*: ranks with parts of the same layers (the axis "model"). *model*: all ranks of one
    replica, pipe and slice together. An axis that the topology does not have has one rank. Ranks are global ones, of
    the default group.

    Making one is a collective over all ranks of ``process_group``, and over no others.

    Args:
        topology: with an axis "pipe" or "data" or both; others may be there too. None: two axes, pipe and data, which
        get
            the prime factors of the number of ranks in turn, pipe first.
        process_group: whose ranks stand in the topology, in its order; None: the default group.

    Raises:
        ValueError: no process group, or a topology for another number of ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        import torch.distributed as dist  # the rest of what is arithmetic here does without torch

        from zoo.comm.groups import make_groups

        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("a grid makes process groups: call zoo.comm.init_distributed() before.")
        ranks = dist.get_process_group_ranks(process_group if process_group is not None else dist.group.WORLD)
        self._topology = topology if topology is not None else _near_square(len(ranks))
        if self._topology.world_size() != len(ranks):
            raise ValueError(
                f"a grid got {self._topology}, for {self._topology.world_size()} ranks, and a process group of "
                f"{len(ranks)}: make the sizes of the axes fit."
            )
        self.global_rank = dist.get_rank()
        self.world_size = len(ranks)
        self._global = ranks
        self._position = ranks.index(self.global_rank)
        self._coord = self._topology.get_coord(self._position)
        self._lists = {
            "pipe": _along(self._topology, ["pipe"]),
            "data": _along(self._topology, ["data"]),
            "slice": _along(self._topology, ["model"]),
            "model": _along(self._topology, ["pipe", "model"]),
        }
        self._groups = {
            name: make_groups([[ranks[p] for p in positions] for positions in lists], name, process_group, alone=True)
            for name, lists in self._lists.items()
        }

    def _members(self, name: str) -> list[int]:
        """Global ranks of this rank's group."""
        return next([self._global[p] for p in lists] for lists in self._lists[name] if self._position in lists)

    def _coordinate(self, axis: str) -> int:
        return int(getattr(self._coord, axis, 0))

    # -- the whole --------------------------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Who stands where."""
        return self._topology

    def get_global_rank(self) -> int:
        """This rank in the default group."""
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The global rank with stage ``stage_id`` and otherwise the coordinates of this rank, or those in ``kwargs``.

        Raises:
            ValueError: nobody is there.
        """
        where = {**self._coord._asdict(), "pipe": stage_id, **kwargs}
        if "pipe" not in self._topology.axes:
            if stage_id != 0:
                raise ValueError(
                    f"stage_to_global got stage_id={stage_id} of a topology without an axis 'pipe'; it is 0."
                )
            del where["pipe"]
        return self._global[self._topology.get_rank(**where)]

    # -- pipe -------------------------------------------------------------------------------------------------------

    def get_stage_id(self) -> int:
        """The coordinate on the axis "pipe"."""
        return self._coordinate("pipe")

    def get_pipe_parallel_rank(self) -> int:
        """The same."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """Ranks of the pipeline."""
        return max(1, self._topology.get_dim("pipe"))

    def get_pipe_parallel_group(self) -> Any:
        """This rank's pipeline."""
        return self._groups["pipe"]

    @property
    def pipe_parallel_size(self) -> int:
        """Ranks of the pipeline."""
        return self.get_pipe_parallel_world_size()

    @property
    def is_first_stage(self) -> bool:
        """This rank is the first of its pipeline."""
        return self.get_stage_id() == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank is the last of its pipeline."""
        return self.get_stage_id() == self.get_pipe_parallel_world_size() - 1

    # -- data -------------------------------------------------------------------------------------------------------

    def get_data_parallel_id(self) -> int:
        """The coordinate on the axis "data"."""
        return self._coordinate("data")

    def get_data_parallel_rank(self) -> int:
        """The same."""
        return self.get_data_parallel_id()

    def get_data_parallel_world_size(self) -> int:
        """Replicas."""
        return max(1, self._topology.get_dim("data"))

    def get_data_parallel_group(self) -> Any:
        """Ranks that reduce their gradients with this one."""
        return self._groups["data"]

    @property
    def data_parallel_size(self) -> int:
        """Replicas."""
        return self.get_data_parallel_world_size()

    # -- model: pipe and slice together -----------------------------------------------------------------------------

    def get_model_parallel_rank(self) -> int:
        """This rank's place among the ranks of its replica."""
        return self._members("model").index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """Ranks of a replica: pipe times slice."""
        return len(self._members("model"))

    def get_model_parallel_group(self) -> Any:
        """All ranks of this replica: who must agree on a norm, or on an overflow."""
        return self._groups["model"]

    @property
    def model_parallel_size(self) -> int:
        """Ranks of a replica."""
        return self.get_model_parallel_world_size()

    # -- slice: tensor parallelism ----------------------------------------------------------------------------------

    def get_slice_parallel_rank(self) -> int:
        """The coordinate on the axis "model"."""
        return self._coordinate("model")

    def get_slice_parallel_world_size(self) -> int:
        """Ranks that share a layer."""
        return max(1, self._topology.get_dim("model"))

    def get_slice_parallel_group(self) -> Any:
        """Ranks that share this rank's layers."""
        return self._groups["slice"]

    @property
    def slice_parallel_size(self) -> int:
        """Ranks that share a layer."""
        return self.get_slice_parallel_world_size()


def _along(topology: ProcessTopology, axes: Sequence[str]) -> list[list[int]]:
    """Groups of ranks that differ in these axes alone; each rank in one, of its own where there are no such axes."""
    others = [axis for axis in topology.axes if axis not in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size()):
        coord = topology.get_coord(rank)
        found.setdefault(tuple(getattr(coord, axis) for axis in others), []).append(rank)
    return list(found.values())


def _near_square(num_ranks: int) -> ProcessTopology:
    sizes, left, factor, turn = [1, 1], num_ranks, 2, 0
    while left > 1:
        if left % factor:
            factor += 1
            continue
        sizes[turn] *= factor
        left, turn = left // factor, 1 - turn
    return PipeDataParallelTopology(*sizes)
