"""What the page of benchmarks/moe decides by itself: routings, equal results, bytes to be sent, ratios, pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.moe import contenders, memory, parallel, report, run, speed
from benchmarks.moe.shapes import ROUTINGS, Shape, Weights, choices, gradient, tokens

from zoo import sim

SMALL = Shape(tokens=40, width=16, hidden=8, experts=4, k=2, dtype="fp32")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_go_where_the_routing_says(routing: str, dtype: str) -> None:
    shape = Shape(tokens=80, width=16, hidden=8, experts=4, k=2, dtype=dtype)
    logits = tokens(shape, routing) @ Weights.of(shape).router.t()
    assert logits.topk(2, -1).indices.tolist() == choices(shape, routing).tolist()
    counts = torch.bincount(choices(shape, routing).reshape(-1), minlength=4).tolist()
    assert counts == {"even": [40] * 4, "most": [76, 76, 4, 4], "all": [80, 80, 0, 0]}[routing]
    assert contenders.padded_rows(shape, routing) == 4 * counts[0]


def test_zoo_and_the_layer_by_hand_compute_the_same_and_another_result_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = speed.Built(SMALL, ROUTINGS, ["by hand", "zoo"])
    assert set(built.steps) == {(r, n) for r in ROUTINGS for n in ("by hand", "zoo")} | {
        ("even", contenders.BARE), ("even", contenders.FRESH),
    }  # fmt: skip

    def wrong(shape: Shape, weights: Weights) -> Any:
        layer, parameters = contenders.CONTENDERS["by hand"].build(shape, weights)
        return lambda x: layer(x) * 1.001, parameters

    monkeypatch.setitem(contenders.CONTENDERS, "wrong", contenders.Contender(build=wrong))
    with pytest.raises(AssertionError, match=r"wrong: the output differs by 0\.001 of its norm"):
        speed.Built(SMALL, ["even"], ["by hand", "wrong"])


def test_what_is_missing_or_too_large_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(shape: Shape, weights: Weights) -> Any:
        raise contenders.NotMeasuredError("it is not installed")

    monkeypatch.setitem(contenders.CONTENDERS, "peer", contenders.Contender(build=missing))
    large = contenders.Contender(build=missing, bytes=lambda shape: 2**40)
    monkeypatch.setitem(contenders.CONTENDERS, "large", large)
    record = speed.measure(SMALL, ["even"], 1, 1, ["peer", "large"])
    assert record["left_out"] == {
        "peer": "it is not installed", "large, even": "would compute 80 rows for 80 and need 1024 GiB",
    }  # fmt: skip
    assert memory.measure(SMALL, "even", "peer") == {"left_out": "it is not installed"}


def test_zoo_sends_the_bytes_that_have_to_be_sent() -> None:
    weights = Weights.of(SMALL)

    def fn(rank: int) -> list[tuple[int, int]]:
        found = []
        for routing in ROUTINGS:
            for name in ("zoo", "zoo, 2 chunks"):
                layer = parallel.CONTENDERS[name](SMALL, weights, rank)
                layer.expert_ranks.log.reset()
                x = tokens(SMALL, routing, seed=rank).requires_grad_()
                layer(x).output.backward(gradient(SMALL))
                expected = parallel.sent_by_a_rank(SMALL, [choices(SMALL, routing, seed=r) for r in range(2)], rank)
                found.append((layer.expert_ranks.log.wire_bytes, expected))
        return found

    for pairs in sim.run(2, fn):
        assert all(sent == expected > 0 for sent, expected in pairs), pairs


def raw(zoo_s: float = 2.0) -> dict[str, Any]:
    def of(name: str, routing: str, *cpu: float) -> dict[str, Any]:
        return {"name": name, "routing": routing, "cpu": list(cpu), "wall": list(cpu)}

    seconds = [
        of(contenders.BARE, "even", 1.0, 3.0), of(contenders.FRESH, "even", 1.5, 4.0),
        of("zoo", "even", zoo_s, 3 * zoo_s), of("zoo", "all", zoo_s / 2, 3 * zoo_s / 2),
        of("transformers eager", "even", 8.0, 24.0), of("transformers grouped_mm", "even", 3.0, 9.0),
        of("DeepSpeed", "even", 4.0, 12.0), of("DeepSpeed", "all", 9.0),
    ]  # fmt: skip
    record = {"shape": SMALL.record(), "threads": 1, "seconds": seconds, "left_out": {"by hand": "gone"}}
    rank = {
        "shape": SMALL.record(), "routing": "even", "left_out": {"DeepSpeed, capacity": "not here"},
        "seconds": {name: {"cpu": [1.0], "wall": [2.0]} for name in ("zoo", "zoo, 2 chunks", "DeepSpeed")},
        "bytes": {"zoo": [10, 10], "zoo, 2 chunks": [10, 10]},
    }  # fmt: skip
    slower = {**rank, "seconds": {**rank["seconds"], "zoo": {"cpu": [2.0], "wall": [5.0]}}}
    held = {"shape": SMALL.record(), "routing": "even", "name": "zoo", "peak": 3 * 2**20, "gradients": 2**20}
    return {"machine": {"cores": 1}, "speed": [record], "memory": [held], "parallel": [[rank, slower]]}


def test_ratios_are_of_one_round_and_the_best_of_transformers_counts() -> None:
    found = raw()
    (record,) = found["speed"]
    ours = report.seconds_of(record, "zoo")
    assert report.ratios(report.seconds_of(record, contenders.BARE), ours).values == (0.5, 0.5)  # type: ignore[union-attr]
    assert report.best_of_transformers(record).values == (1.5, 1.5)  # type: ignore[union-attr]
    text = report.tables(found)
    (row,) = [line for line in text.splitlines() if line.startswith("| fp32  | 40")][:1]
    assert "0.50 (0.50–0.50)" in row
    assert "1.50 (1.50–1.50)" in row
    assert "- fp32, E=4, k=2, by hand: gone" in text
    assert "5000 (5000–5000)" in text
    assert "2.50 (2.50–2.50)" in text
    assert "left out: not here" in text


def test_the_page_keeps_its_remarks_and_records_of_one_shape_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text("figures of last year\n\n## Remarks\n\nby hand\n")
    report.write(raw(), page)
    assert page.read_text().endswith("## Remarks\n\nby hand\n")
    assert "last year" not in page.read_text()
    old, new = raw()["speed"], raw(9.0)["speed"]
    assert run.merged(old, new) == new
    other = json.loads(json.dumps(old))
    other[0]["shape"]["k"] = 1
    assert run.merged(other, new) == other + new


@pytest.mark.slow
def test_a_quick_run_measures_every_section(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run.main(["--quick", "--dtypes", "fp32", "--raw", str(tmp_path / "raw.json")])
    text = capsys.readouterr().out
    for heading in ("## Speed", "## Memory", "## Expert parallelism"):
        assert heading in text
    assert not (tmp_path / "raw.json").exists()
