"""``deepspeed.initialize`` and what comes before it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from zoo import comm
from zoo.comm.launch import PORT, join_alone
from zoo.config import ConfigError
from zoo.deepspeed.adapters import asserting
from zoo.deepspeed.adapters.communication import comm as communication
from zoo.deepspeed.adapters.communication import groups
from zoo.deepspeed.adapters.configuration.plain_values import said_in
from zoo.deepspeed.adapters.configuration.translation import carry_out, find_document, gradient_allreduce_op, translated
from zoo.deepspeed.adapters.root.data import is_data_set
from zoo.deepspeed.adapters.root.engine import DeepSpeedEngine
from zoo.deepspeed.adapters.root.lifetimes import freeze, keep, thaw
from zoo.deepspeed.adapters.root.optimizer import BasicOptimizer, OptimizerView
from zoo.deepspeed.adapters.utilities.leaves import apply_zero_leaf_module_config
from zoo.engine import initialize as _initialize
from zoo.shard.agreement import all_ranks, raise_together_alike
from zoo.shard.guard import ShardedParameter

_log = logging.getLogger("zoo.deepspeed")
_TENSOR_PARALLEL = "zoo.deepspeed.adapters.tensor.training"
_OF_MPU = ("get_data_parallel_group", "get_sequence_parallel_group")
_MADE: WeakValueDictionary[int, DeepSpeedEngine] = WeakValueDictionary()
"""By the id of what shards their models."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job's process group, if it is not joined; see :func:`zoo.comm.init_distributed`. One process without a
    launcher gets a group of its own, unless ``dist_init_required`` is False.

    "nccl" on a machine without CUDA becomes "gloo", which is warned of. ``config`` is for ``deepspeed.comm.configure``.
    """
    communication.configure(config)
    if dist_backend == "nccl" and not torch.cuda.is_available():
        dist_backend = "gloo"
        if not dist.is_initialized():
            _log.warning("init_distributed('nccl'): there is no CUDA device here; the ranks join over gloo instead.")
    comm.init_distributed(
        dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, dist_init_required,
        config if isinstance(config, Mapping) else None, rank, world_size,
    )  # fmt: skip
    if dist_init_required is not False:
        join_alone()
    if dist.is_initialized():
        from zoo.deepspeed.adapters.root.hugging_face import tell_accelerate

        tell_accelerate()


@asserting
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, OptimizerView | None, Any, Any]:
    """The engine that a configuration describes; see :func:`zoo.engine.initialize`. A collective.

    Args:
        args: an object with ``deepspeed_config``, the path of the configuration, where ``config`` is not given.
        model: it is brought to this process's device. An engine that has it already ends, with a warning.
        optimizer: an instance that has made no step, or a callable ``parameters → optimizer``, which is called once
            with the model's parameters; it takes the place of the configuration's.
        model_parameters: parameters or groups of them. Frozen ones are left out; what is in none of them is frozen,
            with a warning.
        training_data: a data set, of which this rank gets batches in DeepSpeed's order
            (:class:`~zoo.deepspeed.adapters.root.data.DeepSpeedDataLoader`); or a loader of this rank's batches.
        collate_fn: list of samples → batch.
        lr_scheduler: a schedule, or a callable ``optimizer → schedule``.
        distributed_port: of rank 0, where the launcher names none.
        mpu: an object with ``get_data_parallel_group()``. Ranks of other groups share layers with this one
            (:func:`~zoo.deepspeed.adapters.communication.tensor_ranks.mesh_of`). Or one with
            ``get_sequence_parallel_group()`` and its size: these ranks share sequences, and all ranks have the same
            layers.
        dist_init_required: as of :func:`zoo.engine.initialize`.
        config, config_params: a dict, the path of a file of JSON, HJSON or YAML, or base64 of JSON. Root keys that
            nobody knows are warned of, once, and left out.
        mesh_param: refused: name the axes in the configuration's section ``mesh``.

    Returns:
        (engine, optimizer, data loader, schedule), the last three None where there is none.

    Raises:
        ValueError: (zoo.config.ConfigError among them) what cannot work, and how to say it.
        RankFailedError: another rank has failed, and with what; see :func:`zoo.engine.initialize`.
    """
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    everyone = all_ranks(None, None)
    needed: dict[str, Any] = {}
    with raise_together_alike(everyone, "initialize", needed):
        module = _checked(model, optimizer, model_parameters, mpu, mesh_param)
        document = find_document(args, config if config is not None else config_params)
        document = _with_tensor_parallel(document, module, mpu)
        pipeline = engine_class(module) is not DeepSpeedEngine
        by_mpu = hasattr(mpu, "get_sequence_parallel_world_size")
        given = translated(document, drop_optimizer=optimizer is not None, pipeline=pipeline, by_mpu=by_mpu)
        # One with a group of sequences alone, of one rank each, says nothing of layers.
        shares_layers = not _shares_sequences(mpu, given) and hasattr(mpu, "get_data_parallel_group")
        if not given.get("mesh"):
            given.pop("seq_parallel_communication_data_type", None)  # no sequence is split
        if dist_init_required is not False:
            join_alone()
        carry_out(document)
        communication.configure(document)
        needed |= {
            "managed_gradient_accumulation": bool(document.get("managed_gradient_accumulation", True)),
            "gradient_allreduce_op": gradient_allreduce_op(document),
        }
    _end_earlier(module)
    with comm.raise_together(everyone, "initialize"):
        chosen, parameters = _optimizer_of(document, given, module, optimizer, model_parameters)
        schedule = lr_scheduler
        if lr_scheduler is None and "scheduler" in given:
            from zoo.deepspeed.adapters.optimizers.schedules import schedule_of

            schedule = schedule_of(given)
        # zoo's own loader only where a section chooses the samples: programs of DeepSpeed know the order of theirs.
        its_own = _chooses_samples(given) or not is_data_set(training_data)
        data = {"training_data": training_data, "collate_fn": collate_fn} if its_own else {}
    with contextlib.ExitStack() as undo:
        undo.callback(thaw, module)
        with comm.raise_together(everyone, "initialize"):
            mesh, group = _placed(mpu if shares_layers else None, module, pipeline=pipeline)
            _freeze_others(module, chosen, parameters)
            engine, _, loader, schedule = _initialize(
                given, module, optimizer=chosen, model_parameters=parameters, lr_scheduler=schedule,
                dist_init_required=False, group=group, mesh=mesh, **data,
            )  # fmt: skip
            undo.push(lambda _, error, __: _ended(engine, error))
            made = _wrapped(engine, document, mpu, pipeline=pipeline)
            made.collate_fn = collate_fn
            made.client_optimizer, made.client_lr_scheduler, made.training_data = optimizer, lr_scheduler, training_data
            if isinstance(made.optimizer, BasicOptimizer):
                made.optimizer.given = optimizer
            if not its_own:
                loader = made.training_loader(training_data)
                made.training_dataloader = engine.dataloader = loader
        undo.pop_all()
    return made, made.optimizer, loader, schedule


def _with_tensor_parallel(document: dict[str, Any], module: nn.Module, mpu: Any) -> dict[str, Any]:
    """The document with what ``tp_model_init`` was told of the model."""
    if _TENSOR_PARALLEL not in sys.modules:  # the program has not called it
        return document
    from zoo.deepspeed.adapters.tensor.training import with_model_init

    return with_model_init(document, module, mpu)


def _placed(mpu: Any, module: nn.Module, *, pipeline: bool) -> tuple[Any, Any]:
    """(mesh, group) of an mpu whose ranks share layers, each None where it says nothing of it."""
    if mpu is None:
        return None, None
    if pipeline:
        return None, mpu.get_data_parallel_group()
    from zoo.deepspeed.adapters.communication.tensor_ranks import mesh_of

    return mesh_of(mpu, module), None


def _wrapped(engine: Any, document: dict[str, Any], mpu: Any, *, pipeline: bool) -> DeepSpeedEngine:
    """zoo's engine as the program knows it."""
    if engine.config.asks_for("compile") and engine.config.compile.deepcompile:
        from zoo.deepspeed.adapters.utilities.compile_passes import schedule_of

        schedule_of(engine)  # the contracts under DeepSpeed's names, which zoo's engine does not know
    if engine.sharded.config.stage == 3:
        import zoo.deepspeed.adapters.zero.parameters  # noqa: F401 - gives the parameters their attributes
    if gradient_allreduce_op(document) == "sum":
        _sum_gradients(engine, pipeline)
    by_section = engine.config.asks_for("tensor_parallel") and engine.config.tensor_parallel.degree > 1
    groups.follow(engine, mpu, by_mesh=by_section)
    if by_section:
        from zoo.deepspeed.adapters.tensor.layers import adopt_all

        adopt_all(engine.module, engine.mesh.get_group("tensor"))
    made = _class_for(engine.module, document)(engine, document, mpu)
    _MADE[id(engine.sharded)] = made
    keep(engine.module, engine.sharded)
    return made


