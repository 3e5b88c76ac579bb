"""``PipelineParallelGrid``: that of :mod:`zoo.pipe` with the attributes and older names that DeepSpeed's has beside."""

from __future__ import annotations

from typing import Any

from zoo.pipe import PipelineParallelGrid as _Grid


class PipelineParallelGrid(_Grid):
    """As :class:`zoo.pipe.PipelineParallelGrid`. ``…_group`` and ``…_groups`` are lists of ranks, ``…_proc_group`` the
    process group; *dp*: data, *pp*: pipe, *slice*: the axis "model", *ds_model*: all ranks of a replica.
    """

    def _all(self, name: str) -> list[list[int]]:
        return [[self._global[p] for p in positions] for positions in self._lists[name]]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share a layer; DeepSpeed leaves the stages out here."""
        return self.get_slice_parallel_world_size()

    @property
    def stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self.get_stage_id()

    @property
    def data_parallel_id(self) -> int:
        """Which replica this rank belongs to."""
        return self.get_data_parallel_id()

    @property
    def dp_group(self) -> list[int]:
        """Ranks that reduce their gradients with this one."""
        return self._members("data")

    @property
    def dp_groups(self) -> list[list[int]]:
        """Those lists of all ranks; empty without an axis "data"."""
        return self._axis_lists("data")

    @property
    def dp_proc_group(self) -> Any:
        """See :meth:`get_data_parallel_group`."""
        return self.get_data_parallel_group()

    @property
    def pp_group(self) -> list[int]:
        """This rank's pipeline."""
        return self._members("pipe")

    @property
    def pipe_groups(self) -> list[list[int]]:
        """All pipelines."""
        return self._axis_lists("pipe")

    @property
    def pp_proc_group(self) -> Any:
        """See :meth:`get_pipe_parallel_group`."""
        return self.get_pipe_parallel_group()

    @property
    def p2p_groups(self) -> list[list[int]]:
        """For each rank: it, and the next one of its pipeline; after the last comes the first."""
        found = {}
        for pipeline in self._all("pipe"):
            for place, rank in enumerate(pipeline):
                found[rank] = [rank, pipeline[(place + 1) % len(pipeline)]]
        return [found[rank] for rank in self._global]

    @property
    def slice_group(self) -> list[int]:
        """Ranks that share this rank's layers."""
        return self._members("slice")

    @property
    def slice_proc_group(self) -> Any:
        """See :meth:`get_slice_parallel_group`."""
        return self.get_slice_parallel_group()

    @property
    def ds_model_rank(self) -> int:
        """This rank's place in its replica."""
        return self.get_model_parallel_rank()

    @property
    def ds_model_world_size(self) -> int:
        """Ranks of a replica."""
        return self.get_model_parallel_world_size()

    @property
    def ds_model_proc_group(self) -> Any:
        """See :meth:`get_model_parallel_group`."""
        return self.get_model_parallel_group()

    def _axis_lists(self, axis: str) -> list[list[int]]:
        return [[self._global[p] for p in positions] for positions in self._topology.get_axis_comm_lists(axis)]

    def get_data_parallel_group_ranks(self) -> list[int]:
        """See :attr:`dp_group`."""
        return self.dp_group

    def get_pipeline_model_parallel_rank(self) -> int:
        """See :meth:`get_pipe_parallel_rank`."""
        return self.get_pipe_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """See :meth:`get_pipe_parallel_world_size`."""
        return self.get_pipe_parallel_world_size()

    def get_tensor_model_parallel_rank(self) -> int:
        """See :meth:`get_slice_parallel_rank`."""
        return self.get_slice_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """See :meth:`get_slice_parallel_world_size`."""
        return self.get_slice_parallel_world_size()
