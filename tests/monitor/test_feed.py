"""The thread that feeds sinks: order, drops, failures."""

from __future__ import annotations

import logging
import threading

import pytest

from zoo.monitor import Feed
from zoo.parts import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.0, lr=(0.1,), grad_norm=None)


class Keeps:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.closed = 0

    def write(self, record: StepRecord) -> None:
        self.steps.append(record.step)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed += 1


def test_every_sink_gets_every_record_in_order_on_one_thread() -> None:
    sinks = {"a": Keeps(), "b": Keeps()}
    feed = Feed(sinks)
    for step in range(100):
        feed.put(record(step))
    assert feed.flush(10)
    feed.close()
    for sink in sinks.values():
        assert sink.steps == list(range(100))
        assert sink.threads == {"zoo-monitor"}
        assert sink.closed == 1
    assert feed.num_dropped == 0


def test_what_is_too_much_is_dropped_oldest_first_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    gate, begun = threading.Event(), threading.Event()

    class Slow(Keeps):
        def write(self, record: StepRecord) -> None:
            begun.set()
            gate.wait(10)
            super().write(record)

    sink = Slow()
    feed = Feed({"slow": sink}, capacity=3)
    feed.put(record(0))
    assert begun.wait(10)
    for step in range(1, 8):
        feed.put(record(step))
    assert feed.num_dropped == 4
    gate.set()
    feed.close()
    assert sink.steps == [0, 5, 6, 7]
    assert len([r for r in caplog.records if "slower than training" in r.message]) == 1


def test_a_sink_that_fails_is_switched_off_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Keeps):
        def write(self, record: StepRecord) -> None:
            super().write(record)
            if record.step == 2:
                raise OSError("disk full")

    bad, good = Fails(), Keeps()
    feed = Feed({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            feed.put(record(step))
        feed.close()
    assert bad.steps == [0, 1, 2]
    assert bad.closed == good.closed == 1
    assert good.steps == list(range(6))
    assert feed.failed == {"bad": "OSError: disk full"}
    assert len(caplog.records) == 1
    assert "the monitor bad failed in write() and is switched off: OSError: disk full" in caplog.text


def test_one_that_fails_when_it_is_closed_for_failing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Keeps):
        def write(self, record: StepRecord) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            super().close()
            raise OSError("still full")

    bad = Fails()
    feed = Feed({"bad": bad})
    feed.put(record(0))
    feed.close()
    assert bad.closed == 1
    assert feed.failed == {"bad": "OSError: disk full"}
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    feed = Feed({})
    feed.put(record(0))
    assert not feed
    assert threading.active_count() == before
    feed.close()


def test_a_sink_that_hangs_does_not_hang_the_end(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    class Hangs(Keeps):
        def write(self, record: StepRecord) -> None:
            gate.wait(30)

    feed = Feed({"hangs": Hangs()})
    feed.put(record(0))
    feed.close(timeout_s=0.1)
    gate.set()
    assert "hangs" in caplog.text
    assert "after 0.1 s" in caplog.text


def test_no_records_after_the_end() -> None:
    feed = Feed({"a": Keeps()})
    feed.close()
    with pytest.raises(ValueError, match=r"put\(\) after close\(\)"):
        feed.put(record(0))


def test_a_queue_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        Feed({}, capacity=0)


def test_to_close_again_waits_again_and_closes_no_sink_that_is_written_to() -> None:
    gate, begun = threading.Event(), threading.Event()

    class Slow(Keeps):
        def write(self, record: StepRecord) -> None:
            begun.set()
            assert gate.wait(10)
            assert not self.closed
            super().write(record)

    sink = Slow()
    feed = Feed({"slow": sink})
    feed.put(record(1))
    feed.put(record(2))
    assert begun.wait(10)
    for _ in range(2):
        feed.close(timeout_s=0.01)
        assert sink.closed == 0
    gate.set()
    feed.close()
    assert (sink.steps, sink.closed, feed.failed) == ([1, 2], 1, {})