def _class_for(model: nn.Module, document: Mapping[str, Any]) -> type[DeepSpeedEngine]:
    """The class of engine for a model and a configuration.

    Raises:
        ValueError: a pipeline is to generate.
    """
    found, section = engine_class(model), document.get("hybrid_engine")
    if not (isinstance(section, Mapping) and said_in(section).get("enabled")):
        return found
    if found is not DeepSpeedEngine:
        raise ConfigError(
            "hybrid_engine.enabled is true, and the model is a PipelineModule, of which each rank has some layers: it "
            "generates nothing. Leave the section out, or give initialize the model in one piece."
        )
    from zoo.deepspeed.adapters.inference.hybrid import DeepSpeedHybridEngine

    return DeepSpeedHybridEngine


def _ended(engine: Any, error: BaseException | None) -> None:
    """What was made goes where the rest has failed. A collective: not for an interrupt of this rank alone."""
    if isinstance(error, Exception) or engine.sharded.everyone.size == 1:
        with contextlib.suppress(Exception):  # the error at hand is the news
            engine.destroy()
    keep(engine.module, None)


def _checked(model: Any, optimizer: Any, parameters: Any, mpu: Any, mesh_param: Any) -> nn.Module:
    """The model, where it is one."""
    if model is None:
        raise ConfigError("initialize() got no model; give it model=, an nn.Module.")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model=...) got a {type(model).__name__}; give it an nn.Module, an instance.")
    if isinstance(model, DeepSpeedEngine):
        raise ConfigError(
            f"initialize(model=...) got a {type(model).__name__}, which has a model already: give its .module, whose "
            "engine then ends."
        )
    if parameters is not None and not isinstance(parameters, Iterable):
        raise ConfigError(
            f"initialize(model_parameters={parameters!r}): a {type(parameters).__name__}; give parameters, pairs of a "
            "name and a parameter, or groups of them."
        )
    if mpu is not None and not any(hasattr(mpu, name) for name in _OF_MPU):
        raise ConfigError(
            f"initialize(mpu={mpu!r}): a {type(mpu).__name__} without {_OF_MPU[0]}() and {_OF_MPU[1]}(); give an "
            "object that says which ranks share layers or sequences, or leave it out."
        )
    if mesh_param is not None:
        raise ConfigError('initialize(mesh_param=...): name the axes in the configuration, {"mesh": {"axes": {...}}}.')
    if isinstance(optimizer, str):
        raise ConfigError(
            f"initialize(optimizer={optimizer!r}): give an optimizer, or a callable parameters → optimizer; names go "
            'into the configuration, {"optimizer": {"type": ...}}.'
        )
    return model


