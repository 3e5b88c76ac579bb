"""What a run leaves for whoever asks later what it was."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from zoo import sim
from zoo.shard.runtime.timing import Span
from zoo.train import timeline, train
from zoo.train.origins import variables

from .tiny import config, registry


def files(out: Path) -> dict[str, Any]:
    names = ("environment", "origins", "forecast", "timeline", "result")
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names if (out / f"{name}.json").exists()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_leaves_what_it_was(tmp_path: Path, stage: int) -> None:
    changes = {"zero_optimization.stage": stage}
    sim.run(2, lambda rank: train(config(tmp_path / "run", 2, changes, steps=4), registry=registry()))
    found = files(tmp_path / "run")
    assert found["environment"]["ranks"] == 2
    assert found["environment"]["packages"]["zoo-kernels"] == found["environment"]["zoo"]
    rows = {path: (value, source) for path, value, source in found["origins"]}
    assert rows["train.steps"] == ("4", "dict")
    assert rows["zero_optimization.stage"] == (str(stage), "override")
    assert rows["train.save_model"] == ("True", "default")
    # What was said before the first step is what the end says and measures.
    result, said = found["result"], found["forecast"]
    kept = said["parameters_bytes"] + said["optimizer_bytes"]
    assert kept == result["forecast_kept_bytes"][0] == result["kept_bytes"][0]
    assert sum(said["wire_bytes"].values()) == result["forecast_wire_bytes"][0]
    line = json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[-1])
    assert line["wire_bytes"] == result["wire_bytes"][0]
    assert line["step_s"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize(("steps", "timed"), [(1, 1), (2, 2), (6, 3)])
def test_one_step_is_told_in_time_on_every_rank(tmp_path: Path, steps: int, timed: int) -> None:
    sim.run(2, lambda rank: train(config(tmp_path / "run", 2, steps=steps), registry=registry()))
    found = files(tmp_path / "run")["timeline"]
    assert (found["step"], found["ranks_of_job"], found["device"]) == (timed, 2, "cpu")
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    for one in found["ranks"]:
        compute = [span for span in one["spans"] if span[0] == "compute"]
        assert all(a[4] == b[3] for a, b in itertools.pairwise(compute))
        assert {"batch", "forward", "loss", "backward", "update"} <= {span[1] for span in compute}
        assert {span[1] for span in one["spans"] if span[0] == "communication"} == {"gather", "reduce"}


def test_the_shortest_spans_are_left_out_and_counted() -> None:
    spans = [Span("compute", "forward", str(i), i, i + 1 + i % 3) for i in range(30)]
    kept, left_out = timeline.longest(spans, most=12)
    assert left_out == 18
    assert kept == sorted(kept, key=lambda s: s.start_s)
    assert min(s.end_s - s.start_s for s in kept) >= 2


def test_what_is_secret_is_not_written(tmp_path: Path) -> None:
    assert variables({"ZOO_KERNELS": "auto", "OMP_NUM_THREADS": "1", "ZOO_API_KEY": "x", "HOME": "/home/me"}) == {
        "ZOO_KERNELS": "auto",
        "OMP_NUM_THREADS": "1",
    }
    secret = "swordfish"
    changes = {"comet.api_key": secret, "comet.enabled": "false"}
    sim.run(1, lambda rank: train(config(tmp_path / "run", 1, changes, steps=1), registry=registry()))
    for name in ("environment.json", "origins.json", "forecast.json", "timeline.json"):
        assert secret not in (tmp_path / "run" / name).read_text()
    assert '"comet.api_key",\n  "not told"' in (tmp_path / "run/origins.json").read_text()
