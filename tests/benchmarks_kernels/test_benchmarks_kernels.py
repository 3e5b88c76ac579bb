"""How the page of benchmarks/kernels judges: the bound of the median, what passes, what is not judged."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from benchmarks.kernels import layers
from hypothesis import given
from hypothesis import strategies as st


def record(workload: str, ratios: list[float]) -> dict[str, Any]:
    """zoo takes a second in every round."""
    return {"workload": workload, "seconds": {"zoo": [1.0] * len(ratios), "torch": ratios}}


@given(st.lists(st.floats(0.1, 10.0), max_size=60))
def test_the_bound_is_one_of_the_lower_half_and_the_order_does_not_matter(values: list[float]) -> None:
    found = layers.bound(values)
    assert (found is None) == (len(values) < 5)
    if found is not None:
        assert found in values
        assert found <= statistics.median(values)
        assert found == layers.bound(values[::-1])


def test_the_bound_is_missed_by_one_sample_in_twenty_at_most() -> None:
    """Of coin tosses: the bound is above the median where fewer values than its rank fall below the median."""
    for n in range(5, 15):
        missed = 0
        for tosses in range(2**n):
            signs = [1.0 if tosses >> i & 1 else -1.0 for i in range(n)]
            missed += (layers.bound(signs) or 0.0) > 0
        assert missed / 2**n <= 0.05
    assert layers.bound([float(i) for i in range(1, 26)]) == 8.0


@pytest.mark.parametrize(
    ("workload", "ratios", "passes"),
    [
        ("softmax, bf16", [0.5] * 7 + [0.97] * 18, "yes"),
        ("softmax, bf16", [0.5] * 8 + [2.0] * 17, "no"),
        ("softmax, bf16", [0.96] * 25, "no"),
        ("softmax, bf16", [2.0] * 4, "–"),
        ("bias, dropout and residual, fp32", [2.0] * 25, "–"),
        ("bias, dropout and residual, gradient, fp32", [0.5] * 25, "–"),
        ("bias, dropout and residual, both, fp32", [2.0] * 25, "yes"),
        ("bias, dropout and residual, both, bf16", [0.5] * 25, "no"),
        ("two of 64 experts", [0.5] * 25, "no"),
    ],
)  # fmt: skip
def test_a_workload_passes_by_its_bound(workload: str, ratios: list[float], passes: str) -> None:
    assert workload in layers.workloads()
    found = record(workload, ratios)
    assert layers.verdict(found) == passes
    assert layers.line(found).endswith(f": {passes}")
    table = layers.section([found], {"date": "today"}).splitlines()
    assert table[-1].startswith(f"| {workload} | 1000.00 | ")
    assert table[-1].endswith(f" | {passes} |")
    assert table[-1].count("|") == table[-2].count("|")


def test_both_of_dropout_are_the_two_one_after_the_other() -> None:
    parts = [layers.workloads()[f"bias, dropout and residual{more}, fp32"]("cpu", 8192) for more in ("", ", gradient")]
    both, num_bytes = layers.workloads()["bias, dropout and residual, both, fp32"]("cpu", 8192)
    assert list(both) == ["zoo", "torch"]
    assert num_bytes == sum(part[1] for part in parts)
    out, (grad_x, grad_bias) = both["zoo"]()
    assert torch.equal(out, parts[0][0]["zoo"]())
    assert all(map(torch.equal, (grad_x, grad_bias), parts[1][0]["zoo"]()))
    assert [len(result) for result in both["torch"]()] == [2, 2]  # two rows, and two gradients
