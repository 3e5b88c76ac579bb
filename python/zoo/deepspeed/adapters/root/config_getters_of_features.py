"""More of what a program may ask an engine: who it is among the ranks, what it was given, which features are on."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zoo.deepspeed.adapters.communication import groups
from zoo.deepspeed.adapters.root.settings import SettableEngine, refuse_in_configuration
from zoo.deepspeed.adapters.utilities.timers import SynchronizedWallClockTimer
from zoo.engine.building import DTYPES

if TYPE_CHECKING:
    from zoo.deepspeed.adapters.configuration.documents import DeepSpeedConfig


# Whether features are on that zoo does not have.
_OFF = ("autotuning_enabled", "super_offload", "fp16_master_weights_and_gradients")


class QuestionsOfFeatures(SettableEngine):
    """The part of ``DeepSpeedEngine`` that answers them.

    Attributes:
        client_optimizer, client_lr_scheduler, training_data: as given to ``initialize``; None otherwise.
        zenflow: False: there is none.
    """

    engine: Any
    optimizer: Any
    mpu: Any
    _document: dict[str, Any]
    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    training_data: Any = None
    zenflow = False

    @property
    def _config(self) -> DeepSpeedConfig:
        """The document as attributes, with DeepSpeed's defaults; sizes of batches and the norm to clip to are those
        that hold now. It is not set: nothing would follow."""
        found = self._read_document
        vars(found).update(
            train_batch_size=self.engine.train_batch_size,
            train_micro_batch_size_per_gpu=self.engine.config.train_micro_batch_size_per_gpu,
            gradient_accumulation_steps=self.engine.accumulation,
            gradient_clipping=self.engine.config.gradient_clipping,
        )
        return found

    @functools.cached_property
    def _read_document(self) -> DeepSpeedConfig:
        from zoo.deepspeed.adapters.configuration.documents import DeepSpeedConfig

        ranks = SimpleNamespace(get_data_parallel_world_size=lambda: self.engine.batch_ranks)

        class ReadConfig(DeepSpeedConfig):
            def __setattr__(self, name: str, value: Any) -> None:
                if hasattr(self, "_is_read"):
                    refuse_in_configuration(name, value)
                super().__setattr__(name, value)

        found = ReadConfig(self._document, ranks)
        vars(found)["_is_read"] = True
        return found

    @property
    def dist_backend(self) -> str | None:
        """Of the job's process group; None without one."""
        return str(dist.get_backend()) if dist.is_initialized() else None

    @functools.cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """Timers of the program's own, by name; ``wall_clock_breakdown`` has zoo's."""
        return SynchronizedWallClockTimer()

    def get_data_parallel_rank(self) -> int:
        """This process's number among those whose samples differ."""
        return groups.get_data_parallel_rank()

    def get_tensor_parallel_rank(self) -> int:
        """This process's number among those that share its layers."""
        return groups.get_tensor_model_parallel_rank()

    def get_model_parallel_rank(self) -> int:
        """The same, under its older name."""
        return groups.get_model_parallel_rank()

    def get_sequence_parallel_group(self) -> Any:
        """The ranks that share a sequence; None where none do."""
        return self.seq_parallel_group  # type: ignore[attr-defined]

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any) -> list[torch.Tensor]:
        """``value`` of each rank of a group. A collective of it."""
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"all_gather_scalar got {value!r}, a {type(value).__name__}; it takes a tensor.")
        found = [torch.zeros_like(value) for _ in range(dist.get_world_size(dp_group))]
        dist.all_gather(found, value, group=dp_group)
        return found

    @property
    def moe_layers(self) -> list[Any]:
        """The mixtures of experts of the model."""
        return [m for m in self.engine.module.modules() if hasattr(m, "expert_group_name")]

    @property
    def gate_modules(self) -> list[Any]:
        """Their gates, each with its ``wg``."""
        return [layer.deepspeed_moe.gate for layer in self.moe_layers]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(of parameters, of gradients that are added up)."""
        half, brain = self._config.float16_config.enabled, self._config.bfloat16_config.enabled
        model = torch.float16 if half else torch.bfloat16 if brain else torch.float32
        said = self.engine.config.data_types.grad_accum_dtype
        return model, DTYPES[said] if said else model

    def bf16_master_weights_and_gradients(self) -> bool:
        """``bf16.bf16_master_weights_and_grads`` of the configuration."""
        return bool(self._config.bfloat16_config.bf16_master_weights_and_grads)

    def bf16_optimizer_states(self) -> bool:
        """``bf16.bf16_optimizer_states`` of the configuration."""
        return bool(self._config.bfloat16_config.bf16_optimizer_states)

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """``torch_autocast.dtype`` of the configuration."""
        found: torch.dtype | None = self._config.torch_autocast_dtype
        return found

    def initial_dynamic_scale(self) -> float:
        """What a dynamic loss scale begins with."""
        return float(self._config.float16_config.initial_dynamic_scale())

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How a dynamic loss scale follows overflows."""
        found: dict[str, Any] = self._config.float16_config.dynamic_loss_scale_args()
        return found

    def optimizer_legacy_fusion(self) -> bool:
        """``optimizer.legacy_fusion`` of the configuration."""
        return self._config.optimizer_legacy_fusion

    def _data(self, section: str) -> dict[str, Any]:
        return dict((self._document.get("data_efficiency") or {}).get(section) or {})

    def data_efficiency_enabled(self) -> bool:
        """Whether the section ``data_efficiency`` is on."""
        return bool((self._document.get("data_efficiency") or {}).get("enabled", False))

    def data_sampling_enabled(self) -> bool:
        """Whether its part ``data_sampling`` is."""
        return bool(self._data("data_sampling").get("enabled", False))

    def zero_partial_offload(self) -> float:
        """The part of optimizer states that ``offload_optimizer`` moves to the host."""
        offload = self._config.zero_config.offload_optimizer
        return 1.0 if offload is None else float(offload.ratio)

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states are on NVMe."""
        return bool(self.engine.config.zero_optimization.offload_optimizer.device == "nvme")

    def zenflow_config(self) -> None:
        """None: there is no ZenFlow."""

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether samples are asked for by their index."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether it is an ``IterableDataset``."""
        return isinstance(obj, torch.utils.data.IterableDataset)


def _no(name: str) -> Any:
    def ask(self: QuestionsOfFeatures) -> bool:
        return False

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = "False: zoo has no such feature."
    return ask


def _of_profiler(key: str) -> Any:
    def ask(self: QuestionsOfFeatures) -> Any:
        section: Any = getattr(self._config, "flops_profiler_config")  # noqa: B009
        return getattr(section, key)

    ask.__name__ = ask.__qualname__ = f"flops_profiler_{key}"
    ask.__doc__ = f"``flops_profiler.{key}`` of the configuration."
    return ask


_OF_PROFILER = (
    "enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
)  # fmt: skip
for _name in _OF_PROFILER:
    setattr(QuestionsOfFeatures, f"flops_profiler_{_name}", _of_profiler(_name))
for _name in _OFF:
    setattr(QuestionsOfFeatures, _name, _no(_name))
