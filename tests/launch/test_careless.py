"""``zoo launch`` where its surroundings are not as one thinks of them: terminals, shells, bytes, names and numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import LAUNCH, basics, launched, new_mark

from zoo.launch import exports, hosts
from zoo.launch.agent import Agent, Start, _Rank
from zoo.launch.job import Job
from zoo.launch.supervisor import Supervisor, _Node


def run(folder: Path, script: str, *arguments: str, **variables: str) -> tuple[int, bytes, bytes]:
    """Exit code and the bytes that a job printed."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, **basics(folder, new_mark()), **variables}
    command = [sys.executable, *LAUNCH, *arguments, str(folder / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


BYTES = """
import sys
sys.stdout.buffer.write("é█".encode() * 50_000 + bytes(range(128, 256)) + b"\\n")
sys.stderr.buffer.write(b"\\xff")
"""


@pytest.mark.dear
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_all_bytes_of_a_rank_are_shown_as_they_are(tmp_path: Path, encoding: str) -> None:
    whole = "é█".encode() * 50_000 + bytes(range(128, 256)) + b"\n"
    assert run(tmp_path, BYTES, PYTHONIOENCODING=encoding) == (0, whole, b"\xff")
    code, said, _ = run(tmp_path, BYTES, "--show", "all", PYTHONIOENCODING=encoding)
    assert (code, said.replace(b"\n[rank 0] ", b"")) == (0, b"[rank 0] " + whole)


@pytest.mark.dear
def test_last_words_may_be_no_text(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "import os; os.write(2, b'caf\\xe9'); os._exit(3)")
    assert code == 3
    assert "exit code 3; it printed last: caf\ufffd" in said.decode(errors="replace")


BAR = """
import sys, time
for step in range(4):
    sys.stderr.write(f"\\r{step} of 4")
    sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\\rall\\n")
"""


@pytest.mark.dear
def test_a_bar_that_moves_is_shown_while_it_does(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, BAR, "--show", "all")
    lines = said.decode().splitlines()
    assert (code, lines[-1]) == (0, "[rank 0] all")
    assert "[rank 0] 1 of 4" in lines


@pytest.mark.slow
def test_a_hundred_megabytes_in_one_line(tmp_path: Path) -> None:
    script = "import os\nfor _ in range(1600): os.write(1, b'x' * 65536)"
    for more in ((), ("--show", "all", "--log-dir", str(tmp_path / "logs"))):
        code, said, _ = run(tmp_path, script, *more)
        assert (code, said.count(b"x")) == (0, 1600 * 65536)
    assert (tmp_path / "logs/rank0/stdout.log").stat().st_size == 1600 * 65536


@pytest.mark.dear
def test_nohup(tmp_path: Path) -> None:
    with launched(tmp_path, "SCRIPT", "wait", str(tmp_path), before=["nohup"]) as job:
        job.wait_for_ranks(1)
        job.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert job.process.poll() is None
        job.process.terminate()
        job.finish(10)
        assert job.left(1) == []


def test_a_terminal_that_closes_ends_the_job(tmp_path: Path) -> None:
    with launched(tmp_path, "--grace-s", "100", "SCRIPT", "wait", str(tmp_path)) as job:
        job.wait_for_ranks(1)
        job.process.send_signal(signal.SIGHUP)
        said = job.finish(10)
        assert job.left(1) == []
    assert job.process.returncode == 128 + signal.SIGHUP
    assert "the job was ended by SIGHUP" in said
    assert "were killed" not in said  # they have been told


@pytest.mark.dear
def test_words_with_spaces_quotes_and_lines_arrive(tmp_path: Path) -> None:
    folder = tmp_path / 'a folder\'s "name"'
    folder.mkdir()
    value = "one  two\n'three' \"four\" $HOME \\"
    (folder / "ssh").write_text('#!/bin/sh\nexec sh -c "$2"\n')
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    (folder / "own.py").write_text("import os, sys; print([os.environ['PYTHON_MINE'], os.getcwd(), sys.argv[1:]])")
    for more in ([], ["-H", "hosts", "--ssh", "sh ./ssh"]):
        arguments = [*more, "--show", "all", "--log-dir", "my logs", "own.py", "x y", "*"]
        with launched(folder, *arguments, inside=True, PYTHON_MINE=value) as job:
            job.finish()
        assert job.process.returncode == 0, job.errors
        expected = [value, str(folder), ["x y", "*"]]
        assert set(job.said.splitlines()) == {f"[rank {rank}] {expected}" for rank in range(2 if more else 1)}
        assert (folder / "my logs/rank0/stdout.log").read_text() == f"{expected}\n" * (2 if more else 1)


SSH = """#!/bin/sh
case $1 in
  noisy) printf '{"a line of a shell\\nWelcome, '; exec sh -c "$2";;
  unmounted) exec sh -c "$(printf %s "$2" | sed 's#^cd [^|]*#cd /none #')";;
  bare) exec sh -c "$(printf %s "$2" | sed 's#; exec.*#; exec /none/python -u#')";;
  *) exec sh -c "$2";;
esac
"""


@pytest.mark.dear
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("noisy", None),
        ("unmounted", "the cause: host unmounted: it has no folder '"),
        ("bare", "the cause: host bare: it has no /"),
    ],
)
def test_other_shells(tmp_path: Path, host: str, said: str | None) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "hosts").write_text(f"h slots=1\n{host} slots=1\n")
    arguments = ["-H", str(tmp_path / "hosts"), "--ssh", f"sh {tmp_path / 'ssh'}", "--start-s", "20", "SCRIPT", "ok"]
    with launched(tmp_path, *arguments) as job:
        found = job.finish(40)
        assert job.left(1) == []
    assert (job.process.returncode == 0) == (said is None), found
    assert said is None or said in found


