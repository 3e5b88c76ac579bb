"""Whole weights out of a checkpoint: the three functions of DeepSpeed's ``zero_to_fp32``, and its script.

Tensors are chosen and files are written by :mod:`zoo.checkpointing.zero_to_fp32`, which does the same without zoo; here
they are read by :func:`zoo.checkpointing.load`, every version of the format, verified on the way.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Literal, overload

import torch
from torch import nn

from zoo.checkpointing import zero_to_fp32
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import Disk, put, read_file
from zoo.checkpointing.format.disk import place_of as disk_of
from zoo.checkpointing.reading import load
from zoo.checkpointing.zero_to_fp32 import LazyTensor, place_of, state_dict_of, tensors_of, write_model
from zoo.comm import Communicator
from zoo.layout import logical_name

SCRIPT = "zero_to_fp32.py"
_OURS = b'"""zero_to_fp32:'
_MOST_BYTES = 1 << 20


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: Literal[False] = False,
) -> dict[str, torch.Tensor]: ...
@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    lazy_mode: Literal[True],
) -> dict[str, LazyTensor]: ...
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]:
    """A checkpoint's parameters and buffers, whole, on the CPU: what ``model.load_state_dict`` takes.

    What has floating point is fp32, whatever dtype it was saved in; the rest is as it was saved. A tied parameter is
    there under all names that the checkpoint knows of it, with one memory.

    Args:
        checkpoint_dir: the directory that holds the tags.
        tag: which checkpoint; the latest if not given.
        exclude_frozen_parameters: leave out those that were not trained: where the checkpoint does not name them, those
            without a state of the optimizer.
        lazy_mode: give :class:`~zoo.checkpointing.zero_to_fp32.LazyTensor` objects, which read when their
            ``contiguous()`` is called; the whole model is never in memory.

    Raises:
        CheckpointError: what is wrong with the checkpoint.
        ValueError: it does not tell what is frozen.
    """
    tensors = tensors_of(
        load(checkpoint_dir, tag, Communicator.alone()), exclude_frozen_parameters=exclude_frozen_parameters
    )
    return tensors if lazy_mode else state_dict_of(tensors)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move ``model`` to the CPU and give it the weights and buffers of a checkpoint; gives the model.

    Weights keep the model's dtypes. The names must be those of the model; ``extra_state`` stays as it is. An engine
    that still has this model must not train it afterwards.

    Raises:
        CheckpointError: what is wrong with the checkpoint, or where it does not fit the model.
        ValueError: the model's weights are split over ranks.
    """
    model.cpu()
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            raise ValueError(
                f"the model's {name!r} is not whole on this rank: an engine has split it; give a model that is in none"
            )
    with load(checkpoint_dir, tag, Communicator.alone()) as found:
        tensors = tensors_of(found, dtype=None)  # as they were saved: the model's dtype may be wider than fp32
        mine = model.state_dict(keep_vars=True)
        names = {key: logical_name(model, key) for key in mine if not key.endswith("_extra_state")}
        first: dict[int, str] = {}  # of tied parameters the checkpoint may have one name alone
        for key, name in names.items():
            if name in tensors:
                first.setdefault(id(mine[key]), name)
        names = {key: name if name in tensors else first.get(id(mine[key]), name) for key, name in names.items()}
        missing = sorted(set(names.values()) - set(tensors))
        surplus = sorted(set(tensors) - set(names.values()))
        if missing or surplus:
            lacks = f"lacks {missing[0]!r}" if missing else f"has {surplus[0]!r}, which the model lacks"
            others = len(missing) + len(surplus) - 1
            raise CheckpointError(
                f"checkpoint {found.tag!r} {lacks}" + (f", and {others} other names differ" if others else "")
            )
        for key, name in names.items():
            if tuple(mine[key].shape) != tensors[name].shape:
                raise CheckpointError(
                    f"the model's {key!r} has shape {tuple(mine[key].shape)}; checkpoint {found.tag!r} has "
                    f"{tensors[name].shape}"
                )
        state = state_dict_of({key: tensors[name] for key, name in names.items()})
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool | None = None,
) -> list[Path]:
    """Write a checkpoint's whole fp32 weights for whoever has no zoo, piece by piece; gives the files.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: see :func:`get_fp32_state_dict_from_zero_checkpoint`.
        output_file: one file: .bin, .pt or .pth, which ``torch.load(weights_only=True)`` reads, or .safetensors. A path
            with another ending is taken for a folder.
        output_dir: in the place of ``output_file``: a folder, made if it does not exist. It gets
            ``pytorch_model.bin``, or several ``pytorch_model-00001-of-00003.bin`` and ``pytorch_model.bin.index.json``,
            as Hugging Face's libraries read them; with ``safe_serialization`` ``model.safetensors`` and so on.
        max_shard_size: of each file in a folder: bytes, or as in "5GB" (10⁹), "1GiB" (2³⁰). A tensor that is larger
            has a file of its own.
        safe_serialization: safetensors. Decided by the name of ``output_file`` where there is one.

    Raises:
        CheckpointError: what is wrong with the checkpoint.
        ValueError: an argument that cannot be; or a folder that holds another model.
    """
    if (output_file is None) == (output_dir is None):
        raise ValueError("convert_zero_checkpoint_to_fp32_state_dict() takes output_file or output_dir, one of them.")
    if output_dir is not None and os.path.isfile(output_dir):
        raise ValueError(f"output_dir={os.fspath(output_dir)!r} is a file")
    output = output_file if output_file is not None else os.path.join(output_dir or "", "")
    safe, shard_bytes = place_of(output, safe_serialization, max_shard_size)
    with load(checkpoint_dir, tag, Communicator.alone()) as found:
        tensors = tensors_of(found, exclude_frozen_parameters=exclude_frozen_parameters)
        return write_model(tensors, output, safe=safe, max_shard_bytes=shard_bytes)


def write_script(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> Path | None:
    """Put ``zero_to_fp32.py`` into a directory of checkpoints, at once; on one rank.

    It needs torch and numpy alone: ``python zero_to_fp32.py . model.bin``. One that is there already is replaced where
    it is an older one of zoo's; another file of that name stays, and nothing is written.

    Returns:
        The script; None where another file has its name.

    Raises:
        OSError: the directory is not there, or refuses.
    """
    disk, root = disk_of(directory, disk)
    path = root / SCRIPT
    content = inspect.getsource(zero_to_fp32).encode()
    if SCRIPT in disk.names(path.parent):
        try:
            there = read_file(disk, path, _MOST_BYTES)
        except (OSError, ValueError):
            return None
        if there == content:
            return path
        if not there.startswith(_OURS):
            return None
    put(disk, path, content)
    return path
