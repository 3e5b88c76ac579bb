"""What single sinks promise beyond the battery: names, defaults, resuming, files of others."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, data, net
from tests.monitor.battery import fields_of, read_csv, read_jsonl, read_tensorboard, read_wandb
from tests.monitor.test_battery import build, by_name, offline, plain, section_of

from zoo import sim
from zoo.config import load
from zoo.engine import initialize
from zoo.monitor import MonitorSection, events
from zoo.monitor.csv_monitor import LONGEST, OPEN_FILES
from zoo.parts import Environment, StepRecord
from zoo.registry import CORE, DEFAULT, Registry

__all__ = ["offline"]  # a fixture

DOCUMENTED: dict[str, dict[str, Any]] = {
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "csv_monitor": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "wandb": {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
    "comet": {
        "enabled": False, "samples_log_interval": 100, "project": None, "workspace": None, "api_key": None,
        "experiment_name": None, "experiment_key": None, "online": None, "mode": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_keys_and_defaults(name: str) -> None:
    assert DEFAULT.get("config_section", name)().model_dump() == {**DOCUMENTED[name], "ranks": "first"}


def test_the_page_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "python/zoo/monitor/README.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(python|json)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    exec(blocks["python"], {"__name__": __name__})
    assert capsys.readouterr().out == "1 2.5\n"
    config = load({"train_batch_size": 1, **json.loads(blocks["json"])}, world_size=1)
    assert config.asks_for("tensorboard")
    assert config.asks_for("wandb")
    for name in DEFAULT.names("sink"):
        for key, value in DEFAULT.get("config_section", name)().model_dump().items():
            assert f"`{key}`" in page, (name, key)
            assert value in (None, "") or str(value) in page or value is False, (name, key)
    shown = [*events(plain(1, tokens=1, total_tokens=1, memory_bytes=1), scaled=True)]
    assert [name for name in shown if f"`{name.rpartition('/')[2]}`" not in page] == []


def test_events_have_the_documented_names() -> None:
    record = StepRecord(
        step=3, loss=2.5, lr=(0.5, 0.25), grad_norm=4.0, loss_scale=1024.0, samples=8, tokens=80, total_samples=24,
        total_tokens=240, step_s=0.5, wire_bytes=7, memory_bytes=9, skipped=True,
        metrics={"time/forward_s": 0.25, "time/backward_s": 0.5, "time/update_s": 0.125, "user/accuracy": 0.75},
    )  # fmt: skip
    assert events(record, scaled=True) == {
        "Train/Samples/train_loss": 2.5, "Train/Samples/lr": 0.5, "Train/Samples/lr_group_1": 0.25,
        "Train/Samples/loss_scale": 1024.0, "Train/Samples/grad_norm": 4.0, "Train/Samples/skipped": 1.0,
        "Train/Samples/step": 3.0, "Train/Samples/step_s": 0.5, "Train/Samples/samples_per_s": 16.0,
        "Train/Samples/tokens_per_s": 160.0, "Train/Samples/total_tokens": 240.0, "Train/Samples/wire_bytes": 7.0,
        "Train/Samples/memory_bytes": 9.0, "Train/Samples/elapsed_time_ms_forward": 250.0,
        "Train/Samples/elapsed_time_ms_backward": 500.0, "Train/Samples/elapsed_time_ms_step": 125.0,
        "user/accuracy": 0.75,
    }  # fmt: skip
    assert set(events(StepRecord(step=1, loss=None, lr=(), grad_norm=None))) == {
        f"Train/Samples/{name}" for name in ("skipped", "step", "step_s", "samples_per_s", "wire_bytes")
    }


def test_the_loss_scale_is_there_in_fp16_and_the_folder_is_where_the_script_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for fp16 in (True, False):
        more: dict[str, Any] = {"fp16": {"enabled": fp16, "auto_cast": fp16, "initial_scale_power": 4}}
        more |= {"csv_monitor": {"enabled": True, "job_name": str(fp16)}}
        engine = initialize({**BASE, **more}, net(), training_data=data())[0]
        engine.train_batch()
        engine.destroy()
    name = "Train_Samples_loss_scale.csv"
    assert (tmp_path / "True" / name).read_text() == "step,loss_scale\n8,16.0\n"
    assert not (tmp_path / "False" / name).exists()


def test_a_sink_that_fails_is_switched_off_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "records.jsonl").symlink_to("/dev/full")
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = initialize({**BASE, "jsonl_monitor": place, "csv_monitor": place}, net(), training_data=data())[0]
    for _ in range(4):
        engine.train_batch()
    engine.destroy()
    assert engine.feed.failed == {"jsonl_monitor": "OSError: [Errno 28] No space left on device"}
    assert len([r for r in caplog.records if "jsonl_monitor" in r.message]) == 1
    assert [x for x, _ in by_name(read_csv(tmp_path / "job"))["Train_Samples_train_loss:train_loss"]] == [8, 16, 24, 32]


def test_csv_names_are_safe_distinct_and_as_documented(tmp_path: Path) -> None:
    names = {
        "user/a b": "user_a_b.csv", "../../up": "_._.._up.csv", "user/ünï": "user_ünï.csv", "a/b:c*?\n": "a_b_c___.csv",
    }  # fmt: skip
    colliding = ["user/a/b", "USER/a b", "x/" + "y" * 300, "x/" + "y" * 301]
    metrics = {name: float(place) for place, name in enumerate([*names, *colliding])}
    sink = build("csv_monitor", tmp_path)
    sink.write(plain(1, metrics=metrics))
    sink.close()
    files = {path.name: path for path in (tmp_path / "job").iterdir()}
    assert set(names.values()) <= set(files)
    assert len(files) == len(events(plain(1, metrics=metrics)))
    assert all(len(name.encode()) < LONGEST + 20 for name in files)
    values = [value for name, _, value in read_csv(tmp_path / "job") if not name.startswith("Train_")]
    assert sorted(values) == sorted(metrics.values())


@pytest.mark.parametrize("names", [("user/a b", "user/a_b"), ("user/Loss", "user/loss"), ("a/b/c", "a_b/c")])
def test_csv_files_of_colliding_names_are_continued_in_any_order(tmp_path: Path, names: tuple[str, str]) -> None:
    for step, order in ((1, names), (2, names[::-1]), (3, names[1:]), (4, names)):
        sink = build("csv_monitor", tmp_path)
        sink.write(plain(step, metrics={name: float(names.index(name)) for name in order}))
        sink.close()
    files = [path for path in (tmp_path / "job").iterdir() if not path.name.startswith("Train_")]
    read = sorted(path.read_text().split("\n", 1)[1].split() for path in files)
    assert read == [["8,0.0", "16,0.0", "32,0.0"], ["8,1.0", "16,1.0", "24,1.0", "32,1.0"]]


@pytest.mark.parametrize("name", ["csv_monitor", "jsonl_monitor", "tensorboard"])
def test_files_stay_where_the_script_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "begun")
    engine = initialize({**BASE, name: {"enabled": True, "output_path": "logs"}}, net(), training_data=data())[0]
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine.train_batch()
    engine.destroy()
    assert engine.feed.failed == {}
    assert list((tmp_path / "begun" / "logs" / "DeepSpeedJobName").iterdir())
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["csv_monitor", "jsonl_monitor"])
def test_two_engines_with_one_file_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    place = {name: {"enabled": True, "output_path": str(tmp_path)}}
    engines = [initialize({**BASE, **place}, net(), training_data=data())[0] for _ in range(2)]
    for _ in range(2):
        for engine in engines:
            engine.train_batch()
            engine.feed.flush()
    assert "as well, and what they write mixes there" in caplog.text
    assert len([r for r in caplog.records if "mixes there" in r.message]) == 1
    for engine in engines:
        engine.destroy()
    caplog.clear()
    again = initialize({**BASE, **place}, net(), training_data=data())[0]
    again.train_batch()
    again.destroy()
    assert caplog.text == ""


def test_a_home_that_is_not_there_is_one_sentence() -> None:
    place = {"enabled": True, "output_path": "~nobody-of-this-name/runs"}
    with pytest.raises(ValueError, match=r"csv_monitor\.output_path = '~nobody-of-this-name/runs': .*whole path"):
        initialize({**BASE, "csv_monitor": place}, net(), training_data=data())


def test_more_csv_files_than_may_be_open(tmp_path: Path) -> None:
    metrics = {f"layer/{n}": float(n) for n in range(3 * OPEN_FILES)}
    sink = build("csv_monitor", tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(1, 4):
        sink.write(plain(step, metrics=metrics))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + OPEN_FILES
    sink.close()
    rows = by_name(read_csv(tmp_path / "job"))
    assert all(rows[f"layer_{n}:{n}"] == [(x, repr(float(n))) for x in (8, 16, 24)] for n in range(3 * OPEN_FILES))


def test_a_csv_file_of_deepspeed_is_continued(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_train_loss.csv").write_bytes(b"step,train_loss\r\n4,2.5\r\n")
    sink = build("csv_monitor", tmp_path)
    sink.write(plain(1))
    sink.close()
    rows = by_name(read_csv(tmp_path / "job"))
    assert rows["Train_Samples_train_loss:train_loss"] == [(4, "2.5"), (8, "1.0")]


@pytest.mark.parametrize("cut", ["", '{"ste', '{"step": 3, "loss": 0.1'])
def test_a_line_that_was_cut_is_removed_when_the_run_is_resumed(tmp_path: Path, cut: str) -> None:
    sink = build("jsonl_monitor", tmp_path)
    written = [plain(1, metrics={"a/long": 1.0, "b/" + "x" * 70_000: 2.0})] if "loss" in cut else []
    for record in written:
        sink.write(record)
    sink.close()
    path = tmp_path / "job" / "records.jsonl"
    with open(path, "a") as file:
        file.write(cut)
    sink = build("jsonl_monitor", tmp_path)
    sink.write(plain(2))
    sink.close()
    expected = by_name([row for record in [*written, plain(2)] for row in fields_of(record)])
    assert by_name(read_jsonl(tmp_path / "job")) == expected


def test_a_file_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    path = tmp_path / "job" / "records.jsonl"
    path.write_text("my diary, without an end of line")
    with pytest.raises(ValueError, match=r"records\.jsonl is there and does not begin with"):
        build("jsonl_monitor", tmp_path)
    assert path.read_text() == "my diary, without an end of line"


def test_what_a_resumed_run_repeats_replaces_what_tensorboard_shows(tmp_path: Path) -> None:
    for steps in (range(1, 6), range(4, 8)):  # the second goes on from a checkpoint after step 3
        sink = build("tensorboard", tmp_path)
        for step in steps:
            sink.write(plain(step, metrics={"user/run": float(steps[0])}))
        sink.close()
    shown = by_name(read_tensorboard(tmp_path / "job"))["user/run"]
    assert shown == [(8, "1.0"), (16, "1.0"), (24, "1.0"), *((x, "4.0") for x in (32, 40, 48, 56))]


def test_training_that_goes_back_replaces_what_tensorboard_shows(tmp_path: Path) -> None:
    sink = build("tensorboard", tmp_path)
    for number, step in enumerate((1, 2, 3, 2, 3, 4, 4)):
        sink.write(plain(step, metrics={"user/number": float(number)}))
    sink.close()
    shown = by_name(read_tensorboard(tmp_path / "job"))["user/number"]
    assert shown == [(8, "0.0"), (16, "3.0"), (24, "4.0"), (32, "5.0"), (32, "6.0")]


def test_the_newest_event_file_is_read_last_whatever_clock_and_process_say(tmp_path: Path) -> None:
    sink = build("tensorboard", tmp_path)
    sink.write(plain(1))
    sink.write(plain(2))
    sink.close()
    (first,) = (tmp_path / "job").iterdir()
    first.rename(first.with_name("events.out.tfevents.9000000000.zzz.999.0"))  # by a host whose clock is ahead
    sink = build("tensorboard", tmp_path)
    sink.write(plain(2, metrics={"user/run": 2.0}))
    sink.close()
    shown = by_name(read_tensorboard(tmp_path / "job"))
    assert shown["user/run"] == [(16, "2.0")]
    assert [x for x, _ in shown["Train/Samples/step"]] == [8, 16]


def test_tensorboard_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    import subprocess

    code = f"""
