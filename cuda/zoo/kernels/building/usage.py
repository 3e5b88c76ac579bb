"""What each CUDA kernel takes of a multiprocessor, as ptxas reports it (``-Xptxas=-v``), and how much fits at a time.

Vocabulary. *Spill*: a register that ptxas keeps in local memory, which is device memory behind the caches. *Stack*:
local memory that the source asks for, such as an array with an index that is known at run time only. *Occupancy*: the
warps that a multiprocessor holds at a time, of the most that it can hold; they hide the time of accesses to memory.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zoo.kernels.building.plan import BuildError

REGISTERS, WARPS, BLOCKS = 65536, 64, 32
"""Of a multiprocessor with compute capability 8.0, 9.0 or 10.0."""

SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)[a-z]*'")
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One kernel on one architecture.

    Attributes:
        kernel: its name, mangled where :func:`readable` has not been asked.
        architecture: the compute capability without the dot.
        registers: of a thread.
        shared_bytes: static shared memory of a block.
        stack_bytes, spill_bytes: of a thread, functions that are called included; spills: stores and loads.
    """

    kernel: str
    architecture: int
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0

    def occupancy(self, threads: int) -> float:
        """The part of a multiprocessor's warps that fit at a time, in blocks of so many threads.

        Registers are given to a warp in steps of 256; a block also takes 1 KiB of shared memory for the system.
        """
        warps = -(-threads // 32)
        each = -(-self.registers * 32 // 256) * 256
        blocks = min(BLOCKS, WARPS // warps, REGISTERS // max(each, 1) // warps)
        shared = SHARED_BYTES.get(self.architecture)
        if shared is not None and self.shared_bytes:
            blocks = min(blocks, shared // (self.shared_bytes + 1024))
        return blocks * warps / WARPS


def parse(text: str) -> list[Usage]:
    """The kernels in what ptxas wrote, in its order.

    Raises:
        BuildError: a kernel without its registers: this ptxas writes in another form.
    """
    found: list[Usage] = []
    complete = True
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            if not complete:
                break
            found.append(Usage(kernel=entry[1], architecture=int(entry[2])))
            complete = False
        elif found and (local := _LOCAL.search(line)):
            stack, stores, loads = map(int, local.groups())
            last = found[-1]
            found[-1] = replace(
                last, stack_bytes=last.stack_bytes + stack, spill_bytes=last.spill_bytes + stores + loads
            )
        elif found and (used := _USED.search(line)):
            shared = _SHARED.search(line)
            found[-1] = replace(found[-1], registers=int(used[1]), shared_bytes=int(shared[1]) if shared else 0)
            complete = True
    if not complete:
        raise BuildError(f"ptxas wrote no line with the registers of {found[-1].kernel}; it wrote:\n{text[:2000]}")
    return found


def readable(names: Sequence[str]) -> dict[str, str]:
    """Mangled names of kernels as C++ writes them, without arguments; as they are where there is no ``c++filt``."""
    from zoo.kernels.building.cuda import run

    if shutil.which("c++filt") is None or not names:
        return {name: name for name in names}
    lines = run(["c++filt", *names]).splitlines()
    return {name: _short(line) for name, line in zip(names, lines, strict=True)}


def _short(signature: str) -> str:
    """``void zoo::(anonymous namespace)::kernel<(bool)1>(int)`` as ``kernel<1>``."""
    for noise in ("(anonymous namespace)::", "zoo::", "void "):
        signature = signature.replace(noise, "")
    signature = re.sub(r"\((?:bool|int)\)", "", signature)
    return signature.partition("(")[0]