def _optimizer_of(
    document: Mapping[str, Any], given: dict[str, Any], model: nn.Module, optimizer: Any, model_parameters: Any
) -> tuple[Any, Any]:  # fmt: skip
    """(optimizer, parameters) for :func:`zoo.engine.initialize`; the model comes to this device."""
    _to_device(model)
    zero = document.get("zero_optimization")
    apply_zero_leaf_module_config(model, (zero.get("leaf_module") or {}) if isinstance(zero, Mapping) else None)
    # An instance has its groups already.
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = _called(optimizer, model, model_parameters)
    if isinstance(zero, Mapping) and "allgather_bucket_size" in zero:
        from zoo.deepspeed.adapters.configuration.refusals import refuse_odd_buckets

        refuse_odd_buckets(zero)
    if "zero_allow_untested_optimizer" in document:
        from zoo.deepspeed.adapters.configuration.refusals import refuse_untested

        refuse_untested(document, optimizer)
    parameters = None if isinstance(optimizer, torch.optim.Optimizer) else _trainable(model_parameters)
    return _components(given, model, optimizer, parameters)


def _sum_gradients(engine: Any, pipeline: bool) -> None:
    """Where gradients arrive they are multiplied by the number of ranks whose mean they go into: its sum.

    Raises:
        NotImplementedError: a pipeline, or ranks that do not all have batches of their own.
    """
    ranks = engine.comm.size
    if pipeline or engine.batch_ranks != ranks:
        raise NotImplementedError(
            'gradient_allreduce_op "sum" of a pipeline, or where ranks share a batch: gradients are means there. Leave '
            "it out, and multiply the loss by the number of ranks whose sum is meant."
        )
    if engine.optimizer is None:
        return
    backward = engine.optimizer.runtime.backward
    own = backward.arriving

    def arriving() -> tuple[float, bool]:
        factor, syncs = own()
        return factor * ranks, syncs

    backward.arriving = arriving


