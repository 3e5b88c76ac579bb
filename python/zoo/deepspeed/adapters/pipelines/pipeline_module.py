"""``PipelineModule``: that of :mod:`zoo.pipe` with the arguments and methods that DeepSpeed's has beside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.deepspeed.adapters.pipelines.pipeline_grid import PipelineParallelGrid
from zoo.pipe import PipelineModule as _PipelineModule
from zoo.pipe import ProcessTopology


class PipelineError(RuntimeError):
    """What a pipeline's engine refuses."""


class PipelineModule(_PipelineModule):
    """As :class:`zoo.pipe.PipelineModule`.

    Args:
        dynamic_shape: makes no difference: shapes of activations may change from batch to batch anyway.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
        partition_method: str | Sequence[float] = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None, dynamic_shape: bool = False, *, schedule: Any = "1f1b",
        mesh: Any = None,
    ) -> None:  # fmt: skip
        if (num_stages is not None or topology is not None) and not dist.is_initialized():
            from zoo import comm

            comm.init_distributed()  # which rank has which layers follows from the job
        super().__init__(
            layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method,
            activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers, schedule=schedule,
            mesh=mesh,
        )  # fmt: skip
        self.dynamic_shape = dynamic_shape
        tied_elsewhere = {
            id(self.tied_parameters[key]) for key, ranks in self.tied_ranks.items()
            if key in self.tied_parameters and self.stage_id != ranks[0]
        }  # fmt: skip
        for parameter in self.parameters():  # what norms are taken over counts those of other stages once
            parameter.ds_pipe_replicated = id(parameter) in tied_elsewhere  # type: ignore[attr-defined]
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def mpu(self) -> PipelineParallelGrid:
        """The process groups of the topology. The first call makes them: collective over all ranks of the job."""
        if not isinstance(self._grid, PipelineParallelGrid):
            self._grid = PipelineParallelGrid(self._topology)
        return self._grid

    @property
    def world_group(self) -> Any:
        """All ranks of the job; None without a process group."""
        return dist.group.WORLD

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """What this rank calls, in turn: modules, functions, and tied modules with their ``forward_fn``."""
        return [getattr(call, "as_given", call) for _, call in sorted(self._calls.items())]

    @property
    def fwd_map(self) -> dict[str, int]:
        """Name of a module of this rank → its place in :attr:`forward_funcs`; tied ones are in ``tied_modules``."""
        names = map(str, sorted(self._calls))
        return {name: place for place, name in enumerate(names) if name in self._modules}

    @property
    def tied_weight_attrs(self) -> dict[str, list[str]]:
        """Key of a tied module of this rank → the names of what it shares."""
        found: dict[str, list[str]] = {}
        for key in self.tied_parameters:
            module, name = key.split(".", 1)
            found.setdefault(module, []).append(name)
        return found

    @property
    def tied_comms(self) -> dict[str, dict[str, Any]]:
        """Key of a tied module that several ranks of this pipeline have → ``ranks``, all of the job's; ``group``, the
        whole pipeline's; ``weight_attr``; ``module``. The first call is collective, see :meth:`mpu`."""
        found: dict[str, dict[str, Any]] = {}
        for key, stages in self.tied_ranks.items():
            module, name = key.split(".", 1)
            if self.stage_id not in stages:
                continue
            comm = found.setdefault(
                module,
                {
                    "ranks": [self.mpu().stage_to_global(stage) for stage in stages],
                    "group": self.mpu().get_pipe_parallel_group(), "weight_attr": [],
                    "module": self.tied_modules[module],
                },
            )  # fmt: skip
            comm["weight_attr"].append(name)
        return found

    @property
    def parts(self) -> list[int]:
        """The number of the first layer of each stage, and that of all layers."""
        return list(self.bounds)

    def partitions(self) -> list[int]:
        """See :attr:`parts`."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that has a layer.

        Raises:
            ValueError: there is no such layer.
        """
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"stage_owner({layer_idx}); there are the layers 0 to {self.num_layers - 1}.")
        return self._rank_with(layer_idx)

    def num_pipeline_stages(self) -> int:
        """Ranks of a pipeline."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Activations of so many layers at a time are computed again in backward; 0: none.

        Raises:
            ValueError: a negative number.
        """
        if interval < 0:
            raise ValueError(f"set_checkpoint_interval({interval}); 0, or a number of layers.")
        self.activation_checkpoint_interval = interval

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Tied parameters of this rank that other ranks of its pipeline have too, each with the pipeline's group."""
        group = self.mpu().get_pipe_parallel_group() if self.tied_ranks else None
        return [(self.tied_parameters[key], group) for key, ranks in self.tied_ranks.items() if self.stage_id in ranks]
