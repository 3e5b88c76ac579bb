"""Files with which a batch system starts a job; they are run with stand-ins for its programs."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.jobs import launched

from zoo.launch import hosts, scripts

SCRIPT = "import os, sys; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MINE')), *sys.argv[1:])"
SRUN = """#!/bin/sh
shift
for node in 0 1; do SLURM_NODEID=$node SLURM_STEP_NUM_NODES=2 "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || exit 1; done
"""


def written(folder: Path, name: str, *more: str) -> str:
    (folder / ".deepspeed_env").write_text("MINE=a'b\n")
    arguments = ("--write", str(folder / name), "--num_nodes", "2", "--ranks", "2", *more, "SCRIPT", "two words")
    with launched(folder, *arguments, script=SCRIPT) as job:
        job.finish()
    assert job.process.returncode == 0, job.errors
    return (folder / name).read_text()


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With programs of this folder before others."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "zoo").write_text(f'#!/bin/sh\nexec {sys.executable} -m zoo.cli "$@"\n')
    (programs / "srun").write_text(SRUN)
    (programs / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n")
    for file in programs.iterdir():
        file.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.mark.dear
def test_a_script_for_sbatch_starts_all_ranks(tmp_path: Path) -> None:
    text = written(tmp_path, "my_job.sbatch", "--master-port", "23457")
    said = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert said == ["--job-name=my-job", "--nodes=2", "--ntasks-per-node=1", "--output=my-job-%j.log"]
    variables = environment(tmp_path, SLURM_JOB_NODELIST="n[1-2]")
    ran = subprocess.run(
        ["bash", tmp_path / "my_job.sbatch"], env=variables, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["0 4 a'b two words"], (
        "rank 0 of each launcher's screen: 0 alone is shown"
    )


@pytest.mark.dear
def test_a_job_of_kubernetes_starts_all_ranks(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(written(tmp_path, "job.yaml", "--image", "mine:1"))
    assert (service["kind"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("Service", "job", "None")
    assert service["spec"]["selector"] == {"job-name": "job"}
    spec: dict[str, Any] = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == ("job", "Never")
    (container,) = pod["containers"]
    assert container["image"] == "mine:1"
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["MASTER_ADDR"] == "job-0.job"
    node = environment(tmp_path, **{**variables, "MASTER_ADDR": "127.0.0.1", "JOB_COMPLETION_INDEX": "0"})
    ran = subprocess.run(container["command"], env=node, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0 4 a'b two words\n"), ran.stderr


def refused(folder: Path, *arguments: str) -> str:
    with launched(folder, *arguments, "x.py", inside=True) as job:
        job.finish()
    assert job.process.returncode != 0
    return job.errors


OPTIONS = {
    "--grace-s": "45.0", "--finish-s": "7.0", "--hang-s": "9.5", "--start-s": "20.0", "--max-restarts": "2",
    "--show": "all", "--log-dir": "logs of it", "--bind-cores": "0-3", "--include": "localhost:0",
    "--exclude": "localhost:1",
}  # fmt: skip


@pytest.mark.dear
def test_written_jobs_have_the_options_that_were_given(tmp_path: Path) -> None:
    given = [word for pair in OPTIONS.items() for word in pair]
    text = written(tmp_path, "job.sbatch", "--as-deepspeed", *given)
    words = shlex.split(text.splitlines()[-1])
    kept = words[words.index("launch") + 1 : words.index("two words") - 1]
    assert {*kept} == {"--ranks=2", "--as-deepspeed", *(f"{name}={value}" for name, value in OPTIONS.items())}
    *_, job = yaml.safe_load_all(written(tmp_path, "job.yaml", "--image", "mine:1", "--as-deepspeed", *given))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == words[words.index("zoo") :]
    assert pod["terminationGracePeriodSeconds"] > 45, (
        "Kubernetes must not kill a launcher before it has killed its ranks"
    )


@pytest.mark.dear
def test_a_written_job_gives_ranks_their_grace(tmp_path: Path) -> None:
    """A rank that needs 8 s to end: more than the 6 s that a launcher gives which is told nothing."""
    script = """import os, signal, sys, time
def end(*_):
    time.sleep(8)
    open("saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("began", flush=True)
time.sleep(100)
"""
    words = ("--write", "job.sbatch", "--ranks", "1", "--grace-s", "30", "SCRIPT")
    with launched(tmp_path, *words, script=script, inside=True) as job:
        job.finish()
    assert job.process.returncode == 0, job.errors
    variables = environment(tmp_path, SLURM_JOB_NODELIST=socket.gethostname())
    (tmp_path / "bin/srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    with subprocess.Popen(
        ["bash", "job.sbatch"], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "began\n"
        ran.terminate()
    assert (tmp_path / "saved").exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "given", [("--hostfile", "all"), ("--check",), ("--node_rank", "1"), ("--ssh", "ssh -p 3"), ("--lost-s", "3")]
)
def test_options_that_a_written_job_cannot_have_are_refused(tmp_path: Path, given: tuple[str, ...]) -> None:
    (tmp_path / "all").write_text("a slots=2\n")
    said = refused(tmp_path, "--write", "job.sbatch", "--ranks", "2", *given)
    assert f"{given[0]} cannot be written into job.sbatch" in said
    assert not (tmp_path / "job.sbatch").exists()


def test_any_file_has_a_name_of_its_job() -> None:
    for stem, name in (
        ("My run.2", "my-run-2"),
        ("2", "job-2"),
        ("été", "t"),
        ("_", "job"),
        ("a" * 62 + ".b", "a" * 62),
    ):
        assert scripts.name_of(stem) == name
        scripts.Batch(name=name, nodes=1, ranks=1, command=["x.py"])


def test_a_file_of_hosts_has_no_options_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "all").write_text("a slots=2\n")
    said = refused(tmp_path, "--write", "some", "-H", "all", "--grace-s", "3", "--show", "all")
    assert "--show, --grace-s cannot be written into some" in said


def test_gpus_are_asked_for() -> None:
    batch = scripts.Batch(name="a", nodes=1, ranks=8, command=["t.py"])
    assert "#SBATCH --gpus-per-node=8\n" in scripts.sbatch(batch)
    _, job = yaml.safe_load_all(scripts.kubernetes(batch, "x"))
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_a_file_of_hosts_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "all").write_text("a slots=2\nb slots=4\n")
    with launched(tmp_path, "--write", str(tmp_path / "some"), "-H", str(tmp_path / "all"), "-e", "b:0", "x.py") as job:
        job.finish()
    assert job.process.returncode == 0, job.errors
    assert hosts.read_hostfile(tmp_path / "some") == {"a": 2, "b": 3}
