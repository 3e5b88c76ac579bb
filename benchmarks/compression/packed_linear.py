"""``python -m benchmarks.compression.packed_linear``: linear layers on packed weights beside torch's and torchao's.

Contenders take turns within a round, each for about ``--turn`` seconds; a ratio is of one round. A call takes another
copy of the weight than the one before, of as many as fill ``--megabytes`` in bf16: weights come from memory, as they
do when a model generates.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, keep, machine, table, write_page

from zoo.kernels import loading
from zoo.kernels.packed_linear import PackedWeight, pack_weight, packed_linear

Tensor = torch.Tensor
Call = Callable[[], object]
PAGE = Path(__file__).with_name("PACKED_LINEAR.md")
RAW = ROOT / "build/benchmarks/packed_linear.json"
SHAPES = ((576, 576), (576, 1536), (1536, 576), (576, 49152), (4096, 4096), (4096, 11008))
"""(K, N): the layers of SmolLM2-135M, its vocabulary, and two of a model of seven billion parameters."""
TOKENS = (1, 4, 16, 128, 512)
GROUP = 64
LONG_S = 0.2
"""A round with a call that takes longer is made three times at most."""
BF16, FP32 = "torch bf16", "torch fp32"
INT8, INT4 = "zoo int8", "zoo int4"
AO8, AO4, PACK8 = "torchao int8", "torchao int4", "torch int8pack"


def turning(calls: Sequence[Call]) -> Call:
    """Each call the next one."""
    at = -1

    def call() -> object:
        nonlocal at
        at = (at + 1) % len(calls)
        return calls[at]()

    return call


def zoo(weights: Sequence[Tensor], x: Tensor, **how: Any) -> tuple[Call, int]:
    """The operation, and the bytes of one weight."""
    packed = [pack_weight(w, **how) for w in weights]

    def one(weight: PackedWeight) -> Call:
        return lambda: packed_linear(x, weight)

    return turning([one(p) for p in packed]), packed[0].num_bytes


def torch_linear(weights: Sequence[Tensor], x: Tensor, dtype: torch.dtype) -> tuple[Call, int]:
    """``torch.nn.functional.linear``."""
    given, cast = x.to(dtype), [w.to(dtype) for w in weights]

    def one(weight: Tensor) -> Call:
        return lambda: torch.nn.functional.linear(given, weight)

    return turning([one(w) for w in cast]), cast[0].nbytes


def torch_int8pack(weights: Sequence[Tensor], x: Tensor) -> tuple[Call, int]:
    """torch's own product with int8 rows, one scale each, of the dtype of x."""
    made = []
    for w in weights:
        scale = w.float().abs().amax(1) / 127
        made.append(((w.float() / scale[:, None]).round().to(torch.int8), scale.to(x.dtype)))

    def one(q: Tensor, scale: Tensor) -> Call:
        return lambda: torch.ops.aten._weight_int8pack_mm(x, q, scale)

    return turning([one(*m) for m in made]), made[0][0].nbytes + made[0][1].nbytes


def torchao(weights: Sequence[Tensor], x: Tensor, config: Any) -> tuple[Call, int]:
    """A linear layer that torchao has quantised, in eager mode."""
    from torchao.quantization import quantize_

    rows, columns = weights[0].shape
    layer = torch.nn.Linear(columns, rows, bias=False, dtype=x.dtype)
    layer.weight.data.copy_(weights[0])
    quantize_(layer, config)
    layers = [copy.deepcopy(layer) for _ in weights]
    parts = [t for t in vars(layer.weight).values() if isinstance(t, torch.Tensor)]
    return turning([lambda layer=layer: layer(x) for layer in layers]), sum(t.nbytes for t in parts)  # type: ignore[misc]


