"""What of a bucket's parameters is here: sharded, unsharding, hidden or shown, and no other change than these."""

from __future__ import annotations

import pytest
from tests.zero.blocks import build, data

from zoo import sim
from zoo.shard.parameters import BucketParameters, Presence

SHARDED, UNSHARDING, HIDDEN, SHOWN = Presence


def parameters() -> BucketParameters:
    _, optimizer = build(3)
    return optimizer.buckets[0].parameters


def test_the_life_of_a_gather() -> None:
    def fn(rank: int) -> None:
        of = parameters()
        seen = [of.presence]
        for change in (of.start, of.finish, of.show, of.hide, of.hide, of.show, of.free):
            change()
            seen.append(of.presence)
        assert seen == [SHARDED, UNSHARDING, HIDDEN, SHOWN, HIDDEN, HIDDEN, SHOWN, SHARDED]
        bucket, executor = of.bucket, of.bucket.executor
        for verb, then in (
            (executor.unshard, UNSHARDING), (executor.unshard, UNSHARDING), (executor.wait, SHOWN),
            (executor.unshard, SHOWN), (executor.hide, HIDDEN), (executor.wait, SHOWN), (executor.reshard, SHARDED),
            (executor.unshard, UNSHARDING), (executor.reshard, SHARDED), (executor.hide, SHARDED),
        ):  # fmt: skip
            verb(bucket)
            assert of.presence is then
        assert of.refused
        assert not of.live

    sim.run(2, fn)


@pytest.mark.parametrize("before", Presence)
@pytest.mark.parametrize(("change", "allowed"), [("start", SHARDED), ("finish", UNSHARDING), ("show", HIDDEN)])
def test_other_changes_are_refused(before: Presence, change: str, allowed: Presence) -> None:
    def fn(rank: int) -> None:
        of = parameters()
        for step in (of.start, of.finish, of.show)[: [SHARDED, UNSHARDING, HIDDEN, SHOWN].index(before)]:
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
