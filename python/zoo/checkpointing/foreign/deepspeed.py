"""Checkpoints of DeepSpeed, read as logical tensors; nothing in them is imported or called.

What of a checkpoint becomes what:

================================================ ==================================================================
fp32 partitions of ZeRO, fp32 copies of fp16     role "parameter"
parameters that no optimizer has                 role "parameter", in their own dtype: frozen ones; all, without ZeRO
states of the optimizer inside (``exp_avg``, …)  roles of the same names; numbers are scalars, "step/<name>", which
                                                 is the number of steps taken where it keeps none (SGD)
buffers (``buffer_names``)                       role "buffer"
a dynamic loss scaler                            scalars "zero/scale", "zero/good_steps" and "zero/lives"
``shared_params``                                ``meta["tied"]``: further name → the name whose values they have
client state                                     ``meta["client"]``
counters, ``lr_scheduler``, options of groups    ``meta["deepspeed"]``
================================================ ==================================================================

Experts have their numbers in the whole model. Names of a pipeline are DeepSpeed's, "<number of the layer>.<name>".
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError, together
from zoo.checkpointing.foreign import deepspeed_tensor, deepspeed_universal
from zoo.checkpointing.foreign.deepspeed_files import (
    Folder,
    find_folder,
    need_dict,
    need_list,
    need_number,
    open_folder,
)
from zoo.checkpointing.foreign.deepspeed_stages import (
    Shapes,
    add_partitioned,
    add_split,
    group_states,
    shapes_of,
    split_runs,
)
from zoo.checkpointing.foreign.deepspeed_whole import add_stages_states, add_whole_states
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.records import Record, plain
from zoo.checkpointing.foreign.regions import StoredTensor
from zoo.comm import Communicator

_KEPT = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts",
)  # fmt: skip
_INNER = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "iteration", "args",
    "frozen_param_fragments", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info", "folding",
    "checkpoint_version", "csr_tensor_module_names", "sparse_tensor_module_names",
)  # fmt: skip


def load_deepspeed(
    directory: str | os.PathLike[str],
    tag: str | None = None,
    comm: Communicator | None = None,
    *,
    groups: Sequence[Sequence[str]] | None = None,
    optimizer_states: bool = True,
    verify: bool = True,
    universal: bool = True,
    shared: Mapping[str, str] | None = None,
) -> ForeignCheckpoint:
    """Open a checkpoint of DeepSpeed: stages 0 to 3, with pipeline and expert files, or universal. A collective.

    Args:
        directory: what ``save_checkpoint`` was given.
        tag: what ``latest_universal`` names if not given, or ``latest`` where there is no such file.
        groups: names of the parameters in each group of the optimizer, in its order. Without ZeRO its states are saved
            by numbers, so several groups cannot be told apart without it; elsewhere it is not used.
        optimizer_states: without them only the weights are there (masters where there are masters).
        verify: compare every tensor with the checksum that its file has; the ranks share that work.
        shared: of a pipeline: begin of the names of a layer → of the module that it shares with others, as
            ``{"0.": "tied_modules.ends.", "4.": "tied_modules.ends."}``; its files do not say it.
        universal: False: without a tag ``latest`` comes before ``latest_universal``.

    Raises:
        CheckpointError: on all ranks alike, naming what is wrong or missing. Tensor-parallel parts whose files do not
            say how they fit together (``universal_checkpoint_info``: AutoTP's and Megatron's do) have to be made
            universal first, with DeepSpeed's ``ds_to_universal``.
    """
    comm = comm if comm is not None else Communicator()
    opened: list[ForeignCheckpoint] = []

    def work() -> None:
        chosen, path = find_folder(directory, tag, universal=universal)
        opened.append(
            _open(
                open_folder(path, verify=verify, share=(comm.rank, comm.size)),
                chosen,
                groups,
                optimizer_states,
                shared or {},
            )
        )

    together(comm, f"loading DeepSpeed's checkpoint {tag or 'latest'!r} of {str(directory)!r}", work)
    return opened[0]


def _open(
    folder: Folder, tag: str, names: Sequence[Sequence[str]] | None, optimizer_states: bool, shared: Mapping[str, str]
) -> ForeignCheckpoint:  # fmt: skip
    path = folder.path
    found = ForeignCheckpoint(tag, path)
    parts = _tensor_ranks(folder)
    if parts:
        opened = [_open(part, tag, names, optimizer_states, shared) for part in parts]
        deepspeed_tensor.join(found, opened, folder.models[min(folder.models)].get(deepspeed_tensor.INFO))
        found.unknown = folder.unknown
        return found
    options: list[dict[str, Any]] = []
    if folder.universal:
        common = deepspeed_universal.add_universal(found, folder, optimizer_states)
        options += deepspeed_universal.options_of(common)
        _add_scaler(found, common)
    stages = sorted({model for _, model in folder.models})
    if not folder.part:
        _check_parallel(folder, stages)
    numbered = folder.layers and optimizer_states and not (folder.universal or folder.optimizers)
    by_stage = add_stages_states(found, folder, names, shared) if numbered else {}
    rests: list[tuple[int, dict[Any, Any], Rest]] = []
    for stage in stages:
        model = folder.models[min(key for key in folder.models if key[1] == stage)]
        what = f"{path.name}/mp_rank_{stage:02d}"
        if folder.universal:
            if len(folder.models) > len(stages):
                _add_split_frozen(found, folder, stage, len(folder.models) // len(stages), path.name)
            rests.append((stage, model, Rest([], _frozen(model, path.name))))
            continue
        partitions = sorted(rank for rank, part in folder.optimizers if part == stage)
        if partitions:
            shapes = _add_zero(found, folder, stage, partitions, model, optimizer_states, what)
        elif model.get("param_shapes") is not None:
            raise CheckpointError(f"{what} was written with ZeRO, and its files of the optimizer are missing")
        else:
            if not optimizer_states:
                shapes = []
            elif folder.layers:
                shapes = by_stage.get(stage, [])
            else:
                shapes = add_whole_states(found, folder, model, names, what)
            _add_scaler(found, model.get("optimizer") or {})
        options += _options(folder, stage, model, shapes, what)
        rests.append((stage, model, Rest(shapes, _frozen(model, what))))
    for stage, model, rest in rests:
        _add_rest(found, folder, stage, model, rest)
    if folder.layers:
        _drop_copies(found, [rest for _, _, rest in rests])
    if stages:
        _add_meta(found, folder.models[min(folder.models)], options)
        _add_steps(found)
    clip = next(iter(folder.optimizers.values()), {}).get("optimizer_state_dict", {}).get("clip_grad")
    if type(clip) in (int, float):
        found.meta["deepspeed"]["clip_grad"] = clip
    found.unknown = folder.unknown
    return found


class Rest:
    """What of a model is trained or frozen, so that the rest are buffers and parameters that nobody listed."""

    def __init__(self, shapes: Shapes, frozen: Mapping[str, tuple[int, ...]]) -> None:
        self.trained = {name for group in shapes for name in group}
        self.frozen = frozen


def _tensor_ranks(folder: Folder) -> list[Folder]:
    """Of files that say how tensor-parallel parts fit together: those of each rank. Empty for all others."""
    ranks = sorted({model for _, model in folder.models})
    dims = [model.get("checkpoint_parallel_dimensions") for model in folder.models.values()]
    stages = any(isinstance(d, dict) and d.get("pp_degree", 1) != 1 for d in dims)
    told = all(model.get(deepspeed_tensor.INFO) for model in folder.models.values())
    if folder.universal or folder.layers or folder.experts or stages or len(ranks) < 2 or not told:
        return []
    size = folder.models[min(folder.models)].get("mp_world_size", len(ranks))
    if ranks != list(range(len(ranks))) or size != len(ranks):
        raise CheckpointError(
            f"{folder.path.name!r} was written by {size} tensor-parallel ranks; it has files of {ranks}"
        )
    return [folder.of_rank(rank) for rank in ranks]


def _check_parallel(folder: Folder, stages: list[int]) -> None:
    """Raise unless the ranks of the model are pipeline stages, or one."""
    name = folder.path.name
    for (_, stage), model in folder.models.items():
        dims = model.get("checkpoint_parallel_dimensions") or {}
        tensor = dims.get("tp_degree") if isinstance(dims, dict) else None
        size = model.get("mp_world_size")
        if type(size) is int and size > 1 and stages != list(range(size)):
            raise CheckpointError(f"{name!r} was written by {size} model-parallel ranks; it has files of {stages}")
        split = tensor if type(tensor) is int else 1 if folder.layers else len(stages)
        if split > 1 and not folder.universal:
            raise CheckpointError(
                f"{name!r} is split over {split} tensor-parallel ranks (file of mp_rank {stage}), and does not say "
                "which dim of each parameter is; make it universal with DeepSpeed's ds_to_universal, which is read"
            )


def _add_zero(
    found: ForeignCheckpoint,
    folder: Folder,
    stage: int,
    ranks: list[int],
    model: dict[Any, Any],
    states: bool,
    what: str,
) -> Shapes:
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{what} has optimizer files of the data-parallel ranks {ranks}; some are missing")
    size = model.get("dp_world_size")
    if type(size) is int and size != len(ranks):
        raise CheckpointError(f"{what} was written by {size} data-parallel ranks; there are files of {len(ranks)}")
    found.world_size = max(found.world_size, len(ranks) * len({part for _, part in folder.models}))
    shapes = shapes_of(model.get("param_shapes"), f"param_shapes of {what}")
    each = [need_dict(folder.optimizers[rank, stage].get("optimizer_state_dict"), what) for rank in ranks]
    zero = need_number(each[0].get("zero_stage", 1), f"zero_stage of {what}")
    key, inner = ("fp32_flat_groups", "optimizer_state_dict") if zero == 3 else (
        "single_partition_of_fp32_groups", "base_optimizer_state"
    )  # fmt: skip
    own = []
    for state in each:
        masters = need_list(state.get(key), f"{key} of {what}")
        own.append(group_states(state, masters, state.get(inner) if states else None, what))
    if zero == 3:
        count = each[0].get("partition_count", len(ranks))
        if count != len(ranks):
            raise CheckpointError(f"{what} splits parameters over {count!r} of {len(ranks)} ranks; that is not read")
        add_split(found, shapes, own, what)
        _add_split_frozen(found, folder, stage, len(ranks), what)
    else:
        counts = each[0].get("partition_count")
        add_partitioned(found, shapes, own, each[0].get("param_alignment_paddings"), counts, what)
    _add_scaler(found, each[0])
    return shapes


def _frozen(model: dict[Any, Any], what: str) -> dict[str, tuple[int, ...]]:
    shapes = model.get("frozen_param_shapes")
    return shapes_of([shapes], f"frozen_param_shapes of {what}")[0] if shapes is not None else {}


def _add_split_frozen(found: ForeignCheckpoint, folder: Folder, stage: int, ranks: int, what: str) -> None:
    models = [folder.models.get((rank, stage)) for rank in range(ranks)]
    for name, shape in _frozen(folder.models[0, stage], what).items():
        parts = []
        for model in models:
            part = need_dict((model or {}).get("frozen_param_fragments"), f"frozen_param_fragments of {what}").get(name)
            if not isinstance(part, StoredTensor) or len(part.shape) != 1:
                raise CheckpointError(f"{what} has no part of the frozen {name!r} on some rank")
            parts.append(part)
        found.add(name, "parameter", shape, split_runs(parts, math.prod(shape)))


def _add_rest(found: ForeignCheckpoint, folder: Folder, stage: int, model: dict[Any, Any], rest: Rest) -> None:
    """Buffers, frozen parameters, and what the files of layers and experts have."""
    what = f"the model of {folder.path.name}"
    given = need_list(model.get("buffer_names") or [], what)
    buffers = {name for name in given if isinstance(name, str)}
    shared = need_dict(model.get("shared_params") or {}, what)
    tied = {a: b for a, b in shared.items() if isinstance(a, str) and isinstance(b, str)}
    if tied:
        found.meta.setdefault("tied", {}).update(tied)
    entries = dict(need_dict(model.get("module") or {}, what))
    first = stage == min(part for _, part in folder.models)
    for (number, _), layer in folder.layers.items() if first else ():
        entries |= {f"{number}.{name}": value for name, value in layer.items() if isinstance(name, str)}
    for expert in folder.experts.values() if first else ():
        entries |= expert
    places: dict[Any, str] = {}
    for name, value in entries.items():
        if isinstance(name, str) and isinstance(value, StoredTensor) and value.numel:
            first_name = places.setdefault(value.place, name)
            if first_name != name and name not in found.shapes:
                found.meta.setdefault("tied", {})[name] = first_name
                continue
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            continue  # extra state of modules
        if name in buffers:
            if "buffer" not in found.roles.get(name, {}):
                found.add_whole(name, "buffer", value)
        elif name not in found.shapes and name not in rest.trained and name not in tied:
            if not value.numel and 0 not in rest.frozen.get(name, ()):
                continue  # at stage 3 nothing is left where a parameter was
            found.add_whole(name, "parameter", value)
    if folder.layers and first:
        later = {n for m in folder.models.values() for n in (m.get("buffer_names") or []) if isinstance(n, str)}
        _rename_buffers(found, later - buffers)


def _drop_copies(found: ForeignCheckpoint, rests: list[Rest]) -> None:
    """Files of layers that share a module of a pipeline's have its weights once more, under the number of the layer;
    that nothing trains or freezes, and its values, tell them from what has no other name."""
    listed = {name for rest in rests for name in (*rest.trained, *rest.frozen)}
    shared: dict[str, list[str]] = {}
    for name in found.shapes:
        if name.startswith("tied_modules."):
            shared.setdefault(name.split(".", 2)[-1], []).append(name)
    for name in [n for n, roles in found.roles.items() if n not in listed and set(roles) == {"parameter"}]:
        number, _, inner = name.partition(".")
        for other in shared.get(inner, ()) if number.isdigit() else ():
            value = found.tensor(name)
            if value.shape == found.shapes[other] and torch.equal(value, found.tensor(other).to(value.dtype)):
                found.remove(name)
                break


def _rename_buffers(found: ForeignCheckpoint, names: set[str]) -> None:
    """Of later stages of a pipeline: their layers' files were read as if all they have were parameters."""
    for name in names:
        found.change_role(name, "parameter", "buffer")


