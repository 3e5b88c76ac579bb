"""What a rank sends in a step: the sum of its collectives, near and far."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import Hop, Traffic, traffic_of
from zoo.cost.collectives import WIRE_FACTOR


@dataclass(frozen=True)
class Ranks:
    size: int
    num_local: int | None = None


def test_two_nodes_of_two() -> None:
    """An all-gather of 400 bytes over 4 ranks: each sends 300, and 2 of its 3 receivers are on the other node."""
    four, pair = Ranks(4, 2), Ranks(2, 2)
    found = traffic_of([Hop("all_gather", four, 400), Hop("all_gather", pair, 100), Hop("all_reduce", pair, 100)])
    assert found == Traffic(
        wire={"all_gather": 350, "all_reduce": 100}, intra={"all_gather": 150, "all_reduce": 100},
        inter={"all_gather": 200},
    )  # fmt: skip


ops = st.sampled_from(sorted(op for op in WIRE_FACTOR if op != "recv"))
groups = st.integers(1, 16).flatmap(
    lambda size: st.builds(Ranks, st.just(size), st.none() | st.integers(1, size))
)  # fmt: skip
hops = st.lists(st.builds(Hop, ops, groups, st.integers(0, 10**9)), max_size=6)


@given(hops, hops)
def test_it_adds_up(some: list[Hop], others: list[Hop]) -> None:
    one, two, both = traffic_of(some), traffic_of(others), traffic_of(some + others)
    for name in ("wire", "intra", "inter"):
        parts = getattr(one, name), getattr(two, name)
        assert getattr(both, name) == {op: sum(p.get(op, 0) for p in parts) for op in {*parts[0], *parts[1]}}
    for op, sent in both.wire.items():
        known = [h for h in some + others if h.op == op and h.comm.num_local is not None and h.comm.size > 1]
        assert both.intra.get(op, 0) + both.inter.get(op, 0) == sum(h.sent()[0] for h in known) <= sent


@given(hops)
def test_a_rank_alone_sends_nothing(found: list[Hop]) -> None:
    assert traffic_of([Hop(h.op, Ranks(1, 1), h.message_bytes) for h in found]) == Traffic()
