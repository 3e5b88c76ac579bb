"""Files with which a batch system starts a job; they are run with stand-ins for its programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
