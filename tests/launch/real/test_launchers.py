"""torchrun, mpirun, SLURM and Ray start a job of zoo, by the engine and as deepspeed; one rank is plain ``python``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.real import slurm
from tests.clients.test_accelerate_launch import KINDS as YAMLS
from tests.clients.test_accelerate_launch import yaml
from tests.launch.real import jobs
from tests.launch.real.jobs import KINDS, PROGRAM, ZOO, Place

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", KINDS)]
Losses = dict[str, list[float]]


def test_python(here: Place, expected: Losses, kind: str) -> None:
    jobs.check(here.run(sys.executable, str(PROGRAM), kind).stdout, 1, expected, kind)


def test_zoo_launch_and_torchrun(here: Place, expected: Losses, kind: str) -> None:
    said = here.run(*ZOO, "launch", "--ranks", "2", str(PROGRAM), kind).stdout
    jobs.check(said, 2, expected, kind)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    jobs.check(here.run(*torchrun, str(PROGRAM), kind).stdout, 2, expected, kind)


def test_mpirun_of_ranks_and_of_launchers(here: Place, expected: Losses, kind: str) -> None:
    jobs.need_program("mpirun", "openmpi-bin")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": jobs.free_port()}
    jobs.check(here.run(*mpirun, sys.executable, str(PROGRAM), kind, **port).stdout, 2, expected, kind)
    port["MASTER_PORT"] = jobs.free_port()
    jobs.check(here.run(*mpirun, *ZOO, "launch", "--ranks", "2", str(PROGRAM), kind, **port).stdout, 4, expected, kind)


def test_accelerate(here: Place, expected: Losses, kind: str) -> None:
    """A program that does not know it; those that do are in tests/clients."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the extra clients)")
    fields, precision, _ = YAMLS["zero2 in fp32"]
    (here.folder / "config.yaml").write_text(yaml(fields, precision))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.yaml"]
    numbers = ["--num_processes", "2", "--main_process_port", jobs.free_port()]
    jobs.check(here.run(*command, *numbers, str(PROGRAM), kind).stdout, 2, expected, kind)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which SLURM's commands find one of two nodes."""
    jobs.need(slurm.missing())
    folder = tmp_path_factory.mktemp("slurm")
    try:
        yield slurm.up(folder, 2)
    finally:
        slurm.down(folder)


def test_srun_of_ranks_and_of_launchers(here: Place, expected: Losses, kind: str, cluster: dict[str, str]) -> None:
    variables = {**cluster, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": jobs.free_port()}
    srun = ["srun", "--nodes=2", "--ntasks=2"]
    jobs.check(here.run(*srun, sys.executable, str(PROGRAM), kind, **variables).stdout, 2, expected, kind)
    variables["MASTER_PORT"] = jobs.free_port()
    said = here.run(*srun, *ZOO, "launch", "--ranks", "2", str(PROGRAM), kind, **variables).stdout
    jobs.check(said, 4, expected, kind)


def test_sbatch_of_a_written_script(
    here: Place, expected: Losses, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs.need(slurm.missing())
    folder = tmp_path_factory.mktemp("slurm")
    try:
        variables = slurm.up(folder)
        written = ("launch", "--write", "job.sbatch", "--num_nodes", "1", "--num_gpus", "2")
        here.run(*ZOO, *written, str(PROGRAM), kind)
        here.run("sbatch", "--wait", "job.sbatch", **variables)
        (log,) = Path(here.folder).glob("job-*.log")
        jobs.check(log.read_text(), 2, expected, kind)
    finally:
        slurm.down(folder)


@pytest.mark.parametrize("how", ["trainer", "actors"])
def test_ray(here: Place, expected: Losses, kind: str, how: str) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (PyPI's package ray, with its extra train)")
    said = here.run(sys.executable, str(PROGRAM), kind, how).stdout
    jobs.check(said, 2, expected, kind)
