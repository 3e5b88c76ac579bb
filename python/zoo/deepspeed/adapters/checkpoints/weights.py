"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights of a checkpoint, of zoo or of DeepSpeed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import CheckpointError, load
from zoo.checkpointing.foreign import deepspeed_tags, load_deepspeed, load_torch
from zoo.checkpointing.listing import listing
from zoo.checkpointing.zero_to_fp32 import bytes_of, state_dict_of, tensors_of, write_model
from zoo.comm import Communicator
from zoo.deepspeed.adapters.utilities.logs import logger
from zoo.shard import ShardedModel
from zoo.shard.values.gathered import owner_of

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip


class NoFolderError(FileNotFoundError, ValueError):
    """There is no such folder; DeepSpeed's functions raise ValueError where it lacks a file ``latest``."""


@contextmanager
def _opened(checkpoint_dir: Any, tag: str | None) -> Iterator[Any]:
    """Whichever system's checkpoint is there, read by this process alone: programs convert on rank 0.

    Raises:
        ValueError: (CheckpointError) what is wrong. FileNotFoundError: there is no such folder.
    """
    place = Path(checkpoint_dir)
    if not place.is_dir() and "://" not in str(checkpoint_dir):
        raise NoFolderError(f"the folder {str(checkpoint_dir)!r} does not exist; give the one that was saved to.")
    theirs = deepspeed_tags(place) if place.is_dir() else []
    if tag in theirs if tag is not None else bool(theirs):
        ours = [found.tag for found in listing(place)]
        if tag is None and ours:
            raise CheckpointError(
                f"{str(place)!r} has checkpoints of zoo ({', '.join(ours[:3])}) and of DeepSpeed "
                f"({', '.join(theirs[:3])}); give the tag of the one that is meant"
            )
        read = load_deepspeed(place, tag, Communicator.alone(), optimizer_states=False)
        read.meta["model"] = {"tied": read.meta.get("tied", {})}  # where checkpoints of zoo have it
        yield read
        return
    with load(checkpoint_dir, tag, Communicator.alone()) as found:
        yield found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Parameters and buffers, whole, on the CPU, what has floating point in fp32; tied ones under all their names.

    ``lazy_mode``: objects that read when their ``contiguous()`` is called.

    Raises:
        ValueError: (CheckpointError) what is wrong with the checkpoint. FileNotFoundError: there is no such folder.
    """
    with _opened(checkpoint_dir, tag) as found:
        tensors = tensors_of(found, exclude_frozen_parameters=exclude_frozen_parameters)
        return dict(tensors) if lazy_mode else state_dict_of(tensors)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the CPU, with the weights of the checkpoint, in the dtypes that it has. On one rank or on all.

    Names of one that the other lacks are passed over, and the log says which. A model whose weights an engine has split
    (stage 3) gets ordinary parameters, and leaves that engine, which does not train it any more.

    Raises:
        ValueError: what is wrong with the checkpoint; or it lacks weights that are split over ranks. RuntimeError:
            shapes differ.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    _take_out(model, state)
    model = model.cpu()
    missing, surplus = model.load_state_dict(state, strict=False)
    if missing or surplus:
        logger.warning(
            "load_state_dict_from_zero_checkpoint: the checkpoint lacks %s; the model lacks %s.",
            ", ".join(missing) or "nothing", ", ".join(surplus) or "nothing",
        )  # fmt: skip
    return model


def _take_out(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Ordinary parameters, without values, in the place of those that are split over ranks; and no hooks of theirs."""
    split = {name: p for name, p in model.named_parameters(remove_duplicate=False) if hasattr(p, "ds_id")}
    lacking = [name for name in split if name not in state]
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks {lacking[0]!r}, which is split over the ranks and not whole here. Give a fresh model"
        )
    made: dict[int, nn.Parameter] = {}  # ties stay ties
    for name, old in split.items():
        owner = owner_of(old._zoo_bucket)  # type: ignore[attr-defined]
        if isinstance(owner, ShardedModel):
            owner.runtime.remove()
        if id(old) not in made:
            empty = torch.empty(tuple(old.ds_shape), dtype=old.dtype)  # type: ignore[attr-defined]
            made[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
        home, _, last = name.rpartition(".")
        model.get_submodule(home)._parameters[last] = made[id(old)]


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the weights into a folder as Hugging Face's libraries read them, in files of ``max_shard_size`` (None: one
    file), piece by piece.

    Raises:
        ValueError: what is wrong with the checkpoint, or a folder that holds another model.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB", safe_serialization: bool = False, tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """:func:`convert_zero_checkpoint_to_fp32_state_dict` in another dtype, also by its name."""
    chosen = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r}; allowed are {', '.join(_DTYPES)}.")
    size = bytes_of(max_shard_size) if max_shard_size is not None else 2**62
    with _opened(checkpoint_dir, tag) as found:
        tensors = tensors_of(found, dtype=chosen, exclude_frozen_parameters=exclude_frozen_parameters)
        write_model(tensors, output_dir, safe=safe_serialization, max_shard_bytes=size)


# -- DeepSpeed's files ------------------------------------------------------------------------------------------------


def atoi(text: str) -> int | str:
    """Digits as a number."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """By which "file_10" comes after "file_9"."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Paths of the files of one checkpoint that fit, in the order of their numbers.

    Raises:
        FileNotFoundError: there are none. Checkpoints of zoo have no files by rank.
    """
    found = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"the folder {str(checkpoint_dir)!r} has no files {glob_pattern}.")
    return found


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Files of the optimizer's states, in a checkpoint of DeepSpeed."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Files of the model's states, in a checkpoint of DeepSpeed."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The first of :func:`get_model_state_files`, by its name at that stage.

    Raises:
        FileNotFoundError: it is not there.
    """
    first = "zero_pp_rank_0_mp_rank_00" if zero_stage == 3 else "mp_rank_00"
    return get_checkpoint_files(checkpoint_dir, f"{first}_model_states.pt")[0]


