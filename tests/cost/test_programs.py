"""From actions to programs: by hand, two ranks that gather, compute and reduce."""

from __future__ import annotations

import pytest

from zoo.cost import program_of, read_hardware, seconds_on, simulate_events
from zoo.cost.events import Compute, Start, Wait
from zoo.plan import Action, Actions, Collective, Kind, Moment

GATHER, SCATTER = Collective(op="all_gather", size=2, num_bytes=64), Collective(
    op="reduce_scatter", size=2, num_bytes=64
)  # fmt: skip
ALONE = Collective(op="all_gather", size=1, num_bytes=64)


def compute(unit: str, flops: int, num_bytes: int = 0) -> Action:
    return Action(kind=Kind.COMPUTE, moment=Moment.FORWARD, unit=unit, flops=flops, num_bytes=num_bytes)


STEP = Actions(
    [
        Action(kind=Kind.UNSHARD, bucket=0, collectives=(GATHER,)),
        Action(kind=Kind.PREFETCH, bucket=1, collectives=(GATHER, ALONE)),
        Action(kind=Kind.WAIT, of=Kind.UNSHARD, bucket=0),
        compute("first", 3),
        Action(kind=Kind.RESHARD, bucket=0),
        Action(kind=Kind.WAIT, of=Kind.UNSHARD, bucket=1),
        compute("second", 4),
        Action(kind=Kind.REDUCE, bucket=1, collectives=(SCATTER,)),
        Action(kind=Kind.WAIT, of=Kind.REDUCE, bucket=1, collectives=(GATHER,)),
        Action(kind=Kind.PUBLISH, bucket=0, collectives=(GATHER,)),
    ]
)


def test_what_is_begun_is_waited_for_where_the_list_says() -> None:
    program = program_of(STEP, seconds=lambda c: float(c.flops), members=lambda _: (0, 1))
    keys = [item.key for item in program if isinstance(item, Start)]
    assert keys == [((0, 1), n) for n in range(5)]
    assert [item.num_bytes for item in program if isinstance(item, Start)] == [32, 32, 64, 32, 32]
    waits = [item.keys for item in program if isinstance(item, Wait)]
    assert waits == [(keys[0],), (keys[1],), (keys[2], keys[3]), (keys[4],)]
    assert [item for item in program if isinstance(item, Compute)] == [Compute(3.0, "first"), Compute(4.0, "second")]


def test_its_time_is_that_of_the_list() -> None:
    """Each collective takes 5 s and they go one after the other: gathers end at 5 and 10; first computes from 5 to 8,
    second from 10 to 14; the reduction, its gather and the publication take 15 more."""
    program = program_of(STEP, seconds=lambda c: float(c.flops), members=lambda _: (0, 1))
    found = simulate_events([program, program], lambda start: 5.0)
    assert [(start, end) for start, end, _ in found.computed[0]] == [(5.0, 8.0), (10.0, 14.0)]
    assert found.makespan_s == 29.0


def test_the_roofline() -> None:
    device = read_hardware("h100").device
    seconds, peak = seconds_on(device), device.peak("bf16") * device.reached
    assert seconds(compute("large", 10**15)) == pytest.approx(10**15 / peak)
    memory = device.bytes_per_s * device.memory_reached
    assert seconds(compute("wide", 1, 10**12)) == pytest.approx(10**12 / memory)
