"""What a program may ask an engine of its configuration: methods that return one value each."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

import torch

from zoo.config.section import is_own
from zoo.deepspeed.adapters.configuration.sections import get_zero_config
from zoo.deepspeed.adapters.root.config_getters_of_features import QuestionsOfFeatures
from zoo.engine import Engine
from zoo.parts.hooks import is_compiled
from zoo.shard.config import ZeroConfig

_log = logging.getLogger("zoo.deepspeed")
_told: set[tuple[str, str]] = set()

_OF_LAYERS = ("model", "tensor")
"""Axes of a mesh whose ranks share each layer."""

# Method of the engine → dotted path in zoo's configuration.
_PATHS = {
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "steps_per_print": "steps_per_print",
    "gradient_clipping": "gradient_clipping",
    "is_deepcompile_enabled": "compile.deepcompile",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "sparse_gradients_enabled": "sparse_gradients",
    "zero_optimization_stage": "zero_optimization.stage",
}

# Methods of the engine that are attributes of DeepSpeedConfig.
_OF_DOCUMENT = (
    "dump_state", "memory_breakdown", "optimizer_params", "scheduler_params", "load_universal_checkpoint",
    "use_node_local_storage", "checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio_config",
)  # fmt: skip
# Methods of the engine that are not called "zero_" and their key of the section zero_optimization.
_OTHER_NAMES = {
    "enable_sanity_checks": "is_sanity_checks_enabled",
    "use_multi_rank_bucket_allreduce": "zero_multi_rank_bucket_allreduce",
}


class Questions(QuestionsOfFeatures):
    """The part of ``DeepSpeedEngine`` that answers."""

    engine: Engine
    optimizer: Any
    _document: dict[str, Any]
    mpu: Any
    is_pipeline = pipeline_parallelism = False
    loaded_checkpoint_dp_world_size = loaded_checkpoint_mp_world_size = None

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer that updates. At stage 3 ``optimizer`` is an object without one too."""
        return self.engine.optimizer is not None

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> NoReturn:
        raise NotImplementedError(
            "DeepSpeedEngine._configure_optimizer(): initialize makes the optimizer; give it optimizer=, an instance "
            "or a callable parameters → optimizer."
        )

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
        from zoo.deepspeed.adapters.configuration.documents import get_log_level

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

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients travel: what the configuration says, or the parameters' type."""
        from zoo.deepspeed.adapters.configuration.documents import get_communication_data_type

        said: torch.dtype | None = get_communication_data_type(self._document)
        if said is not None:
            return said
        half = self._at("fp16.enabled")
        return torch.float16 if half else torch.bfloat16 if self._at("bf16.enabled") else torch.float32

    @property
    def enable_backward_allreduce(self) -> bool:
        """True. A program that adds gradients up over ranks itself needs an optimizer of its own.

        Setting it to False raises NotImplementedError.
        """
        return True

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value: bool) -> None:
        if not value:
            raise NotImplementedError(
                "engine.enable_backward_allreduce = False: zoo's step() reduces what backward has not. Leave the "
                "reduction to it; engine.coalesce_grad_reduction() puts it off, no_sync() at stages 0 and 1."
            )

    def curriculum_learning_enabled(self) -> bool:
        """Whether the configuration chooses samples by their difficulty."""
        section = (self._document.get("data_efficiency") or {}).get("data_sampling") or {}
        return bool((section.get("curriculum_learning") or {}).get("enabled", False))

    def random_ltd_enabled(self) -> bool:
        """Whether layers see a part of the tokens."""
        section = (self._document.get("data_efficiency") or {}).get("data_routing") or {}
        return bool((section.get("random_ltd") or {}).get("enabled", False))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Micro-batches of another size from now on, and as many of them in a step; a loader that there is goes on
        with its own.

        Raises:
            ValueError: no whole number above 0.
        """
        from zoo.engine.numbers import whole

        size = whole("set_train_micro_batch_size()", micro_batch_size)
        self.engine.config = self.engine.config.model_copy(
            update={"train_micro_batch_size_per_gpu": size, "train_batch_size": None}
        )

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.trains and self.optimizer.dynamic_loss_scale

    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.optimizer.cur_scale if self.trains else 1.0

    def optimizer_name(self) -> str | None:
        """Its type in the configuration, in lower case."""
        from zoo.deepspeed.adapters.configuration.documents import get_optimizer_name

        name = get_optimizer_name(self._document)
        return None if name is None else str(name).lower()

    def scheduler_name(self) -> str | None:
        """Its type in the configuration."""
        from zoo.deepspeed.adapters.configuration.documents import get_scheduler_name

        name = get_scheduler_name(self._document)
        return None if name is None else str(name)

    def get_lr(self) -> list[float]:
        """The learning rate of each group; empty without an optimizer."""
        return self.engine.get_lr() if self.trains else []

    def get_type(self) -> list[Any]:
        """The types of groups: "type", 0.0 where a group has none."""
        return [g.get("type", 0.0) for g in self.optimizer.param_groups] if self.trains else []

    def get_mom(self) -> list[Any]:
        """The momentum or betas of each group."""
        groups = self.optimizer.param_groups if self.trains else []
        return [g["betas"] if "betas" in g else g.get("momentum", 0.0) for g in groups]

    @property
    def basic_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self.optimizer.optimizer if self.trains else None

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
    def mp_world_size(self) -> int:
        """Ranks that share each layer: of the program's ``mpu``, or of the axes "model" and "tensor". 1 for an mpu
        whose ranks share sequences: they have the same layers."""
        if hasattr(self.mpu, "initialize_sequence_parallel"):
            return 1
        ask = getattr(self.mpu, "get_model_parallel_world_size", None) or getattr(
            self.mpu, "get_tensor_model_parallel_world_size", None
        )
        return int(ask()) if ask is not None else math.prod(_axis(self.engine.mesh, axis) for axis in _OF_LAYERS)

    @property
    def checkpoint_mp_rank(self) -> int:
        """This process's number among the :attr:`mp_world_size` ranks that share each layer. DeepSpeed names its files
        by it; zoo's have no such names."""
        if hasattr(self.mpu, "initialize_sequence_parallel"):
            return 0
        ask = getattr(self.mpu, "get_model_parallel_rank", None) or getattr(
            self.mpu, "get_tensor_model_parallel_rank", None
        )
        if ask is not None:
            return int(ask())
        place, mesh = 0, self.engine.mesh
        for axis in _OF_LAYERS:
            size = _axis(mesh, axis)
            place = place * size + (int(mesh.get_local_rank(axis)) if size > 1 else 0)
        return place

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.dp_world_size

    @property
    def num_experts(self) -> list[int]:
        """Of each mixture of experts."""
        return [int(layer.num_experts) for layer in self.moe_layers]

    @property
    def param_names(self) -> dict[Any, str]:
        """Parameter → name."""
        return {parameter: name for name, parameter in self.engine.module.named_parameters()}

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks."""
        return int(self.engine.comm.size)

    @property
    def data_parallel_group(self) -> Any:
        """The data-parallel ranks; None where the engine is alone and nobody has made a group for it."""
        asked = getattr(self.mpu, "get_data_parallel_group", None)
        return asked() if asked is not None else getattr(self.engine.comm, "group", None)

    @property
    def seq_data_parallel_group(self) -> Any:
        """The data-parallel ranks."""
        return self.data_parallel_group

    @property
    def seq_parallel_group(self) -> Any:
        """The ranks that share a sequence; None where none do."""
        asked = getattr(self.mpu, "get_sequence_parallel_group", None)
        if asked is not None:
            return asked()
        return self.engine.mesh.get_group("sequence") if self.sequence_parallel_size > 1 else None

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return _axis(self.engine.mesh, "sequence")

    def autotp_size(self) -> int:
        """Ranks that have parts of a layer by the section ``tensor_parallel``; 0 where it does not ask for any."""
        asked = getattr(self.engine.config, "tensor_parallel", None)
        return 0 if asked is None else int(asked.autotp_size or asked.degree * (asked.degree > 1))

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts."""
        kinds = {type(module) for module in self.engine.module.modules()}  # of models of transformers, subclasses
        return any(base.__module__.startswith("zoo.moe") for kind in kinds for base in kind.__mro__)

    @property
    def monitor(self) -> Any:
        """Takes events of the program to the sinks that get each step's record."""
        from zoo.deepspeed.adapters.utilities.monitors import FeedMonitor

        return FeedMonitor(self.engine.feed)

    @property
    def flops_profiler(self) -> Any:
        """The profiler of the section ``flops_profiler``; None where it is off."""
        return getattr(self.engine.parts.get("flops_profiler"), "profiler", None)

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled, or a part of it: by :meth:`compile`, the configuration or the program."""
        return any(map(is_compiled, self.engine.module.modules()))

    def is_deepcompile_active(self) -> bool:
        """Whether the model is called as one graph, where it can be one."""
        return self.engine.sharded.runtime.compiled.has_whole_graph


def _axis(mesh: Any, name: str) -> int:
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.size(names.index(name))) if name in names else 1


def _method(name: str, doc: str, read: Callable[[Any], Any]) -> Any:
    def ask(self: Questions) -> Any:
        return read(self)

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = doc
    return ask


def _of_zoo(path: str) -> Callable[[Any], Any]:
    return lambda engine: engine._at(path)


def _of_document(attribute: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine._config, attribute)


def _obeyed(key: str) -> Callable[[Any], Any]:
    """What a key that zoo carries out is for this engine."""

    def read(engine: Any) -> Any:
        section = engine.engine.config.zero_optimization
        if key in ("reduce_bucket_size", "allgather_bucket_size"):
            return section.bucket_size
        if key in ("prefetch_bucket_size", "max_live_parameters"):
            given = getattr(section, key)
            return engine.engine.sharded.obeyed[key] if given is None else given
        if key in ("offload_param", "offload_optimizer"):
            found = getattr(get_zero_config(engine._document), key)
            return None if getattr(found, "device", None) == "none" else found
        return getattr(section, key)

    return read


def _said(key: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(get_zero_config(engine._document), key)


def _add_questions() -> None:
    for name, path in _PATHS.items():
        setattr(Questions, name, _method(name, f"``{path}`` of the configuration.", _of_zoo(path)))
    for name in _OF_DOCUMENT:
        setattr(Questions, name, _method(name, f"``{name}`` of the configuration.", _of_document(name)))
    for key, field in ZeroConfig.model_fields.items():
        if not is_own(field) and key != "stage":
            doc = f"``zero_optimization.{key}``, as this engine obeys it."
            name = key if key.startswith("zero_") else f"zero_{key}"
            setattr(Questions, name, _method(name, doc, _obeyed(key)))
    for key, fate in ZeroConfig.fates.items():
        if fate.what != "translated" and fate.kind is not dict:
            name = _OTHER_NAMES.get(key, f"zero_{key}")
            doc = f"What the configuration says; it changes nothing: {fate.text}."
            setattr(Questions, name, _method(name, doc, _said(key)))


_add_questions()


def tell_of_replaced(kind: type) -> None:
    """Warn, once each, of methods with a leading underscore that a program has put onto zoo's classes."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith("zoo.deepspeed."):
            continue
        for name, value in vars(owner).items():
            strange = isinstance(value, FunctionType) and not value.__module__.startswith("zoo.")
            if strange and name.startswith("_") and not name.endswith("__") and (owner.__name__, name) not in _told:
                _told.add((owner.__name__, name))
                _log.warning(
                    "%s.%s is replaced by a function of %s: zoo's engine calls none of DeepSpeed's internal methods, "
                    "so it has no effect.",
                    owner.__name__, name, value.__module__,
                )  # fmt: skip