def _shares_sequences(mpu: Any, given: dict[str, Any]) -> bool:
    """Whether ``mpu`` says that ranks share sequences; ``given`` then has a mesh that does. They are consecutive."""
    size = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    if size <= 1:
        return False
    both = getattr(mpu, "get_sequence_data_parallel_group", None)
    if both is not None and dist.get_world_size(both()) != dist.get_world_size():
        raise NotImplementedError(
            f"the mpu has {size} ranks share a sequence, and others share layers: zoo carries out one of the two by an "
            'mpu. Name all axes in the configuration, {"mesh": {"axes": {...}}}, and leave the mpu out.'
        )
    _refuse_beside_sequences(given)
    ranks = dist.get_process_group_ranks(mpu.get_sequence_parallel_group())
    if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        raise ConfigError(f"the mpu has the ranks {ranks} share a sequence; consecutive ones can.")
    given["mesh"] = {"axes": {"data": -1, "sequence": size}}
    return True


def _refuse_beside_sequences(given: Mapping[str, Any]) -> None:
    """What the configuration says of axes and of all-to-alls, beside an mpu whose ranks share sequences."""
    if given.get("mesh"):
        raise ConfigError(
            "an mpu whose ranks share sequences, and the section mesh: leave the mpu out, or the section."
        )
    if given.get("seq_parallel_communication_data_type", "fp32") not in ("fp32", None):
        raise ConfigError(
            "seq_parallel_communication_data_type: sequences are exchanged in the type that they have. Leave it out."
        )


def _called(optimizer: Any, model: nn.Module, model_parameters: Iterable[Any] | None) -> torch.optim.Optimizer:
    """What ``parameters → optimizer`` makes of the model's own parameters; it is called once."""
    if not callable(optimizer):
        raise ConfigError(
            f"initialize(optimizer={optimizer!r}): a {type(optimizer).__name__}; give an optimizer of torch, or a "
            "callable parameters → optimizer."
        )
    parameters = _trainable(model_parameters)
    made = optimizer([p for p in model.parameters() if p.requires_grad] if parameters is None else parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"initialize(optimizer=...): it made a {type(made).__name__} of the parameters; it has to return an "
            "optimizer of torch."
        )
    return made


def _end_earlier(model: nn.Module) -> None:
    """A parameter has one engine at a time. Whether the program has kept the earlier one makes no difference to what
    the ranks do together."""
    owners: dict[int, Any] = {}
    for parameter in model.parameters():
        owner = _owner(parameter) if isinstance(parameter, ShardedParameter) else None
        if owner is not None:
            owners[id(owner)] = owner
    if owners:
        _log.warning(
            "initialize() got a model that an engine has: that engine ends, and its optimizer's states with it. Call "
            "its destroy() before, or load its checkpoint into the new one."
        )
    for number, owner in owners.items():
        earlier = _MADE.get(number)
        if earlier is not None and earlier.engine.sharded is owner:
            earlier.destroy()
        else:
            owner.close()
    thaw(model)


