"""What gloo's threads still do is waited for before Python ends."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading

import pytest

from zoo.comm.launch import wait_until_asleep

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are listed on Linux only")


def _thread(started: threading.Event, done: list[bool], forever: threading.Event) -> None:
    ctypes.CDLL(None).prctl(15, b"pt_gloo_test", 0, 0, 0)  # PR_SET_NAME
    started.set()
    for _ in range(8):
        hashlib.sha256(bytes(1 << 24)).digest()  # without Python's lock, then with it
    done.append(True)
    forever.wait()


def test_a_thread_that_works_is_waited_for_until_it_sleeps() -> None:
    started, forever = threading.Event(), threading.Event()
    done: list[bool] = []
    thread = threading.Thread(target=_thread, args=(started, done, forever), daemon=True)
    thread.start()
    started.wait()
    try:
        assert wait_until_asleep(60.0)
        assert done
        assert thread.is_alive()
    finally:
        forever.set()
        thread.join()


def test_a_thread_that_never_sleeps_is_left_after_the_patience() -> None:
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_busy", 0, 0, 0)
        started.set()
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 22)).digest()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started.wait()
    try:
        assert not wait_until_asleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert wait_until_asleep(0.05, "no thread has this name")
