"""The zoo command: what it prints, how it refuses, how it ends when a rank fails."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests import processes
from typer.testing import CliRunner

from zoo.cli import app, failure

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {
    "train_batch_size": 8,
    "steps_per_print": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
    "comm": {"timeout_s": 30},
    "train": {
        "task": {
            "type": "byte_lm",
            "params": {
                "layers": 1, "width": 16, "heads": 2, "context": 16, "text": str(ROOT / "LICENSE"), "num_segments": 4,
                "held_out": 0.1, "num_validation_windows": 12, "sample_bytes": 8,
            },
        },
        "steps": 6,
        "validate_every": 3,
        "checkpoint_every": 3,
        "threads": 1,
    },
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "train": {**TINY["train"], "out": str(tmp_path / "out")}}))
    return path


def zoo(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.mark.dear
def test_activations_are_checkpointed_with_the_same_losses(config: Path, tmp_path: Path) -> None:
    logs = []
    for number, more in enumerate(((), ("--checkpoint-activations",))):
        out = tmp_path / f"run{number}"
        two = ("--set", "train.task.params.layers=2")  # blocks are what repeats
        assert zoo("train", config, "--steps", 2, "--out", out, *two, *more).exit_code == 0
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        logs.append([line["loss"] for line in lines if "loss" in line])
        section = json.loads((out / "config.json").read_text())["activation_checkpointing"]
        assert section["blocks"] == ("auto" if more else None)
    assert logs[0] == logs[1]
    assert len(logs[0]) >= 2


def test_it_trains_validates_compares_and_saves(config: Path) -> None:
    result = zoo("train", config, "--stage", 3)
    assert result.exit_code == 0, result.output
    assert "step     6/6" in result.output
    assert "validation loss" in result.output
    assert "byte bigram" in result.output
    out = config.parent / "out"
    names = {
        "config.json",
        "log.jsonl",
        "log.csv",
        "loss.png",
        "result.json",
        "sample.txt",
        "checkpoints",
        "model",
        "run.json",
        "origins.json",
        "environment.json",
        "forecast.json",
        "timeline.json",
    }
    assert {p.name for p in out.iterdir()} == names
    there = {p.name for p in (out / "checkpoints").iterdir()}
    assert there == {"latest", "zero_to_fp32.py", "step_00000003", "step_00000006"}
    found = json.loads((out / "result.json").read_text())
    assert found["stage"] == 3
    assert found["steps"] == 6
    assert len((out / "log.csv").read_text().splitlines()) == 7
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.dear
def test_resuming_continues_to_the_last_bit(config: Path) -> None:
    assert zoo("train", config).exit_code == 0
    log = config.parent / "out" / "log.jsonl"

    def losses() -> list[tuple[Any, ...]]:
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return [tuple(r.get(k) for k in ("step", "loss", "validation_loss", "lr", "grad_norm")) for r in records]

    expected = losses()
    (config.parent / "out" / "checkpoints" / "latest").write_text("step_00000003\n")
    with log.open("a") as file:
        file.write('{"step": 7, "lo')  # as a crash leaves it
    result = zoo("train", config, "--resume")
    assert result.exit_code == 0, result.output
    assert "resumed from" in result.output
    assert losses() == expected
    assert [step for step, *_ in expected] == [1, 2, 3, 4, 5, 6]


def test_resume_without_a_checkpoint_says_so_and_begins(config: Path) -> None:
    result = zoo("train", config, "--resume", "--steps", 1)
    assert result.exit_code == 0
    assert "no checkpoint in" in result.output


def test_options_change_the_configuration(config: Path) -> None:
    other = config.parent / "other place"
    result = zoo("train", config, "--steps", 2, "--out", other, "--set", "seed=5", "--set", "optimizer.params.lr=0.5")
    assert result.exit_code == 0, result.output
    used = json.loads((other / "config.json").read_text())
    assert (used["train"]["steps"], used["seed"], used["optimizer"]["params"]["lr"]) == (2, 5, 0.5)
    assert used["scheduler"]["params"]["total_num_steps"] == 2


@pytest.mark.dear
def test_an_example_that_comes_with_zoo_goes_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        zoo("config", "explain", "byte_lm").stdout
        == zoo("config", "explain", ROOT / "python/zoo/examples/byte_lm/config.json").stdout
    )
    assert (ROOT / "examples/bytes/config.json").samefile(ROOT / "python/zoo/examples/byte_lm/config.json")
    Path("byte_lm").mkdir()
    assert "train.steps = 1200" in zoo("config", "explain", "byte_lm").stdout
    Path("byte_lm").rmdir()
    Path("byte_lm").write_text("{")
    assert zoo("config", "explain", "byte_lm").exit_code == 2
    assert zoo("config", "explain", "bite_lm").exit_code == 2


WRONG: dict[str, tuple[list[str], str]] = {
    "unknown key": (
        ["--set", "gradient_cliping=1"],
        "gradient_cliping: unknown key; did you mean 'gradient_clipping'?",
    ),
    "unknown key below": (["--set", "train.step=1"], "train.step: unknown key; did you mean 'steps'?"),
    "wrong type": (["--set", 'train_batch_size="many"'], "train_batch_size"),
    "stage": (["--stage", "4"], "zero_optimization.stage"),
    "triangle": (["--set", "train_micro_batch_size_per_gpu=3"], "train_batch_size = 8 is not a multiple of"),
    "task": (["--set", "train.task.type=bite_lm"], "did you mean 'byte_lm'?"),
    "task option": (["--set", "train.task.params.depth=3"], "train.task.params.depth: unknown key"),
    "heads": (["--set", "train.task.params.heads=3"], "must be a multiple of the heads"),
    "no text": (["--set", "train.task.params.text=nowhere.txt"], "'nowhere.txt' does not exist"),
    "optimizer": (["--set", "optimizer.type=AdamX"], "no optimizer is named 'AdamX'"),
    "optimizer option": (["--set", "optimizer.params.lrr=1"], "optimizer.params.lrr: unknown key; did you mean 'lr'?"),
    "no equals": (["--set", "seed"], "not of the form key.path=value"),
    "contradiction": (
        ["--set", "sparse_gradients=true", "--set", "zero_optimization.hierarchical_all_reduce=true"],
        "sparse_gradients is true, and zero_optimization.hierarchical_all_reduce is set",
    ),
    "later part": (["--set", "graph_harvesting=true"], "graph_harvesting: given True; it waits for"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(WRONG))
def test_user_errors_are_one_sentence_and_exit_code_2(config: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOO_TRACEBACK", raising=False)
    options, said = WRONG[kind]
    result = zoo("train", config, *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.startswith("zoo: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "the document is list"),
        ('{"seed": 1, "seed": 2}', "'seed' is given twice"),
        ('{"train_batch_size": 8}', "train: missing"),
    ],
)
def test_documents_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    result = zoo("train", path)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_file_that_is_not_there() -> None:
    result = zoo("train", "nowhere.json")
    assert result.exit_code == 2
    assert result.stderr == "zoo: nowhere.json: No such file or directory\n"


def test_the_traceback_can_be_had(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    result = zoo("train", config, "--stage", "4")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.slow
@pytest.mark.long
def test_only_rank_0_speaks_of_what_all_ranks_see(config: Path) -> None:
    for rank, expected in ((0, True), (1, False)):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        result = processes.run(CLI, "train", str(config), "--stage", "4", env=environment)
        assert result.returncode == 2
        assert bool(result.stderr) is expected


def test_components_are_listed() -> None:
    result = zoo("components")
    assert result.exit_code == 0
    assert "lr_schedule\n  LRRangeTest" in result.output
    assert "byte_lm" in result.output
    assert zoo("components", "optimizer").output.startswith("optimizer\n")
    assert "no kind is named 'optimiser'" in zoo("components", "optimiser").stderr


def test_explain_says_where_values_come_from(config: Path) -> None:
    result = zoo("config", "explain", config, "--set", "seed=9")
    assert result.exit_code == 0, result.output
    assert "seed = 9" in result.output
    assert "override" in result.output
    assert "resolved auto" in result.output


def test_explain_without_a_train_section(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"train_batch_size": 8}')
    result = zoo("config", "explain", path)
    assert result.exit_code == 0
    assert "train_batch_size = 8" in result.output


@pytest.mark.dear
def test_schema_is_json() -> None:
    result = zoo("config", "schema")
    assert "train_batch_size" in json.loads(result.output)["properties"]


def test_version_and_help() -> None:
    assert zoo("--version").output.startswith("zoo")
    assert "train" in zoo("--help").output


def test_help_imports_neither_torch_nor_pydantic_nor_rich() -> None:
    program = """
