"""``python -m benchmarks.zero.init``: a model several times larger than the memory cap is constructed.

The kernel enforces the cap (RLIMIT_DATA, all private writable memory): so much beyond what the process has after it
built a small model the same way. Every contender of every round is a fresh process. The digest of every parameter is
compared with that of the ordinary construction with the same seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, Spread, facts, keep, machine, table, write_page
from benchmarks.launch import ContenderError, run_ranks
from benchmarks.zero.workloads import GPT, WORKER
from torch import nn

MIB = 1 << 20
CONTEXT = 128
SIZES = {"full": (40, 1024, 320, 1280), "quick": (2, 64, 48, 48)}  # layers, width, MiB of the caps
PAGE = Path(__file__).with_name("INIT.md")
RAW = ROOT / "build" / "benchmarks" / "init.json"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``cap``: 0 none, 1 or 2 one of the caps; ``like``: with whose parameters its own are compared; ``heap``: the C
    library gives freed blocks of a MiB and more back, which zoo asks it for by itself."""

    label: str
    how: str
    where: str = "cpu"
    size: int = 1
    cap: int = 0
    like: str = "plain"
    heap: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """One arena, since those of other threads reserve 64 MiB each of what is limited."""
        fixed = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}
        return {"MALLOC_ARENA_MAX": "1", **(fixed if self.heap else {})}


CONTENDERS = {
    "plain": Contender(label="torch", how="plain"),
    "plain-cap": Contender(label="torch", how="plain", cap=1),
    "later": Contender(label="torch, meta device, `to_empty`, then initialised", how="plain-later", like=""),
    "zoo": Contender(label="`zoo.zero.Init`", how="zoo"),
    "zoo-nvme": Contender(label="`zoo.zero.Init`", how="zoo", where="nvme", cap=1),
    "zoo-meta": Contender(label="`zoo.zero.Init` on the meta device", how="zoo-meta", where="nvme", cap=1),
    "zoo-later": Contender(
        label="`zoo.zero.Init(model)`, model built on the meta device", how="zoo-later", where="nvme", cap=1,
        like="later",
    ),
    "zoo-nvme-2": Contender(label="`zoo.zero.Init`", how="zoo", where="nvme", size=2, cap=1),
    "zoo-2": Contender(label="`zoo.zero.Init`", how="zoo", size=2, cap=2),
    "ds": Contender(label="`deepspeed.zero.Init`", how="deepspeed"),
    "ds-nvme-free": Contender(label="`deepspeed.zero.Init`", how="deepspeed", where="nvme"),
    "ds-nvme": Contender(label="`deepspeed.zero.Init`", how="deepspeed", where="nvme", cap=1),
    "ds-nvme-heap": Contender(
        label="`deepspeed.zero.Init`, `MALLOC_MMAP_THRESHOLD_` 1 MiB", how="deepspeed", where="nvme", cap=1, heap=True
    ),
}  # fmt: skip


def initialise(module: nn.Module) -> None:
    """Values for a module that was built on the meta device: those that ``GPT.__init__`` would give, but in turn."""
    module.reset_parameters()  # type: ignore[operator]
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)


def build_later(build: Callable[[], nn.Module]) -> nn.Module:
    """Torch's own way with the meta device: memory for everything at once, then values."""
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            initialise(module)
    return model


def construct(how: str, where: str, folder: str, build: Callable[[], nn.Module]) -> nn.Module:
    """The model, built after ``manual_seed(0)``."""
    torch.manual_seed(0)
    if how == "plain":
        return build()
    if how == "plain-later":
        return build_later(build)
    offload: dict[str, Any] = {"device": where, **({"nvme_path": folder} if where == "nvme" else {})}
    if how == "deepspeed":
        return construct_deepspeed(offload, build)
    from zoo.zero import Init

    config = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    if how == "zoo-later":
        with torch.device("meta"):
            model = build()
        torch.manual_seed(0)
        Init(model, config=config, materialise=initialise)
        return model
    device: AbstractContextManager[Any] = torch.device("meta") if how == "zoo-meta" else nullcontext()
    with device, Init(config=config):
        return build()


def construct_deepspeed(offload: dict[str, Any], build: Callable[[], nn.Module]) -> nn.Module:
    from benchmarks.zero.contenders import import_deepspeed

    deepspeed = import_deepspeed()
    where = offload["device"]
    if where == "nvme":
        offload = {**offload, "buffer_count": 4, "buffer_size": 4 * 1024 * 1024, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "offload_param": offload},
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }  # fmt: skip
    # Without dtype=, which on the CPU would make it bf16 whatever was given.
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device=where):
        return build()


def digests(model: nn.Module, how: str) -> Iterator[tuple[str, str]]:
    """Name and digest of the bytes of every parameter, one whole at a time."""
    gathered: Any = nullcontext
    if how.startswith("zoo"):
        from zoo.zero import GatheredParameters as gathered
    elif how == "deepspeed":
        from benchmarks.zero.contenders import import_deepspeed

        gathered = import_deepspeed().zero.GatheredParameters
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            value = parameter.detach().contiguous()
            yield name, hashlib.blake2b(value.numpy().tobytes(), digest_size=8).hexdigest()


def bytes_in_files(folder: str) -> int:
    """Bytes on disk of what this process has in ``folder``: named files, and open ones without a name."""
    found = {
        (s.st_dev, s.st_ino): s.st_blocks * 512 for s in (f.stat() for f in Path(folder).rglob("*") if f.is_file())
    }
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
                status = os.fstat(int(fd))
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:  # the one that the directory was read with
            continue
    return sum(found.values())