import sys
from zoo.monitor.tensorboard import TensorBoardMonitor, TensorBoardSection
from zoo.parts import Environment, StepRecord
where = Environment(config=None, rank=0, world_size=1, batch_rank=0, batch_ranks=1)
sink = TensorBoardMonitor(TensorBoardSection(enabled=True, output_path={str(tmp_path)!r}), where)
sink.write(StepRecord(step=1, loss=1.0, lr=(0.1,), grad_norm=None))
sink.close()
sys.exit(any(name in sys.modules for name in ("torch", "tensorflow")))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.dear
def test_wandb_joins_the_scripts_run_begins_its_own_and_takes_no_earlier_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    (tmp_path / "mine").mkdir()
    section_of("wandb", tmp_path / "theirs", {})  # sets WANDB_DIR, which W&B reads once
    run = wandb.init(project="x", dir=str(tmp_path / "mine"))
    sink = build("wandb", tmp_path / "theirs")
    sink.write(plain(1))
    sink.close()
    assert wandb.run is run  # not finished
    assert not list((tmp_path / "theirs").iterdir())
    run.finish()
    first = build("wandb", tmp_path / "theirs", group="g", team="t", project="p")
    began = wandb.run
    assert began is not None
    assert (began.project, began.entity, began.group) == ("p", "t", "g")
    second = build("wandb", tmp_path / "theirs")  # of another engine
    assert wandb.run is began
    assert second.run is not began  # type: ignore[attr-defined]
    assert second.run.project == "deepspeed"  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 2, 3, 4):  # back to a checkpoint after step 1
            first.write(plain(step))
    first.close()
    second.close()
    assert wandb.run is None
    assert "a step ends at 16 samples, and the run has 24 already" in caplog.text
    assert len([r for r in caplog.records if r.name == "zoo.monitor"]) == 1
    (only,) = (tmp_path / "mine").glob("wandb/offline-run-*")
    assert ("Train/Samples/step", 8, 1.0) in read_wandb(tmp_path / "mine"), only
    found = by_name(read_wandb(tmp_path / "theirs"))
    assert found["Train/Samples/step"] == [(8, "1.0"), (16, "2.0"), (24, "3.0"), (32, "4.0")]