import sys
from zoo.cli import main
sys.argv = ["zoo", "--help"]
try:
    main()
except SystemExit:
    print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "pydantic", "rich", "numpy"}), "end")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1].strip() == "end"


PLUGIN = """
import os, time
from zoo.examples.byte_lm import ByteTask

class Failing(ByteTask):
    def validation_data(self):
        if os.environ["RANK"] == "1":
            raise {error}
        return super().validation_data()
"""


CLI = "import sys; sys.argv[0] = 'zoo'; from zoo.cli import main; sys.exit(main())"


def _two_ranks(config: Path, plugin: Path, *args: str) -> tuple[list[int], list[str], float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As srun would start them.
    shared = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"PYTHONPATH": f"{plugin}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(processes.run, CLI, "train", config, *args, env={**shared, "SLURM_PROCID": rank})
            for rank in "01"
        ]
        done = [rank.result() for rank in ranks]
    return [rank.returncode for rank in done], [rank.stderr for rank in done], time.monotonic() - began


@pytest.mark.dear
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("ValueError('the held-out text is gone')", 2, "zoo: rank 1: the held-out text is gone"),
        pytest.param("KeyError('x')", 1, "zoo: rank 1: KeyError: 'x'", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(
    config: Path, tmp_path: Path, error: str, code: int, line: str
) -> None:
    # As another package would bring a task of its own.
    (tmp_path / "failing_task.py").write_text(PLUGIN.format(error=error))
    info = tmp_path / "failing_task-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-task\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zoo.components]\ntask.failing = failing_task:Failing\n")
    codes, said, seconds = _two_ranks(config, tmp_path, "--set", "train.task.type=failing")
    assert codes == [1, code], said
    assert said[1].strip().splitlines()[-1] == line
    assert "zoo: rank 0: stopped, because a peer is gone or does not answer" in said[0]
    assert "Traceback" not in said[0]
    assert seconds < 60