@dataclass
class zero_model_state:
    """What a file of the model's states says."""

    buffers: dict[str, torch.Tensor]
    param_shapes: list[dict[str, torch.Size]]
    shared_params: list[list[str]]
    ds_version: Any
    frozen_param_shapes: dict[str, torch.Size] | None
    frozen_param_fragments: dict[str, torch.Tensor] | None


def parse_model_states(files: list[str]) -> list[zero_model_state]:
    """Each file of :func:`get_model_state_files`, buffers in fp32. Nothing of a file is executed.

    Raises:
        ValueError: a file is no such file, or damaged.
    """
    return [_parsed(Path(file)) for file in files]


def _parsed(file: Path) -> zero_model_state:
    state: Any = load_torch(file).value
    if not isinstance(state, dict) or "buffer_names" not in state:
        raise ValueError(f"{str(file)!r} is no file of a model's states as DeepSpeed saves them.")
    module = state["module"]
    buffers = {name: _tensor(module[name]) for name in state["buffer_names"] if name in module}
    fragments = state.get("frozen_param_fragments")
    frozen = state.get("frozen_param_shapes")
    return zero_model_state(
        buffers={name: b.float() if b.is_floating_point() else b for name, b in buffers.items()},
        param_shapes=[{name: torch.Size(shape) for name, shape in group.items()} for group in state["param_shapes"]],
        shared_params=[[alias, name] for alias, name in (state.get("shared_params") or {}).items()],
        ds_version=state.get("ds_version"),
        frozen_param_shapes=None if frozen is None else {name: torch.Size(shape) for name, shape in frozen.items()},
        frozen_param_fragments=None if fragments is None else {name: _tensor(t) for name, t in fragments.items()},
    )


def _tensor(stored: Any) -> torch.Tensor:
    found: torch.Tensor = stored.read().view(stored.shape)
    return found
