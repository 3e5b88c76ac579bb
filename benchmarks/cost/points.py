"""Step times that others measured, as runs: every second one is for calibration, the others judge."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.cost import Hardware, Layout, Transformer, read_hardware
from zoo.cost.calibration import Run

FOLDER = Path(__file__).parent / "published"
VOCAB = 51_200  # GPT-2's words, made a multiple of 128 by each tensor degree


def rows(name: str) -> list[dict[str, Any]]:
    """Of a table, numbers as numbers."""
    with (FOLDER / name).open() as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def vtrain_cluster() -> Hardware:
    """A100-80, eight a node; 800 Gbit/s between nodes, as the configurations of vTrain's case studies have it."""
    return dataclasses.replace(read_hardware("a100-80"), name="a100-80, 4 adapters", adapters=4)


def vtrain(name: str, recompute: Any, machine: Hardware) -> list[Run]:
    """Of ``vtrain_one_node.csv`` or ``vtrain_many_nodes.csv``."""
    return [
        Run(
            model=gpt(row["hidden_size"], row["num_heads"], row["num_layers"], row["seq_length"]), hardware=machine,
            layout=Layout(
                global_batch=row["global_batch"], micro_batch=row["micro_batch"], tensor=row["tensor"],
                data=row["data"], pipeline=row["pipeline"], recompute=recompute,
            ),
            step_s=row["step_ms"] / 1e3,
        )
        for row in rows(name)
    ]  # fmt: skip


def gpt(hidden: int, heads: int, layers: int, seq: int = 2048) -> Transformer:
    """Megatron's GPT: scores in memory, a table of positions."""
    return Transformer(hidden=hidden, heads=heads, layers=layers, seq=seq, vocab=VOCAB, positions=seq)


# Width, heads and layers of MPT's configurations in llm-foundry; the table has their numbers of parameters.
_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip


def llm_foundry() -> list[Run]:
    """Of ``llm_foundry.csv``: FSDP, attention in one operation."""
    machines = {
        "A100-40": read_hardware("a100-40"),
        "A100-80": read_hardware("a100-80"),
        "H100-80": read_hardware("h100-80"),
    }
    found = []
    for row in rows("llm_foundry.csv"):
        hidden, heads, layers = _MPT[row["model"]]
        model = Transformer(
            hidden=hidden, heads=heads, layers=layers, seq=row["seq_length"], vocab=50_368, positions=row["seq_length"],
            attention="flash", dropout=False,
        )  # fmt: skip
        ranks, batch = row["num_gpus"], row["global_batch"]
        layout = Layout(
            global_batch=batch, micro_batch=row["micro_batch"], data=ranks,
            stage=3 if row["sharding"] == "FULL_SHARD" else 2,
            recompute="full" if row["activation_checkpointing"] == "True" else "none",
        )  # fmt: skip
        step_s = batch * row["seq_length"] / (row["tokens_per_s_per_gpu"] * ranks)
        found.append(Run(model=model, layout=layout, hardware=machines[row["hardware"]], step_s=step_s))
    return found


def megatron_2022() -> Iterator[tuple[str, Run]]:
    """V1: Korthikanti et al. 2022 (arXiv:2205.05198), table 5."""
    for recompute, times in (("full", (1.42, 18.13, 49.05, 94.42)), ("selective", (1.10, 13.75, 37.83, 71.49))):
        for (name, model, pipeline, chunks, batch, micro), step_s in zip(MEGATRON, times, strict=True):
            layout = Layout(
                global_batch=batch, micro_batch=micro, tensor=8, pipeline=pipeline, chunks=chunks,
                recompute=recompute, sequence_parallel=recompute == "selective",
            )  # fmt: skip
            yield (
                f"{name}, {recompute}",
                Run(model=model, layout=layout, hardware=read_hardware("a100-80"), step_s=step_s),
            )


MEGATRON = (
    ("22B", gpt(6144, 64, 48), 1, 1, 4, 4), ("175B", gpt(12288, 96, 96), 8, 3, 64, 1),
    ("530B", gpt(20480, 128, 105), 35, 3, 280, 1), ("1T", gpt(25600, 160, 128), 64, 1, 512, 1),
)  # fmt: skip
"""Models of V1 and V2: name, shape, stages, chunks, batch, micro-batch."""


def torchtitan() -> Iterator[tuple[str, Run]]:
    """V8: torchtitan's page on performance: FSDP on 64 A100-80, tokens a second and GPU."""
    shared = {"kv_heads": 8, "gated": True, "tied": False, "dropout": False, "bias": "none", "attention": "flash"}
    wide = {"hidden": 8192, "heads": 64, "layers": 80, "ffn": 28_672}
    models = (
        ("Llama 3 8B", {"hidden": 4096, "heads": 32, "layers": 32, "ffn": 14_336, "vocab": 128_256}, 8192, 1, 2904),
        ("Llama 3 70B", {**wide, "vocab": 128_256}, 8192, 1, 331),
        ("Llama 2 13B", {"hidden": 5120, "heads": 40, "kv_heads": 40, "layers": 40, "ffn": 13_824, "vocab": 32_000},
         4096, 2, 2162),
        ("Llama 2 70B", {**wide, "vocab": 32_000}, 4096, 1, 355),
    )  # fmt: skip
    for name, shape, seq, micro, tokens_per_s in models:
        model = Transformer(seq=seq, **{**shared, **shape})  # type: ignore[arg-type]
        layout = Layout(
            global_batch=64 * micro, micro_batch=micro, data=64, stage=3, recompute="full" if "70B" in name else "none"
        )
        yield (
            name,
            Run(model=model, layout=layout, hardware=read_hardware("a100-80"), step_s=micro * seq / tokens_per_s),
        )


def zero_3() -> Iterator[tuple[str, Run]]:
    """V3: Narayanan et al. 2021 (arXiv:2104.04473), table 2; its FLOPs are those of equation 3."""
    points = (
        ("175B", gpt(12288, 96, 96), ((384, 1536, 144), (768, 1536, 88), (1536, 1536, 44))),
        ("530B", gpt(20480, 128, 105), ((640, 2560, 138), (1120, 2240, 98), (2240, 2240, 48))),
    )
    for name, model, jobs in points:
        for ranks, batch, teraflops in jobs:
            h, layers, seq = model.hidden, model.layers, model.seq
            flops = 96 * batch * seq * layers * h * h * (1 + seq / (6 * h) + VOCAB / (16 * layers * h))
            layout = Layout(
                global_batch=batch, micro_batch=batch // ranks, data=ranks, stage=3, recompute="full", rings=1
            )  # fmt: skip
            run = Run(
                model=model, layout=layout, hardware=read_hardware("a100-80"), step_s=flops / (ranks * teraflops * 1e12)
            )  # fmt: skip
            yield f"{name} on {ranks:,}", run