def measure_init(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds, growth of the resident set, bytes in files and digests of one construction."""
    from benchmarks.process import reset_peak, status_bytes, warm_up

    contender = CONTENDERS[spec["contender"]]
    layers, width, *caps = SIZES[spec["size"]]
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        arguments = (contender.how, contender.where, folder)
        warm_up()
        list(digests(construct(*arguments, lambda: GPT(1, 64, CONTEXT)), contender.how))
        before, data = reset_peak(), status_bytes("VmData")
        if contender.cap:
            limit = data + caps[contender.cap - 1] * MIB
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        began, cpu_began = time.perf_counter(), time.process_time()
        model, error = None, ""
        try:
            model = construct(*arguments, lambda: GPT(layers, width, CONTEXT))
        except (RuntimeError, MemoryError, OSError) as failed:
            error = f"{type(failed).__name__}: {str(failed).splitlines()[0] if str(failed) else ''}"
        found: dict[str, Any] = {
            "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began,
            "growth": status_bytes("VmHWM") - before, "files": bytes_in_files(folder), "error": error,
        }  # fmt: skip
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found["digests"] = dict(digests(model, contender.how)) if model is not None else {}
        return found


def measure(rounds: int, folder: str, quick: bool, names: list[str]) -> dict[str, Any]:
    size = "quick" if quick else "full"
    layers, width, *caps = SIZES[size]
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(layers, width, CONTEXT).parameters())
    raw: dict[str, Any] = {
        "machine": machine(["torch", "deepspeed"]), "rounds": [], "failures": {}, "numel": numel, "caps": caps,
    }  # fmt: skip
    for number in range(rounds):
        figures: dict[str, Any] = {}
        raw["rounds"].append(figures)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            print(f"\rround {number + 1}/{rounds} {name:<14}", end="", file=sys.stderr, flush=True)
            spec = {"section": "init", "contender": name, "folder": folder, "size": size}
            try:
                figures[name] = run_ranks(WORKER, spec, CONTENDERS[name].size, 300, CONTENDERS[name].variables)
            except ContenderError as error:
                raw["failures"][name] = error.last
                print(f"\n{name} failed: {error}", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return raw


def verdict(raw: dict[str, Any], name: str) -> str:
    """How many parameters have the bits of the construction that this one is compared with, on every rank."""
    like = CONTENDERS[name].like
    if name == like:
        return "is the measure"
    if not like:
        return "another order of random numbers"
    checked = [(ours["digests"], r[like][0]["digests"]) for r in raw["rounds"] if name in r and like in r
               for ours in r[name]]  # fmt: skip
    if not checked:
        return "nothing to compare with"
    equal = min(sum(ours.get(key) == value for key, value in theirs.items()) for ours, theirs in checked)
    total = len(checked[0][1])
    return f"{'all' if equal == total else equal} of {total} {'' if like == 'plain' else 'as torch, later'}".rstrip()


def report(raw: dict[str, Any]) -> str:
    rows = []
    size = raw["numel"] * 4 / MIB
    for name, contender in CONTENDERS.items():
        have = [r[name] for r in raw["rounds"] if name in r]
        cap = raw["caps"][contender.cap - 1] if contender.cap else 0
        head = [contender.label, str(contender.size), contender.where, f"{cap} MiB" if cap else "none",
                f"{size / cap:.1f}" if cap else ""]  # fmt: skip
        if not have:
            rows.append([*head, "", "", "", "", f"failed: {raw['failures'].get(name, 'not run')}", ""])
            continue
        wall, cpu, growth = (Spread(tuple(max(f[key] for f in ranks) for ranks in have))
                             for key in ("wall_s", "cpu_s", "growth"))  # fmt: skip
        errors = sorted({f["error"] for ranks in have for f in ranks if f["error"]})
        files = max(f["files"] for ranks in have for f in ranks) / MIB
        rows.append([
            *head, wall.text(1), cpu.text(1), growth.text(0, 1 / MIB), f"{files:.0f}" if files else "",
            f"no: {errors[0]}" if errors else "yes", "" if errors else verdict(raw, name),
        ])  # fmt: skip
    header = ["contender", "ranks", "kept in", "cap of a rank", "model ÷ cap", "s", "CPU, s", "growth of RSS, MiB",
              "in files, MiB a rank", "constructed", "parameters with the bits of torch"]  # fmt: skip
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero.init")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a directory on the device")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--report-only", action="store_true", help="the table from the last raw figures")
    parser.add_argument("--write-results", action="store_true", help="write INIT.md (its remarks are kept)")
    args = parser.parse_args()
    raw = json.loads(RAW.read_text()) if args.report_only else measure(args.rounds, args.folder, args.quick, args.only)
    if not args.report_only and not args.quick:
        keep(raw, RAW)
    print(report(raw))
    if args.write_results:
        about = facts(raw["machine"])
        write_page(
            PAGE,
            "# Init: a model several times larger than the memory cap\n\nWritten by `python -m benchmarks.zero.init`, "
            f"{len(raw['rounds'])} rounds; medians (lowest–highest), of 2 ranks the larger figure. A GPT of "
            f"{raw['numel']:,} parameters in fp32, {raw['numel'] * 4 / MIB:.0f} MiB, whose `__init__` draws its "
            "matrices anew with `nn.init.normal_` after its layers were built.\n\n"
            f"{about}\n\n{report(raw)}",
        )


if __name__ == "__main__":
    main()
