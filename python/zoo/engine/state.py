"""The engine's own part of a checkpoint: counters, schedule, position in the data, buffers, random numbers."""

from __future__ import annotations

import logging
import random
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zoo import checkpointing
from zoo.comm import gather_object
from zoo.engine.foreign import options_of_groups, tell_what_is_missing
from zoo.layout import StateSlice, logical_name, split_of

if TYPE_CHECKING:
    from zoo.engine.agreed_reader import AnyCheckpoint, Reads
    from zoo.engine.engine import Engine
    from zoo.engine.partial_load import Wanted
    from zoo.shard import ShardedModel

BUFFER = "buffer"
BUFFER_OF_RANK = "buffer|"
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_log = logging.getLogger("zoo.engine")


def buffer_slices(module: nn.Module, sharded: ShardedModel) -> list[StateSlice]:
    """Rank 0's buffers, those that ``state_dict`` would hold, by their names in the whole model; on another rank those
    that no rank before it has: of other layers, of experts. Collective where there are such."""
    buffers = first_buffers(module, sharded)
    return [
        StateSlice(name, BUFFER, 0, b.numel(), tuple(b.shape), _as_is(b).reshape(-1)) for name, b in buffers.items()
    ]


def first_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """See :func:`buffer_slices`."""
    mine, comm = persistent_buffers(module), sharded.everyone
    if not has_parts(mine, sharded):
        return mine if comm.rank == 0 else {}
    first: dict[str, int] = {}
    for rank, names in enumerate(comm.all_gather_object(sorted(mine))):
        for name in names:
            first.setdefault(name, rank)
    return {name: buffer for name, buffer in mine.items() if first[name] == comm.rank}


def whole_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The buffers of the whole model that ``state_dict`` would have, on every rank: this rank's own, or, where other
    ranks have other ones, the first rank's that has them. Collective where there are such."""
    buffers = persistent_buffers(module)
    if not has_parts(buffers, sharded):
        return buffers
    own = {name: buffer.detach().cpu() for name, buffer in first_buffers(module, sharded).items()}
    return {name: buffer for there in sharded.everyone.all_gather_object(own) for name, buffer in there.items()}


def has_parts(buffers: Mapping[str, torch.Tensor], sharded: ShardedModel) -> bool:
    """Whether other ranks have other ones."""
    return sharded.layers is not None or any(split_of(buffer).axes for buffer in buffers.values())


def load_buffers(module: nn.Module, found: Reads, wanted: Wanted) -> None:
    """Every buffer of the module takes the checkpoint's value."""
    values: dict[str, torch.Tensor] = {}
    for name in persistent_buffers(module):
        if wanted.module_strict or name in found.shapes:
            # Formats of weights alone do not tell buffers from parameters.
            role = BUFFER if BUFFER in found.roles.get(name, {}) else "parameter"
            values[name] = found.tensor(name, role)
    _fill(module, values)


def _as_is(buffer: torch.Tensor) -> torch.Tensor:
    """On the CPU, with the bytes of its values: of a conjugate view too."""
    return buffer.detach().cpu().resolve_conj().resolve_neg()


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ``state_dict`` has, by their names in the whole model; each once."""
    persistent: dict[str, torch.Tensor] = {}
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                persistent[logical_name(module, f"{path}.{name}" if path else name)] = buffer
    return persistent


def meta_of(found: AnyCheckpoint) -> dict[str, Any]:
    """What the engine that wrote it says of itself."""
    meta = found.meta.get("engine")
    if not isinstance(meta, dict):
        raise checkpointing.CheckpointError(
            f"checkpoint {found.tag!r} was not written by an engine: it has weights, and does not say how training "
            "goes on. Load it with load_module_only=True."
        )
    return meta


def engine_meta(engine: Engine) -> dict[str, Any]:
    """The engine's state beside tensors. What a checkpoint cannot hold exactly is refused when it is written."""
    schedule = engine.lr_scheduler
    return {
        "optimizer": type(engine.optimizer.inner).__name__,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "zero_stage": engine.config.zero_optimization.stage,
        "accumulation": engine.accumulation if engine.accumulation_was_set else None,
        "samples": engine.global_samples,
        "tokens": engine.global_tokens,
        "loader": engine.dataloader.state_dict() if has_state(engine.dataloader) else None,
        "lr_scheduler": _state_of(schedule) if schedule is not None else None,
        "parts": {name: part.state_dict() for name, part in engine.parts.items() if has_state(part)},
        "registered": {name: item.state_dict() for name, item in engine.registered.items()},
        "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
    }


