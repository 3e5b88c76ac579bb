"""``PipelineEngine``: zoo's engine of a pipeline under DeepSpeed's name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zoo.deepspeed.adapters.pipelines.pipeline_module import PipelineError
from zoo.deepspeed.adapters.root.data import loader_of
from zoo.deepspeed.adapters.root.engine import DeepSpeedEngine
from zoo.engine import RepeatingLoader
from zoo.pipe.schedules.instructions import (
    BackwardPass,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

_log = logging.getLogger("zoo.deepspeed")


class _Instructions(dict[type[PipeInstruction], Callable[..., NoReturn]]):
    """Instruction → what carries it out. Programs that put functions of their own into DeepSpeed's are told that zoo
    would not call them."""

    def __setitem__(self, kind: Any, function: Any) -> NoReturn:
        raise NotImplementedError(
            f"PipelineEngine._INSTRUCTION_MAP[{getattr(kind, '__name__', kind)}] = ...: zoo's pipelines run a plan, "
            "which calls no functions of this map. A schedule of your own is registered with zoo.pipe; what a stage "
            "computes is the model's layers and its loss_fn."
        )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Each of them is refused."""
        for kind, function in dict(*args, **kwargs).items():
            self[kind] = function


def _tell_of_schedules() -> None:
    """Warn where a program has put a schedule of its own into ``deepspeed.runtime.pipe.schedule``."""
    names = vars(sys.modules.get("zoo.deepspeed.runtime.pipe.schedule", object))
    for own in (TrainSchedule, InferenceSchedule):
        if names.get(own.__name__, own) is not own or not own.steps.__module__.startswith("zoo."):
            _log.warning(
                "%s is replaced, or its steps() are: zoo's pipelines run the schedule that the configuration names, "
                '{"pipeline": {"schedule": {"type": ...}}}, so it has no effect.',
                own.__name__,
            )


def _carried_out(engine: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "one instruction of a schedule by hand: zoo's pipelines run whole batches, train_batch() and eval_batch()."
    )