def test_wandb_takes_more_of_the_latest_step(tmp_path: Path) -> None:
    sink = build("wandb", tmp_path / "runs")
    sink.write(plain(1))
    sink.write(StepRecord(step=1, loss=None, lr=(), grad_norm=None, total_samples=8, metrics={"Mine/a": 1.5}))
    sink.write(StepRecord(step=1, loss=None, lr=(), grad_norm=None, total_samples=8, metrics={"Mine/b": 2.5}))
    sink.write(plain(2))
    sink.close()
    found = by_name(read_wandb(tmp_path / "runs"))
    assert found["Mine/a"] == [(8, "1.5")]
    assert found["Mine/b"] == [(8, "2.5")]
    assert [x for x, _ in found["Train/Samples/lr"]] == [8, 16]


class FakeExperiment:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.name: str | None = None
        self.logged: list[tuple[dict[str, float], int]] = []
        self.ended = False

    def set_name(self, name: str) -> None:
        self.name = name

    def log_metrics(self, dic: dict[str, float], prefix: str | None = None, step: int | None = None) -> None:
        assert step is not None
        self.logged.append((dic, step))

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def comet(monkeypatch: pytest.MonkeyPatch) -> list[FakeExperiment]:
    """The part of comet_ml's documented interface that is used: ``start``, ``set_name``, ``log_metrics``, ``end``."""
    begun: list[FakeExperiment] = []

    def start(
        api_key: str | None = None, workspace: str | None = None, project: str | None = None,
        experiment_key: str | None = None, mode: str | None = None, online: bool | None = None,
    ) -> FakeExperiment:  # fmt: skip
        if api_key == "wrong":
            raise ValueError("no such key,\nplease log in")
        begun.append(FakeExperiment({k: v for k, v in locals().items() if k != "begun"}))
        return begun[-1]

    module = ModuleType("comet_ml")
    module.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return begun


