"""The names of ``deepspeed.autotuning``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tuning.fakes import FakeRunner

import zoo.tuning.tuner
from zoo.deepspeed.adapters.utilities.launcher import parse_args
from zoo.deepspeed.adapters.utilities.tuner import Autotuner, DeepSpeedAutotuningConfig, ResourceManager


def made(tmp_path: Path, hosts: dict[str, list[int]], *options: str, **values: Any) -> Autotuner:
    section = {"results_dir": str(tmp_path / "results"), "exps_dir": str(tmp_path / "trials")}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"autotuning": {"enabled": True, **section}, **values}))
    args = parse_args([*options, "--autotuning", "tune", "train.py", "--deepspeed_config", str(config)])
    return Autotuner(args, hosts)


def test_a_trial_has_what_every_host_has_or_what_is_asked_for(tmp_path: Path) -> None:
    tuner = made(tmp_path, {"a": [0, 1, 2], "b": [4, 5]})
    assert (tuner.exp_num_nodes, tuner.exp_num_gpus) == (2, 2)
    assert [(node.host, node.idle_slots) for node in tuner.rm.nodes] == [("a", [0, 1]), ("b", [0, 1])]
    tuner = made(tmp_path, {"a": [0, 1, 2], "b": [4, 5]}, "--num_nodes", "1", "--num_gpus", "1")
    assert (tuner.exp_num_nodes, tuner.exp_num_gpus) == (1, 1)
    with pytest.raises(ValueError, match="there are 1 hosts with 2 slots"):
        made(tmp_path, {"a": [0, 1]}, "--num_gpus", "3")
    with pytest.raises(ValueError, match="each host has at least one slot"):
        made(tmp_path, {"a": []})


def test_the_largest_metric_of_a_space_counts_and_what_has_none_does_not(tmp_path: Path) -> None:
    tuner = made(tmp_path, {"a": [0]})
    assert tuner.get_best_space_record("z1") is None
    tuner.update_records("z1", "first", None, 2)
    assert tuner.get_best_space_record("z1") is None
    assert tuner.get_best_space_records() == {}
    tuner.update_records("z1", "second", 3.0, 1)
    tuner.update_records("z1", "third", 2.0, 1)
    tuner.update_records("z2", "fourth", 9.0, 1)
    assert tuner.get_best_space_record("z1") == ("second", 3.0, 4)
    assert tuner.get_best_space_records()["global"] == ("fourth", 9.0, 1)


def test_a_resource_manager_keeps_what_it_is_given() -> None:
    manager = ResourceManager(None, ["a"], 4, None, None, {" train_batch_size ": " -b "})
    assert manager.arg_mappings == {"train_batch_size": "-b"}
    assert ResourceManager(None, ["a"], 4, None, None, None).arg_mappings == {}


def test_the_section_has_documented_defaults() -> None:
    found: Any = DeepSpeedAutotuningConfig({"autotuning": {"fast": False, "mp_size": 2}})
    assert (found.fast, found.mp_size, found.metric, found.tuner_num_trials) == (False, 2, "throughput", 50)
    assert (found.start_profile_step, found.end_profile_step, found.arg_mappings) == (3, 5, {})
    assert not DeepSpeedAutotuningConfig({}).enabled


def test_without_a_document_or_a_job_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no document; add --deepspeed_config FILE"):
        Autotuner(parse_args(["train.py", "--epochs", "3"]), {"a": [0]})
    with pytest.raises(ValueError, match="this document has no section train"):
        made(tmp_path, {"a": [0]}).tune()


@pytest.mark.dear
def test_tune_is_the_search_of_zoo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo.tuning.tuner.Processes, "run", FakeRunner().run)
    text = str(Path(__file__).parents[2] / "LICENSE")
    params = {"layers": 2, "width": 16, "heads": 2, "context": 16, "text": text, "num_segments": 4, "held_out": 0.1}
    job = {"train_batch_size": 8, "optimizer": {"type": "AdamW"},
           "train": {"task": {"type": "byte_lm", "params": params}, "steps": 4}}  # fmt: skip
    tuner = made(tmp_path, {"a": [0]}, **job)
    tuner.print_tuning_results()
    tuner.tune()
    tuner.print_tuning_results()
    said = capsys.readouterr().out
    assert "nothing was tuned yet" in said
    assert "measured" in said
    assert tuner.optimal_ds_config is not None
    assert tuner.optimal_ds_config["train_batch_size"] == 8
    best = tuner.get_best_space_records()["global"]
    assert best[1] == max(value for space in tuner.records.values() for _, value, _ in space if value is not None)
    with pytest.raises(ValueError, match="trials run on one machine"):
        made(tmp_path, {"a": [0], "b": [0]}, **job).tune()