class PipelineEngine(DeepSpeedEngine):
    """The engine of a :class:`zoo.pipe.PipelineModule`: whole batches only.

    Attributes:
        grid, mpu: the process groups of the topology; None without a process group.
        agg_train_loss: what the latest ``train_batch`` returned; None before.
        batch_fn: see :meth:`set_batch_fn`. data_iterator: see :meth:`set_dataiterator`.
        is_pipe_parallel, is_data_parallel, is_model_parallel: whether there are several ranks of a kind.
    """

    engine: Any
    is_pipeline = pipeline_parallelism = True
    _INSTRUCTION_MAP = _Instructions(
        dict.fromkeys(
            (
                OptimizerStep, ReduceGrads, ReduceTiedGrads, LoadMicroBatch, ForwardPass, BackwardPass, SendActivation,
                RecvActivation, SendGrad, RecvGrad,
            ),
            _carried_out,
        )
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _tell_of_schedules()
        # Groups are made by all ranks at once, so not when a rank first asks.
        self.grid: Any = self.engine.module.mpu() if dist.is_initialized() else None
        if self.grid is not None:
            self.mpu = self.grid
        self.agg_train_loss: torch.Tensor | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.data_iterator: Any = None
        self.log_batch_step_id = -1
        sizes = self.engine.module.topology().mesh_axes
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = sizes.get("data", 1) > 1
        self.is_model_parallel = sizes.get("model", 1) > 1
        if self.engine.module.loss_fn is None:
            self.engine.set_batch_fn(_inputs)

    # -- batches ------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """One whole step; the mean loss of all replicas, on every rank. Without an iterator it goes on with the one
        before."""
        data_iter = self.data_iterator if data_iter is None else data_iter
        self.data_iterator = data_iter
        self.agg_train_loss = super().train_batch(data_iter)
        return self.agg_train_loss

    def eval_batch(
        self, data_iter: Any, return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """The loss of the next micro-batches, without gradients; see
        :meth:`zoo.engine.pipeline.PipelineEngine.eval_batch`. With ``return_logits`` (loss, outputs of the last
        micro-batch), the latter on the last stage and None elsewhere."""
        found = self.engine.eval_batch(
            data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
        )
        if not return_logits:
            return found
        loss, outputs = found
        return loss, outputs[-1] if outputs else None

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: stages exchange activations by ``train_batch`` and ``eval_batch``."""
        _refuse()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse()

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse()

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see :meth:`train_batch`."""
        _refuse()

    def set_dataiterator(self, iterator: Any) -> None:
        """Batches for ``train_batch()`` without an iterator."""
        self.data_iterator = iterator
        self.engine.set_dataiterator(iterator)

    def set_dataloader(self, loader: Any) -> None:
        """Batches for ``train_batch()``, epoch after epoch."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = loader
            self.set_dataiterator(iter(RepeatingLoader(loader)))

    def training_loader(self, dataset: Any) -> Any:
        """That of ``initialize(training_data=...)``: samples in the data set's order."""
        return loader_of(self, dataset, None, "train", torch.cuda.is_available(), None, None, None, shuffle=False)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """``fn(batch)`` → (inputs, labels), for each batch of the data. Without ``loss_fn`` the first layer gets the
        inputs, and the last one gives the loss."""
        self.batch_fn = fn
        if self.engine.module.loss_fn is None:
            self.engine.set_batch_fn(_inputs if fn is None else lambda batch: _inputs(fn(batch)))
            return
        self.engine.set_batch_fn(fn)

    def reset_activation_shape(self) -> None:
        """Activations will have other shapes; the inputs' shapes tell too. On all ranks."""
        self.engine.reset_activation_shape()

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing to do: tensors of any dtype travel between stages."""
        if not isinstance(value, bool):
            raise ValueError(f"set_has_attention_mask({value!r}); it takes True or False.")

    def get_additional_losses(self) -> Mapping[str, torch.Tensor | float] | None:
        """Means of the latest batch by name; None where there are none."""
        found: Mapping[str, float] | None = self.engine.get_additional_losses()
        return found

    def is_gradient_accumulation_boundary(self) -> bool:
        """True: each batch ends in a step."""
        return True

    # -- places -------------------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Ranks of a pipeline."""
        return int(self.engine.num_stages)

    @property
    def stage_id(self) -> int:
        """This rank's place among them."""
        return int(self.engine.stage_id)

    @property
    def prev_stage(self) -> int:
        """The place before this rank's; -1 before the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The place after this rank's."""
        return self.stage_id + 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of one."""
        return int(self.engine.config.train_micro_batch_size_per_gpu)

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return bool(self.engine.is_first_stage())

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return bool(self.engine.is_last_stage())

    def get_pipeline_parallel_rank(self) -> int:
        """See :attr:`stage_id`."""
        return self.stage_id

    # -- weights ------------------------------------------------------------------------------------------------------

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The whole model's, of all stages, on the CPU. A collective."""
        found = self.engine.module_state_dict(exclude_frozen_parameters)
        return {prefix + name: value for name, value in found.items()}

    def load_module_state_dict(
        self, checkpoint: Any, strict: bool = True, custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False, z3_params_to_fetch: Any = None, allowed_missing_keys: Any = None,
    ) -> None:  # fmt: skip
        """The values of a whole model's state_dict, or of {"module": a state_dict}. A collective.

        Args:
            checkpoint: None or the path of a checkpoint: its weights.
        """
        if custom_load_fn is not None:
            raise AssertionError("custom_load_fn not supported w. pipeline parallelism")
        if isinstance(checkpoint, Mapping) and set(checkpoint) >= {"module"} and not _is_tensor(checkpoint["module"]):
            checkpoint = checkpoint["module"]
        super().load_module_state_dict(checkpoint, strict, allowed_missing_keys=allowed_missing_keys)


def _inputs(batch: Any) -> Any:
    """(its inputs,), of a pair with labels."""
    return (batch[0],) if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _refuse() -> NoReturn:
    raise PipelineError("Only train_batch() and eval_batch() are accessible in pipeline mode.")
