"""What a rank of the axis "tensor" takes to load its part: peak memory, and bytes that are read.

::

    python -m benchmarks.tensor.loading                    # degrees 1 to 4
    python -m benchmarks.tensor.loading --write-results    # also write LOADING.md

A Llama of SmolLM2-135M's shape (9 heads, 3 of keys and values, a tied head over 49,152 words), fp32, as one safetensors
file. Each rank makes the model without values, cuts it and reads its boxes. Peak: by how much the resident memory of
the process grows at most, pages of files among it. Boxes: bytes of the parameters that the rank then has; one tensor:
the largest of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import run_ranks
from benchmarks.tensor.step import SMOLLM2, tiny

WORKER, RESULTS = "benchmarks.tensor.loading_worker", Path(__file__).with_name("LOADING.md")


def figures(shape: dict[str, int], degree: int, *, training: bool = False) -> list[dict[str, Any]]:
    """Of every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for folder, size in ((first, tiny(shape)), (second, shape)):
            LlamaForCausalLM(LlamaConfig(**size, tie_word_embeddings=True)).save_pretrained(folder)
        spec = {"folders": [first, second], "degree": degree, "training": training}
        return run_ranks(WORKER, spec, degree, timeout_s=600)


def rows_of(degree: int, ranks: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each rank."""
    return [
        [
            str(degree), str(rank), *(f"{found[key] / 1e6:.1f}" for key in ("boxes", "largest", "peak", "read")),
            f"{found['peak'] / (found['boxes'] + found['largest']):.2f}", f"{found['read'] / found['boxes']:.4f}",
            f"{found['cpu_s']:.2f}",
        ]
        for rank, found in enumerate(ranks)
    ]  # fmt: skip


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor.loading", description=about)
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    rows = [row for degree in (1, 2, 3, 4) for row in rows_of(degree, figures(SMOLLM2, degree))]
    header = [
        "degree", "rank", "boxes MB", "one tensor MB", "peak MB", "read MB", "peak / (boxes + one tensor)",
        "read / boxes", "CPU s",
    ]  # fmt: skip
    text = table(header, rows)
    print(text)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        told = rest.rpartition("LOADING.md\n")[2].strip()
        RESULTS.write_text(
            f"# Loading parts\n\nWritten by `python -m benchmarks.tensor.loading`. {first.strip()}\n\n"
            f"{facts(machine(('torch', 'transformers')))}\n\n{told}\n\n{text}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