def test_a_command_for_other_hosts_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.2 slots=1\n")
    with launched(tmp_path, "-H", str(tmp_path / "hosts"), "--ssh", "no-such-ssh -p 1", "SCRIPT", "wait") as job:
        said = job.finish()
        assert job.left(1) == []
    assert (job.process.returncode, said) == (
        2, "zoo: host 127.0.0.2 is reached by 'no-such-ssh', which cannot be started (No such file or directory); give "
        "--ssh.\n",
    )  # fmt: skip


@pytest.mark.dear
def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with launched(tmp_path, "--no-python", "no-such-program") as job:
        said = job.finish()
    assert job.process.returncode == 127
    assert "rank 0 on host localhost: exit code 127; it printed last: the program 'no-such-program' cannot be" in said


@pytest.mark.dear
def test_a_wait_without_an_end(tmp_path: Path) -> None:
    script = "import os, time; time.sleep(1 - int(os.environ['RANK']))"
    code, _, said = run(tmp_path, script, "--ranks", "2", "--finish-s", "1e9", "--hang-s", "1e9", "--start-s", "1e9")
    assert code == 0, said


def test_a_port_of_the_environment_that_is_none(tmp_path: Path) -> None:
    variables = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "any"}
    code, _, said = run(tmp_path, "", **variables)
    assert (code, said) == (
        2, b"zoo: the environment has MASTER_PORT='any'; a number belongs there, or give --master-port.\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shown": (0, 3)}, "rank 3 is to be shown, and ranks are 0 to 2"),
        ({"shown": (-1,)}, "rank -1 is to be shown"),
        ({"grace_s": float("nan")}, "have to be numbers from 0 on"),
        ({"finish_s": float("inf")}, "finish_s is inf"),
        ({"ssh": " "}, "the command for other hosts is empty"),
        ({"ssh": "ssh -i 'my key"}, "which no shell can read .No closing quotation.; correct --ssh"),
        ({"hosts": {"a": [0], "-oProxyCommand=x": [0]}}, "ssh would take it for an option"),
        ({"hosts": {"localhost": [0], "b": [0]}}, "rank 0 would be on 'localhost'.* by which b can reach it"),
        ({"hosts": {"a": [0], "localhost": [0]}, "max_restarts": 1, "min_nodes": 1}, "would be on 'localhost'"),
        ({"hosts": {}}, "needs a script, and hosts"),
        ({"min_nodes": 1}, "min_nodes is 1 and max_restarts 0, so that nothing starts again; give both"),
    ],
)
def test_jobs_that_cannot_be(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Job(**{"command": ["x.py"], "hosts": {"a": [0, 1], "b": [0]}, **changed})


def test_jobs_that_can_be() -> None:
    Job(command=["x.py"], hosts={"localhost": [0], "b": [0]}, address="10.0.0.1")
    Job(command=["x.py"], hosts={"localhost": [0], "127.0.0.2": [0]})
    Job(command=["x.py"], hosts={"b": [0], "localhost": [0]}, max_restarts=1)
    Job(command=["x.py"], hosts={"a": [0]}, nodes=2, address="a", port=1, shown=(1,))


def test_a_host_with_fewer_devices_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(
        generation=0, command=["-m", "x"], ranks=[0, 1, 2], world=3, node=0, nodes=1, environment={}, shown=[0],
        slots=[0, 1, 2], grace_s=1.0,
    )  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert start.problem() == "it has no GPU 2, only [0, 1]; correct the file of hosts, or --include"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert start.problem() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ranks on its cores
    assert start.problem() is None


@pytest.mark.dear
def test_slots_are_of_the_devices_that_are_visible(tmp_path: Path) -> None:
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    for visible, include, expected in (("4,GPU-5f,6", "1,2", "GPU-5f,6"), ("4,5", "0", "4"), ("", "0", "0")):
        arguments = ["-i", f"localhost:{include}", "SCRIPT"]
        with launched(tmp_path, *arguments, script=script, CUDA_VISIBLE_DEVICES=visible) as job:
            job.finish()
        assert job.said == f"{expected}\n", job.errors


def test_files_of_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfa slots=2\r\nfe80::1 slots=1\r\n")
    assert hosts.read_hostfile(file) == {"a": 2, "fe80::1": 1}
    file.write_bytes(b"caf\xe9 slots=2")
    with pytest.raises(ValueError, match=f"{file}' is no text in UTF-8"):
        hosts.read_hostfile(file)
    for digits in ("5000", "9" * 5000):
        with pytest.raises(ValueError, match="slots; 4096 are the most"):
            hosts.parse_hostfile([f"a slots={digits}"])
    assert hosts.parse_hostfile(["a slots=0004"]) == {"a": 4}
    file.write_bytes(b"\xef\xbb\xbfA=1\r\n")
    assert exports.exported({}, files=[file]) == {"A": "1"}
    file.write_bytes(b"A=\xe9")
    with pytest.raises(ValueError, match=f"{file} is no text in UTF-8"):
        exports.exported({}, files=[file])


def test_hosts_with_a_user() -> None:
    there = {"me@a": [0, 1], "b": [0], "you@b": [0], "me@fe80::1": [0, 1]}
    assert hosts.select(there, include="me@a:1@b:0") == {"me@a": [1], "b": [0]}
    assert hosts.select(there, include="a@you@b") == {"me@a": [0, 1], "you@b": [0]}
    assert hosts.select(there, exclude="b@you@b@me@[fe80::1]:0") == {"me@a": [0, 1], "me@fe80::1": [1]}
    with pytest.raises(ValueError, match="host 'me' is not in the file of hosts"):
        hosts.select(there, include="me@b")
    with pytest.raises(ValueError, match="'a' may be me@a or you@a; write which"):
        hosts.select({"me@a": [0], "you@a": [0]}, include="a")


def test_addresses_of_hosts() -> None:
    there = {"fe80::1": [0, 1], "b": [0]}
    assert hosts.select(there, include="fe80::1") == {"fe80::1": [0, 1]}
    assert hosts.select(there, include="[fe80::1]:1@b:0") == {"fe80::1": [1], "b": [0]}
    assert hosts.select(there, exclude="[fe80::1]") == {"b": [0]}
    for text in ("[fe80::1", "[fe80::1]1", "[fe80::1]:"):
        with pytest.raises(ValueError, match="does not name a host"):
            hosts.parse_host(text)


@pytest.mark.dear
def test_a_script_by_a_link_has_the_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/beside.py").write_text("there = 'found'")
    (tmp_path / "real/train.py").write_text("import beside; print(beside.there)")
    (tmp_path / "script.py").symlink_to("real/train.py")
    command = [sys.executable, *LAUNCH, str(tmp_path / "script.py")]
    environment = {**os.environ, **basics(tmp_path, new_mark())}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"found\n"), done.stderr


