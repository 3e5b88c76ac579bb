"""The operations of layers and quantisation on one thread of the CPU, beside torch: ``--layers``.

What is timed is that of :mod:`benchmarks.gpu.stages`, on 1,024 rows of 4,096: four million elements.

A workload passes if it is sure, to 95 %, that the median of the ratios torch / zoo is at least :data:`TARGET`. Dropout
is judged forward and backward together: zoo makes its mask twice, where torch makes it once and keeps it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.gpu import stages
from benchmarks.gpu.timing import Timer

ELEMENTS = 1024 * 4096
HEADING = "## Layer operations"
TARGET, CONFIDENCE = 0.97, 0.95
Make = Callable[[str, int], tuple[stages.Contenders, int]]


def together(*makes: Make) -> Make:
    """The contenders of several workloads, one after the other in one call."""

    def make(device: str, elements: int) -> tuple[stages.Contenders, int]:
        made = [each(device, elements) for each in makes]
        calls = {name: [contenders[name] for contenders, _ in made] for name in made[0][0]}
        steps = {name: lambda steps=steps: [step() for step in steps] for name, steps in calls.items()}
        return steps, sum(num_bytes for _, num_bytes in made)

    return make


DROPOUT = "bias, dropout and residual"
WITH_DTYPE: dict[str, Callable[[torch.dtype], Make]] = {
    "quantise to int8": lambda t: stages.quantise_bits(8, t),
    "quantise to int4": lambda t: stages.quantise_bits(4, t),
    "dequantise int8": lambda t: stages.dequantise(1, 8, t),
    "dequantise int4": lambda t: stages.dequantise(1, 4, t),
    "quantise to 8 bits, asymmetric": lambda t: stages.quantise_asymmetric_bits(8, t),
    "quantise to 4 bits, asymmetric": lambda t: stages.quantise_asymmetric_bits(4, t),
    "dequantise 8 bits, asymmetric": lambda t: stages.dequantise_asymmetric(8, t),
    "dequantise 4 bits, asymmetric": lambda t: stages.dequantise_asymmetric(4, t),
    "layer norm": lambda t: lambda d, n: stages.layer_norm_forward(d, n, t),
    "layer norm of a sum": lambda t: lambda d, n: stages.add_layer_norm_forward(d, n, t),
    "layer norm, gradient": lambda t: lambda d, n: stages.layer_norm_grad(d, n, t),
    "bias and GELU (tanh)": lambda t: lambda d, n: stages.bias_gelu_forward(d, n, t),
    "bias and GELU (tanh), gradient": lambda t: lambda d, n: stages.bias_gelu_grad(d, n, t),
    "gated SiLU": lambda t: lambda d, n: stages.gated_silu(d, n, t),
    "gated SiLU, gradient": lambda t: lambda d, n: stages.gated_silu_grad(d, n, t),
    "softmax": lambda t: lambda d, n: stages.softmax_forward(d, n, t),
    "softmax, gradient": lambda t: lambda d, n: stages.softmax_grad(d, n, t),
    DROPOUT: lambda t: lambda d, n: stages.dropout_forward(d, n, t),
    f"{DROPOUT}, gradient": lambda t: lambda d, n: stages.dropout_grad(d, n, t),
    f"{DROPOUT}, both": lambda t: together(
        lambda d, n: stages.dropout_forward(d, n, t), lambda d, n: stages.dropout_grad(d, n, t)
    ),
    "permute to two experts": lambda t: lambda d, n: stages.permute(d, n, t),
    "unpermute, weighted": lambda t: lambda d, n: stages.unpermute(d, n, t),
    "unpermute, gradient": lambda t: lambda d, n: stages.unpermute_grad(d, n, t),
}
FP32_ONLY = {
    "two of 64 experts": stages.gate,
    "places within 64 experts, 1,024 tokens": stages.places,
    "places by a key, 1,024 tokens": stages.places_by_key,
}


NOT_JUDGED = (DROPOUT, f"{DROPOUT}, gradient")
"""Only together."""


def workloads() -> dict[str, Make]:
    """Name → what makes the contenders."""
    made = {}
    for name, of in WITH_DTYPE.items():
        for dtype, short in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            made[f"{name}, {short}"] = of(dtype)
    return made | FP32_ONLY


def measure(rounds: int, limit_s: float) -> list[dict[str, Any]]:
    """Seconds of zoo and torch in every round; they take turns. A workload takes ``limit_s`` or so at most.

    Seconds of the one thread's processor time: those in which others had the processor say nothing about either.
    """
    torch.set_num_threads(1)
    timer, records = Timer("cpu", time.thread_time), []
    for name, make in workloads().items():
        contenders, _ = make("cpu", ELEMENTS)
        for call in contenders.values():  # what torch does once, of autograd for example, is not to use up the limit
            call()
        records.append({"workload": name, "seconds": timer.rounds(contenders, most=rounds, limit_s=limit_s)})
        print(line(records[-1]), flush=True)
        del contenders
        gc.collect()
    return records


def ratios(record: dict[str, Any]) -> list[float]:
    """torch's seconds over zoo's, round by round: how many times as fast zoo is."""
    return [b / a for a, b in zip(record["seconds"]["zoo"], record["seconds"]["torch"], strict=True)]


def bound(values: Sequence[float]) -> float | None:
    """A lower bound of the median at :data:`CONFIDENCE`, whatever the distribution; None for fewer than five values.

    The k-th smallest of n values, with the largest k for which P(B < k) ≤ 1 - CONFIDENCE, B binomial of n and 1/2: the
    median is below the k-th smallest only if fewer than k values are below the median. n = 25: the 8th.
    """
    n, below, k = len(values), 0.0, 0
    while below + math.comb(n, k) / 2**n <= 1 - CONFIDENCE:
        below += math.comb(n, k) / 2**n
        k += 1
    return sorted(values)[k - 1] if k else None


def verdict(record: dict[str, Any]) -> str:
    """Whether the bound reaches the target: "yes" or "no"; "–" for what is not judged, or not by so few rounds."""
    least = bound(ratios(record))
    if least is None or record["workload"].rpartition(", ")[0] in NOT_JUDGED:
        return "–"
    return "yes" if least >= TARGET else "no"


def cells(record: dict[str, Any]) -> list[str]:
    """Medians in ms, the ratio with the middle half of the rounds, its bound, the verdict."""
    low, _, high = statistics.quantiles(ratios(record), n=4) if len(ratios(record)) > 1 else ratios(record) * 3
    zoo, torchs = (f"{1e3 * statistics.median(record['seconds'][n]):.2f}" for n in ("zoo", "torch"))
    ratio, least = f"{statistics.median(ratios(record)):.2f} ({low:.2f}–{high:.2f})", bound(ratios(record))
    return [record["workload"], zoo, torchs, ratio, "–" if least is None else f"{least:.2f}", verdict(record)]


def line(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    name, zoo, torchs, ratio, least, passed = cells(record)
    return f"{name}: zoo {zoo} ms, torch {torchs} ms, {ratio}, at least {least}: {passed}"


def section(records: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The section of the page."""
    counts = [len(record["seconds"]["zoo"]) for record in records]
    facts = ", ".join(f"{key} {value}" for key, value in about.items() if key != "C loop")
    return "\n".join(
        [
            HEADING,
            "",
            f"Written by `python -m benchmarks.kernels --layers`: {facts}. One thread and its processor time, 1,024 "
            f"rows of 4,096; zoo and torch take turns, {min(counts)} to {max(counts)} rounds. The ratio is torch's "
            "time over zoo's in one "
            'round (above 1: zoo is faster), its median and the middle half. "At least": the bound of the median '
            "at 95 %, which is the k-th smallest of n ratios with the largest k for which P(Binomial(n, 1/2) < k) ≤ "
            f"0.05; a workload passes with {TARGET} or more. Dropout is judged forward and backward together, since "
            "its mask is never stored. Where torch has no such operation, several stand for it "
            "(benchmarks/gpu/stages.py); its permute is given the token of each row, which zoo works out.",
            "",
            "| workload | zoo, ms | torch, ms | ratio | at least | passes |",
            "|---|---|---|---|---|---|",
            *(f"| {' | '.join(cells(record))} |" for record in records),
            "",
        ]
    )
