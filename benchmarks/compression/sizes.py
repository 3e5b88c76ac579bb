"""``python -m benchmarks.compression.sizes``: how good models are at a size, beside torchao; see README.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, facts, keep, machine, table, write_page
from benchmarks.compression import training
from benchmarks.compression.jobs import JOBS, Job, MissingError
from torch import nn

from zoo.compression.post_training import Binary, Floating, Grid, Recipe, Ternary, Uniform, quantise
from zoo.compression.post_training.recipe import chosen

PAGE = Path(__file__).parent / "SIZES.md"
PICTURE = Path(__file__).parent / "sizes.png"
RAW = ROOT / "build/benchmarks/compression_sizes.json"
GRIDS: dict[str, Grid] = {
    "int8": Uniform(bits=8), "int4": Uniform(bits=4), "int4 with minima": Uniform(bits=4, symmetric=False),
    "int3": Uniform(bits=3), "int2 with minima": Uniform(bits=2, symmetric=False), "ternary": Ternary(),
    "binary": Binary(), "fp8 e4m3": Floating(format="fp8_e4m3"), "fp6 e3m2": Floating(format="fp6_e3m2"),
    "fp4 e2m1": Floating(format="fp4_e2m1"),
}  # fmt: skip
EXACT = "fp32"


def recipes(job: Job) -> dict[str, Recipe]:
    """By the name of the contender."""
    found = {}
    for name, grid in GRIDS.items():
        common: dict[str, Any] = {"grid": grid, "group_size": job.group_size, "leave_out": job.leave_out}
        found[f"{name}, nearest"] = Recipe(**common)
        if grid.bits <= 4:
            found[f"{name}, searched"] = Recipe(**common, candidates=20)
            found[f"{name}, GPTQ"] = Recipe(**common, method="gptq", candidates=20)
    found["int3, GPTQ, rank 8"] = Recipe(
        grid=Uniform(bits=3), group_size=job.group_size, method="gptq", candidates=20, low_rank=8
    )
    found["int3, distilled"] = Recipe(
        grid=Uniform(bits=3), group_size=job.group_size, candidates=20, distil_steps=40, distil_lr=1e-4
    )
    return found


def bits_a_weight(model: nn.Module, recipe: Recipe) -> float:
    """Of the layers that are quantised: codes, fp32 numbers of groups, compensation."""
    total, bits = 0, 0.0
    for module in chosen(model, recipe.leave_out):
        rows, columns = module.weight.shape
        rank = min(recipe.low_rank, rows, columns)
        total += rows * columns
        bits += rows * columns * (recipe.grid.bits + 32 * recipe.grid.num_params / recipe.size_for(columns))
        bits += 32 * rank * (rows + columns)
    return bits / total


def of_torchao(job: Job) -> dict[str, Callable[[nn.Module], tuple[nn.Module, float]]]:
    """torchao's weight-only quantisation: a model, and bits a weight by what its tensors hold."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup
    except ImportError:
        return {}

    def apply(config: Any, bits: Callable[[nn.Linear], float]) -> Callable[[nn.Module], tuple[nn.Module, float]]:
        def run(model: nn.Module) -> tuple[nn.Module, float]:
            layers = chosen(model, job.leave_out)
            weights = {name: m.weight.numel() for m, name in layers.items()}
            held = sum(bits(m) for m in layers)
            quantize_(model, config, filter_fn=lambda m, name: name in weights)
            return model, held / sum(weights.values())

        return run

    size = job.group_size
    return {
        "torchao int8, a scale a row": apply(
            Int8WeightOnlyConfig(), lambda m: m.weight.numel() * 8 + 32 * m.out_features
        ),
        "torchao int4, groups": apply(
            IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(size)),
            lambda m: m.weight.numel() * (4 + 32 / size),
        ),
    }


@torch.no_grad()
def measured(job: Job, only: Sequence[str], steps: int) -> dict[str, dict[str, float]]:
    """Bits a weight, the measure and the seconds that quantising took, of each contender."""
    found = {EXACT: {"bits": 32.0, "value": job.measure(job.make()), "s": 0.0}}
    for name, recipe in recipes(job).items():
        if only and not any(part in name for part in only):
            continue
        model, began = job.make(), time.perf_counter()
        bits = bits_a_weight(model, recipe)
        # The same layers for all, with batches or without.
        blocks = list(job.blocks(model))
        inside = {id(m) for block in blocks for m in block.modules()}
        outside = [name for m, name in chosen(model, job.leave_out).items() if id(m) not in inside]
        if recipe.needs_batches:
            quantise(model, recipe, blocks=blocks, batches=job.batches)
            rest = Recipe(grid=recipe.grid, group_size=recipe.group_size, candidates=recipe.candidates,
                          low_rank=recipe.low_rank, leave_out=_others(model, outside))  # fmt: skip
            if outside:
                quantise(model, rest)
        else:
            quantise(model, recipe)
        seconds = time.perf_counter() - began
        found[name] = {"bits": bits, "value": job.measure(model), "s": seconds}
        print(f"  {name}: {bits:.2f} bits, {found[name]['value']:.5f}", file=sys.stderr)
    for name, apply in of_torchao(job).items():
        if only and not any(part in name for part in only):
            continue
        began = time.perf_counter()
        model, bits = apply(job.make())
        seconds = time.perf_counter() - began
        found[name] = {"bits": bits, "value": job.measure(model), "s": seconds}
        print(f"  {name}: {bits:.2f} bits, {found[name]['value']:.5f}", file=sys.stderr)
    for name, sections in training.contenders(job).items():
        if only and not any(part in name for part in only):
            continue
        began = time.perf_counter()
        model = training.compressed(job, sections, steps)
        seconds = time.perf_counter() - began
        bits = sections.bits_a_weight(job) if sections != training.Sections(trained=True) else 32.0
        found[name] = {"bits": bits, "value": job.measure(model), "s": seconds}
        print(f"  {name}: {bits:.2f} bits, {found[name]['value']:.5f}", file=sys.stderr)
    return found


