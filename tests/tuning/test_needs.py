"""What a candidate is said to need is what it needs at least."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.profiles import examples
from tests.tuning.tasks import Net, document, registry
from torch import nn
from torch.profiler import ProfilerActivity, profile

from zoo.train.config import read_document
from zoo.tuning import Candidate, Needs, candidates, job_of, kept_bytes
from zoo.tuning.limits import _of_groups, bytes_of, device_named, memory_limit
from zoo.tuning.needs import base_of, settings, with_settings


def needs_of(values: dict[str, Any], ranks: int = 1, **options: Any) -> Needs:
    found = read_document(values, registry=registry())
    job, model, task = job_of(found, ranks, registry=registry(), **options)
    return Needs(found, job, model, task, registry())


def peak_of(values: dict[str, Any], ranks: int) -> int:
    """The most bytes of tensors that were there at once while a rank made its job and three steps."""
    from zoo.train.job import Job

    config = read_document(values, registry=registry()).load(ranks)
    gc.collect()  # what an earlier job left is not to be freed, and so subtracted, while this one is recorded
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        job = Job(config, registry(), quiet=True, monitors=False)
        for _ in range(3):
            job.step()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    job.engine.destroy()
    return max(itertools.accumulate(event.nbytes() for event in changes))


def on_a_rank(rank: int, values: dict[str, Any], ranks: int) -> int:
    return peak_of(values, ranks)


shapes = st.fixed_dictionaries({"width": st.sampled_from([8, 33, 64]), "layers": st.sampled_from([2, 3])})


@pytest.mark.dear
@given(shape=shapes, draw=st.data())
def test_nothing_that_fits_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, draw: st.DataObject
) -> None:
    values = document(tmp_path_factory.mktemp("job"), batch=draw.draw(st.sampled_from([8, 256])), **shape)
    needs = needs_of({**values, **draw.draw(st.sampled_from([{}, {"bf16": {"enabled": True, "auto_cast": True}}]))})
    candidate = draw.draw(st.sampled_from(candidates(needs.job)))
    need = needs.of(candidate)
    assert (need.refused != "") is (candidate.micro > needs.samples)
    if need.refused:
        return
    assert not needs.notes
    made = with_settings(needs.document, settings(candidate, needs.job)).values
    peak = peak_of(made, 1)
    assert need.job_bytes <= peak
    assert need.job_bytes > 0.3 * peak or candidate.checkpointing or shape["width"] < 64


@pytest.mark.slow
@given(shape=shapes, draw=st.data())
@examples(times=0.2)
def test_nothing_that_fits_is_rejected_on_two_ranks(
    tmp_path_factory: pytest.TempPathFactory, shape: Any, draw: st.DataObject
) -> None:
    needs = needs_of(document(tmp_path_factory.mktemp("job"), batch=draw.draw(st.sampled_from([8, 256])), **shape), 2)
    every = candidates(needs.job)
    candidate = draw.draw(st.sampled_from(every))
    need = needs.of(candidate)
    assert (need.refused != "") is (candidate.micro * candidate.data > needs.samples)
    if need.refused:
        return
    made = with_settings(needs.document, settings(candidate, needs.job)).values
    peaks = processes.run_ranks(2, on_a_rank, made, 2)
    assert need.job_bytes <= sum(peaks.values())


@examples(times=4)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9))
def test_what_a_graph_keeps_is_counted_exactly(width: int, layers: int, rows: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), Mean())
    # Each product keeps its input; the loss keeps its own.
    assert kept_bytes(model, torch.zeros(rows, width)) == 4 * rows * width * (layers + 1)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_a_checkpointed_block_keeps_nothing() -> None:
    with torch.device("meta"):
        model = Net(16, 3)
    batch = (torch.zeros(5, 16), torch.zeros(5, 1))
    plain = kept_bytes(model, batch)
    assert kept_bytes(model, batch, blocks="auto") < plain / 3
    assert kept_bytes(model, batch) == plain  # blocks are as they were


def test_more_of_everything_needs_more(tmp_path: Path) -> None:
    needs = needs_of(document(tmp_path, batch=16, width=32), 2)
    found = {c: needs.of(c).job_bytes for c in candidates(needs.job) if c.data == 2 and not c.bucket}
    for c, size in found.items():
        for other, more in found.items():
            if (c.micro, c.checkpointing) == (other.micro, other.checkpointing) and c.stage < other.stage:
                assert more <= size
    sizes = [needs.of(Candidate(stage=0, micro=m, accumulation=8 // m, mesh=(1, 2, 1))).job_bytes for m in (1, 2, 4)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_what_zoo_train_would_refuse_is_refused_with_its_sentence(tmp_path: Path) -> None:
    needs = needs_of({**document(tmp_path), "zero_optimization": {"stage": 1, "update_in_backward": True},
                      "gradient_clipping": 1.0})  # fmt: skip
    assert "update_in_backward" in needs.of(candidates(needs.job)[0]).refused


def test_a_model_that_does_not_run_without_values_is_not_rejected_for_it(tmp_path: Path) -> None:
    needs = needs_of(document(tmp_path))

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    needs.model.forward = broken  # type: ignore[method-assign]
    need = needs.of(candidates(needs.job)[0])
    assert need.activation_bytes == 0
    assert need.job_bytes == need.state_bytes > 0
    assert "cannot be called on meta tensors" in needs.notes[0]


@given(st.data())
def test_settings_say_what_the_candidate_is(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    values = document(tmp_path_factory.mktemp("job"), batch=16)
    values["mesh"] = data.draw(st.sampled_from([{}, {"axes": {"data": -1}}, {"axes": {"pipe": ranks, "data": -1}}]))
    needs = needs_of(values, ranks)
    candidate = data.draw(st.sampled_from(candidates(needs.job)))
    config = with_settings(needs.document, settings(candidate, needs.job)).load(ranks)
    again = base_of(config, ranks)
    assert (again.stage, again.micro, again.accumulation) == (candidate.stage, candidate.micro, candidate.accumulation)
    assert (again.mesh, again.checkpointing, again.offload) == (
        candidate.mesh,
        candidate.checkpointing,
        candidate.offload,
    )
    assert again.schedule == candidate.schedule
    assert config.train_batch_size == 16
    if candidate.bucket:
        assert config.zero_optimization.reduce_bucket_size == candidate.bucket


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("77", 77), ("2kB", 0), ("-1", 0)]
)
def test_sizes(text: str, size: int) -> None:
    if size:
        assert bytes_of(text) == size
    else:
        with pytest.raises(ValueError, match="write a number of bytes"):
            bytes_of(text)


def test_limits(tmp_path: Path) -> None:
    assert device_named("cpu").kind == "cpu"
    with pytest.raises(ValueError, match="device 'tpu'; allowed are cpu and cuda"):
        device_named("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU here"):
            device_named("cuda")
    limit = memory_limit(device_named("cpu"))
    assert limit is not None
    assert limit > 0
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/memory.max").write_text("1234\n")
    (tmp_path / "root/a/b/memory.max").write_text("max\n")
    assert _of_groups(tmp_path / "root", own) == [1234]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("path", "tried", "less"),
    [
        ("bf16.enabled", [False, True], True),
        ("bf16.enabled", [True, False], False),
        ("train.task.params.width", [64, 4], True),
        ("train.task.params.layers", [2, 8], False),
        ("optimizer.params.lr", [0.1, 0.2], None),
    ],
)
def test_a_candidate_is_judged_with_its_own_settings(
    tmp_path: Path, path: str, tried: list[Any], less: bool | None
) -> None:
    values = {**document(tmp_path, batch=64, width=64, rows=64), "bf16": {"enabled": False, "auto_cast": True}}
    space = {"stage": [1], "micro": [32], path: tried}
    together = needs_of(values, space=space, fast=True)
    every = candidates(together.job)
    first, second = (together.of(candidate) for candidate in every)
    assert [first, second] == [needs_of(values, space=space, fast=True).of(candidate) for candidate in every]
    assert not together.notes
    assert (first.activation_bytes == second.activation_bytes) is (less is None)
    assert (second.activation_bytes < first.activation_bytes) is bool(less)


def test_a_data_set_that_a_setting_makes_smaller_is_counted(tmp_path: Path) -> None:
    space = {"stage": [0], "micro": [32], "train.task.params.rows": [64, 16]}
    needs = needs_of(document(tmp_path, batch=32), space=space, fast=True)
    assert [needs.of(c).refused[:27] for c in candidates(needs.job)] == ["", "the data set has 16 samples"]
