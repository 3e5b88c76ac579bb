"""``deepspeed.launcher``: what programs read of it before anything is started. Values are DeepSpeed's, written down."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from zoo.deepspeed.launcher import runner

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


def test_main_names_the_command_that_starts_the_same(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=4\n")
    with pytest.raises(NotImplementedError) as told:
        runner.main(["-H", str(file), "--master_port", "7000", "train.py", "--name", "two words"])
    assert (
        "torchrun --nproc-per-node 4 --nnodes 2 --node-rank <of this host> --master-addr a --master-port 7000 "
        "train.py --name 'two words'"
    ) in str(told.value)
    with pytest.raises(NotImplementedError, match=r"torchrun --nproc-per-node 2 -m pkg\.train"):
        runner.main(["-H", "none", "--num_gpus", "2", "--module", "pkg.train"])
    with pytest.raises(ValueError, match="--num_gpus and --include"):
        runner.main(["--num_gpus", "1", "-i", "localhost", "train.py"])
