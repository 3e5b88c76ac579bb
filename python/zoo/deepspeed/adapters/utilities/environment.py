"""``deepspeed.env_report``: which operations work here, and which versions."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zoo.deepspeed.adapters.utilities import build_info, op_builders


def human_readable_size(size: float) -> str:
    """ "2.00 KB" of 2048."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024 or unit == "TB":
            break
        size /= 1024
    return f"{size:.2f} {unit}"


def get_shm_size() -> tuple[str | None, list[str]]:
    """How much /dev/shm holds (None where there is none), and warnings about it."""
    try:
        system = os.statvfs("/dev/shm")
    except OSError:
        return None, []
    size = system.f_frsize * system.f_blocks
    small = ["/dev/shm holds less than 512 MB: ranks on this machine may have no place to talk."]
    return human_readable_size(size), small if size < 512 * 2**20 else []


def nvcc_version() -> str:
    """Of the CUDA compiler on the path."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "there is no nvcc on the path"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release ([\d.]+)", said)
    return found.group(1) if found else "unknown"


def _rows(rows: Sequence[tuple[str, object]]) -> None:
    for name, value in rows:
        sys.stdout.write(f"{name} {'.' * max(2, 34 - len(name))} {value}\n")


def op_report(verbose: bool = True) -> None:
    """Print each operation, whether it is compiled already, and whether it works here."""
    sys.stdout.write("operation, compiled ahead, works here (what is not compiled is, when it is first used)\n")
    _rows(
        [
            (builder.NAME, f"{'yes' if builder().is_compiled_ahead() else 'no':3}  {'yes' if works else 'no'}")
            for builder in op_builders.ALL
            for works in (builder().is_compatible(verbose),)
            if builder is not op_builders.NotImplementedBuilder
        ]
    )


def debug_report() -> None:
    """Print where torch and zoo are, which versions, and what ``zoo doctor`` finds."""
    _debug_report(problems=True)


def _debug_report(*, problems: bool) -> None:
    import zoo.deepspeed
    from zoo.cli.doctor.examining import examine

    info = build_info.torch_info
    shm, warnings = get_shm_size()
    _rows(
        [
            ("torch", f"{torch.__version__}, {Path(torch.__file__).parent}"),
            ("zoo.deepspeed", f"{build_info.version}, {Path(str(zoo.deepspeed.__file__)).parent}"),
            ("torch's CUDA, NCCL, HIP", ", ".join(info[f"{key}_version"] for key in ("cuda", "nccl", "hip"))),
            ("nvcc", nvcc_version()),
            ("accelerator", build_info.accelerator_name),
            ("shared memory", "none" if shm is None else shm),
        ]
    )
    for warning in warnings if problems else ():
        sys.stdout.write(f"{warning}\n")
    sys.stdout.write(f"\nzoo doctor\n{examine().text(problems=problems)}\n")


def parse_arguments() -> argparse.Namespace:
    """The arguments of ``ds_report``."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Which operations work here, and which versions.")
    parser.add_argument("--hide_operator_status", action="store_true", help="only versions")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="nothing about what does not work")
    return parser.parse_args()


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    _debug_report(problems=not hide_errors_and_warnings)


def cli_main() -> None:
    """The command ``ds_report``."""
    given = parse_arguments()
    main(given.hide_operator_status, given.hide_errors_and_warnings)
