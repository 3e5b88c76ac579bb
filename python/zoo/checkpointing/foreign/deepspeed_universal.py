"""Universal checkpoints of DeepSpeed: a folder for each parameter, with a file for each role; read and written."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.deepspeed_files import Folder, need_dict, need_list
from zoo.checkpointing.foreign.deepspeed_stages import shapes_of
from zoo.checkpointing.foreign.local import make_folder, replace, sync
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.records import plain
from zoo.checkpointing.foreign.regions import StoredTensor
from zoo.checkpointing.format.exact import dtype_named

WRITTEN_AS = "0.19.8"
"""The version of DeepSpeed whose format is written."""
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")
_MANY_GROUPS = 1024
LATEST = ("latest", "latest_universal")
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class Source(Protocol):
    """Whatever is read as :class:`zoo.checkpointing.Checkpoint` is."""

    scalars: Any
    meta: Any

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def roles(self) -> Mapping[str, Mapping[str, str]]: ...
    def tensor(self, name: str, role: str = "parameter") -> torch.Tensor: ...


# -- reading ----------------------------------------------------------------------------------------------------------


def add_universal(found: ForeignCheckpoint, folder: Folder, states: bool) -> dict[Any, Any]:
    """All that ``zero/`` has; returns what the optimizer has in common for all parameters.

    Raises:
        CheckpointError: a file that is damaged, or of another shape than the model's.
    """
    zero = folder.path / "zero"
    shapes, buffers, tied = _described(folder)
    common: dict[Any, Any] = {}
    for entry in sorted(os.scandir(zero), key=lambda entry: entry.name):
        if entry.name == "optimizer_state.pt":
            common = folder.load_dict(zero / entry.name)
        elif entry.is_dir(follow_symlinks=False) and entry.name not in tied:
            role = "buffer" if entry.name in buffers else "parameter"
            _add_parameter(found, folder, zero / entry.name, shapes.get(entry.name), role, states)
        elif not entry.is_dir(follow_symlinks=False):
            raise CheckpointError(f"{str(zero)!r} holds {entry.name!r}, which no universal checkpoint has")
    if states:
        _add_common_step(found, common)
    return common


def options_of(common: dict[Any, Any]) -> list[dict[str, Any]]:
    """Of the optimizer's groups, from what parameters have in common."""
    what = "a group of optimizer_state.pt"
    groups = need_list(common.get("param_groups") or [], what)
    return [plain({k: v for k, v in need_dict(g, what).items() if k != "params"}, what) for g in groups]


def _add_common_step(found: ForeignCheckpoint, common: dict[Any, Any]) -> None:
    """Stage 3 has the number of steps in the state of its first sub-group, for all parameters."""
    inner = common.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    first = states.get(0) if isinstance(states, dict) else None
    step = _number(first.get("step")) if isinstance(first, dict) else None
    for name, roles in found.roles.items() if step is not None else ():
        if set(roles) - {"parameter", "buffer"}:
            found.scalars.setdefault(f"step/{name}", step or 0.0)


def _number(value: Any) -> Any:
    """A number of steps, None if it is none."""
    if isinstance(value, StoredTensor) and value.numel == 1:
        value = float(value.tensor().reshape(()))
    return float(value) if type(value) in (int, float) and 0 <= value < 2**53 else None


def _described(folder: Folder) -> tuple[dict[str, tuple[int, ...]], set[str], set[str]]:
    """Shapes, buffers, and further names of parameters, as the models' files say them."""
    shapes: dict[str, tuple[int, ...]] = {}
    buffers: set[str] = set()
    tied: set[str] = set()
    for model in folder.models.values():
        for group in shapes_of(model.get("param_shapes") or [], "param_shapes"):
            shapes |= group
        buffers |= {
            name for name in need_list(model.get("buffer_names") or [], "buffer_names") if isinstance(name, str)
        }
        tied |= {name for name in need_dict(model.get("shared_params") or {}, "shared_params") if isinstance(name, str)}
    return shapes, buffers, tied


def _add_parameter(
    found: ForeignCheckpoint, folder: Folder, path: Path, shape: tuple[int, ...] | None, main: str, states: bool
) -> None:
    for file in sorted(os.scandir(path), key=lambda entry: entry.name):
        role, dot, suffix = file.name.rpartition(".")
        if not dot or suffix != "pt" or (role != "fp32" and not states):
            continue
        value = folder.load(path / file.name)
        if isinstance(value, dict):
            value = value.get("param")
        if role == "step":
            step = _number(value)
            if step is None:
                raise CheckpointError(f"{str(path / file.name)!r} holds no number of steps")
            found.scalars[f"step/{path.name}"] = step
            continue
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{str(path / file.name)!r} holds no tensor")
        whole = value.shape if shape is None else shape
        if value.shape not in (whole, (math.prod(whole),)):
            raise CheckpointError(f"{str(path / file.name)!r} has shape {value.shape}; the parameter has {whole}")
        found.add_whole(path.name, main if role == "fp32" else role, value, whole)


# -- writing ----------------------------------------------------------------------------------------------------------


