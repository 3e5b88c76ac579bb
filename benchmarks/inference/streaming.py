"""A model 1.6 times as large as the memory that its layers may take: tokens at the speed of the disk.

::

    python -m benchmarks.inference.streaming                    # zoo, accelerate's disk offload, bare reads
    python -m benchmarks.inference.streaming --quick            # a tiny model, one turn: does it run
    python -m benchmarks.inference.streaming --write-results    # also write STREAMING.md

A Llama of 24 layers of 1,024 (fp32, random weights, 1.2 GB of layers) whose layers may take 1/1.6 of their bytes, one
row, one thread, files in the current folder's file system. token: the time by the clock of one token, of the 8 after
the first. streamed: bytes read for a token. of bare: how fast these bytes came, as a share of reading the same files
again and again with the same handle and nothing else. peak: the largest PSS of the process while it generates, less
what it had before the model, as a share of what was told: layers and buffers within the budget, and what stands outside
of the layers. accelerate: ``disk_offload`` of every layer. Contenders run in turns, in fresh processes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import ContenderError, run_ranks

SHAPE = {
    "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip
TINY = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 4}
CONTENDERS = ("zoo", "accelerate")
WORKER, RESULTS = "benchmarks.inference.streaming_worker", Path(__file__).with_name("STREAMING.md")


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference.streaming", description=about)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one turn")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    failed: dict[str, str] = {}
    for _ in range(1 if args.quick else args.turns):
        for name in CONTENDERS:
            spec = {"contender": name, "shape": TINY if args.quick else SHAPE, "folder": args.folder, "ratio": 1.6}
            try:
                rows[name].append(run_ranks(WORKER, spec, 1, timeout_s=600)[0])
            except ContenderError as error:
                failed[name] = error.last[:120]

    def told(name: str, key: str, form: str, scale: float = 1.0) -> str:
        values = [row[key] for row in rows[name] if row.get(key) is not None]
        return format(statistics.median(values) * scale, form) if values else ""

    lines = [
        [name, failed.get(name) or told(name, "token_s", ".0f", 1e3), told(name, "streamed", ".0f", 1e-6),
         told(name, "speed", ".2f", 1e-9), told(name, "of_bare", ".2f"), told(name, "peak", ".0f", 1e-6),
         told(name, "of_told", ".2f")]
        for name in CONTENDERS
    ]  # fmt: skip
    header = ["", "ms a token", "MB streamed", "GB/s", "of bare", "peak, MB", "of told"]
    found = table(header, lines)
    print(found, flush=True)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        RESULTS.write_text(
            f"# Weights on NVMe\n\nWritten by `python -m benchmarks.inference.streaming`. {first.strip()}\n\n"
            f"{facts(machine(('torch', 'transformers', 'accelerate')))}\n\n"
            f"{rest.rpartition('STREAMING.md')[2].strip()}\n\n{found}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