def contenders(shape: tuple[int, int], tokens: int, megabytes: int) -> dict[str, tuple[Call, int]]:
    """Name → the call and the bytes of the weight; torchao is left out where it is not installed."""
    columns, rows = shape
    copies = max(1, -(-megabytes * 2**20 // (2 * rows * columns)))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, columns, generator=generator).bfloat16()] * copies
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    made = {
        BF16: torch_linear([w.clone() for w in weights], x, torch.bfloat16),
        FP32: torch_linear(weights, x, torch.float32),
        INT8: zoo(weights, x),
        INT4: zoo(weights, x, bits=4, group_size=GROUP, symmetric=False),
        f"{INT8}, fp32": zoo(weights, x.float()),
        f"{INT4}, fp32": zoo(weights, x.float(), bits=4, group_size=GROUP, symmetric=False),
        PACK8: torch_int8pack(weights, x),
    }
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError:
        return made
    made[AO8] = torchao(weights, x, Int8WeightOnlyConfig(set_inductor_config=False))
    made[AO4] = torchao(weights, x, PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False))
    return made


def timed(call: Call, calls: int) -> float:
    """Seconds of a call: with one thread of its processor, which other programs lengthen less; else of the clock."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls


def measure(made: dict[str, tuple[Call, int]], rounds: int, turn_s: float) -> dict[str, list[float]]:
    """Seconds of a call in each round."""
    calls, slowest = {}, 0.0
    for name, (call, _) in made.items():
        call()
        once = timed(call, 1)
        slowest = max(slowest, once)
        calls[name] = max(1, min(1000, int(turn_s / max(once, 1e-6))))
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds if slowest < LONG_S else min(3, rounds)):
        for name, (call, _) in made.items():
            found[name].append(timed(call, calls[name]))
    return found


def ratio(seconds: dict[str, list[float]], peer: str, name: str) -> str:
    """The peer's time over that of ``name``, of one round each: median and middle half."""
    if peer not in seconds:
        return "–"
    each = [a / b for a, b in zip(seconds[peer], seconds[name], strict=True)]
    if len(each) < 3:
        return f"{statistics.median(each):.2f}"
    low, _, high = statistics.quantiles(each, n=4)
    return f"{statistics.median(each):.2f} ({low:.2f}–{high:.2f})"


def tables(records: Sequence[dict[str, Any]]) -> str:
    """One table of ratios and one of microseconds for each number of threads."""
    text = []
    versus = ((INT8, (BF16, PACK8, AO8)), (INT4, (BF16, AO4)), (f"{INT8}, fp32", (FP32,)), (f"{INT4}, fp32", (FP32,)))
    for threads in sorted({r["threads"] for r in records}):
        mine = [r for r in records if r["threads"] == threads]
        names = [f"{name} / {peer}" for name, peers in versus for peer in peers]
        rows = [
            [f"{r['shape'][0]} → {r['shape'][1]}", str(r["tokens"]),
             *(ratio(r["seconds"], peer, name) for name, peers in versus for peer in peers)]
            for r in mine
        ]  # fmt: skip
        text += [f"## Speed, {threads} thread{'s' if threads > 1 else ''}", ""]
        text += [table(["layer", "tokens", *names], rows), ""]
        peers = list(mine[0]["seconds"])
        rows = [
            [f"{r['shape'][0]} → {r['shape'][1]}", str(r["tokens"]),
             *(f"{1e6 * statistics.median(r['seconds'][name]):.0f}" for name in peers)]
            for r in mine
        ]  # fmt: skip
        text += ["Microseconds of a call, medians:", "", table(["layer", "tokens", *peers], rows), ""]
    return "\n".join(text)


def sizes(records: Sequence[dict[str, Any]]) -> str:
    """Bytes of a weight, of each contender, beside the formula."""
    first = {tuple(r["shape"]): r for r in records}
    peers = [n for n in next(iter(first.values()))["bytes"] if not n.endswith(", fp32")]
    rows = []
    for (columns, count), r in first.items():
        formula8, formula4 = count * columns + 4 * count, count * columns // 2 + 8 * count * columns // GROUP
        rows.append([f"{columns} → {count}", *(f"{r['bytes'][n]:,}" for n in peers), f"{formula8:,}", f"{formula4:,}"])
    return table(["layer", *peers, "formula, int8", "formula, int4"], rows)


def page(records: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The text of PACKED_LINEAR.md."""
    facts = ", ".join(f"{k} {v}" for k, v in about.items())
    return "\n".join([
        "# Linear layers on packed weights, on the CPU", "",
        f"Written by `python -m benchmarks.compression.packed_linear --write-results`: {facts}.", "",
        "A ratio is the peer's time over zoo's in one round (above 1: zoo is faster), median and middle half of the "
        f"rounds. zoo int8: symmetric, one scale a row, as the peers have it; zoo int4: with minima, groups of "
        f"{GROUP}, as torchao has it. x is bf16 except where fp32 is said. One thread: processor time; two: the clock. "
        "Calls of more than 0.2 s have three rounds.", "",
        tables(records), "## Bytes of a weight", "", sizes(records), "",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and with ``--write-results`` write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.02, help="seconds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="numbers of SHAPES")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--add", action="store_true", help="to what was measured before, in place of the same cells")
    parser.add_argument("--write-results", action="store_true")
    args = parser.parse_args(argv)
    about = {**machine(["torch", "torchao"]), "instruction set": loading.isas()[-1], "rounds": args.rounds}
    old = json.loads(RAW.read_text()) if args.add and RAW.exists() else {"about": {"loads": []}, "records": []}
    records: list[dict[str, Any]] = []
    before, loads = torch.get_num_threads(), [*old["about"]["loads"], os.getloadavg()[0]]
    with torch.no_grad():
        for shape in (SHAPES[i] for i in args.shapes):
            for tokens in args.tokens:
                made = contenders(shape, tokens, args.megabytes)
                for threads in args.threads:
                    torch.set_num_threads(threads)
                    seconds = measure(made, args.rounds, args.turn)
                    num_bytes = {name: size for name, (_, size) in made.items()}
                    records.append({
                        "shape": shape, "tokens": tokens, "threads": threads, "seconds": seconds, "bytes": num_bytes,
                    })  # fmt: skip
                    print(shape, f"{tokens} tokens, {threads} threads:", end=" ")
                    print(", ".join(f"{n} {1e6 * statistics.median(s):.0f}" for n, s in seconds.items()), flush=True)
                loads.append(os.getloadavg()[0])
    torch.set_num_threads(before)
    cells = {(*r["shape"], r["tokens"], r["threads"]): r for r in [*old["records"], *records]}
    records = [cells[cell] for cell in sorted(cells, key=lambda c: (SHAPES.index(c[:2]), c))]
    about["load of the machine"] = f"{min(loads):.1f} to {max(loads):.1f} (of {os.cpu_count()} cores)"
    keep({"about": {"loads": loads}, "records": records}, RAW)
    text = page(records, about)
    print(text)
    if args.write_results:
        write_page(PAGE, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
