"""Over a real sshd on addresses of this host: zoo launch, pdsh, the commands of ``dropin``, ``accelerate launch``."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.real import sshd
from tests.clients.test_accelerate_launch import DS_CONFIG, agree, yaml
from tests.clients.test_accelerate_launch import KINDS as YAMLS
from tests.launch.jobs import MARK, alive, basics, launched, new_mark
from tests.launch.real import jobs
from tests.launch.real.jobs import KINDS, PROGRAM, ZOO, Place

pytestmark = pytest.mark.slow
Losses = dict[str, list[float]]
HOSTS = ("127.0.0.2", "127.0.0.3")
ACCELERATE = Path(jobs.ROOT, "tests/clients/launched.py")


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Place]:
    """A folder in which ``ssh`` reaches the hosts, and a file names them with one slot each."""
    jobs.need(sshd.missing())
    folder = tmp_path / "sshd"
    mark = new_mark()
    variables = {**basics(tmp_path, mark), "OMP_NUM_THREADS": "1"}
    try:
        sshd.up(folder, int(jobs.free_port()), HOSTS, variables)
        (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
        yield jobs.place(tmp_path, [folder / "bin"], PDSH_RCMD_TYPE="ssh")
        left = {pid: line for pid, line in alive(mark).items() if "sshd" not in line}
        assert not left
    finally:
        sshd.down(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_zoo_launch(there: Place, expected: Losses, kind: str) -> None:
    said = there.run(*ZOO, "launch", "-H", "hosts", "--check", str(PROGRAM), kind).stdout
    jobs.check(said, 2, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_pdsh_of_launchers(there: Place, expected: Losses, kind: str) -> None:
    jobs.need_program("pdsh", "pdsh")
    line = (
        f"cd {there.folder} && PYTHONPATH={there.variables['PYTHONPATH']} {' '.join(ZOO)} launch --ranks 2 "
        f"--num_nodes 2 --node_rank %n --master_addr {HOSTS[0]} --master_port {jobs.free_port()} {PROGRAM} {kind}"
    )
    said = there.run("pdsh", "-S", "-w", ",".join(HOSTS), line).stdout
    jobs.check(said, 4, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_deepspeed_and_ds(there: Place, expected: Losses, kind: str) -> None:
    here = there.run("ds", "--num_gpus", "2", str(PROGRAM), kind).stdout
    jobs.check(here, 2, expected, kind)
    both = there.run("deepspeed", "-H", "hosts", "--master_port", jobs.free_port(), str(PROGRAM), kind).stdout
    jobs.check(both, 2, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_deepspeed_without_ssh_on_each_host(there: Place, expected: Losses, kind: str) -> None:
    """How many nodes there are is what the file of hosts says."""
    port = jobs.free_port()
    command = ["deepspeed", "-H", "hosts", "--no_ssh", "--master_addr", HOSTS[0], "--master_port", port, "--node_rank"]
    environment = {**there.variables, **basics(there.folder, new_mark())}
    running = [
        subprocess.Popen(
            [*command, node, str(PROGRAM), kind], cwd=there.folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        for node in ("0", "1")
    ]  # fmt: skip
    with jobs.together(*running) as said:
        jobs.check(said[0], 2, expected, kind)
    assert [process.returncode for process in running] == [0, 0]


@pytest.mark.parametrize("name", ["ds_report", "dsr"])
def test_the_report(there: Place, name: str) -> None:
    assert "+zoo" in there.run(name).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_other_launchers_of_the_command_deepspeed(there: Place, expected: Losses, kind: str) -> None:
    jobs.need_program("mpirun", "openmpi-bin")
    arguments = ("-H", "hosts", "--launcher", "openmpi", "--master_port", jobs.free_port())
    args = "--launcher_args=--allow-run-as-root --mca plm_rsh_agent ssh --mca btl_tcp_if_include lo"
    said = there.run("deepspeed", *arguments, "--master_addr", HOSTS[0], args, str(PROGRAM), kind).stdout
    jobs.check(said, 2, expected, kind)


def by_accelerate(there: Place, launcher: str, kind: str, *program: str) -> str:
    """What ``accelerate launch`` printed, on two machines with this YAML; every one has to end with 0."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the extra clients)")
    if launcher == "pdsh":
        jobs.need_program("pdsh", "pdsh")
    fields, precision, _ = YAMLS[kind]
    fields = {**fields, "deepspeed_multinode_launcher": launcher, "deepspeed_hostfile": "hosts"}
    (there.folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    text = yaml(fields, precision).replace("num_machines: 1", "num_machines: 2")
    port = jobs.free_port()
    (there.folder / "config.yaml").write_text(f"{text}main_process_ip: {HOSTS[0]}\nmain_process_port: {port}\n")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "config.yaml",
        "--num_processes",
        "2",
    ]
    environment = {**there.variables, **basics(there.folder, new_mark())}
    running = [
        subprocess.Popen(
            [*command, "--machine_rank", node, *program], cwd=there.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in (["0"] if launcher == "pdsh" else ["0", "1"])
    ]  # fmt: skip
    with jobs.together(*running) as said:
        whole = "".join(said)
    assert [process.returncode for process in running] == [0] * len(running), whole
    return whole


MACHINES = ("pdsh", "standard", "nossh")
OFTEN = ("zero2 in fp32", "a ds_config")


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        *((launcher, kind) for launcher in MACHINES for kind in OFTEN),
        *(
            pytest.param(launcher, kind, marks=pytest.mark.campaign)
            for launcher in ("pdsh", "standard")
            for kind in YAMLS
            if kind not in OFTEN
        ),
    ],
)
def test_accelerate_on_two_machines(there: Place, launcher: str, kind: str) -> None:
    said = by_accelerate(there, launcher, kind, str(ACCELERATE))
    (found,) = (json.loads(line.partition("FOUND ")[2]) for line in said.splitlines() if "FOUND " in line)
    agree(found, kind, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launcher", ["pdsh", "standard"])
def test_accelerate_starts_a_program_that_does_not_know_it(
    there: Place, expected: Losses, launcher: str, kind: str
) -> None:
    jobs.check(by_accelerate(there, launcher, "zero2 in fp32", str(PROGRAM), kind), 2, expected, kind)


WAITS = """
import os, sys, time
open(os.path.join(sys.argv[1], f"{os.environ['RANK']}.0"), "w").write(str(os.getpid()))
time.sleep(200)
"""


@pytest.mark.parametrize("victim", ["sshd", "ssh", "launcher"])
def test_what_ends_a_connection_ends_all(there: Place, victim: str) -> None:
    mark = new_mark()
    (there.folder / ".deepspeed_env").write_text(f"{MARK}={mark}\n")
    path = there.variables["PATH"]
    arguments = ("launch", "-H", str(there.folder / "hosts"), "SCRIPT", str(there.folder))
    with launched(there.folder, *arguments, script=WAITS, program=("-m", "zoo.cli"), mark=mark, PATH=path) as job:
        ranks = job.wait_for_ranks(2)
        keeper = job.above(job.above(ranks[1]))
        pid = {"sshd": job.above(keeper), "launcher": job.process.pid}.get(victim) or _client(job.process.pid)
        os.kill(pid, signal.SIGKILL)
        said = job.finish(30)
        until = time.monotonic() + 10
        while any(Path(f"/proc/{rank}").exists() for rank in ranks.values()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())
        assert job.left(0) == []
    assert job.process.returncode != 0
    if victim != "launcher":
        assert "the connection to its agent ended before its ranks did" in said.splitlines()[-1]


def _client(launcher: int) -> int:
    """The process of ssh for the second host."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if above == launcher and HOSTS[1].encode() in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError("there is no process of ssh.")