def test_build_prints_the_library_that_the_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.kernels import building

    monkeypatch.setattr(building, "build", lambda plan: f"built {plan.name}")
    monkeypatch.setattr(building, "build_cuda_library", lambda architectures: f"library for {architectures}")
    assert zoo("build").output == "built zoo_kernels_cpu\nbuilt zoo_kernels_python\n"
    assert zoo("build", "--cuda-arch", "80,90").output == "library for (80, 90)\n"
    both = "built zoo_kernels_cpu\nbuilt zoo_kernels_python\n"
    assert zoo("build", "--cpu", "--cuda-arch", "100").output == f"{both}library for (100,)\n"
    assert zoo("build", "--cuda-arch", "nonsense").exit_code == 2


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP]
)
def test_a_disk_that_takes_no_more_is_one_sentence(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, failure.one_sentence(shared=True):
        raise OSError(number, os.strerror(number), "runs/log.jsonl")
    assert ended.value.code == failure.USER_ERROR
    assert capsys.readouterr().err == f"zoo: runs/log.jsonl: {os.strerror(number)}\n"


def test_a_reader_that_goes_away_ends_a_command_without_a_word() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "zoo.cli", "components"], stdout=nobody, stderr=subprocess.PIPE, check=False
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_terminal_of_another_encoding_is_no_error() -> None:
    said = r"from zoo.cli import app; app.command('say')(lambda: print('2\xd73 \udce9')); "
    done = subprocess.run(
        [sys.executable, "-c", said + CLI, "say"], env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, rb"2\xd73 \udce9" + b"\n"), done.stderr
