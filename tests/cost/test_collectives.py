"""What collectives send and take: against rings and trees that are walked step by step, and laws of both."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import Hardware, read_hardware, seconds, wire_bytes

A100 = read_hardware("a100-80")
FORMULA = dataclasses.replace(A100, inside=dataclasses.replace(A100.inside, all_reduce={}))
OPS = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"])


def walked(op: str, num_bytes: float, ranks: int, machine: Hardware) -> float:
    """A ring in a node: each step every rank sends one part."""
    time_s = 0.0
    for _ in range(2 if op == "all_reduce" else 1):
        for _ in range(ranks - 1):
            time_s += machine.inside.latency_s + num_bytes / ranks / machine.inside.bytes_per_s
    return time_s


@given(op=OPS, num_bytes=st.integers(1, 10**10), ranks=st.integers(1, 8))
def test_a_ring_in_a_node(op: str, num_bytes: int, ranks: int) -> None:
    found = seconds(op, num_bytes, ranks, FORMULA, local=ranks)
    assert found == pytest.approx(walked(op, num_bytes, ranks, FORMULA), rel=1e-13, abs=0)  # some 40 roundings of fp64


@given(op=OPS, num_bytes=st.integers(1, 10**10), nodes=st.integers(2, 64), local=st.integers(1, 8))
def test_over_nodes(op: str, num_bytes: int, nodes: int, local: int) -> None:
    """Never faster than what a node has to send through its adapters, nor than the network's latency; more of anything
    is never slower."""
    ranks = nodes * local
    found = seconds(op, num_bytes, ranks, FORMULA, local=local)
    sent = wire_bytes(op, num_bytes, ranks, None)[0]
    assert found >= 0.999 * sent / (FORMULA.adapters * local / 8 * FORMULA.between.bytes_per_s)
    assert found >= FORMULA.between.latency_s * min(math.log2(nodes), nodes - 1)
    faster = dataclasses.replace(FORMULA, between=dataclasses.replace(FORMULA.between, bytes_per_s=1e12, latency_s=0.0))
    assert seconds(op, num_bytes, ranks, faster, local=local) <= found
    assert seconds(op, 2 * num_bytes, ranks, FORMULA, local=local) >= found
    assert seconds(op, num_bytes, ranks, FORMULA, local=local, rings=1) >= found * (1 if local == 8 else 0)


def up_a_tree(nodes: int, local: int, machine: Hardware) -> float:
    """When the root knows what all have: ranks of a node hand on along a chain, nodes join in pairs, pairs in fours."""
    time_s, there = (local - 1) * machine.inside.latency_s, nodes
    while there > 1:
        time_s += machine.between.latency_s
        there = (there + 1) // 2
    return time_s


@given(exponent=st.integers(2, 9), local=st.integers(1, 8))
def test_trees_of_many_nodes(exponent: int, local: int) -> None:
    """What has no bytes takes an all-reduce once up and once down, a gather or a reduction over parts one of both."""
    nodes = 2**exponent
    once = up_a_tree(nodes, local, FORMULA)
    around = (nodes - 1) * FORMULA.between.latency_s + nodes * (local - 1) * FORMULA.inside.latency_s
    for op, times in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        found = seconds(op, 1e-9, nodes * local, FORMULA, local=local)
        assert found == pytest.approx(times * min(once, around))


@given(ranks=st.integers(2, 8), at=st.integers(0, 10))
def test_measured_all_reduces_are_met(ranks: int, at: int) -> None:
    points = A100.inside.all_reduce[ranks]
    size, time_s = points[at % len(points)]
    assert seconds("all_reduce", size, ranks, A100, local=ranks) == pytest.approx(time_s)
    half = seconds("all_gather", size, ranks, A100, local=ranks)
    assert half == pytest.approx(time_s / 2)
    more = seconds("all_reduce", 10 * points[-1][0], ranks, A100, local=ranks)
    assert more == pytest.approx(10 * points[-1][1])
    assert seconds("all_reduce", 1, ranks, A100, local=ranks) == points[0][1]


def test_nothing_takes_nothing() -> None:
    assert seconds("all_reduce", 0, 8, A100, local=8) == 0.0
    assert seconds("all_gather", 10, 1, A100, local=1) == 0.0


@given(num_bytes=st.integers(10**6, 10**10), nodes=st.integers(2, 64), local=st.integers(1, 8))
def test_an_all_to_all_sends_each_message_straight(num_bytes: int, nodes: int, local: int) -> None:
    """Counted one message after the other: all of a node's go through its adapters."""
    ranks = nodes * local
    away = sum(
        num_bytes / ranks
        for sender in range(local)
        for receiver in range(ranks)
        if receiver // local != sender // local
    )
    found = seconds("all_to_all", num_bytes, ranks, FORMULA, local=local, rings=FORMULA.adapters)
    least = away / FORMULA.node_bytes_per_s
    latency = (ranks - local) * FORMULA.between.latency_s + (local - 1) * FORMULA.inside.latency_s
    inside = (local - 1) * num_bytes / ranks / FORMULA.inside.bytes_per_s
    assert found == pytest.approx(max(least, inside) + latency)


def test_what_no_collective_is() -> None:
    with pytest.raises(ValueError, match="no collective is named 'all_sum'; known are all_gather"):
        seconds("all_sum", 1e6, 8, A100, local=8)
    for more in ({"local": 0}, {"local": 4, "rings": 0}):
        with pytest.raises(ValueError, match="both are at least 1"):
            seconds("all_reduce", 1e6, 8, A100, **more)
