"""The model's weights alone, as one file, streamed from the shards."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from zoo import checkpointing
from zoo.checkpointing import foreign
from zoo.engine.checkpoint.module_state import every_name_of_buffers, whole_buffers
from zoo.engine.checkpoint.places import check_place
from zoo.layout import logical_name
from zoo.shard import ShardedModel

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_log = logging.getLogger("zoo.engine")


def save_model(
    module: nn.Module, sharded: ShardedModel, folder: str | os.PathLike[str], filename: str, *,
    exclude_frozen: bool = False,
    always: bool = False,
) -> bool:  # fmt: skip
    """See :meth:`~zoo.engine.Engine.save_16bit_model`; with ``always`` at stage 3 whatever the option says."""
    comm, config = sharded.everyone, sharded.config

    def check() -> None:
        check_place(folder)
        _check_name(filename)

    checkpointing.alike(comm, "save_16bit_model()", check)
    device = sharded.buckets[0].device
    comm.agree("save_16bit_model with filename and exclude_frozen_parameters", repr((filename, exclude_frozen)), device)
    first = comm.rank == 0
    if config.stage == 3 and not (always or config.gather_16bit_weights_on_model_save):
        if first:
            _log.warning(
                "save_16bit_model() saved nothing: at stage 3 the parameters are split over the ranks, and "
                "zero_optimization.gather_16bit_weights_on_model_save is false. Set it to true, or use "
                "save_checkpoint(), which every rank writes its part of."
            )
        return False
    whole = sharded.whole_model(frozen=not exclude_frozen)
    if first:
        _tell_wide(whole.described)
    buffers: dict[str, torch.Tensor] = {}
    for name, buffer in whole_buffers(module, sharded).items():
        if all(buffer is not other for other in buffers.values()):
            buffers[name] = buffer
    tied = aliases(module, sharded, {*whole.described, *buffers})
    what = f"saving the model as {filename!r} in {str(folder)!r}"
    opened: list[checkpointing.TensorFile | foreign.TorchFile] = []
    failure: Exception | None = None

    def begin() -> None:
        if first:
            opened.append(_open(Path(folder) / filename, whole.described, buffers, tied))

    def finish() -> None:
        if failure is not None:
            raise failure
        for file in opened:
            file.commit()

    checkpointing.together(comm, what, begin)
    try:
        for name, tensor in whole:
            try:
                for file in opened if failure is None else ():
                    file.put(name, tensor)
            except Exception as error:  # told to everybody in finish(): the other ranks are in the next gather by now
                failure = error
        checkpointing.together(comm, what, finish)
    finally:
        for file in opened:
            file.discard()
    return True


def _open(
    path: Path, parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]], buffers: dict[str, torch.Tensor],
    tied: dict[str, str],
) -> checkpointing.TensorFile | foreign.TorchFile:  # fmt: skip
    """The file, with its buffers."""
    from zoo.checkpointing.format.disk import LOCAL, make_directories

    make_directories(LOCAL, Path(os.path.abspath(path.parent)))
    described = {**parameters, **{name: (b.dtype, tuple(b.shape)) for name, b in buffers.items()}}
    file: checkpointing.TensorFile | foreign.TorchFile
    if path.suffix in TORCH_SUFFIXES:
        file = foreign.TorchFile(path, described, tied)
    else:
        file = checkpointing.TensorFile(path, described, {"format": "pt", **tied})
    try:
        for name, buffer in buffers.items():
            file.put(name, buffer)
    except BaseException:
        file.discard()
        raise
    return file


def _check_name(filename: object) -> None:
    if not isinstance(filename, str) or not _NAME.fullmatch(filename) or not filename.endswith(SUFFIXES):
        raise checkpointing.CheckpointError(
            f"filename={filename!r}; it is the name of a file in the folder, of letters, digits and any of _ . + = - "
            f"(not first), at most 200 of them, and ends in {' or '.join(map(repr, SUFFIXES))}, the formats "
            "that are written"
        )


def _tell_wide(described: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    wide = sorted({str(dtype).removeprefix("torch.") for dtype, _ in described.values() if dtype.itemsize > 2})
    if wide:
        _log.info(
            "save_16bit_model() saves %s parameters as they are: the model computes with them. With bf16.enabled or "
            "fp16.enabled in the configuration they have 16 bits.",
            " and ".join(wide),
        )


def aliases(module: nn.Module, sharded: ShardedModel, kept: Collection[str]) -> dict[str, str]:
    """Further names, in the whole model, of what is saved: parameters that are tied, and buffers of modules that have
    several names. Collective where ranks have other layers."""
    found: dict[str, str] = {}
    parameters = [(logical_name(module, n), p) for n, p in module.named_parameters(remove_duplicate=False)]
    for everything in (parameters, list(every_name_of_buffers(module))):
        first_name = {id(tensor): name for name, tensor in everything if name in kept}
        found |= {n: first_name[id(t)] for n, t in everything if n not in kept and id(t) in first_name}
    if sharded.layers is None:
        return found
    return {name: first for there in sharded.layers.all_gather_object(found) for name, first in there.items()}
