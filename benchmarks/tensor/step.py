"""CPU time of a rank at degree 2, over that of the model that is not split.

::

    python -m benchmarks.tensor.step                    # every contender, both shapes, training and tokens
    python -m benchmarks.tensor.step --quick            # tiny models: does it run
    python -m benchmarks.tensor.step --write-results    # also write RESULTS.md

A Llama of SmolLM2-135M's shape (30 layers of 576, a tied head over 49,152 words) with its 9 heads and 3 of keys and
values, and with 8 and 4, which other libraries can split. fp32, random values, one thread a rank, two ranks over gloo.
Training: forward, backward and AdamW of 2 sequences of 128; a token: one more of a sequence with a cache. zoo: with
torch's AdamW, as the model that is not split; whole_twice: that model in two processes that know nothing of each
other, which is what a second busy core costs; whole_injected and zoo_injected: with zoo.inject, in one process and in
the parts of two; zoo_stage0 and zoo_stage3: under zoo's ZeRO optimizer; dtensor: torch's
own plans; deepspeed: AutoTP, where it is installed. Contenders
run in turns, in fresh processes; a figure is the median over turns of the median over steps, and a ratio the median
over turns of ratios within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import ContenderError, run_ranks

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
EVEN = {**SMOLLM2, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES = {"9 / 3 heads": SMOLLM2, "8 / 4 heads": EVEN}
CONTENDERS = {
    "train": (
        "whole", "whole_twice", "zoo", "zoo_sequence", "zoo_stage0", "zoo_stage3", "transformers", "dtensor",
        "deepspeed",
    ),
    "token": (
        "whole", "whole_twice", "whole_injected", "zoo", "zoo_injected", "transformers", "dtensor", "deepspeed"
    ),
}  # fmt: skip
WORKER, RESULTS = "benchmarks.tensor.worker", Path(__file__).with_name("RESULTS.md")


def tiny(shape: dict[str, int]) -> dict[str, int]:
    """The same heads in a model that runs at once."""
    return {
        **shape,
        "vocab_size": 512,
        "hidden_size": 8 * shape["num_attention_heads"],
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }


def saved(shape: dict[str, int], folder: Path) -> None:
    """What transformers reads: it splits models when it loads them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).save_pretrained(folder)


def turn(what: str, shape: dict[str, int], folder: Path, steps: int, only: list[str]) -> dict[str, Any]:
    """Of each contender the figures, or why it has none."""
    found: dict[str, Any] = {}
    for contender in CONTENDERS[what]:
        if only and contender not in ("whole", *only):
            continue
        spec = {
            "contender": contender, "what": what, "shape": shape, "steps": steps, "folder": str(folder),
            "tied": contender not in ("transformers", "dtensor"),
        }  # fmt: skip
        try:
            alone = contender in ("whole", "whole_injected")
            ranks = run_ranks(WORKER, spec, 1 if alone else 2, timeout_s=900)
        except ContenderError as error:
            found[contender] = error.last[:120]
            continue
        found[contender] = {key: max(rank[key] for rank in ranks) for key in ("cpu_s", "wall_s")}
        found[contender]["alike"] = all(rank["value"] == ranks[0]["value"] for rank in ranks)
    return found


def rows_of(turns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each contender."""
    rows = []
    for contender in turns[0]:
        mine = [(t[contender], t["whole"]) for t in turns if isinstance(t[contender], dict)]
        if not mine:
            rows.append([contender, turns[0][contender], "", ""])
            continue
        cpu = statistics.median(found["cpu_s"] for found, _ in mine)
        ratios = [statistics.median(found[key] / whole[key] for found, whole in mine) for key in ("cpu_s", "wall_s")]
        differ = "" if all(found["alike"] for found, _ in mine) else " (ranks have other results)"
        rows.append([contender + differ, f"{cpu * 1e3:.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor.step", description=about)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny models, one turn")
    parser.add_argument("--only", nargs="+", default=[], help="contenders, beside the whole model")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    parts = []
    for name, shape in SHAPES.items():
        shape = tiny(shape) if args.quick else shape
        with tempfile.TemporaryDirectory() as folder:
            saved(shape, Path(folder))
            for what in CONTENDERS:
                steps = args.steps if what == "train" else 4 * args.steps
                turns = [
                    turn(what, shape, Path(folder), steps, args.only) for _ in range(1 if args.quick else args.turns)
                ]
                header = [what, "CPU ms a rank", "CPU / whole", "wall / whole"]
                parts.append(f"## {name}: {what}\n\n{table(header, rows_of(turns))}")
                print(parts[-1], flush=True)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        told = rest.rpartition("RESULTS.md\n")[2].strip()
        about = facts(machine(("torch", "transformers")))
        text = "\n\n".join(parts)
        RESULTS.write_text(
            f"# Tensor parallelism at degree 2\n\nWritten by `python -m benchmarks.tensor.step`. {first.strip()}\n\n"
            f"{about}\n\n{told}\n\n{text}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
