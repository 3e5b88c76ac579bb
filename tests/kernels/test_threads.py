"""The threads of the CPU kernels are torch's: as many, the same ones, and none that ends because of a small call."""

from __future__ import annotations

import pytest
from tests import processes

from zoo.kernels import loading

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")

# Processes of their own: each test counts all threads there are.
COMMON = """
import os, threading, torch
from zoo.kernels import loading
from zoo.kernels.norm import sum_squares
assert loading.native()
def threads(): return set(os.listdir("/proc/self/task"))
def large_operation_of_torch(): return torch.ones(1 << 22).mul_(2.0)
"""

KEPT = """
torch.set_num_threads(4)
large_operation_of_torch()
before = threads()
for wanted in (2, 3, 1, 4, 2):
    x = torch.ones(32768 * wanted)  # a thread for each 32,768 elements
    assert float(sum_squares([x])[0]) == x.numel()
    large_operation_of_torch()
    assert threads() == before, (wanted, len(before), len(threads() - before))
print("kept")
"""

FRESH = """
import sys
wanted = int(sys.argv[1])
torch.set_num_threads(wanted)
found = []
x = torch.ones(65536 * 8)  # made here: an operation of torch would tell the new thread
def fresh():
    before = threads()
    assert float(sum_squares([x])[0]) == x.numel()
    found.append(len(threads() - before) + 1)
thread = threading.Thread(target=fresh)
thread.start()
thread.join()
print(found)
"""


@pytest.fixture
def openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process is not forked but started, OpenMP's own number is another than torch's too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_call_for_fewer_threads_ends_none_of_torchs(openmp: None) -> None:
    result = processes.run(COMMON + KEPT)
    assert result.stdout == "kept\n", result.stderr


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_new_thread_of_python_uses_as_many_as_torch_says(wanted: int, openmp: None) -> None:
    result = processes.run(COMMON + FRESH, wanted)
    assert result.stdout == f"[{wanted}]\n", result.stderr
