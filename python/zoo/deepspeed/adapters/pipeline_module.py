"""``PipelineModule``: that of :mod:`zoo.pipe` with the arguments and methods that DeepSpeed's has beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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
