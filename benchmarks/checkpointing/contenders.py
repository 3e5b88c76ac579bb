"""Who saves and loads. Each is a pair of functions on this rank's tensors and a folder."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.layout import StateSlice

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """``save`` returns what has to be waited for, or None; ``load`` fills tensors that look like the state's."""

    save: Callable[[State, Path], Callable[[], Any] | None]
    load: Callable[[State, Path], None]
    peer: bool = True


def _slice(name: str, tensor: torch.Tensor) -> StateSlice:
    rank, size, numel = dist.get_rank(), dist.get_world_size(), tensor.numel()
    return StateSlice(name, "parameter", rank * numel, numel, (numel * size,), tensor)


def _zoo() -> Contender:
    from zoo.checkpointing import load, save
    from zoo.comm import Communicator

    comm = Communicator()

    def write(state: State, folder: Path) -> None:
        save(folder, "one", [_slice(*item) for item in state.items()], comm=comm)

    def read(state: State, folder: Path) -> None:
        with load(folder, comm=comm) as found:
            for name, tensor in state.items():
                part = _slice(name, tensor)
                if found.read(name, "parameter", part.start, part.length, out=tensor) is not tensor:
                    raise AssertionError("a tensor was not filled where it lies.")

    return Contender(write, read, peer=False)


def _zoo_background() -> Contender:
    from zoo.checkpointing import BackgroundSaver
    from zoo.comm import Communicator

    saver = BackgroundSaver(Communicator())

    def write(state: State, folder: Path) -> Callable[[], Any]:
        saver.save(folder, "one", [_slice(*item) for item in state.items()])
        return saver.wait

    return Contender(write, _zoo().load, peer=False)


def _file(folder: Path) -> Path:
    return folder / f"rank{dist.get_rank()}.pt"


def _synced(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _torch_save() -> Contender:
    def write(state: State, folder: Path) -> None:
        torch.save(state, _file(folder))
        _synced(_file(folder))

    def read(state: State, folder: Path) -> None:
        for name, tensor in torch.load(_file(folder), mmap=False).items():
            state[name].copy_(tensor)

    return Contender(write, read)


def _dcp(asynchronous: bool) -> Contender:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    def named(state: State) -> dict[str, torch.Tensor]:
        return {f"{name}.{dist.get_rank()}": tensor for name, tensor in state.items()}

    def write(state: State, folder: Path) -> Callable[[], Any] | None:
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        if not asynchronous:
            dcp.save(named(state), storage_writer=writer)
            return None
        future: Any = dcp.async_save(named(state), storage_writer=writer)
        return lambda: future.result()

    def read(state: State, folder: Path) -> None:
        dcp.load(named(state), storage_reader=FileSystemReader(folder))

    return Contender(write, read)


def _deepspeed() -> Contender:
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        engine = TorchCheckpointEngine()

    def write(state: State, folder: Path) -> None:
        engine.save(state, str(_file(folder)))
        engine.commit("one")

    def read(state: State, folder: Path) -> None:
        for name, tensor in engine.load(str(_file(folder)), map_location="cpu").items():
            state[name].copy_(tensor)

    return Contender(write, read)


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "zoo": _zoo, "zoo, in the background": _zoo_background, "torch.save": _torch_save,
    "DCP": lambda: _dcp(False), "DCP async": lambda: _dcp(True), "DeepSpeed": _deepspeed,
}  # fmt: skip
