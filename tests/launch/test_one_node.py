"""``zoo launch`` on one node: what it starts, what it says at the end, and that nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.launch.jobs import Launched, alive, launched

from zoo.cli import app


def last_lines(text: str, count: int = 20) -> str:
    return "\n".join(text.splitlines()[-count:])


@pytest.mark.dear
def test_ranks_run_and_rank_0_alone_is_on_the_screen(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "--log-dir", str(tmp_path / "logs"), "SCRIPT", "ok") as job:
        job.finish()
    assert job.process.returncode == 0
    assert (job.said, job.errors) == ("rank 0 of 2 began\n", "rank 0 says to stderr\n")
    for rank in (0, 1):
        assert (tmp_path / f"logs/rank{rank}/stdout.log").read_text() == f"rank {rank} of 2 began\n"
        assert (tmp_path / f"logs/rank{rank}/stderr.log").read_text() == f"rank {rank} says to stderr\n"
    assert job.left() == []


@pytest.mark.dear
def test_all_ranks_are_shown_with_their_number(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "--show", "all", "SCRIPT", "ok") as job:
        job.finish()
    assert sorted(job.said.splitlines()) == ["[rank 0] rank 0 of 2 began", "[rank 1] rank 1 of 2 began"]


@pytest.mark.dear
def test_a_rank_has_what_torchrun_gives_and_its_script_is_main(tmp_path: Path) -> None:
    script = """
import json, multiprocessing, os, sys
import beside
class Mine:
    pass
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [3])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    found = {name: os.environ[name] for name in names}
    found |= {"main": Mine.__module__, "argv": sys.argv[1:], "doubled": doubled, "spec": __spec__}
    found["ours"] = [name for name in [*os.environ, *globals()] if name.startswith(("ZOO_LAUNCH", "_settle"))]
    found["cores"] = sorted(os.sched_getaffinity(0))
    print(json.dumps(found))
