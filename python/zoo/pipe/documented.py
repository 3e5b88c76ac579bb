"""What else is documented of a PipelineModule: names of files by layer, process groups, gradients without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from zoo.pipe.grid import PipelineParallelGrid
    from zoo.pipe.topology import ProcessTopology

__all__ = ["Documented"]


class Documented:
    """A part of :class:`~zoo.pipe.module.PipelineModule`.

    Attributes:
        tied_ranks: key of each tied parameter → pipeline ranks that have it, if there are several.
        tied_parameters: those of this rank, by key.
    """

    _topology: ProcessTopology
    _calls: dict[int, Any]
    stage_id: int
    tied_ranks: dict[str, tuple[int, ...]]
    tied_parameters: dict[str, nn.Parameter]
    _grid: PipelineParallelGrid | None = None
    _sharded = False

    def mpu(self) -> PipelineParallelGrid:
        """The process groups of the topology. The first call makes them: collective over all ranks of the job.

        Raises:
            ValueError: no process group.
        """
        if self._grid is None:
            from zoo.pipe.grid import PipelineParallelGrid

            self._grid = PipelineParallelGrid(self._topology)
        return self._grid

    def allreduce_tied_weight_gradients(self) -> None:
        """``.grad`` of each tied parameter = the sum over the pipeline ranks that have it; a missing one is 0.

        For a module that is trained without an engine, between backward and the step: those that ``tied_weight_attr``
        names. An engine does it by itself, for all parameters of a tied module.
        Collective over the ranks of a pipeline; the first call is so over all ranks of the job (:meth:`mpu`).

        Raises:
            RuntimeError: an engine has the module.
        """
        if self._sharded:
            raise RuntimeError(
                "allreduce_tied_weight_gradients of a module that an engine has, which adds these gradients up itself "
                "in every step: leave the call out."
            )
        if not self.tied_ranks:
            return
        from zoo.comm import Communicator

        comm = Communicator(self.mpu().get_pipe_parallel_group())
        for key, ranks in self.tied_ranks.items():
            if self.stage_id in ranks:
                _sum(comm, self.tied_parameters[key], self.stage_id, ranks)

    def ckpt_prefix(self, checkpoints_path: str | Path, tag: str) -> str:
        """What the names of all files of this rank begin with, in checkpoints that have a file for each of them.

        ``PATH/TAG/module-pipe_01-model_00``: the coordinates on all axes but "data". These three methods are for
        scripts that read or write such files; zoo's own checkpoints know no stages and load at any number of them.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        where = self._topology.get_rank_repr(rank, omit_axes=("data",))
        return str(Path(checkpoints_path, tag, "-".join(["module", where] if where else ["module"])))

    def ckpt_layer_path(self, ckpt_dir: str | Path, local_layer_idx: int) -> str:
        """The file of a layer: ``DIR/layer_03-model_00-model_states.pt``, with its number in the whole model and the
        coordinates on all axes but "pipe" and "data".

        Args:
            local_layer_idx: of this rank's layers, from 0.

        Raises:
            ValueError: this rank has fewer layers.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        where = self._topology.get_rank_repr(rank)
        return str(Path(ckpt_dir, "-".join([self._layer_file(local_layer_idx), *([where] if where else []), _STATES])))

    def ckpt_layer_path_list(self, ckpt_dir: str | Path, local_layer_idx: int) -> list[str]:
        """The files that there are of a layer, those of all tensor-parallel ranks, sorted; see
        :meth:`ckpt_layer_path`."""
        return sorted(map(str, Path(ckpt_dir).glob(f"{self._layer_file(local_layer_idx)}-*{_STATES}")))

    def _layer_file(self, local_layer_idx: int) -> str:
        own = sorted(self._calls)
        if not 0 <= local_layer_idx < len(own):
            raise ValueError(
                f"local_layer_idx={local_layer_idx}; this rank has {len(own)} layers, 0 to {len(own) - 1} locally."
            )
        return f"layer_{own[local_layer_idx]:02d}"


_STATES = "model_states.pt"


def _sum(comm: Any, parameter: nn.Parameter, me: int, ranks: tuple[int, ...]) -> None:
    """Over pipeline ranks, in their order: the first one adds, and tells the others."""
    total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
    first, *others = ranks
    if me == first:
        for rank in others:
            received = torch.empty_like(total)
            comm.recv(received, rank).wait()
            total += received
        for rank in others:
            comm.send(total, rank).wait()
    else:
        comm.send(total, first).wait()
        comm.recv(total, first).wait()
    parameter.grad = total
