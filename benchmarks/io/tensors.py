"""``python -m benchmarks.io.tensors FILE``: what a transfer from ordinary memory costs, part by part.

The same bytes lie in memory of different kinds: as torch makes a tensor (64 bytes into a page, which most virtual disks
cannot reach, so that they are copied), at a multiple of 512 in ordinary pages (the kernel pins 4 KiB pages for every
transfer), there in huge pages, and in a pool (huge pages that a ring has registered). A copy alone, without any
transfer, is beside them. Before that, the first write from a buffer is compared with the second from the same.
FILE lies on the device, is made when it is missing, and stays.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.io.warm import Figure, cpu_s, measure

import zoo.io

SIZE = 1 << 29
BLOCK = 1 << 20
HUGE_PAGE = 2 << 20
HUGE, COLLAPSE = 14, 25
"""``MADV_HUGEPAGE``; ``MADV_COLLAPSE``, since Linux 6.1."""
_libc = ctypes.CDLL(None, use_errno=True)


def at_512() -> torch.Tensor:
    """(SIZE,) bytes of a tensor that begin at a multiple of 512, and of no more."""
    raw = torch.empty(SIZE + 8192, dtype=torch.uint8)
    return raw[(512 - raw.data_ptr()) % 4096 :][:SIZE]


def in_huge_pages() -> torch.Tensor:
    """(SIZE,) bytes of anonymous memory that asked for huge pages before it was touched."""
    memory = mmap.mmap(-1, SIZE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    return raw[-raw.data_ptr() % HUGE_PAGE :][:SIZE]


def advise(tensor: torch.Tensor, advice: int) -> str:
    """Advice about the huge pages that lie in a tensor; empty, or why it was refused."""
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    refused = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
    return f"refused: {os.strerror(ctypes.get_errno())}" if refused else ""


def collapse(tensor: torch.Tensor) -> str:
    """Ask the kernel to bring a tensor's ordinary pages together to huge ones; what that cost."""
    cpu, begun = cpu_s(), time.perf_counter()
    refused = advise(tensor, COLLAPSE)
    gigabytes = tensor.nbytes / 1e9
    spent = f"{(cpu_s() - cpu) / gigabytes:.3f} CPU s/GB, {(time.perf_counter() - begun) / gigabytes:.3f} s/GB"
    return refused or spent


def into_new(handle: zoo.io.Handle, path: Path, *, huge: bool) -> Figure:
    """A read into a tensor that nobody has touched."""
    cpu, begun = cpu_s(), time.perf_counter()
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    if huge:
        advise(tensor, HUGE)
    handle.pread(tensor, path)
    del tensor
    wall = time.perf_counter() - begun
    return SIZE / wall / 1e9, (cpu_s() - cpu) / (SIZE / 1e9)


def transfer(handle: zoo.io.Handle, tensor: torch.Tensor, path: Path, operation: str) -> Figure:
    """One transfer of the whole tensor."""
    cpu, begun = cpu_s(), time.perf_counter()
    (handle.pwrite if operation == "write" else handle.pread)(tensor, path)
    wall = time.perf_counter() - begun
    return tensor.nbytes / wall / 1e9, (cpu_s() - cpu) / (tensor.nbytes / 1e9)


def copy(tensor: torch.Tensor, buffers: torch.Tensor) -> Figure:
    """The copy through bounce buffers, and no transfer."""
    cpu, begun = cpu_s(), time.perf_counter()
    for index, block in enumerate(tensor.split(BLOCK)):
        buffers[index % len(buffers), : len(block)].copy_(block)
    wall = time.perf_counter() - begun
    return tensor.nbytes / wall / 1e9, (cpu_s() - cpu) / (tensor.nbytes / 1e9)


def first_and_second(path: Path) -> list[str]:
    """Two writes from each of some buffers of a pool that were touched, and written from by nobody yet.

    The backends take them in turns, and all are made before: one that came second would get memory that the first has
    given back, which the host of a virtual machine knows already.
    """
    with (
        zoo.io.Handle(block_size=BLOCK, queue_depth=8) as ring,
        zoo.io.Handle(block_size=BLOCK, queue_depth=8, backend="threads") as threads,
    ):
        pool = zoo.io.BufferPool(7 * SIZE, pinned=False)
        ratios: dict[zoo.io.Handle, list[str]] = {ring: [], threads: []}
        for handle in ratios:  # the file, the ring, the threads
            handle.pwrite(pool.empty(BLOCK, dtype=torch.uint8), path)
        buffers = [pool.empty(SIZE, dtype=torch.uint8).fill_(number) for number in range(6)]
        for index, buffer in enumerate(buffers):
            handle = (ring, threads)[index % 2]
            first, second = (transfer(handle, buffer, path, "write")[0] for _ in range(2))
            ratios[handle].append(f"{first / second:.2f}")
        return [
            f"{handle.backend}: first write from a buffer, of the second: {', '.join(found)}"
            for handle, found in ratios.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.io.tensors")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    path: Path = arguments.file
    torch.set_num_threads(1)
    print("\n".join(first_and_second(path)))
    with zoo.io.Handle(block_size=BLOCK, queue_depth=8) as handle:
        collapsed = at_512().fill_(3)
        tensors = {
            "tensor (copied)": torch.empty(SIZE, dtype=torch.uint8).fill_(1),
            "at 512": at_512().fill_(2),
            "at 512, collapsed": collapsed,
            "huge pages": in_huge_pages().fill_(4),
            "pool (registered)": handle.empty(SIZE, dtype=torch.uint8).fill_(5),
        }
        print(f"bringing pages together (MADV_COLLAPSE), once: {collapse(collapsed)}")
        buffers = torch.zeros((16, BLOCK), dtype=torch.uint8)
        handle.pwrite(tensors["pool (registered)"], path)
        for operation in ("write", "read"):
            contenders: dict[str, Callable[[], Figure]] = {
                name: lambda tensor=tensor, op=operation: transfer(handle, tensor, path, op)
                for name, tensor in tensors.items()
            }
            contenders["a copy alone"] = lambda: copy(tensors["tensor (copied)"], buffers)
            if operation == "read":
                contenders["new tensor"] = lambda: into_new(handle, path, huge=False)
                contenders["new, huge pages"] = lambda: into_new(handle, path, huge=True)
            before = os.getloadavg()[0]
            for name, figures in measure(contenders, arguments.rounds).items():
                rates, cpu = [rate for rate, _ in figures], [cost for _, cost in figures]
                rate = f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f}) GB/s"
                cost = f"{statistics.median(cpu):.3f} ({min(cpu):.3f}-{max(cpu):.3f}) CPU s/GB"
                print(f"{operation:<6}{name:<20}{rate}, {cost}")
            print(f"load average {before:.1f} to {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
