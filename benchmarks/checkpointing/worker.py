"""One rank of a measurement, in a fresh process of one gloo group. Writes its figures as JSON."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.checkpointing.contenders import CONTENDERS, Contender, State
from benchmarks.launch import answer
from benchmarks.process import reset_peak, status_bytes
from benchmarks.turns import turn

NUM_TENSORS = 100


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of every contender in every round; of the disk itself too."""
    folder = Path(spec["folder"])
    numel = spec["num_bytes"] // (4 * NUM_TENSORS * dist.get_world_size())
    dice = torch.Generator().manual_seed(rank)
    state = {f"t{n}": torch.randn(numel, generator=dice) for n in range(NUM_TENSORS)}
    made: dict[str, Contender] = {}
    left_out: dict[str, str] = {}
    for name in spec["names"]:
        try:
            made[name] = CONTENDERS[name]()
        except ImportError as error:
            left_out[name] = str(error)
    rounds: list[dict[str, Any]] = []
    order = list(made)
    for number in range(spec["rounds"]):
        with turn():
            figures: dict[str, Any] = {"the disk": _disk(folder, sum(t.nbytes for t in state.values()), rank)}
        for name in order[number % len(order) :] + order[: number % len(order)]:
            with turn():
                figures[name] = _round(made[name], state, folder / "one", rank)
        rounds.append(figures)
    return {"rounds": rounds, "left_out": left_out}


def _round(contender: Contender, state: State, folder: Path, rank: int) -> dict[str, float]:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.sync()
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    cpu, began = time.process_time(), time.perf_counter()
    wait = contender.save(state, folder)
    blocked = time.perf_counter() - began
    if wait is not None:
        wait()
    dist.barrier()
    found = {"blocked": blocked, "save": time.perf_counter() - began, "save_cpu": time.process_time() - cpu}
    found["memory"] = float(status_bytes("VmHWM") - before)
    found["bytes"] = float(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    _forget(folder)
    dist.barrier()
    like = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dist.barrier()
    cpu, began = time.process_time(), time.perf_counter()
    contender.load(like, folder)
    dist.barrier()
    found |= {"load": time.perf_counter() - began, "load_cpu": time.process_time() - cpu}
    if any(not torch.equal(like[name], tensor) for name, tensor in state.items()):
        raise AssertionError("what was loaded is not what was saved")
    return found


def _disk(folder: Path, num_bytes: int, rank: int) -> dict[str, float]:
    """One file a rank, past the page cache, forced at the end; and back."""
    from zoo.io import Handle

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"disk{rank}"
    with Handle(block_size=1 << 20, queue_depth=16) as handle:
        memory = handle.empty(num_bytes // 4, dtype=torch.float32)
        memory.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        handle.write(memory, path, fsync=True)
        dist.barrier()
        found = {"save": time.perf_counter() - began}
        _forget(folder)
        dist.barrier()
        began = time.perf_counter()
        handle.read(memory, path)
        dist.barrier()
        found["load"] = time.perf_counter() - began
    path.unlink()
    return found


def _forget(folder: Path) -> None:
    """The page cache forgets these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


if __name__ == "__main__":
    answer(measure)
