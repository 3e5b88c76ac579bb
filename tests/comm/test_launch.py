"""Joining a job: what launchers say, and what arguments say."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import run_ranks
from tests.profiles import examples

from zoo.comm import Communicator, init_distributed, launch, local_device
from zoo.comm.launch import Place, discover, first_node
from zoo.engine import add_config_arguments

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the process group would have been joined with."""
    found: list[dict[str, Any]] = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: found.append({"backend": backend, **more}))
    monkeypatch.setattr("zoo.comm.launch._ranks", lambda: (0, 1))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    return found


def test_a_process_computes_on_the_gpu_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert local_device() == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")


SEES = {  # GPUs, variables, backend → the GPU that is chosen
    "gloo": (4, {"LOCAL_RANK": "3"}, "gloo", 3),
    "both": (4, {"LOCAL_RANK": "3"}, "cpu:gloo,cuda:nccl", 3),
    "default": (4, {"LOCAL_RANK": "3"}, None, 3),
    "its own alone": (1, {"LOCAL_RANK": "3"}, None, 0),
    "untold": (2, {}, None, 1),
    "shared": (2, {"LOCAL_RANK": "3"}, "gloo", 1),
}


@pytest.mark.parametrize("case", SEES)
def test_each_process_of_a_host_has_its_gpu(
    case: str, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, variables, backend, expected = SEES[case]
    chosen: list[int] = []
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    init_distributed(backend)
    assert chosen == [expected]
    assert joined[0]["backend"] == (backend or "nccl")


def test_more_ranks_than_gpus_and_local_ranks_that_are_no_numbers_are_told(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"rank 3 of its host \(torchrun\) and sees 2 GPUs; .* Start at most 2 on"):
        init_distributed()
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ValueError, match="the environment has LOCAL_RANK='x'"):
        init_distributed(rank=0, world_size=2, init_method="tcp://h:1")
    assert not joined


def test_each_launchers_variables() -> None:
    assert discover({}) is None
    assert discover({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a shell of a job, not a step of it
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert discover(torchrun) == Place(3, 8, 1, 2, "torchrun", "h")
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[07-09]"}
    assert discover(slurm) == Place(5, 8, 1, None, "srun", "n07")
    assert discover(slurm, others=False) is None
    assert discover({**slurm, **torchrun}) == discover(torchrun)
    ompi = {
        f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
    }
    assert discover(ompi) == Place(1, 2, 1, 2, "Open MPI", "127.0.0.1")
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert discover(mpich) == Place(1, 4, 0, 1, "MPICH", None)
    mvapich = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}
    assert discover(mvapich) == Place(0, 2, None, None, "MVAPICH2", None)
    with pytest.raises(ValueError, match="the environment has WORLD_SIZE='many'; a launcher sets a number there"):
        discover({"RANK": "0", "WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"), ("a1,b2", "a1"), ("gpu[003-007,9],x", "gpu003"), ("n[1,4]-ib,m", "n1-ib"),
        ("rack-2-node[10-20]", "rack-2-node10"),
    ],
)  # fmt: skip
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@examples(times=3)
@given(st.integers(0, 3), st.integers(4, 9), st.integers(1, 99))
def test_srun_fills_in_what_torchrun_would(rank: int, size: int, port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found: list[dict[str, Any]] = []
        for name in NAMES:
            patch.setenv(name, "")
            patch.delenv(name)
        patch.setattr(dist, "init_process_group", lambda backend, **more: found.append({"backend": backend, **more}))
        patch.setattr("zoo.comm.launch._ranks", lambda: (0, 1))
        for name, value in (("PROCID", rank), ("STEP_NUM_TASKS", size), ("LOCALID", 0), ("STEP_NODELIST", "n[2-3]")):
            patch.setenv(f"SLURM_{name}", str(value))
        init_distributed("gloo", distributed_port=port, verbose=False)
        said = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert said == [str(rank), str(size), "0", "n2", str(port)]
    assert found == [
        {"backend": "gloo", "init_method": "env://", "timeout": timedelta(minutes=30), "rank": rank, "world_size": size}
    ]


def test_arguments(joined: list[dict[str, Any]]) -> None:
    assert init_distributed() == (0, 1)
    assert init_distributed(dist_init_required=False) == (0, 1)
    assert joined == []
    init_distributed(
        "gloo", init_method="tcp://127.0.0.1:1", rank=1, world_size=2, timeout=timedelta(seconds=9), verbose=False
    )
    init_distributed("gloo", rank=0, world_size=1, config={"comm": {"timeout_s": 5}}, verbose=False)
    assert [call["timeout"] for call in joined] == [timedelta(seconds=9), timedelta(seconds=5)]
    assert [call["init_method"] for call in joined] == ["tcp://127.0.0.1:1", "env://"]
    assert [(call["rank"], call["world_size"]) for call in joined] == [(1, 2), (0, 1)]


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}]
)
def test_ranks_that_nobody_has_joined_do_not_train_alone(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"nobody has joined the [23] ranks of this job .*each would train alone"):
        init_distributed(dist_init_required=False)
    assert joined == []


