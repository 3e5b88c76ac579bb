"""What a candidate needs, before anything runs: a lower bound of its memory, and what it sends.

For the ranks r of a job, with parameters P, gradients G and optimizer states O that a rank keeps
(:func:`zoo.train.forecast`), and A bytes that autograd keeps for the backward of one micro-batch::

    need = Σ_r max(P_r + O_r + A + G_r · [accumulation > 1], P_r + G_r + O_r)

The interpreter, libraries, messages, gathered units and what a backward makes for itself come on top, so that nothing
is rejected that would fit. Where a mesh cuts layers, a role that the stage splits counts once for all ranks, another
one once for each data rank, and A once for each data rank.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from zoo.config import Config, ConfigError
from zoo.config.document import Document
from zoo.cost import Forecast
from zoo.nn.blocks import Blocks, find_blocks
from zoo.registry import DEFAULT, Registry
from zoo.train import forecast
from zoo.train.task import Task
from zoo.tuning.space import AXES, Candidate, Job

__all__ = ["Need", "Needs", "base_of", "job_of", "kept_bytes", "settings", "with_settings"]

SHORTENED = ("compile", "curriculum_learning", "data_efficiency", "progressive_layer_drop", "compression_training")
"""Sections under which a forward may keep less than the model's own forward does: nothing is counted."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Of one candidate. Bytes of ``job_bytes`` are of all ranks together and a lower bound, others of rank 0.

    Attributes:
        refused: why ``zoo train`` would not take the configuration; "" where it does.
    """

    job_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    wire_bytes: int = 0
    nvme_bytes: int = 0
    refused: str = ""


def base_of(config: Config, ranks: int) -> Candidate:
    """What a configuration asks for."""
    axes = config.mesh.sizes(ranks) if config.mesh.axes else {"data": ranks}
    data = config.mesh.batch_ranks(ranks)
    pipe, tensor = axes.get("pipe", 1), axes.get("tensor", 1)
    schedule = config.pipeline.schedule
    return Candidate(
        stage=config.zero_optimization.stage, micro=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps, mesh=(pipe, data, tensor),
        schedule=schedule.type if schedule is not None and pipe > 1 else "",
        offload=config.zero_optimization.offload_optimizer.device,
        checkpointing=config.activation_checkpointing.blocks is not None
        or (pipe > 1 and config.pipeline.activation_checkpoint_interval > 0),
    )  # fmt: skip


def job_of(
    document: Document, ranks: int, *, device: str = "cpu", registry: Registry = DEFAULT, **options: Any
) -> tuple[Job, nn.Module, Task]:
    """What is known of the job of a configuration, its model without values, and its task.

    Args:
        options: further fields of :class:`Job`.

    Raises:
        ValueError: the configuration cannot be trained.
    """
    config = document.load(ranks)
    if config.train is None or config.optimizer is None:
        raise ValueError("a configuration with the sections train and optimizer is needed (see zoo.train.TrainConfig).")
    task = _task_of(config, registry)
    model = _without_values(task)
    section = config.zero_optimization
    nvme = section.offload_optimizer.nvme_path or section.offload_param.nvme_path
    return Job(
        ranks=ranks, batch=config.train_batch_size, base=base_of(config, ranks), device=device,
        num_parameters=sum(p.numel() for p in model.parameters()), nvme=str(nvme) if nvme else "",
        fixed_mesh=bool(set(config.mesh.axes) - set(AXES)), tensor=hasattr(model, "tensor_plan"),
        pipe=ranks > 1, blocks=_has_blocks(model), **options,
    ), model, task  # fmt: skip


def _task_of(config: Config, registry: Registry) -> Task:
    if config.train is None:
        raise ValueError("the section train says which task there is.")
    task: Task = registry.build("task", config.train.task.type, config.train.task.params, seed=config.seed)
    return task


def _task_key(config: Config) -> str:
    """Configurations with the same have the same task."""
    choice = None if config.train is None else config.train.task.model_dump()
    return json.dumps([choice, config.seed], sort_keys=True, default=str)


def _samples(task: Task) -> int | None:
    try:
        return len(task.training_data())  # type: ignore[arg-type]
    except Exception:  # what the task says of missing files is said where activations are counted
        return None


def _without_values(task: Task) -> nn.Module:
    try:
        with torch.device("meta"):
            return task.model()
    except (RuntimeError, NotImplementedError):  # its initialisation needs values
        return task.model().to("meta")


def _has_blocks(model: nn.Module) -> bool:
    try:
        return bool(find_blocks(model, None, "activation_checkpointing"))
    except ValueError:
        return False


def settings(candidate: Candidate, job: Job, *, cut: bool = True) -> dict[str, Any]:
    """Values for paths of the configuration that make it the candidate's.

    Args:
        cut: with its mesh; otherwise the data ranks alone.
    """
    found: dict[str, Any] = {
        "train_batch_size": candidate.micro * candidate.accumulation * candidate.data,
        "train_micro_batch_size_per_gpu": candidate.micro,
        "gradient_accumulation_steps": candidate.accumulation,
        "zero_optimization.stage": candidate.stage,
    }
    if candidate.mesh != job.base.mesh and cut:
        found["mesh"] = {"axes": dict(zip(AXES, candidate.mesh, strict=True))}
        found["tensor_parallel.autotp_size"] = candidate.tensor
    if candidate.schedule and candidate.schedule != job.base.schedule and cut:
        found["pipeline.schedule"] = {"type": candidate.schedule}
    if candidate.bucket:
        found["zero_optimization.reduce_bucket_size"] = candidate.bucket
        found["zero_optimization.allgather_bucket_size"] = candidate.bucket
    if candidate.offload != job.base.offload or candidate.stage != job.base.stage:
        keys = ["offload_optimizer", *(["offload_param"] if candidate.stage == 3 or job.base.stage == 3 else [])]
        for key in keys:
            here = candidate.offload if key == "offload_optimizer" or candidate.stage == 3 else "none"
            found[f"zero_optimization.{key}.device"] = here
            if here == "nvme":
                found[f"zero_optimization.{key}.nvme_path"] = job.nvme
    piped, was_piped = candidate.pipe > 1 and cut, job.base.pipe > 1  # a pipeline checkpoints runs of its layers
    if candidate.checkpointing != job.base.checkpointing or (candidate.checkpointing and piped != was_piped):
        found["activation_checkpointing.blocks"] = "auto" if candidate.checkpointing and not piped else None
        if piped or was_piped:
            found["pipeline.activation_checkpoint_interval"] = int(candidate.checkpointing and piped)
    for path, text in candidate.extra:
        found[path] = json.loads(text)
    return found


def with_settings(document: Document, found: Mapping[str, Any]) -> Document:
    """A configuration with those values; a mesh takes the place of the one that is there."""
    rest = dict(found)
    mesh = rest.pop("mesh", None)
    if mesh is not None:
        values = {key: value for key, value in document.values.items() if key != "mesh"}
        document = replace(document, values=values)
        rest["mesh.axes"] = mesh["axes"]
    return document.override(rest)


@dataclass
class Needs:
    """Forecasts of the candidates of one job; what several have in common is made once."""

    document: Document
    job: Job
    model: nn.Module
    task: Task
    registry: Registry = DEFAULT
    notes: list[str] = field(default_factory=list)
    """What could not be counted, and why."""
    _kept: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _models: dict[str, tuple[nn.Module, Task]] = field(default_factory=dict)
    _states: dict[tuple[Any, ...], list[Forecast]] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Need:
        """See :class:`Need`."""
        try:
            config = with_settings(self.document, settings(candidate, self.job)).load(self.job.ranks)
            model, task = self._model_of(config)
            if (refused := self._too_few_samples(candidate, task)) != "":
                return Need(refused=refused)
            of_ranks = self._forecasts(candidate)
        except ConfigError as error:
            return Need(refused=str(error).splitlines()[-1].strip(" -"))
        except (ValueError, NotImplementedError) as error:
            return Need(refused=str(error).splitlines()[0])
        kept = self._kept_bytes(candidate, config, model, task)
        cut = candidate.pipe * candidate.tensor > 1
        in_backward = config.zero_optimization.update_in_backward
        job_bytes = states = 0
        for rank in of_ranks:
            parameters, gradients, optimizer = self._roles(rank)
            gradients = 0 if in_backward else gradients
            summed = gradients if candidate.accumulation > 1 else 0
            job_bytes += max(parameters + optimizer + kept + summed, parameters + gradients + optimizer)
            states += parameters + gradients + optimizer
        if cut:  # of one copy, and of what each data rank has
            one = of_ranks[0]
            parameters, gradients, optimizer = self._roles(one)
            copies = candidate.data
            parameters *= copies if candidate.stage < 3 else 1
            gradients *= 0 if in_backward else copies if candidate.stage < 2 else 1
            optimizer *= copies if candidate.stage < 1 else 1
            states = parameters + gradients + optimizer
            job_bytes = max(parameters + optimizer + kept * copies, states)
        sent = of_ranks[0]
        wire = sum(sent.wire_bytes.values()) // (candidate.pipe * candidate.tensor) if candidate.data > 1 else 0
        return Need(
            job_bytes=job_bytes, state_bytes=states, activation_bytes=kept, wire_bytes=wire,
            nvme_bytes=sent.nvme_read_bytes + sent.nvme_written_bytes,
        )  # fmt: skip

    def _model_of(self, config: Config) -> tuple[nn.Module, Task]:
        """Those of a candidate: its settings may make another model, or a data set of another size."""
        if not self._models:
            self._models[_task_key(self.document.load(self.job.ranks))] = self.model, self.task
        key = _task_key(config)
        if key not in self._models:
            try:
                task = _task_of(config, self.registry)
                self._models[key] = _without_values(task), task
            except Exception as error:  # whatever a task says of its options
                text = f"the model cannot be made ({type(error).__name__}: {error})".splitlines()[0]
                raise ValueError(text) from error
        return self._models[key]

    def _too_few_samples(self, candidate: Candidate, task: Task) -> str:
        """Why the data set cannot fill one micro-batch of each data rank; "" where it can, or says no length."""
        least = candidate.micro * candidate.data
        samples = self.samples if task is self.task else _samples(task)
        if samples is None or samples >= least:
            return ""
        return (
            f"the data set has {samples} samples, fewer than one micro-batch of {candidate.micro} on each of "
            f"{candidate.data} data ranks ({least})"
        )

    @cached_property
    def samples(self) -> int | None:
        """Of the task's data set; None where it is not there or has no length."""
        return _samples(self.task)

    def _roles(self, found: Forecast) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer states in the memory that is limited."""
        if self.job.device == "cpu":  # one memory for device and host
            return found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes
        gradients = min(found.gradients_bytes, found.tiers["device"])
        return found.tiers["device"] - gradients, gradients, 0

    def _forecasts(self, candidate: Candidate) -> list[Forecast]:
        """Of each data rank; of one rank where the mesh cuts layers, which pads nothing."""
        cut = candidate.pipe * candidate.tensor > 1
        ranks = candidate.data if candidate.data <= 8 else 1
        key = (candidate.stage, candidate.bucket, candidate.offload, candidate.data, cut, candidate.extra)
        if key not in self._states:
            found = settings(candidate, self.job, cut=False)
            values = {k: v for k, v in self.document.values.items() if k not in ("mesh", "pipeline", "tensor_parallel")}
            plain = with_settings(replace(self.document, values=values), found)
            config = plain.load(candidate.data)
            self._states[key] = [self._forecast(config, candidate.data, rank) for rank in range(ranks)]
            if ranks < candidate.data:  # the last has the smallest share
                self._states[key] += [self._forecast(config, candidate.data, candidate.data - 1)] * (candidate.data - 1)
            if cut:
                one = plain.override({"train_batch_size": candidate.micro * candidate.accumulation}).load(1)
                sent = self._states[key][0]
                self._states[key] = [replace(self._forecast(one, 1, 0), wire_bytes=sent.wire_bytes)]
        return self._states[key]

    def _forecast(self, config: Config, ranks: int, rank: int) -> Forecast:
        """Of one micro-batch, whatever the number of them."""
        return forecast(
            config, ranks=ranks, rank=rank, device=self.job.device, registry=self.registry, micro_batches=1
        )  # fmt: skip

    def _kept_bytes(self, candidate: Candidate, config: Config, model: nn.Module, task: Task) -> int:
        if any(config.asks_for(name) for name in SHORTENED if name in config.package_sections):
            return 0
        key = candidate.micro, candidate.checkpointing, candidate.extra  # any setting may change what a forward keeps
        if key not in self._kept:
            self._kept[key] = self._count(config, model, task, checkpointing=candidate.checkpointing)
        return self._kept[key]

    def _count(self, config: Config, model: nn.Module, task: Task, *, checkpointing: bool) -> int:
        from zoo.engine.building import compute_dtype, input_dtype

        try:
            data = task.training_data()
            micro = min(config.train_micro_batch_size_per_gpu, len(data))  # type: ignore[arg-type]
            batch = default_collate([data[0]] * micro)
            if (dtype := compute_dtype(config)) is not None:
                model = copy.deepcopy(model).to(dtype=dtype)  # the next candidate may keep the model's own type
            blocks = config.activation_checkpointing.blocks or ("auto" if checkpointing else None)
            found = kept_bytes(model, batch, input_dtype(config), blocks)
        except Exception as error:  # whatever a model does with a tensor that has no values
            text = f"activations do not count, because the model does not run without values ({error})".splitlines()[0]
            self.notes += [] if text in self.notes else [text]
            return 0
        return found // 2 if config.torch_autocast.enabled else found


def kept_bytes(model: nn.Module, batch: Any, dtype: torch.dtype | None = None, blocks: Any = None) -> int:
    """Bytes of the storages that the graph of one forward keeps for its backward, parameters apart.

    Args:
        model: on the meta device. batch: as ``default_collate`` makes it, on any device.
        dtype: what floating-point inputs are cast to.
        blocks: as ``activation_checkpointing.blocks``; a block keeps nothing then.
    """
    from zoo.engine.batches import placed

    batch = placed(batch, torch.device("meta"), dtype)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        alive.add(kept)
        return kept

    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (
        tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {},
    )  # fmt: skip
    model.train()
    checkpointed = None
    if blocks is not None:
        found = find_blocks(model, None if blocks == "auto" else blocks, "activation_checkpointing")
        checkpointed = Blocks(found, _without_graph, "activation_checkpointing")
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), hooks:
            result = model(*args, **kwargs)
        storages = {s._cdata: s.nbytes() for s in (kept.tensor.untyped_storage() for kept in alive)}
        del result
    finally:
        if checkpointed is not None:
            checkpointed.close()
    return sum(size for place, size in storages.items() if place not in own)


class _Kept:
    """A tensor that a graph keeps: alive as long as the graph is."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _without_graph(number: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block whose values are computed again in backward: its graph keeps nothing meanwhile."""
    del number
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept):
        return block(*args, **kwargs)