def _owner(parameter: ShardedParameter) -> Any:
    """What shards it; None where that is ``Init`` alone, or gone."""
    from zoo.shard.init.parts import InitBucket

    bucket = parameter._zoo_bucket
    return bucket.owner() if bucket is not None and not isinstance(bucket, InitBucket) else None


_IN_ZOO = ("adam", "adamw", "adagrad", "lamb", "lion", "sgd", "onebitadam", "onebitlamb", "zerooneadam")
"""Types of the section ``optimizer`` that zoo knows; of others it is found out."""


def _components(given: dict[str, Any], model: nn.Module, optimizer: Any, parameters: Any) -> tuple[Any, Any]:
    """(optimizer, parameters) where the section ``optimizer`` names one that is made here: Muon, of the package mup, or
    of ``torch.optim`` alone."""
    section = given.get("optimizer")
    if optimizer is not None or not isinstance(section, Mapping):
        return optimizer, parameters
    name = str(section.get("type")).lower()
    if name in _IN_ZOO:
        return optimizer, parameters
    if name != "muon":
        from zoo.deepspeed.adapters.optimizers.made_optimizers import maker_of

        make = maker_of(section)
        if make is None:
            return optimizer, parameters
        del given["optimizer"]
        return make(section.get("params") or {}, model, parameters), None
    from zoo.deepspeed.adapters.optimizers import muon

    del given["optimizer"]
    return muon.MuonWithAuxAdam, muon.groups_by_section(model, parameters, section.get("params") or {})


def _freeze_others(model: nn.Module, optimizer: Any, parameters: Any) -> None:
    """Parameters that are in no group are not updated: under DeepSpeed by nobody, here because they are frozen."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else parameters
    if groups is None:
        return
    members: set[int] = set()
    for item in groups:
        of_group = item["params"] if isinstance(item, Mapping) else [item]
        members |= {id(p[1] if isinstance(p, tuple) else p) for p in of_group}
    left = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in members]
    if left and any(id(p) in members for p in model.parameters()):  # else they are those of another model
        _log.warning(
            "%d parameters are in no group of the optimizer and are frozen, because nothing updates them: %s.",
            len(left), ", ".join(name for name, _ in left[:10]) + (", …" if len(left) > 10 else ""),
        )  # fmt: skip
        for _, parameter in left:
            freeze(parameter)


def _chooses_samples(document: Mapping[str, Any]) -> bool:
    sections = (document.get(name) for name in ("data_efficiency", "curriculum_learning"))
    return any(isinstance(section, Mapping) and section.get("enabled") for section in sections)


def engine_class(model: nn.Module) -> type[DeepSpeedEngine]:
    """The class of engine for a model."""
    if getattr(model, "engine_runner", "plain") == "pipeline":
        from zoo.deepspeed.adapters.pipelines.pipeline import PipelineEngine

        return PipelineEngine
    return DeepSpeedEngine


def _trainable(given: Iterable[Any] | None) -> list[Any] | None:
    """Parameters and groups without what is frozen, as DeepSpeed takes them."""
    if given is None:
        return None
    found: list[Any] = []
    for number, item in enumerate(given):
        if isinstance(item, Mapping):
            members = item.get("params")
            if not isinstance(members, Iterable):
                what = "no params" if "params" not in item else f"params={members!r}, a {type(members).__name__}"
                raise ConfigError(f"group {number} of model_parameters has {what}: give it a list of its parameters.")
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            found.append({**item, "params": [p for p in members if _requires_grad(p)]})
        elif _requires_grad(item):
            found.append(item)
    return found


def _requires_grad(item: Any) -> bool:
    tensor = item[1] if isinstance(item, tuple) else item
    return not isinstance(tensor, torch.Tensor) or tensor.requires_grad


def _to_device(model: nn.Module) -> None:
    first = next(model.parameters(), None)
    if first is None or isinstance(first, ShardedParameter) or not torch.cuda.is_available():
        return
    model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
