"""``DeepSpeedEngine``: zoo's engine as the ``nn.Module`` that programs of DeepSpeed know."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from zoo.deepspeed.adapters import asserting
from zoo.deepspeed.adapters.root.config_getters import Questions, tell_of_replaced
from zoo.deepspeed.adapters.root.data import loader_of
from zoo.deepspeed.adapters.root.lifetimes import keep, thaw
from zoo.deepspeed.adapters.root.optimizer import refuse_endless_overflows, smallest_scale, view_of
from zoo.deepspeed.adapters.utilities.timers import throughput_timer
from zoo.engine import Engine
from zoo.shard import ReadPolicy

_log = logging.getLogger("zoo.deepspeed")


def _count(name: str, what: str) -> Any:
    """A count of the engine's, which a program that restores it may set; a ValueError tells of what is no count."""

    def count(self: DeepSpeedEngine) -> int:
        return int(getattr(self.engine, name))

    def restore(self: DeepSpeedEngine, value: int) -> None:
        from zoo.engine.numbers import whole

        engine, value = self.engine, whole(f"engine.{name}", value, least=0)
        if name in ("global_steps", "micro_steps"):
            setattr(engine, name, value)
            return
        counts = {key: getattr(engine, key) for key in ("skipped_steps", "global_samples")} | {name: value}
        engine.records.restore_counts(
            steps=engine.global_steps, tokens=engine.global_tokens, skipped=counts["skipped_steps"],
            samples=counts["global_samples"],
        )  # fmt: skip

    return property(count, restore, doc=what)