def _others(model: nn.Module, kept: Sequence[str]) -> list[str]:
    return [name for name in chosen(model, ()).values() if name not in kept]


def of_job(name: str, about: Mapping[str, Any]) -> str:
    """A table."""
    exact = about["found"][EXACT]["value"]
    rows = []
    for contender, row in sorted(about["found"].items(), key=lambda item: -item[1]["bits"]):
        change = row["value"] - exact
        against = f"{100 * change / exact:+.2f} %" if about["relative"] else f"{change:+.5f}"
        seconds = "" if row["s"] is None else f"{row['s']:.1f}"  # it was not kept
        rows.append([contender, f"{row['bits']:.2f}", f"{row['value']:.5f}", against, seconds])
    header = ["weights", "bits a weight", about["unit"], "against fp32", "s to quantise"]
    return f"### {name}\n\n{table(header, rows)}\n"


def draw(raw: Mapping[str, Any]) -> None:
    """One picture, a panel a job."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    jobs = [name for name in JOBS if name in raw]
    figure, panels = plt.subplots(1, len(jobs), figsize=(5.2 * len(jobs), 4.6), squeeze=False)
    marks = {"nearest": "o", "searched": "s", "GPTQ": "^", "rank 8": "D", "distilled": "v", "trained": "*"}
    kinds = {**marks, "zeros": "+", "zeros, trained": "P", "torchao": "x"}
    for panel, name in zip(panels[0], jobs, strict=True):
        about = raw[name]
        exact = about["found"][EXACT]["value"]
        for number, (kind, marker) in enumerate(kinds.items()):
            rows = {n: r for n, r in about["found"].items() if _kind(n) == kind}
            if not rows:
                continue
            bits, values = [r["bits"] for r in rows.values()], [r["value"] for r in rows.values()]
            panel.plot(bits, values, marker, color=f"C{number}", label=kind)
        panel.axhline(exact, color="grey", linewidth=1, label=EXACT)
        panel.set(title=name, xlabel="bits a weight, scales included", ylabel=about["unit"], xscale="log")
        if about["lower"] and not about["relative"]:
            panel.set_yscale("log")
        panel.set_xticks([1, 2, 3, 4, 6, 8], labels=["1", "2", "3", "4", "6", "8"])
        panel.minorticks_off()
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90)


def _kind(name: str) -> str:
    if name.startswith("torchao"):
        return "torchao"
    kind = name.rpartition(", ")[2]
    if "zeros" in name:
        return "zeros, trained" if kind == "trained" else "zeros"
    return EXACT if name.startswith(EXACT) else kind


def main() -> None:
    parser = argparse.ArgumentParser(description="How good models are at a size.")
    parser.add_argument("--jobs", nargs="*", choices=sorted(JOBS), default=list(JOBS))
    parser.add_argument("--only", nargs="*", default=[], help="contenders whose names have one of these; others stay")
    parser.add_argument("--steps", type=int, default=300, help="of training after compression, where a job has it")
    parser.add_argument("--write-results", action="store_true", help="write SIZES.md and the plot")
    args = parser.parse_args()
    for name in args.jobs:
        try:
            job = JOBS[name]()
        except (MissingError, ImportError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        print(name, file=sys.stderr)
        found = measured(job, args.only, args.steps)
        raw = json.loads(RAW.read_text()) if RAW.exists() else {}
        if args.only and name in raw:
            found = {**raw[name]["found"], **found}
        relative = name in ("bytes", "smollm2")
        raw[name] = {"unit": job.unit, "lower": job.lower, "relative": relative, "found": found}
        keep(raw, RAW)
    raw = json.loads(RAW.read_text())
    text = "\n".join(of_job(name, raw[name]) for name in JOBS if name in raw)
    print(text)
    if args.write_results:
        draw(raw)
        about = facts(machine(["torch", "torchao", "transformers"]))
        intro = (
            "Written by `python -m benchmarks.compression.sizes`. Weights of linear layers (a tied head stays) are "
            "rounded after training, in groups with fp32 scales, and models computed in fp32. *nearest*: each weight "
            "by itself; *searched*: with the range of each group that is best of 20; *GPTQ*: also searched. *Bits a "
            "weight* has the scales in it. *trained*: with `init_compression` for "
            f"{args.steps} further steps, straight through (as is *fp32, trained*, which is what those are to be "
            "compared with). *zeros*: by magnitude, or by snip_momentum over all layers together; values that are kept "
            f"count {training.KEPT_BITS} bits, and one bit an element says which they are."
        )
        intro += f"\n\n![a plot for each job](sizes.png)\n\n{about}"
        write_page(PAGE, f"# Quality at a size\n\n{intro}\n\n{text}")


if __name__ == "__main__":
    main()