def _add_scaler(found: ForeignCheckpoint, state: Any) -> None:
    """The dynamic loss scaler, in the words of zoo.zero's: good steps since the last overflow, lives left."""
    if not isinstance(state, dict):
        return
    scaler = state.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, Record) else dict(state)
    scale, number, last = fields.get("cur_scale"), fields.get("cur_iter"), fields.get("last_overflow_iter")
    dynamic = state.get("dynamic_loss_scale") is True
    if not dynamic or type(scale) not in (int, float) or type(number) is not int or type(last) is not int:
        return
    lives = fields.get("cur_hysteresis", 1)
    if not 0 < scale < 2.0**127 or not -1 <= last < number + 1 < 2**48:  # type: ignore[operator]
        raise CheckpointError(f"the loss scaler has scale {scale!r} at step {number!r}, last overflow at {last!r}")
    found.scalars["zero/scale"] = float(scale)  # type: ignore[arg-type]
    found.scalars["zero/good_steps"] = float(max(number - last - 1, 0))
    found.scalars["zero/lives"] = float(lives) if type(lives) is int and 0 < lives < 2**31 else 1.0


def _options(folder: Folder, stage: int, model: dict[Any, Any], shapes: Shapes, what: str) -> list[dict[str, Any]]:
    """Options of each group of the optimizer, with the names of its parameters."""
    state: Any = model.get("optimizer")
    if (0, stage) in folder.optimizers:
        state = folder.optimizers[0, stage].get("optimizer_state_dict")
        state = state.get("base_optimizer_state", state) if isinstance(state, dict) else None
    if isinstance(state, dict) and "optimizer_state_dict" in state:
        state = state["optimizer_state_dict"]
    if not isinstance(state, dict) or "param_groups" not in state:
        return []
    found, left = [], [list(group) for group in shapes]
    for group in need_list(state["param_groups"], what):
        options = {k: v for k, v in need_dict(group, what).items() if k != "params"}
        members = need_list(group.get("params", []), what)
        many = len(members) if len(left) > 1 and (0, stage) in folder.optimizers else 1
        names = [name for _ in range(min(many, len(left))) for name in left.pop(0)]
        found.append({**plain(options, f"the options of {what}"), "names": names})
    return found


def _add_steps(found: ForeignCheckpoint) -> None:
    """Of optimizers that keep no number of steps, as torch's SGD: those that moved the parameters."""
    said = found.meta["deepspeed"]
    steps, skipped = said.get("global_steps"), said.get("skipped_steps", 0)
    if type(steps) is not int or type(skipped) is not int or not 0 <= skipped < steps < 2**48:
        return
    for name, roles in found.roles.items():
        if set(roles) - {"parameter", "buffer"}:
            found.scalars.setdefault(f"step/{name}", float(steps - skipped))


def _add_meta(found: ForeignCheckpoint, model: dict[Any, Any], options: list[dict[str, Any]]) -> None:
    what = f"the state of {found.tag!r}"
    kept = {key: model[key] for key in _KEPT if key in model}
    client = {k: v for k, v in model.items() if k not in _KEPT and k not in _INNER}
    found.meta["deepspeed"] = {**plain(kept, what), "param_groups": options}
    found.meta["client"] = plain(client, f"the client state of {found.tag!r}")