def test_the_log_says_what_was_joined(joined: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zoo.comm"):
        init_distributed("gloo", rank=0, world_size=1)
        init_distributed("gloo", rank=0, world_size=1, verbose=False)
    assert caplog.messages == ["rank 0 of 1 (by hand) joined over gloo"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dist_init_required": True}, "no launcher has set RANK and WORLD_SIZE"),
        ({"rank": 1}, "rank=1, world_size=-1; give both"),
        ({"rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"init_method": "tcp://a:1"}, "without a launcher needs rank= and world_size="),
        ({"timeout": timedelta(0)}, "a timeout of 0:00:00; it must be longer than nothing"),
        ({"config": {"comm": {"timeout_s": -1}}}, "it must be longer than nothing"),
    ],
)
def test_what_cannot_be(joined: list[dict[str, Any]], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        init_distributed(**arguments)


def test_mpi_over_several_hosts_needs_an_address(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name, value in (("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MPICH started 4 ranks on several hosts and does not tell where rank 0 is"):
        init_distributed("gloo")
    monkeypatch.setenv("MASTER_ADDR", "host0")
    init_distributed("gloo", verbose=False)
    assert joined[-1]["rank"] == 1


def _over_a_file(rank: int, path: str) -> tuple[int, int]:
    dist.destroy_process_group()
    found = init_distributed("gloo", init_method=f"file://{path}", rank=rank, world_size=2, verbose=False)
    assert init_distributed(dist_init_required=True) == found  # once is enough
    dist.barrier()  # a rank that ends while the other still connects breaks that connection
    return found


def test_real_ranks_meet_without_a_launcher(tmp_path: Path) -> None:
    assert run_ranks(2, _over_a_file, str(tmp_path / "meet")) == {0: (0, 2), 1: (1, 2)}


def test_a_scripts_command_line() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}
    found = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (found.deepspeed, found.deepspeed_config) == (True, "ds.json")


def _left_at_exit(rank: int) -> list[str]:
    """What is registered by a process whose group is not of zoo's making, in two uses of it."""
    found: list[str] = []
    atexit.register = lambda function: found.append(function.__name__)  # type: ignore[assignment, misc]
    for _ in range(2):
        Communicator()
    return found


def test_a_group_that_the_program_has_joined_is_left_too() -> None:
    assert run_ranks(2, _left_at_exit) == {0: ["_leave"], 1: ["_leave"]}


def test_the_group_is_left_before_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time, and not after a failure: peers that wait for it learn of that by the end of the process."""
    said: list[str] = []
    held = threading.Event()
    monkeypatch.setattr(launch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: said.append("left"))
    launch._leave()
    assert said == ["left"]
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: held.wait(60) and said.append("late"))
    launch._leave()  # returns, though it has not left
    assert said == ["left"]
    held.set()
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: said.append("after a failure"))
    monkeypatch.setattr("sys.last_type", RuntimeError, raising=False)
    launch._leave()
    assert "after a failure" not in said
