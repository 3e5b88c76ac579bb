"""What a graph will take: operations and bytes to the integer, what passes did, a step foretold on other hardware."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from zoo import sim
from zoo.compile import compile_whole, register_compile_pass
from zoo.compile.ops import EVENTS
from zoo.compile.picture import draw
from zoo.compile.timeline import Recording, recording
from zoo.cost import Hardware, read_hardware
from zoo.zero import ZeroOptimizer

BATCH, WIDTHS = 4, (8, 16, 16, 16)
LAYERS = list(itertools.pairwise(WIDTHS))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(schedule: Any = ((0, ("keep", "place")),), **options: Any) -> tuple[Any, Recording]:
    """Of a chain of linear layers, each a unit with a bucket of its own, on one of two ranks."""
    settings: dict[str, Any] = {
        "param_persistence_threshold": 0, "reduce_bucket_size": 1, "max_live_parameters": 0, "prefetch_bucket_size": 0,
        **options,
    }  # fmt: skip

    def fn(rank: int) -> tuple[Any, Recording]:
        model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in LAYERS))
        optimizer = ZeroOptimizer(model, stage=3, lr=0.0, **settings)
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=schedule)
        for _ in range(2):  # what is gathered ahead is known from the first one
            with recording(whole) as found:
                optimizer.backward(model(torch.ones(BATCH, WIDTHS[0])).sum())
        assert not whole.reasons
        return whole, found

    found: Any = sim.run(2, fn)[0]
    whole, recorded = found
    return whole, recorded


@pytest.mark.dear
def test_operations_and_memory_are_counted_to_the_integer() -> None:
    _, found = step()
    forward = [mark.of for mark in found.marks if not mark.backward]
    entered = [segment for segment in forward if segment.event == "enter" and segment.call]
    assert [segment.total.macs for segment in entered] == [BATCH * a * b for a, b in LAYERS]
    assert [segment.total.read_bytes for segment in entered] == [4 * (BATCH * a + a * b) for a, b in LAYERS]
    assert [segment.total.written_bytes for segment in entered] == [4 * BATCH * b for _, b in LAYERS]
    # Every activation is needed by backward, or is the output.
    kept = [4 * BATCH * sum(WIDTHS[: i + 2]) for i in range(len(LAYERS))]
    assert [segment.live_bytes for segment in entered] == kept
    macs = sum(mark.of.total.macs for mark in found.marks if mark.backward)
    assert macs == sum(2 * BATCH * a * b for a, b in LAYERS) - BATCH * WIDTHS[0] * WIDTHS[1]  # none of the input


@pytest.mark.dear
def test_what_a_pass_did_is_told_by_what_is_there_before_and_after() -> None:
    def delays(graph: Any, plan: Any) -> Any:
        """Forward gets a copy; a node of backward comes later than it did."""
        if not plan.backward:
            node = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.mm.default)
            with graph.graph.inserting_after(node):
                copied = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
                copied.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
        else:
            nodes = [n for n in graph.graph.nodes if n.target not in EVENTS]
            pairs = itertools.pairwise(nodes)
            one, other = next(
                (a, b) for a, b in pairs if a.op == b.op == "call_function" and a not in b.all_input_nodes
            )
            other.append(one)
        return graph

    register_compile_pass("delays_in_tests", delays)
    whole, _ = step([(0, ["keep", "place", "delays_in_tests"])])
    told = whole.report()
    assert "place: forward: " in told
    assert f"+{len(LAYERS) + 1} zoo_compile.enter_, +{len(LAYERS)} zoo_compile.leave_" in told
    assert f"starts 0 → {len(LAYERS) + 1}" in told
    (forward, backward) = whole.plans[0].report["delays_in_tests"]
    assert "+1 aten.clone" in forward
    assert "moved" not in forward
    assert backward.split(", ")[1] == "1 moved"


LINK = 50e9


def hardware(*, flops: float = 1e30) -> Hardware:
    """A machine of eight, whose links take no time before the first byte; its memory takes none."""
    given = read_hardware("h100-80")
    device = dataclasses.replace(
        given.device, flops_per_s={"fp32": flops}, reached=1.0, bytes_per_s=1e30, memory_reached=1.0
    )
    inside = dataclasses.replace(given.inside, latency_s=0.0, bytes_per_s=LINK)
    return dataclasses.replace(given, device=device, inside=inside, ranks_per_node=8)


@pytest.mark.dear
def test_communication_that_nothing_hides_is_exposed_as_a_whole() -> None:
    _, found = step()
    timeline = found.simulate(hardware(), ranks=8)
    sent = sum(c.num_bytes for action in found.actions for c in action.collectives)
    sizes = [4 * a * b for a, b in LAYERS]
    assert sent == 2 * sum(sizes) + sum(sizes)  # two gathers, a reduction
    assert math.isclose(timeline.makespan_s, sent * 7 / 8 / LINK)
    assert math.isclose(sum(timeline.exposed_s[0].values()), timeline.makespan_s)
    assert max(m.gathered_bytes for m in found.memory(timeline)) == max(sizes)


@pytest.mark.dear
def test_what_is_gathered_ahead_is_hidden_by_what_is_computed() -> None:
    largest = max(a * b for a, b in LAYERS)
    slow = hardware(flops=2 * BATCH * LINK / 8)  # a product takes twice as long as the gather of its weight
    exposed = {}
    for ahead in (0, largest):
        torch._dynamo.reset()
        _, found = step(prefetch_bucket_size=ahead)
        timeline = found.simulate(slow, ranks=8)
        exposed[ahead] = sum(timeline.exposed_s[0].values())
        computed = sum(2 * mark.of.total.macs for mark in found.marks) / slow.device.peak("fp32")
        assert math.isclose(timeline.makespan_s, computed + exposed[ahead])
    assert exposed[largest] < 0.5 * exposed[0]


@pytest.mark.dear
def test_the_picture_has_both_kinds_of_memory(tmp_path: Path) -> None:
    _, found = step()
    moments = found.memory(found.simulate(hardware(flops=1e9), ranks=8))
    draw(moments, tmp_path / "memory.svg", title="three layers")
    drawn = (tmp_path / "memory.svg").read_text()
    assert all(f'id="{name}"' in drawn for name in ("gathered", "values"))
    with pytest.raises(ValueError, match=r"it takes \.png, \.svg or \.pdf"):
        draw(moments, tmp_path / "memory.txt", title="")
    with pytest.raises(ValueError, match="no graph ran"):
        draw([], tmp_path / "memory.svg", title="")