class DeepSpeedEngine(Questions, nn.Module):
    """Wraps :class:`zoo.engine.Engine`: a module whose one child is ``module``, the model.

    ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``. What it does not have itself is looked up in
    the model, as in DeepSpeed.

    Attributes:
        module: the model. engine: zoo's engine.
        optimizer, lr_scheduler, training_dataloader: as ``initialize`` returns them.
        config: the configuration that was given, a dict. mpu: as given.
    """

    def __init__(self, engine: Engine, config: Mapping[str, Any], mpu: Any = None) -> None:
        super().__init__()
        tell_of_replaced(type(self))
        self.engine, self.mpu = engine, mpu
        self.module = engine.module
        self._document = dict(config)
        self.optimizer = view_of(engine)
        engine.sharded.reads = ReadPolicy(names_for=None, gradients=False)  # both find nothing, as with DeepSpeed
        self.training_dataloader = engine.dataloader
        self.loaded_checkpoint_tag: str | None = None
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self._inside = ""  # which of no_sync() and coalesce_grad_reduction()
        self._dropped_within_a_step = self._stepping = False
        self._asked_schedule: tuple[Any, str | None] = None, None
        self.tput_timer = throughput_timer(self._document, engine)
        if not self.managed_gradient_accumulation():
            engine.set_gradient_accumulation_boundary(True)
        self.training = engine.module.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self.__prepare_scriptable__()
        if self.training:
            self.tput_timer.start()
        return self.engine(*args, **kwargs)

    def __prepare_scriptable__(self) -> NoReturn:
        """What ``torch.jit.script`` calls first."""
        raise ValueError(
            "TorchScript was given an engine, which counts, moves and reduces as it runs: nothing of that can be "
            "compiled or traced. Give torch.jit.trace the model, engine.module (at stage 3 a copy, made inside of "
            "GatheredParameters); torch.jit.script takes the model before initialize or after engine.destroy()."
        )

    @asserting
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of ``loss``, added to those of the step; divided by the number of micro-batches of a step unless
        ``scale_wrt_gas`` is False.

        Returns:
            The loss, so divided.
        """
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        records = self.engine.records
        records.note_counts((0, records.take_counts()[1]))  # there may be one step() for several of them
        return loss / self.engine.accumulation if scale_wrt_gas and self.engine.accumulation > 1 else loss

    @asserting
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro-batch; at the boundary move parameters and learning rate, and clear the gradients. With
        ``managed_gradient_accumulation`` false every step is a boundary."""
        engine, samples = self.engine, 0
        self._stepping, steps, scale = True, engine.global_steps, self._smallest_scale()
        if engine.is_gradient_accumulation_boundary():  # DeepSpeed counts a step's samples by the configuration
            samples = engine.train_batch_size // engine.batch_ranks
            lr_kwargs = self._for_schedule() if lr_kwargs is None else lr_kwargs
        engine.records.note_counts((samples, 0))
        try:
            engine.step(lr_kwargs)
        except BaseException:
            if engine.global_steps == steps:  # else a schedule has raised, say, after the step
                engine.records.note_counts((-samples, 0))
            raise
        finally:
            self._stepping = False
        self.tput_timer.stop(global_step=engine.global_steps > steps)
        refuse_endless_overflows(self.engine, scale)

    def _for_schedule(self) -> Mapping[str, Any] | None:
        """For a schedule whose step wants an argument, as Megatron's ``step(increment)``: the samples of a step."""
        schedule = self.engine.lr_scheduler
        if schedule is None or isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):  # wants a metric
            return None
        if schedule is not self._asked_schedule[0]:
            from zoo.deepspeed.adapters.optimizers.schedules import first_required

            self._asked_schedule = schedule, first_required(schedule.step)
        name = self._asked_schedule[1]
        return None if name is None else {name: self.train_batch_size()}

    def _smallest_scale(self) -> float | None:
        return smallest_scale(self.engine) if self.trains and self.zero_optimization_stage() else None

    @asserting
    def scale(self, loss: Any) -> torch.Tensor:
        """The loss of which ``backward()`` may be called: times the loss scale, where there is one."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"scale() takes a scalar tensor, the loss, and got {shape}; give its mean() or sum().")
        optimizer = self.engine.training("scale()")
        return optimizer.scale_loss(loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those of earlier micro-batches of the step too; which micro-batch comes next stays."""
        if not self.trains:
            self.module.zero_grad()
            return
        if self.engine.clock.micro_batch and not self._dropped_within_a_step:
            self._dropped_within_a_step = True
            _log.warning(
                "zero_grad() between the micro-batches of one step drops what the earlier ones of it have given. "
                "step() drops the gradients by itself: leave zero_grad() out."
            )
        self.engine.optimizer.zero_grad()

    def _forget_empty_step(self) -> None:
        """A step whose gradients were all dropped begins anew: there is nothing that a checkpoint would lose."""
        engine = self.engine
        if self.trains and engine.clock.micro_batch and not engine.optimizer.holds_gradients:
            engine.records.restart_counts()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside communicate nothing. For stages 0 and 1, not within another, as in DeepSpeed.

        Raises:
            AssertionError: stage 2 or 3, or within another.
        """
        if (stage := self.zero_optimization_stage()) > 1:
            raise AssertionError(
                f"the no_sync context manager is incompatible with ZeRO stage {stage}, as in DeepSpeed: whole "
                "gradients would stay on each rank. Where that is meant use coalesce_grad_reduction()."
            )
        return self._not_reducing("no_sync()")

    @contextlib.contextmanager
    def _not_reducing(self, what: str) -> Iterator[None]:
        if self._inside:
            raise AssertionError(
                f"{what} within {self._inside} of this engine: {self._inside.removesuffix('()')} context manager "
                "reentry is unsupported, leave the inner one out."
            )
        self._inside = what
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._inside = ""

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside communicate nothing; the ``step()`` after it reduces what they have added up.

        Raises:
            NotImplementedError: at stage 0, and of a pipeline. AssertionError: ``managed_gradient_accumulation`` is
                false, or it is nested.
        """
        if self.zero_optimization_stage() == 0 or self.pipeline_parallelism:
            raise NotImplementedError("coalesce_grad_reduction() is for stages 1 to 3 without pipeline parallelism.")
        if not self.managed_gradient_accumulation():
            raise AssertionError(
                "coalesce_grad_reduction() with managed_gradient_accumulation=false: step() does that."
            )
        with self._not_reducing("coalesce_grad_reduction()"):
            yield

    @asserting
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One whole step; see :meth:`zoo.engine.Engine.train_batch`."""
        self._forget_empty_step()
        scale = self._smallest_scale()
        loss = self.engine.train_batch(data_iter, lr_kwargs=self._for_schedule())
        refuse_endless_overflows(self.engine, scale)
        return loss

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """See the engine's."""
        return self.engine.eval_batch(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on every micro-batch is the last of its step, or none is.

        Raises:
            AssertionError: ``managed_gradient_accumulation`` is false.
        """
        if not self.managed_gradient_accumulation():
            raise AssertionError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation=false: there every step() is "
                "a boundary. Leave one of the two out."
            )
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its step; with ``managed_gradient_accumulation`` false,
        whether ``step()`` is under way."""
        if not self.managed_gradient_accumulation():
            return self._stepping
        return self.engine.is_gradient_accumulation_boundary()

    def was_step_applied(self) -> bool:
        """Whether the latest ``step()`` moved the parameters: it was at a boundary and nothing overflowed."""
        engine = self.engine
        record = engine.record
        return record is not None and engine.clock.micro_batch == 0 and not record.skipped

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing to do: ``step()`` finds every gradient reduced."""

    def empty_partition_cache(self) -> None:
        """Free what is kept whole between two passes at stage 3. On all ranks."""
        self.engine.sharded.runtime.residency.clear()

    def compile(
        self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:  # fmt: skip
        """The model's units, at every stage; with ``compile.deepcompile`` all of it, as one graph where it can be one:
        see :meth:`zoo.engine.Engine.compile`.

        Args:
            backend: of torch; None: that of the configuration, or else ``get_accelerator().get_compile_backend()``.
            compile_kwargs: further arguments of ``torch.compile``.
            schedule: with deepcompile, (update, passes) by name or function, DeepSpeed's or zoo's; contracts hold.

        Raises:
            NotImplementedError: with ``compiled_autograd_enabled``. ValueError: a schedule that is none.
        """
        from zoo.deepspeed.adapters.utilities.compile_passes import arguments

        given = arguments(self.engine, backend, compile_kwargs, schedule, autograd=compiled_autograd_enabled)
        self.engine.compile(**given)

    def register_compile_pass(self, pass_name: str, pass_fn: Callable[..., Any], contract: Any = None) -> None:
        """See :func:`zoo.deepspeed.adapters.utilities.compile_passes.register_compile_pass`."""
        from zoo.deepspeed.adapters.utilities.compile_passes import register_compile_pass

        register_compile_pass(pass_name, pass_fn, contract)

    def destroy(self) -> None:
        """Close what the engine has opened; the model is an ordinary one again, and trainable where ``initialize`` has
        frozen it. Collective at stage 3."""
        self.engine.destroy()
        keep(self.module, None)
        thaw(self.module)

    # -- data ---------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Any = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:  # fmt: skip
        """A loader of this rank's micro-batches.

        Args:
            dataset: with ``__len__`` and ``__getitem__``, or an ``IterableDataset``.
            batch_size: by default a micro-batch's.
            route: "train": shuffled, once for all, or as ``data_efficiency`` of the configuration chooses; "eval",
                "predict": in the data set's order.
            pin_memory: batches lie in page-locked memory, where there is a GPU.
            data_sampler: of this rank's indices, instead.
            collate_fn: by default that of ``initialize``.
            num_local_io_workers: processes that load; by default this one does.
        """
        return loader_of(
            self, dataset, batch_size, route, pin_memory and torch.cuda.is_available(), data_sampler, collate_fn,
            num_local_io_workers,
        )  # fmt: skip

    def training_loader(self, dataset: Any) -> Any:
        """That of ``initialize(training_data=...)``."""
        return self.deepspeed_io(dataset)

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that was given."""
        return self._document

    global_steps = _count("global_steps", "Steps taken, skipped ones included.")
    micro_steps = _count("micro_steps", "Micro-batches that went through ``step()``.")
    skipped_steps = _count("skipped_steps", "Steps whose gradients were not finite.")
    global_samples = _count("global_samples", "Samples of all steps and ranks.")

    @property
    def lr_scheduler(self) -> Any:
        """The schedule, or None."""
        return self.engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self.engine.lr_scheduler = schedule

    def get_global_grad_norm(self) -> torch.Tensor | float | None:
        """The norm of the latest step's gradient, before clipping; None before the first step; infinite after an
        overflow. A number at stage 0, elsewhere a tensor without dimensions."""
        norm = self.engine.get_global_grad_norm() if self.trains else None
        if norm is None:
            return None
        norm = norm if math.isfinite(norm) else math.inf
        return torch.tensor(norm) if self.zero_optimization_stage() else norm

    # -- states elsewhere ---------------------------------------------------------------------------------------------

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """That of the optimizer."""
        self.engine.training("offload_states()")
        self.optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` took away."""
        self.engine.training("reload_states()").reload_states(non_blocking=non_blocking)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint in zoo's format; it is on the disk when this returns, on all ranks. A collective.

        Gradients that no ``step()`` has used are not part of it, which is warned of, and stay as they are here.

        Returns:
            True.

        Raises:
            ValueError: what kept it from being written, see :meth:`zoo.engine.Engine.save_checkpoint`; or an
                AssertionError too: ranks give other tags, and ``checkpoint.tag_validation`` is "Fail".
        """
        from zoo.deepspeed.adapters.root.engine_checkpoints import save

        save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint of zoo or of DeepSpeed. A collective.

        Returns:
            (its directory, client_state); (None, None), with a warning, where no tag is given and the folder has no
            checkpoint.

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError) what is wrong with the checkpoint that is there; or there is
                none with the tag; or ``load_dir`` is no path.
        """
        from zoo.deepspeed.adapters.root.engine_checkpoints import load

        return load(
            self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn,
        )  # fmt: skip

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's ``state_dict`` as it is at stages 0 to 2; the whole one, on the CPU, at stage 3. There it is a
        collective."""
        from zoo.deepspeed.adapters.root.engine_checkpoints import state_dict_of

        return state_dict_of(self, destination, prefix, keep_vars, exclude_frozen_parameters)

    def load_module_state_dict(
        self,
        checkpoint: Any,
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Parameters and buffers take these values, in shards and masters too; ``z3_params_to_fetch`` is not needed. A
        collective.

        Raises:
            ValueError: names or shapes that do not fit; ``allowed_missing_keys``, which is not taken.
        """
        if strict and allowed_missing_keys:
            raise ValueError(
                "load_module_state_dict(allowed_missing_keys=...): zoo knows strict=True, which wants every name, and "
                "strict=False."
            )
        self.engine.load_module_state_dict(checkpoint, strict, custom_load_fn, fetch_z3_params)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model's state_dict on rank 0, on the CPU; None on other ranks. A collective of stage 3."""
        if self.zero_optimization_stage() != 3:
            raise ValueError("this function requires ZeRO-3 mode")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The same at any stage, where ranks share layers by the section ``tensor_parallel``.

        Raises:
            ValueError: every rank has the parameters whole.
        """
        if self.zero_optimization_stage() != 3 and not self.autotp_size():
            raise ValueError(
                f"_consolidated_16bit_state_dict() at stage {self.zero_optimization_stage()}: only stage 3 and "
                "tensor_parallel part the parameters; every rank has them whole: module_state_dict()."
            )
        found = self.engine.module_state_dict(exclude_frozen_parameters)
        return dict(found) if self.engine.sharded.everyone.rank == 0 else None

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the whole model's weights as one file; see :meth:`zoo.engine.Engine.save_16bit_model`."""
        return self.engine.save_16bit_model(
            save_dir, save_filename, exclude_frozen_parameters=exclude_frozen_parameters
        )

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """:meth:`save_16bit_model` under its older name."""
        return self.save_16bit_model(save_dir, save_filename)