def test_comet_gets_what_the_section_says_and_values_at_intervals(comet: list[FakeExperiment], tmp_path: Path) -> None:
    key = "some-experiment-key"  # Comet's own business
    options = {
        "samples_log_interval": 20, "project": "p", "workspace": "w", "api_key": "secret", "experiment_name": "n",
        "experiment_key": key, "online": True, "mode": "get_or_create",
    }  # fmt: skip
    sink = build("comet", tmp_path, **options)
    for step in range(1, 9):
        sink.write(plain(step, metrics={"user/late": 1.0} if step == 5 else {}))
    sink.write(plain(2))  # back to a checkpoint
    sink.close()
    (experiment,) = comet
    assert experiment.arguments == {
        "api_key": "secret", "workspace": "w", "project": "p", "experiment_key": key, "mode": "get_or_create",
        "online": True,
    }  # fmt: skip
    assert (experiment.name, experiment.ended) == ("n", True)
    assert [step for _, step in experiment.logged] == [8, 32, 40, 56, 16]
    assert experiment.logged[2] == ({"user/late": 1.0}, 40)
    assert experiment.logged[1] == (events(plain(4)), 32)


def test_comets_defaults_leave_everything_to_its_own_configuration(comet: list[FakeExperiment], tmp_path: Path) -> None:
    section, where = DEFAULT.get("config_section", "comet"), Environment(
        config=None, rank=1, world_size=2, batch_rank=1, batch_ranks=2
    )  # fmt: skip
    build_it = DEFAULT.get("sink", "comet")
    build_it(section(enabled=True), where)
    assert set(comet[0].arguments.values()) == {None}
    assert comet[0].name is None
    build_it(section(enabled=True, ranks="all", experiment_name="n"), where)
    assert (comet[1].name, comet[1].arguments["mode"]) == ("n-rank_1", "create")
    with pytest.raises(ValueError, match="experiment_key names one experiment"):
        build_it(section(enabled=True, ranks="all", experiment_key="k" * 40), where)
    with pytest.raises(
        ValueError, match=r"^comet: no experiment could be begun \(ValueError: no such key, please log "
    ):
        build_it(section(enabled=True, api_key="wrong"), where)


