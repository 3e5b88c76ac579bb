"""``deepspeed.launcher``: what programs read of it before anything is started. Values are DeepSpeed's, written down."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import launched
from zoo.deepspeed.launcher import multinode_runner, runner

from zoo.deepspeed.adapters.utilities import launcher

HOSTS = {"a": [0, 1, 2], "b": [0, 1]}


def test_constants_are_deepspeeds_and_lists_are_shared() -> None:
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert runner.PDSH_LAUNCHER == "pdsh"
    assert runner.PDSH_MAX_FAN_OUT == 1024
    runner.EXPORT_ENVS.append("MINE")
    from zoo.deepspeed.launcher.runner import EXPORT_ENVS

    assert EXPORT_ENVS == ["MLFLOW", "PYTHON", "MV2", "UCX", "MINE"]
    runner.EXPORT_ENVS.remove("MINE")


def test_a_file_of_hosts_is_read_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the fast ones\n\n  b slots=4\na\tslots=2 max_slots=8\n10.0.0.1 slots=16\n")
    found = runner.fetch_hostfile(str(file))
    assert found is not None
    assert list(found.items()) == [("b", 4), ("a", 2), ("10.0.0.1", 16)]
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert dict(runner.parse_inclusion_exclusion(found, "", "a@b:1,2")) == {"b": [0, 3], "10.0.0.1": list(range(16))}


@pytest.mark.parametrize(
    ("text", "said"),
    [("a slots=2\na slots=1", "'a' twice"), ("a b slots=1", "'a b slots=1'"), ("a", "'a'"), ("\n# a\n", "no hosts")],
)
def test_a_wrong_file_of_hosts_is_refused_by_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner._parse_hostfile(text.splitlines())


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("b", "", {"b": [0, 1]}),
        ("b:1@a:2,0@b:0", "", {"a": [0, 2], "b": [0, 1]}),
        ("", "a", {"b": [0, 1]}),
        ("", "a:1@b:0,1", {"a": [0, 2]}),
        ("", "a@b", {}),
    ],
)
def test_filters_leave_slots_in_the_order_of_hosts(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    found = runner.parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)
    assert list(found.items()) == list(left.items())
    assert HOSTS == {"a": [0, 1, 2], "b": [0, 1]}, "what was given stays"


@pytest.mark.parametrize(
    ("include", "exclude"), [("a", "b"), ("c", ""), ("", "b:2"), ("", "a@b:1@5"), ("a:x", ""), ("a:0:1", "")]
)
def test_filters_that_cannot_be_are_refused(include: str, exclude: str) -> None:
    with pytest.raises(ValueError, match=r"include|host|slot"):
        runner.parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)


def test_arguments_are_those_of_the_command() -> None:
    line = "-H hosts -i a:0@b --num_accelerators 4 --no_ssh --launcher slurm train.py --lr 1 --module"
    found = runner.parse_args(line.split())
    assert (found.hostfile, found.include, found.num_gpus, found.no_ssh, found.launcher) == (
        "hosts", "a:0@b", 4, True, "slurm",
    )  # fmt: skip
    assert (found.user_script, found.user_args) == ("train.py", ["--lr", "1", "--module"])
    assert (found.module, found.num_nodes, found.master_port, found.autotuning) == (False, -1, 29500, "")


def test_world_info_is_json_in_base64() -> None:
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info({"a": [0, 1]}))) == {"a": [0, 1]}


DEEPSPEED = ("-c", "from zoo.deepspeed.launcher.runner import main; main()")


@pytest.mark.dear
def test_the_command_starts_ranks_with_their_local_rank(tmp_path: Path) -> None:
    script = (
        "import os, sys, importlib.util\n"
        "print(os.environ['RANK'], sys.argv[1:], bool(importlib.util.find_spec('deepspeed')), os.environ['FROM_FILE'])"
    )
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    arguments = ("-H", "none", "--num_gpus", "2", "SCRIPT", "--prompt", 'I\'m "here"')
    with launched(tmp_path, *arguments, script=script, program=DEEPSPEED) as job:
        job.finish()
    assert job.process.returncode == 0, job.errors
    words = "'--prompt', 'I\\'m \"here\"'"
    expected = [f"[rank {rank}] {rank} ['--local_rank={rank}', {words}] True a b" for rank in (0, 1)]
    assert sorted(line for line in job.said.splitlines() if line.startswith("[rank")) == expected
    assert "there is no file of hosts none" in job.said


@pytest.mark.dear
def test_what_is_wrong_is_one_sentence_at_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\na slots=1\n")
    with launched(tmp_path, "-H", str(tmp_path / "hosts"), "SCRIPT", program=DEEPSPEED) as job:
        job.finish()
    assert job.process.returncode == 2
    assert job.errors.startswith(f"zoo: the file of hosts '{tmp_path}/hosts' has 'a' twice")
    assert "Traceback" not in job.errors
    with pytest.raises(ValueError, match="has 'a' twice"):
        runner.main(["-H", str(tmp_path / "hosts"), "x.py"])


def test_the_command_starts_ranks_on_hosts_and_ends_with_their_code(tmp_path: Path, monkeypatch: Any) -> None:
    started: list[Any] = []

    class Taken:
        def __init__(self, job: Any) -> None:
            started.append(job)

        def run(self) -> int:
            return 5

    monkeypatch.setattr(launcher, "Supervisor", Taken)
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=4\n")
    with pytest.raises(SystemExit) as told:
        runner.main(["-H", str(file), "-i", "a:0,2@b", "--master_port", "7000", "--ssh_port", "23", "-q", "t.py", "x"])
    assert told.value.code == 5
    (job,) = started
    assert (dict(job.hosts), list(job.command)) == ({"a": [0, 2], "b": [0, 1, 2, 3]}, ["t.py", "x"])
    assert (job.port, job.devices, job.local_rank, job.ssh.endswith("-p 23")) == (7000, True, True, True)
    with pytest.raises(SystemExit):
        runner.main(["-H", "none", "--no_ssh", "--num_nodes", "2", "--node_rank", "1", "--master_addr", "h", "t.py"])
    assert (started[1].node, started[1].nodes, started[1].address, started[1].port) == (1, 2, "h", 29500)
    with pytest.raises(SystemExit):  # the file of hosts says how many, as Accelerate's launcher nossh expects
        runner.main(["-H", str(file), "--no_ssh", "--node_rank", "1", "t.py"])
    assert (started[2].node, started[2].nodes, started[2].address) == (1, 2, "a")
    assert dict(started[2].hosts) == {"localhost": [0, 1, 2, 3]}
    file.write_text("a slots=4\nb slots=2\n")
    with pytest.raises(ValueError, match="there are 4, 2 on a, b; give --num_gpus"):
        runner.main(["-H", str(file), "--no_ssh", "--node_rank", "1", "t.py"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num_gpus", "1", "-i", "localhost", "t.py"], "--num_gpus and --include"),
        (["--autotuning", "run", "t.py"], "`zoo tune CONFIG`"),
        (["--venv_script", "x", "t.py"], "--venv_script is not in zoo"),
        (["-e", "localhost", "t.py"], "leaves no host of localhost"),
        (["--launcher", "mine", "--force_multi", "-H", "HOSTS", "t.py"], "--launcher 'mine' is none of pdsh, openmpi"),
        (["--launcher", "slurm", "--force_multi", "-H", "HOSTS", "t.py"], "needs the program sinfo, which is not on"),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises((ValueError, NotImplementedError), match=said):
        runner.main([str(file) if word == "HOSTS" else word for word in arguments])


POOL = {"worker-0": 4, "worker-1": 4}


def command_of(name: str, *more: str) -> Any:
    args = runner.parse_args([*more, "train.py", "--lr", "1"])
    made = getattr(multinode_runner, name)
    info = runner.encode_world_info(POOL)
    found = made(args, info) if name == "PDSHRunner" else made(args, info, POOL)
    found.add_export("SLURM_CPUS", "64(x2)")
    return found.get_cmd({}, POOL)


def test_command_lines_of_other_launchers() -> None:
    words, stop, environment = command_of("PDSHRunner", "--ssh_port", "23", "--module")
    assert words[:6] == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1"]
    assert environment == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 23"}
    assert 'export SLURM_CPUS="64(x2)";' in words[-1]
    assert "--num_nodes=2 --node_rank=%n --ranks=4" in words[-1]
    assert words[-1].endswith("-m train.py --lr 1")
    assert stop[-1] == "train.py"
    openmpi = command_of("OpenMPIRunner")
    assert openmpi[:5] == ["mpirun", "-n", "8", "-host", "worker-0:4,worker-1:4"]
    assert "eth0" in openmpi
    assert openmpi[openmpi.index("-x") + 1] == "SLURM_CPUS=64(x2)"
    for dashes in ("-mca", "--mca"):
        found = command_of("OpenMPIRunner", "--launcher_arg", f"{dashes} btl_tcp_if_include eth1")
        assert ("eth0" in found, "eth1" in found) == (False, True)
    for name in ("MPICHRunner", "IMPIRunner"):
        assert command_of(name)[:7] == ["mpirun", "-n", "8", "-ppn", "4", "-hosts", "worker-0,worker-1"]
    assert command_of("MVAPICHRunner")[:5] == ["mpirun", "-np", "8", "-ppn", "4"]
    slurm = command_of("SlurmRunner", "--include", "worker-0@worker-1")
    assert slurm[:7] == ["srun", "-n", "8", "--nodes", "2", "--nodelist", "worker-0,worker-1"]
    assert slurm[slurm.index("--export") + 1].startswith("ALL,SLURM_CPUS=64(x2),MASTER_ADDR=worker-0,MASTER_PORT=")
    for found in (openmpi, slurm):
        assert found[-5:][1:] == ["-u", "train.py", "--lr", "1"]


def test_srun_gets_values_with_commas_whole() -> None:
    made = multinode_runner.SlurmRunner(runner.parse_args(["train.py"]), runner.encode_world_info(POOL), POOL)
    made.add_export("NCCL_IB_HCA", "mlx5_0,mlx5_1")
    made.add_export("NCCL_DEBUG", "INFO")
    environment: dict[str, str] = {}
    words = made.get_cmd(environment, POOL)
    exports = words[words.index("--export") + 1].split(",")  # as srun reads it
    assert exports[0] == "ALL"
    assert all("=" in export for export in exports[1:])
    assert "NCCL_DEBUG=INFO" in exports
    assert environment == {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}  # ALL takes it from there


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("OpenMPIRunner", ["-i", "worker-0"], "OpenMPIRunner starts ranks on whole hosts"),
        ("SlurmRunner", ["-i", "worker-0:1"], "cannot name specific device ids"),
    ],
)
def test_what_other_launchers_cannot_do(name: str, arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command_of(name, *arguments)
