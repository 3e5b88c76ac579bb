"""When a graph gathers: not before it is needed, no more than budgets allow, and hidden where something can hide it.

DeepSpeed's passes over the graph of backward once put all gathers, and casts of what they brought, to its beginning
(seed 002 of this part: 69 gathers before the first product, 3.49 MB; with casts fused into the gathers 6 and 0.132 MB,
which is one layer of 256 x 256 with its bias in 16 bits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from zoo import sim
from zoo.compile import compile_whole, use_dtypes
from zoo.compile.timeline import Recording, recording
from zoo.cost import Hardware, read_hardware
from zoo.plan import Kind, Moment
from zoo.zero import Precision, ZeroOptimizer

WIDTH, DEPTH, TOKENS = 256, 6, 16
LAYER = WIDTH * WIDTH + WIDTH  # elements
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def step(*, ahead: int, autocast: bool = False, fused: bool = False, param: torch.dtype | None = None) -> Recording:
    """A forward and a backward on one of two ranks; ``ahead``: elements."""

    def fn(rank: int) -> Recording:
        model, x = layers(), torch.ones(TOKENS, WIDTH)
        lower = torch.autocast("cpu", BF16, enabled=autocast)
        with lower:
            gather = use_dtypes(model, x) if fused else {}
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.0, precision=Precision(gather=gather, param=param), param_persistence_threshold=0,
            reduce_bucket_size=1, max_live_parameters=0, prefetch_bucket_size=ahead,
        )  # fmt: skip
        whole = compile_whole(optimizer.sharded, "aot_eager")
        for _ in range(2):  # what is gathered ahead is known from the first one
            with recording(whole) as found:
                with lower:
                    loss = model(x).sum()
                optimizer.backward(loss)
        assert not whole.reasons
        return found

    found: Any = sim.run(2, fn)[0]
    assert isinstance(found, Recording)
    return found


@pytest.mark.dear
@pytest.mark.parametrize("ahead", [0, pytest.param(LAYER, marks=pytest.mark.slow)])
def test_backward_gathers_what_comes_next_and_no_more(ahead: int) -> None:
    found = step(ahead=ahead, param=BF16)
    itemsize = 2
    first = next(mark for mark in found.marks if mark.backward and mark.of.total.macs)
    begun = [
        action for action in found.actions[: first.actions]
        if action.moment is Moment.BACKWARD and action.kind in (Kind.UNSHARD, Kind.PREFETCH)
    ]  # fmt: skip
    assert [action.kind for action in begun].count(Kind.UNSHARD) == 1  # what the product reads
    assert sum(action.num_bytes for action in begun if action.kind is Kind.PREFETCH) <= ahead * itemsize
    assert max(found.actions.whole_bytes()) == (LAYER + ahead) * itemsize
    assert ahead or max(found.actions.whole_bytes()) <= 0.132e6


def slow_link(tokens: int) -> tuple[Hardware, float]:
    """Eight H100 with links of 50 GB/s, and how many times as long they compute for so many tokens."""
    given = read_hardware("h100-80")
    inside = dataclasses.replace(given.inside, bytes_per_s=50e9)
    # Of so few tokens what a layer reads would be its weight alone; of many the products are all that counts.
    device = dataclasses.replace(given.device, bytes_per_s=1e30)
    return dataclasses.replace(given, inside=inside, device=device), tokens / TOKENS


@pytest.mark.slow
def test_fewer_bytes_and_one_layer_ahead_hide_half_of_what_was_exposed() -> None:
    hardware, computes = slow_link(tokens=8192)
    scale = (4096 / WIDTH) ** 2  # seconds of layers of 4,096 x 4,096: of products and of bytes alike
    link = dataclasses.replace(hardware.inside, bytes_per_s=hardware.inside.bytes_per_s / scale)
    hardware = dataclasses.replace(hardware, inside=link)
    exposed = {}
    for fused, ahead in ((False, 0), (False, LAYER), (True, 0), (True, LAYER)):
        torch._dynamo.reset()
        found = step(ahead=ahead, autocast=True, fused=fused)
        timeline = found.simulate(hardware, ranks=8, computes=computes * scale)
        exposed[fused, bool(ahead)] = sum(timeline.exposed_s[0].values())
    assert exposed[True, True] <= 0.5 * exposed[False, False]
    assert exposed[True, True] < min(exposed[True, False], exposed[False, True])
    assert max(exposed[True, False], exposed[False, True]) < exposed[False, False]