def test_comets_key_is_shown_nowhere(tmp_path: Path) -> None:
    config = load({"train_batch_size": 1, "comet": {"enabled": True, "api_key": "hush-hush"}}, world_size=1)
    assert config.comet.api_key.get_secret_value() == "hush-hush"
    for text in (config.explain(), json.dumps(config.to_dict()), repr(config), str(config)):
        assert "hush-hush" not in text


def test_a_sink_of_another_package_is_built_on_rank_0_unless_its_section_asks() -> None:
    class Mine(MonitorSection):
        pass

    class Sink:
        def __init__(self, section: Mine, environment: Environment) -> None:
            built.append(environment.rank)

        def write(self, record: StepRecord) -> None:
            pass

        def close(self) -> None:
            pass

    registry = Registry(CORE, origin="core")
    registry.register("config_section", "mine", Mine)
    registry.register("sink", "mine", Sink)
    for ranks, expected in (("first", [0]), ("all", [0, 1])):
        built: list[int] = []
        section = {"mine": {"enabled": True, "ranks": ranks}}

        def job(rank: int, section: dict[str, Any] = section) -> None:
            torch.set_num_threads(1)
            initialize({**BASE, **section}, net(), registry=registry)[0].destroy()

        sim.run(2, job)
        assert sorted(built) == expected


@pytest.mark.parametrize("bad", [0, 1])
def test_a_sink_that_cannot_be_built_on_one_rank_is_an_error_on_all_and_leaves_nothing_open(
    tmp_path: Path, bad: int
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / f"rank_{bad}").write_text("no folder")
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "job", "ranks": "all"}
    mine = {"enabled": True, "ranks": "all"}
    closed: list[int] = []

    class Early:
        def __init__(self, section: MonitorSection, environment: Environment) -> None:
            self.rank = environment.rank

        def close(self) -> None:
            closed.append(self.rank)

    registry = Registry(CORE, origin="core")
    registry.register("config_section", "a_first", MonitorSection)
    registry.register("sink", "a_first", Early)

    def job(rank: int) -> str:
        torch.set_num_threads(1)
        with pytest.raises(ValueError) as caught:
            initialize({**BASE, "jsonl_monitor": place, "a_first": mine}, net(), registry=registry)
        return str(caught.value)

    first, second = sim.run(2, job)
    assert first == second
    assert first.startswith(f"building monitors failed: rank {bad}: jsonl_monitor: cannot write into {tmp_path}")
    assert sorted(closed) == [0, 1]