def model_meta(module: nn.Module, sharded: ShardedModel) -> dict[str, Any]:
    """What readers without the model cannot know: names of frozen parameters, and the first name of each other one that
    a parameter has. What ``get_extra_state`` of modules returns. Rank 0's is kept; of layers and experts that other
    ranks have it is told. Collective where there are such."""
    frozen = {name for b in sharded.buckets if not b.spec.trainable for name in b.in_model()}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[logical_name(module, name)] = logical_name(module, known)
    extra = {key: child.get_extra_state() for key, child in with_extra_state(module)}
    mine = sorted(frozen), tied, extra
    parted = sharded.layers is not None or any(b.spec.axes for b in sharded.buckets)
    everywhere = gather_object(sharded.everyone, mine) or [mine] if parted else [mine]
    return {
        "frozen": sorted({name for names, _, _ in everywhere for name in names}),
        "tied": {name: known for _, names, _ in everywhere for name, known in names.items()},
        "extra": {key: value for _, _, states in reversed(everywhere) for key, value in states.items()},
    }


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have ``get_extra_state``, by the keys that ``state_dict`` has for it in the whole model."""
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield logical_name(module, f"{path}._extra_state" if path else "_extra_state"), child


def load_extra_state(module: nn.Module, found: AnyCheckpoint) -> None:
    """The reverse: ``set_extra_state`` of each of these modules."""
    model = found.meta.get("model")
    saved = model.get("extra", {}) if isinstance(model, dict) else {}
    for key, child in with_extra_state(module):
        if key in saved:
            child.set_extra_state(saved[key])
        else:
            _log.warning("checkpoint %r has no %r, the extra state of a %s.", found.tag, key, type(child).__name__)


def options_to_take(engine: Engine, found: AnyCheckpoint) -> list[dict[str, Any]]:
    """Of each group of the optimizer, the options of a checkpoint that it goes on with. Another class of optimizer
    takes those that it has itself."""
    meta = meta_of(found)
    saved: list[dict[str, Any]] = meta["param_groups"]
    if meta.get("imported"):
        return options_of_groups(engine, saved, found)
    if meta.get("optimizer") in (None, type(engine.optimizer.inner).__name__):
        return saved
    groups = zip(engine.optimizer.param_groups, saved, strict=True)
    return [{key: value for key, value in theirs.items() if key in own} for own, theirs in groups]


def restore_options(engine: Engine, found: AnyCheckpoint) -> None:
    """Give the parameter groups the options of a checkpoint; which states there are depends on them. A schedule that
    the checkpoint has nothing of has set the rate of its own step."""
    begins = engine.lr_scheduler is not None and meta_of(found)["lr_scheduler"] is None
    for group, saved in zip(engine.optimizer.param_groups, options_to_take(engine, found), strict=True):
        rate = group["lr"]
        group.update({key: _like(group.get(key), value) for key, value in saved.items()})
        if begins:
            group["lr"] = rate


def restore_meta(engine: Engine, found: AnyCheckpoint, *, schedule: bool = True) -> None:
    """The reverse of :func:`engine_meta`, but for the options. Counters stay consistent when gradient accumulation
    differs. ``schedule``: that of learning rates too."""
    meta = found.meta["engine"]
    engine.restore_counts(
        steps=int(meta["global_steps"]), skipped=int(meta["skipped_steps"]), samples=int(meta.get("samples", 0)),
        tokens=int(meta.get("tokens", 0)),
    )  # fmt: skip
    if meta.get("accumulation") is not None:  # set by hand
        engine.set_accumulation(int(meta["accumulation"]))
    engine.micro_steps = engine.global_steps * engine.accumulation
    engine.restart_counts()
    if meta.get("imported"):
        tell_what_is_missing(engine, found.meta, found)
    if engine.dataloader is not None and not has_state(engine.dataloader):
        _log.warning(
            "the loader, a %s, has no state_dict and load_state_dict: it begins anew, and not at the checkpoint's "
            "sample.", type(engine.dataloader).__name__,
        )  # fmt: skip
    if has_state(engine.dataloader) and meta["loader"] is not None:
        engine.dataloader.load_state_dict(meta["loader"])
        engine.forget_batches()
    mine = {name: part for name, part in engine.parts.items() if has_state(part)}
    _restore("engine part", mine, meta.get("parts", {}), found)
    _restore("registered state", engine.registered, meta.get("registered", {}), found)
    if schedule:
        _restore_schedule(engine, meta["lr_scheduler"], found)


def _restore_schedule(engine: Engine, saved: dict[str, Any] | None, found: AnyCheckpoint) -> None:
    schedule = engine.lr_scheduler
    if schedule is not None and saved is not None:
        schedule.load_state_dict(saved)
    elif schedule is not None:
        schedule.load_state_dict(schedule.state_dict())  # what it has set beside the rate, such as momentum
        _log.warning(
            "checkpoint %r has nothing of a learning-rate schedule: the %s begins anew, at step %d of training.",
            found.tag, type(schedule).__name__, engine.global_steps,
        )  # fmt: skip
    elif saved is not None:
        _log.warning(
            "checkpoint %r has a state of a learning-rate schedule, and there is none now: learning rates stay as they "
            "were, %s.", found.tag, ", ".join(f"{rate:g}" for rate in engine.get_lr()),
        )  # fmt: skip


def has_state(item: Any) -> bool:
    """Whether it can be saved and loaded."""
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _restore(what: str, mine: Mapping[str, Any], saved: Mapping[str, Any], found: AnyCheckpoint) -> None:
    for name, item in mine.items():
        if name in saved:
            item.load_state_dict(saved[name])
        else:
            _log.warning("checkpoint %r has nothing of the %s %r, which begins anew.", found.tag, what, name)
    for name in sorted(set(saved) - set(mine)):
        _log.warning("checkpoint %r has a state of the %s %r, which is not there now.", found.tag, what, name)


def _state_of(schedule: Any) -> dict[str, Any]:
    # The default state_dict of a schedule is its attributes, and those of the schedules that it is made of. Functions
    # among them are its code: whoever builds the schedule again gives them again, and load_state_dict() leaves what it
    # is not given.
    code: list[str] = []
    state: dict[str, Any] = _without_functions(dict(schedule.state_dict()), "", code)
    if code:
        _log.info(
            "the checkpoint does not hold %s of the learning-rate schedule %s: functions are code, not state, and are "
            "taken from the schedule that continues.",
            ", ".join(sorted(code)),
            type(schedule).__name__,
        )
    return state


def _without_functions(value: Any, path: str, left_out: list[str]) -> Any:
    if type(value) is list:
        return [_without_functions(item, f"{path}[{k}]", left_out) for k, item in enumerate(value)]
    if type(value) is not dict:
        return value
    places = {key: f"{path}.{key}" if path else str(key) for key in value}
    left_out += [places[key] for key, item in value.items() if isinstance(item, _FUNCTIONS)]
    return {
        key: _without_functions(item, places[key], left_out)
        for key, item in value.items()
        if not isinstance(item, _FUNCTIONS)
    }


def _like(old: Any, new: Any) -> Any:
    return new.to(old.device) if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) else new


def random_state() -> dict[str, torch.Tensor]:
    """The states of this rank's random number generators: torch's, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "rng_cpu": torch.get_rng_state(),
        "rng_python": torch.tensor([version, *numbers], dtype=torch.int64),
        "rng_python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if name == "MT19937":  # numpy knows no other one here; somebody may have put one in its place
        state["rng_numpy"] = torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64)
        state["rng_numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_available():
        state["rng_cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """The reverse of :func:`random_state`; a generator that has no state there stays as it is."""
    if "rng_cpu" in state:
        torch.set_rng_state(state["rng_cpu"])
    if "rng_python" in state:
        version, *numbers = state["rng_python"].tolist()
        gauss = state["rng_python_gauss"].tolist()
        random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    if "rng_numpy" in state:
        *keys, position, has_gauss = state["rng_numpy"].tolist()
        cached = float(state["rng_numpy_gauss"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "rng_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["rng_cuda"])


def own_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The buffers of a rank other than 0, as this rank's own state: each rank's forwards keep theirs."""
    if sharded.everyone.rank == 0:
        return {}
    return {BUFFER_OF_RANK + name: _as_is(b) for name, b in persistent_buffers(module).items()}


def load_own_buffers(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Those buffers that :func:`own_buffers` gave; the others stay as they are."""
    values: dict[str, torch.Tensor] = {}
    for name, buffer in persistent_buffers(module).items():
        found = state.get(BUFFER_OF_RANK + name)
        if found is not None and found.numel() == buffer.numel():  # it was kept flat
            values[name] = found.view(buffer.shape)
    _fill(module, values)


def _fill(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Buffers take values, by their names. What is a view of another buffer has its value then, and stays a view."""
    from zoo.shard.module_buffers import repeats, write_buffer

    buffers = persistent_buffers(module)
    for name in sorted(values, key=lambda name: repeats(buffers[name])):
        write_buffer(module, buffers[name], values[name])
