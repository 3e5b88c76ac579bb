"""What of a bucket's parameters is here: sharded, unsharding, hidden or shown, and no other change than these."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zoo import sim
from zoo.shard.parameters import BucketParameters, Presence

from .blocks import build, data

SHARDED, UNSHARDING, HIDDEN, SHOWN = Presence


def parameters() -> BucketParameters:
    _, optimizer = build(3, max_live_parameters=0, prefetch_bucket_size=0)
    return optimizer.buckets[0].parameters


def test_the_life_of_a_gather() -> None:
    def fn(rank: int) -> None:
        of = parameters()
        seen = [of.presence]
        for change in (of.unshard, of.unshard, of.finish_unshard, of.wait, of.hide, of.hide, of.wait, of.reshard):
            change()
            seen.append(of.presence)
        assert seen == [SHARDED, UNSHARDING, UNSHARDING, HIDDEN, SHOWN, HIDDEN, HIDDEN, SHOWN, SHARDED]
        of.unshard()
        of.reshard()  # waits for the gather that is under way
        of.hide()
        assert of.presence is SHARDED
        assert of.refused
        assert not of.live

    sim.run(2, fn)


@pytest.mark.parametrize("before", Presence)
@pytest.mark.parametrize(("change", "allowed"), [("unshard_now", SHARDED), ("finish_unshard", UNSHARDING)])
def test_other_changes_are_refused(before: Presence, change: str, allowed: Presence) -> None:
    def fn(rank: int) -> None:
        of = parameters()
        steps: dict[Presence, Callable[[], None]] = {SHARDED: of.reshard, UNSHARDING: of.unshard, SHOWN: of.wait}
        for step in (of.wait, of.hide) if before is HIDDEN else (steps[before],):
            step()
        assert of.presence is before
        if before is allowed:
            getattr(of, change)()
            return
        with pytest.raises(AssertionError, match=f"they are {before.value}, not {allowed.value}"):
            getattr(of, change)()
        assert of.presence is before

    sim.run(2, fn)


def test_what_is_whole_always_is_shown() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(2)
        model(data(rank)).square().mean().backward()
        optimizer.step()
        assert {bucket.parameters.presence for bucket in optimizer.buckets} == {SHOWN}

    sim.run(2, fn)