MEET = """
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
print(dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_meet_where_a_rank_of_torchrun_starts_a_launcher(tmp_path: Path) -> None:
    of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"}
    code, said, errors = run(tmp_path, MEET, "--ranks", "2", **of_torchrun)
    assert (code, said) == (0, b"2\n"), errors


def test_a_launcher_speaks_where_another_rank_than_0_starts_it(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "", "--ranks", "0", RANK="1", WORLD_SIZE="2")
    assert (code, said) == (2, b"zoo: rank 1: --num_gpus is 0; give 1 or more, or leave it out for all.\n")


def test_what_a_rank_leaves_behind_may_print_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    endless = open("/dev/zero", "rb", buffering=0)  # noqa: SIM115  (the agent closes it)
    rank = _Rank(0, ended, {}, [endless])
    monkeypatch.setattr(agent._selector, "unregister", lambda _: None)
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(agent._outlet, "say", said.append)
    agent._ended(rank, 0)
    assert endless.closed
    assert [event["exit"] for event in said] == [0]


def test_rank_0_is_reached_without_the_name_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(Job(command=["x.py"], hosts={"me@a": [0], "me@b": [0]}))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(supervisor, "_tell", lambda node, command: told.append(command["start"]))
    supervisor._begin([_Node(host, [0], subprocess.Popen(["true"])) for host in ("me@a", "me@b")])
    assert [start["environment"]["MASTER_ADDR"] for start in told] == ["a", "a"]


@pytest.mark.dear
def test_a_pipe_that_does_not_wait_gets_all_bytes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nfor _ in range(8): os.write(1, b'x' * 65536)")
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    environment = {**os.environ, **basics(tmp_path, new_mark())}
    with subprocess.Popen([sys.executable, *LAUNCH, str(script)], env=environment, stdout=writes) as started:
        os.close(writes)
        with os.fdopen(reads, "rb") as file:
            time.sleep(2)  # until it is full
            assert len(file.read()) == 8 * 65536
    assert started.returncode == 0
