"""What a program may ask an engine of its configuration: methods that return one value each."""

from __future__ import annotations

from typing import Any

import torch

from zoo.deepspeed.adapters.documents import get_log_level
from zoo.deepspeed.adapters.optimizer import OptimizerView
from zoo.deepspeed.adapters.sections import get_zero_config
from zoo.engine import Engine

# Method of the engine → dotted path in zoo's configuration.
_PATHS = {
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "sparse_gradients_enabled": "sparse_gradients",
    "communication_data_type": "communication_data_type",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.model_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
}


class Questions:
    """The part of ``DeepSpeedEngine`` that answers."""

    engine: Engine
    optimizer: OptimizerView | None
    _document: dict[str, Any]

    def _at(self, path: str) -> Any:
        value: Any = self.engine.config
        for key in path.split("."):
            value = getattr(value, key)
        return value

    def train_batch_size(self) -> int:
        """Samples in one step, all ranks."""
        return self.engine.train_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one step."""
        return self.engine.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches in a step."""
        self.engine.set_train_batch_size(train_batch_size)

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples of a step, samples of a micro-batch on one rank, micro-batches of a step)."""
        return self.train_batch_size(), self._at("train_micro_batch_size_per_gpu"), self.gradient_accumulation_steps()

    def log_level(self) -> str | None:
        """``log_level`` of the configuration; None where it does not say."""
        level: str | None = get_log_level(self._document)
        return level

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the micro-batches of a step; otherwise each ``step()`` is a whole one."""
        return bool(self._document.get("managed_gradient_accumulation", True))

    def dataloader_drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return bool(self._document.get("dataloader_drop_last", False))

    def zero_optimization(self) -> bool:
        """Whether a stage above 0 is asked for."""
        return bool(self._at("zero_optimization.stage") > 0)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether a rank keeps only its part of gradients."""
        return bool(self._at("zero_optimization.stage") >= 2)

    def zero_optimization_partition_weights(self) -> bool:
        """Whether a rank keeps only its part of parameters."""
        return bool(self._at("zero_optimization.stage") >= 3)

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states are in host memory."""
        return bool(self._at("zero_optimization.offload_optimizer.device") == "cpu")

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the CPU updates."""
        return bool(self._at("zero_optimization.offload_optimizer.device") in ("cpu", "nvme"))

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they were added up over ranks."""
        return not self._at("prescale_gradients")

    def coalesce_grad_reduction(self) -> bool:
        """False: reductions of several backwards are not put together; ``no_sync`` does it."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.optimizer is not None and self.optimizer.dynamic_loss_scale

    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self.optimizer is None else self.optimizer.cur_scale

    def optimizer_name(self) -> str | None:
        """Its type in the configuration, in lower case."""
        section = self.engine.config.optimizer
        return None if section is None else str(section.type).lower()

    def scheduler_name(self) -> str | None:
        """Its type in the configuration."""
        section = self.engine.config.scheduler
        return None if section is None else str(section.type)

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self.engine.get_lr()

    def get_type(self) -> list[Any]:
        """The types of groups: "type", where a group has one."""
        return [] if self.optimizer is None else [g.get("type") for g in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum or betas of each group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [g["betas"] if "betas" in g else g.get("momentum", 0.0) for g in groups]

    @property
    def basic_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.engine.device

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        import os

        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return int(self.engine.sharded.everyone.rank)

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return int(self.engine.sharded.everyone.size)

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return int(self.engine.comm.size)

    @property
    def data_parallel_group(self) -> Any:
        """The data-parallel ranks."""
        return getattr(self.engine.comm, "group", None)

    @property
    def seq_data_parallel_group(self) -> Any:
        """The data-parallel ranks."""
        return self.data_parallel_group

    @property
    def seq_parallel_group(self) -> Any:
        """None: sequences are split by an axis of the mesh."""
        return None

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return _axis(self.engine.mesh, "sequence")

    def autotp_size(self) -> int:
        """Ranks that share a layer by the configuration's own doing; none do."""
        return 0

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts."""
        return any(type(m).__module__.startswith("zoo.moe") for m in self.engine.module.modules())

    @property
    def monitor(self) -> Any:
        """What takes records to sinks."""
        return self.engine.feed

    @property
    def flops_profiler(self) -> None:
        """None: zoo has no profiler yet."""
        return None

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return getattr(self.engine.module, "_compiled_call_impl", None) is not None


def _axis(mesh: Any, name: str) -> int:
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.size(names.index(name))) if name in names else 1


def _method(name: str, path: str) -> Any:
    section, _, key = path.partition(".")

    def ask(self: Questions) -> Any:
        found = self._at(path)
        if found is None and section == "zero_optimization":  # zoo finds out by itself; programs want a number
            return getattr(get_zero_config(self._document), key)
        return found

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = f"``{path}`` of the configuration."
    return ask


for _name, _path in _PATHS.items():
    setattr(Questions, _name, _method(_name, _path))
