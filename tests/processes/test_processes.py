"""A forked process is, to a test, what a new one is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import run, run_ranks, start, started

PROGRAM = """
import atexit, os, sys, threading, time
def late():
    time.sleep(0.1)
    print("thread", flush=True)
atexit.register(print, "atexit")
threading.Thread(target=late).start()
print(__name__, sys.argv, os.getcwd(), os.environ.get("ZOO_WORD"), os.environ.get("PATH"), file=sys.stderr)
print(sys.stdin.read() == "", sys.flags.dev_mode)
{end}
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1), ("os.abort()", -6)]
)
def test_a_program_says_and_returns_what_it_would_in_a_new_interpreter(
    end: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PATH": "/bin", "ZOO_WORD": "a b"}
    done = []
    for fork in ("1", "0"):
        monkeypatch.setenv("ZOO_TEST_FORK", fork)
        done.append(run(PROGRAM.format(end=end), "one", 2, env=environment))
    forked, new = done
    assert forked.returncode == new.returncode == status
    assert forked.stdout == new.stdout
    assert forked.stderr.splitlines()[0] == new.stderr.splitlines()[0]
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_a_file_is_run_as_main_and_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'near'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import neighbour, sys\nif __name__ == '__main__': print(neighbour.WORD, __file__, sys.argv[1:])\n"
    )
    assert run(script, "x", check=True).stdout == f"near {script} ['x']\n"


def test_packages_of_pythonpath_are_found(tmp_path: Path) -> None:
    (tmp_path / "zoo_of_a_stranger.py").write_text("print('found')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run("import zoo_of_a_stranger", env=environment, check=True).stdout == "found\n"


def test_nothing_is_left_of_the_processes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    run("import torch; torch.mark = 1; import os; os.environ['ZOO_LEFT'] = '1'", check=True)
    said = run("import torch, os; print(hasattr(torch, 'mark'), 'ZOO_LEFT' in os.environ)")
    assert said.stdout == "False False\n"


def test_random_numbers_differ_between_processes() -> None:
    assert run("import torch; print(torch.rand(3))").stdout != run("import torch; print(torch.rand(3))").stdout


def test_a_process_can_be_talked_to() -> None:
    program = "import sys\nfor line in sys.stdin: print(int(line) + 1, flush=True)"
    asked, ask = os.pipe()
    hear, answered = os.pipe()
    with os.fdopen(asked) as a, os.fdopen(answered, "w") as b, os.fdopen(hear) as said, os.fdopen(ask, "w") as told:
        process = start(program, stdin=a, stdout=b)
        a.close()
        b.close()
        print(41, file=told, flush=True)
        assert said.readline() == "42\n"
        told.close()
        assert process.wait(timeout=20) == 0
        assert said.read() == ""


def test_what_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '60']); Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    with started(program, tmp_path / "pid") as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the child is still there")


def total(rank: int, factor: int) -> tuple[int, list[float]]:
    tensor = torch.tensor([float(rank * factor)])
    dist.all_reduce(tensor)
    return dist.get_world_size(), tensor.tolist()


def one_leaves(rank: int) -> str:
    if rank == 1:
        os._exit(9)
    return "here"


def one_fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("that")


def test_ranks_give_what_they_return() -> None:
    assert run_ranks(3, total, 10) == {rank: (3, [30.0]) for rank in range(3)}


def test_ranks_that_die_give_nothing() -> None:
    assert run_ranks(2, one_leaves) == {0: "here"}


def test_ranks_that_raise_are_named_with_their_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised:.*in one_fails.*KeyError: 'that'"):
        run_ranks(2, one_fails)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_forked_process_begins_with_one_thread_and_can_have_more() -> None:
    program = (
        "import os, torch; first = len(os.listdir('/proc/self/task')); torch.set_num_threads(3)\n"
        "x = torch.ones(1000, 1000) @ torch.ones(1000, 1000); print(first, x.mean().item())"
    )
    assert run(program, check=True).stdout == "1 1000.0\n"
