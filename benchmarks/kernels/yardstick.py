"""The C loop, compiled here for this machine, and called on the tensors of the run."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from zoo.kernels.building.plan import compiler_version, find_compiler

SOURCE = Path(__file__).with_name("loop.cpp")
MACHINE = {"avx2": "haswell", "portable": "x86-64"}.get(os.environ.get("ZOO_KERNELS_ISA", ""), "native")
"""As zoo's kernels are held to an instruction set, so is the loop."""
FLAGS = ("-O3", f"-march={MACHINE}", "-fopenmp", "-fPIC", "-shared")


class Row(ctypes.Structure):
    _fields_ = [
        ("p", ctypes.c_void_p), ("m", ctypes.c_void_p), ("v", ctypes.c_void_p), ("g", ctypes.c_void_p),
        ("o", ctypes.c_void_p), ("n", ctypes.c_int64),
    ]  # fmt: skip


class Yardstick:
    """``fp32(...)`` and ``mixed(...)`` make a function without arguments that runs the loop once."""

    def __init__(self) -> None:
        compiler = find_compiler()
        self.about = f"{compiler_version(compiler)}, {shlex.join(FLAGS)}"
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "loop.so"
            lib = Path(torch.__file__).parent / "lib"
            # Objects first, then linked without -fopenmp: the loop uses torch's OpenMP runtime, as the kernels do.
            compile_flags = [flag for flag in FLAGS if flag != "-shared"]
            subprocess.run([*compiler, *compile_flags, "-c", SOURCE, "-o", f"{folder}/loop.o"], check=True)
            subprocess.run(
                [*compiler, "-shared", f"{folder}/loop.o", "-o", library, f"-L{lib}", "-ltorch_cpu"], check=True
            )
            self.loop = ctypes.CDLL(str(library))

    def _bind(self, name: str, rows: ctypes.Array[Row]) -> Callable[[], None]:
        function, count = getattr(self.loop, name), ctypes.c_int64(len(rows))
        return lambda: function(rows, count, ctypes.c_int64(torch.get_num_threads()))

    def fp32(self, lists: Sequence[Sequence[torch.Tensor]]) -> Callable[[], None]:
        """Over (p, g, m, v) of each tensor."""
        p, g, m, v = lists
        rows = (Row * len(p))(
            *(Row(a.data_ptr(), c.data_ptr(), d.data_ptr(), b.data_ptr(), None, a.numel())
              for a, b, c, d in zip(p, g, m, v, strict=True))
        )  # fmt: skip
        return self._bind("loop_fp32", rows)

    def mixed(self, lists: Sequence[Sequence[torch.Tensor]]) -> Callable[[], None]:
        """Over (bf16 parameter, bf16 gradient, fp32 master, m, v) of each tensor."""
        o, g, p, m, v = lists
        rows = (Row * len(p))(
            *(Row(a.data_ptr(), c.data_ptr(), d.data_ptr(), b.data_ptr(), e.data_ptr(), a.numel())
              for a, b, c, d, e in zip(p, g, m, v, o, strict=True))
        )  # fmt: skip
        return self._bind("loop_mixed", rows)