"""
    (tmp_path / "beside.py").write_text("")
    core = min(os.sched_getaffinity(0))
    with launched(
        tmp_path, "--ranks", "1", "--bind-cores", str(core), "SCRIPT", "--ranks", "-m", script=script
    ) as job:  # fmt: skip
        job.finish()
    assert job.process.returncode == 0, job.errors
    found = json.loads(job.said)
    assert found == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "main": "__main__", "argv": ["--ranks", "-m"],
        "doubled": [6], "ours": [], "spec": None, "cores": [core],
    }  # fmt: skip


@pytest.mark.dear
def test_modules_and_other_programs(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "-m", "json.tool", "--help") as job:
        job.finish()
    assert job.process.returncode == 0, job.errors
    assert "usage:" in job.said
    with launched(tmp_path, "--ranks", "2", "--show", "1", "--no-python", "sh", "-c", "echo $RANK; exit 3") as job:
        job.finish()
    assert (job.process.returncode, job.said) == (3, "1\n")


@pytest.mark.dear
def test_the_first_error_is_told_whole_and_last(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "3", "SCRIPT", "fails") as job:
        said = last_lines(job.finish())
    assert job.process.returncode == 1
    assert job.left(0.5) == []
    assert "Traceback (most recent call last):" in said
    assert "in inner" in said
    assert "zoo/launch" not in said, "frames of the launcher are not the script's"
    assert said.endswith("zoo launch: the cause: rank 1 on host localhost: ValueError: the learning rate is a fish")
    assert said.count("was ended") == 2


@pytest.mark.dear
def test_an_exit_code_is_that_of_the_rank_and_its_last_words_are_told(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "SCRIPT", "exits") as job:
        said = job.finish()
    assert job.process.returncode == 7
    assert said.endswith("rank 1 on host localhost: exit code 7; it printed last: my last words\n")
    assert job.left(0.5) == []


def parts(job: Launched) -> dict[str, int]:
    agent = job.above(job.ranks[0])
    return {"rank": job.ranks[1], "agent": agent, "keeper": job.above(agent), "supervisor": job.process.pid}


KILLS = [
    (part, name) for part in ("rank", "agent", "keeper", "supervisor") for name in ("SIGKILL", "SIGTERM", "SIGINT")
]


def kill_and_look(folder: Path, part: str, name: str) -> None:
    """End one process of a running job: all of it ends in 10 s, with the cause at the end and no exit code 0."""
    with launched(folder, "--ranks", "2", "--grace-s", "2", "SCRIPT", "wait", str(folder)) as job:
        job.wait_for_ranks(2)
        os.kill(parts(job)[part], signal.Signals[name])
        said = last_lines(job.finish(12))
        assert job.left(max(0.0, 10 - job.took_s)) == []
    assert job.process.returncode != 0
    if part == "supervisor":
        assert ("whoever started this job is gone" if name == "SIGKILL" else f"ended by {name}") in said
    elif part == "rank":
        known = "KeyboardInterrupt" if name == "SIGINT" else f"killed by {name}"
        assert f"the cause: rank 1 on host localhost: {known}" in said
    else:
        assert "the cause: host localhost: its agent" in said
        assert name in said or part == "keeper"


@pytest.mark.dear
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("rank", "SIGKILL"),
        ("agent", "SIGKILL"),
        ("keeper", "SIGKILL"),
        ("supervisor", "SIGKILL"),
        ("supervisor", "SIGINT"),
    ],
)
def test_whatever_is_killed_nothing_is_left(tmp_path: Path, part: str, name: str) -> None:
    kill_and_look(tmp_path, part, name)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), KILLS)
def test_each_kill_leaves_nothing(tmp_path: Path, part: str, name: str) -> None:
    kill_and_look(tmp_path, part, name)


@pytest.mark.campaign
@pytest.mark.parametrize("draw", range(200))
def test_drawn_kills_at_any_moment(tmp_path: Path, draw: int) -> None:
    """Of a process of the job drawn at a moment drawn from its start on."""
    chance = random.Random()
    with launched(tmp_path, "--ranks", "2", "--grace-s", "2", "SCRIPT", "wait", str(tmp_path)) as job:
        time.sleep(chance.uniform(0.0, 2.0))
        there = alive(job.mark)
        pid = chance.choice([one for one, line in there.items() if "sleep" not in line] or [job.process.pid])
        name = chance.choice(["SIGKILL", "SIGTERM", "SIGINT"])
        os.kill(pid, signal.Signals[name])
        said = last_lines(job.finish(14))
        assert job.left(max(0.0, 10 - job.took_s)) == [], (name, there[pid])
    assert job.process.returncode != 0, (name, there.get(pid), said)
    assert "zoo launch:" in said or pid == job.process.pid, (name, there.get(pid), said)


@pytest.mark.dear
def test_a_worker_that_ignores_sigterm_is_killed_and_named(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "--grace-s", "0.5", "SCRIPT", "stubborn", str(tmp_path)) as job:
        job.wait_for_ranks(2)
        job.process.terminate()
        said = job.finish(10)
        assert job.left(1) == []
    assert job.process.returncode == 128 + signal.SIGTERM
    assert "ranks 0, 1 on host localhost were killed, because they had not ended 0.5 s after" in said


@pytest.mark.dear
def test_a_rank_that_ends_while_others_train(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "--finish-s", "0.5", "SCRIPT", "ends") as job:
        said = job.finish(15)
        assert job.left(1) == []
    assert job.process.returncode == 1
    assert "the cause: rank 1 on host localhost: it ended with exit code 0 0.5 s ago, while ranks [0] still run" in said


@pytest.mark.dear
def test_a_hang_gives_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "--hang-s", "1", "SCRIPT", "wait") as job:
        said = job.finish(20)
        assert job.left(1) == []
    assert job.process.returncode == 1
    assert said.count("most recent call first") == 2
    assert said.count('script.py", line') >= 2
    assert "the cause: host localhost: no rank has printed anything for 1 s (--hang-s)" in said


@pytest.mark.slow
def test_sigquit_gives_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", "SCRIPT", "wait", str(tmp_path)) as job:
        job.wait_for_ranks(2)
        job.process.send_signal(signal.SIGQUIT)
        said = ""
        while said.count("most recent call first") < 2:
            line = job.process.stderr.readline() if job.process.stderr else ""
            assert line, said
            said += line
        assert job.process.poll() is None


@pytest.mark.dear
def test_what_cannot_be_started_names_the_host(tmp_path: Path) -> None:
    with launched(tmp_path, "--ranks", "2", str(tmp_path / "none.py")) as job:
        said = job.finish()
    assert job.process.returncode == 2
    assert "the cause: host localhost: there is no script" in said
    assert job.left(1) == []
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        with launched(tmp_path, "--ranks", "2", "--master-port", str(port), "SCRIPT", "ok") as job:
            said = job.finish()
    assert job.process.returncode == 2
    assert f"host localhost: port {port} cannot be used (Address already in use)" in said


@pytest.mark.dear
def test_a_full_disk_for_logs_ends_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "logs/rank1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to("/dev/full")
    with launched(tmp_path, "--ranks", "2", "--log-dir", str(tmp_path / "logs"), "SCRIPT", "wait") as job:
        said = job.finish(15)
        assert job.left(1) == []
    assert job.process.returncode == 1
    assert "host localhost: the stdout of rank 1 cannot be logged: No space left on device" in said
    (tmp_path / "file").write_text("")
    with launched(tmp_path, "--bind-cores", "0-", "SCRIPT", "ok") as job:
        assert "host localhost: '0-' is no list of cores" in job.finish()
    with launched(tmp_path, "--log-dir", str(tmp_path / "file"), "SCRIPT", "ok") as job:
        said = job.finish()
    assert "host localhost: rank 0 cannot be started: [Errno 20] Not a directory" in said


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--show", "x"], "--show is 'x'; give ranks as 0,3, or all"),
        (["--num_nodes", "2"], "--num_nodes is 2, and there are 1 hosts: localhost"),
        (["-i", "other"], "host 'other' is not in the file of hosts, which has localhost"),
        (["-e", "localhost"], "--exclude 'localhost' leaves no slot of localhost"),
        (["-H", "/nowhere/hosts"], "there is no file of hosts '/nowhere/hosts'"),
        (["--finish-s", "0"], "finish_s is 0.0; give seconds above 0"),
        (["--min-nodes", "2"], "min_nodes is 2, and there are 1 hosts"),
        (["--num_nodes", "2", "--node_rank", "0"], "give --master-addr and --master-port"),
        (["--num_nodes", "2", "--node_rank", "2", "--master_addr", "h"], "node 2 is none of 2 nodes; give 0 to 1"),
        (["--image", "mine"], "--image is of a job for Kubernetes; add --write FILE.yaml"),
        (["-H", "hosts", "--node_rank", "0"], "--hostfile is for one launcher, which starts all hosts"),
        (["--write", "a.sbatch"], "a.sbatch needs to know how many ranks a node has; give --num_gpus"),
        (["--write", "a.yaml", "--ranks", "2"], "needs the name of an image"),
        (["--write", "1.sbatch", "--ranks", "2"], "the name of a job is '1'"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("zoo.launch.supervisor.Supervisor.run", lambda _: pytest.fail("it has started"))
    with pytest.raises(SystemExit) as told:
        app(["launch", *arguments, "script.py"], prog_name="zoo")
    assert told.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_launchers_on_two_nodes_that_something_else_starts(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'MASTER_PORT')))"
    for node in ("0", "1"):
        arguments = ("--ranks", "2", "--show", "all", "SCRIPT")
        variables = {"NODE_RANK": node, "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with launched(tmp_path, *arguments, script=script, **variables) as job:
            job.finish()
        first = 2 * int(node)
        expected = [f"[rank {rank}] {rank} 4 {node} {port}" for rank in (first, first + 1)]
        assert sorted(job.said.splitlines()) == expected, job.errors