def write_universal(
    directory: str | os.PathLike[str], tag: str, source: Source, groups: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write a universal checkpoint that DeepSpeed 0.19 loads with ``{"checkpoint": {"load_universal": true}}``.

    One process writes it, tensor by tensor: from a checkpoint of zoo (:func:`zoo.checkpointing.load`) or any that is
    read like one. Parameters and states are made fp32. What DeepSpeed never restores from such a checkpoint (buffers,
    frozen parameters) is written into the file of the model for other readers. The folder is written as
    ``.writing-<tag>`` and renamed when it is whole; ``latest_universal`` names it then.

    Args:
        source: its roles other than "parameter" and "buffer" are the optimizer's states; "step/<name>" its steps.
        groups: options of the optimizer's groups (``lr``, ``betas``, …) that replace those of the engine that loads,
            in its order; by default those of the engine that wrote the source, where one of zoo did, else that
            engine's own stay. Stage 3 of DeepSpeed gives all groups the options of the
            first; so it gets only those in which all groups agree. It also gives all its sub-groups one and the same
            tensor of steps, which ``torch.optim`` counts up once for each of them: continue there with
            an optimizer that has its steps as plain numbers, as DeepSpeed's own have, or with one sub-group.

    Raises:
        CheckpointError: a name that cannot be a folder's, a trained parameter of complex numbers, or what the source
            cannot read.
    """
    root = Path(directory)
    _check_names([tag, *source.shapes])
    if tag in LATEST:
        raise CheckpointError(f"the tag {tag!r} is the name of a file beside checkpoints; give another one")
    _check_dtypes(source)
    final, temporary = root / tag, root / f".writing-{tag}"
    if final.exists():
        raise CheckpointError(f"{str(final)!r} exists; give another tag, or remove it")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary / "zero")
    trained: dict[str, tuple[int, ...]] = {}
    rest: dict[str, torch.Tensor] = {}
    steps: dict[str, float] = {}
    for name, shape in source.shapes.items():
        states = [role for role in source.roles[name] if role not in ("parameter", "buffer") and "." not in role]
        if "parameter" not in source.roles[name] or not states:
            for role in {"parameter", "buffer"} & set(source.roles[name]):
                rest[name] = source.tensor(name, role)
            continue
        trained[name] = tuple(shape)
        for role in ("parameter", *states):
            value = {"cat_dim": 0, "param": source.tensor(name, role).float().clone()}
            _save(value, temporary / "zero" / name / f"{'fp32' if role == 'parameter' else role}.pt")
        steps[name] = float(source.scalars.get(f"step/{name}", 0))
        _save(torch.tensor(steps[name]), temporary / "zero" / name / "step.pt")
    _write_common(temporary, source, trained, rest, steps, groups or _options_of(source))
    os.replace(temporary, final)
    sync(root)
    replace(root / "latest_universal", tag.encode())
    return final


def _write_common(
    folder: Path, source: Source, trained: dict[str, tuple[int, ...]], rest: dict[str, torch.Tensor],
    steps: dict[str, float], groups: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    options = [{k: v for k, v in group.items() if k not in ("params", "names")} for group in groups]
    common = {k: v for k, v in (options[0] if options else {}).items() if all(o.get(k) == v for o in options)}
    step = torch.tensor(max(steps.values(), default=0.0))
    state: dict[str, Any] = {
        "ds_version": WRITTEN_AS,
        # DeepSpeed fills as many groups as are here; those without options keep their own.
        "param_groups": options + [{} for _ in range(_MANY_GROUPS - len(options))],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }
    _save(state, folder / "zero" / "optimizer_state.pt")
    said = _training_of(source)
    client = source.meta.get("client", {}) if isinstance(source.meta, Mapping) else {}
    counters = {
        key: said.get(key, default)
        for key, default in (
            ("global_steps", int(step)),
            ("global_samples", 0),
            ("skipped_steps", 0),
            ("lr_scheduler", None),
        )
    }
    buffers = [name for name in rest if "buffer" in source.roles[name]]
    model = {
        **client, **counters, "module": rest, "buffer_names": buffers, "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in trained.items()}], "frozen_param_shapes": None,
        "shared_params": {}, "frozen_param_fragments": None, "data_sampler": None, "random_ltd": None,
        "dp_world_size": 1, "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {}, "ds_version": WRITTEN_AS, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }  # fmt: skip
    for name in _MODEL_FILES:
        _save(model, folder / name)


def _options_of(source: Source) -> list[dict[str, Any]]:
    """Of the groups of zoo's engine, the options that every system's optimizers call so."""
    own = source.meta.get("engine") if isinstance(source.meta, Mapping) else None
    groups = own.get("param_groups", ()) if isinstance(own, Mapping) else ()
    return [{key: group[key] for key in _OPTIONS if key in group} for group in groups]


def _training_of(source: Source) -> Mapping[str, Any]:
    """Counters and the schedule's state, in DeepSpeed's words."""
    meta = source.meta if isinstance(source.meta, Mapping) else {}
    own = meta.get("engine")
    if not isinstance(own, Mapping):
        said: Mapping[str, Any] = meta.get("deepspeed", {})
        return said
    schedule = own.get("lr_scheduler")
    if isinstance(schedule, Mapping) and type(schedule.get("last_step")) is int:  # one of zoo's; others have their own
        schedule = {"last_batch_iteration": schedule["last_step"] - 1}
    return {
        "global_steps": own["global_steps"], "skipped_steps": own["skipped_steps"],
        "global_samples": own.get("samples", 0), "lr_scheduler": schedule,
    }  # fmt: skip


def _check_dtypes(source: Source) -> None:
    """Raise CheckpointError for complex states, of which fp32 would lose the imaginary part."""
    for name, roles in source.roles.items():
        for role, dtype in roles.items() if set(roles) - {"parameter", "buffer"} else ():
            if dtype_named(dtype).is_complex:
                raise CheckpointError(
                    f"{role} {name!r} is {dtype}, and a universal checkpoint holds fp32; write another format "
                    "(save_dcp), or make the parameter real (torch.view_as_real)"
                )


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(".writing-") or len(name) > 200:
            raise CheckpointError(f"{name[:80]!r} cannot be the name of a folder, as a universal checkpoint has them")


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
