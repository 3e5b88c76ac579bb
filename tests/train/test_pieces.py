"""The parts of the training job on their own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from zoo import sim
from zoo.checkpointing import TensorFile
from zoo.comm import Communicator
from zoo.config import ConfigError
from zoo.engine import initialize
from zoo.examples.byte_lm import Bigram, ByteTask, ByteWindows, Corpus, standard_library_text
from zoo.examples.byte_lm.model import ByteGPT, ModelConfig, generate
from zoo.train import read_config
from zoo.train.config import WarmStart
from zoo.train.history import History
from zoo.train.job import validate
from zoo.train.machine import peak_bytes, resident_bytes
from zoo.train.picture import draw, running_mean
from zoo.train.warm_start import warm_start

ROOT = Path(__file__).resolve().parents[2]


def test_validation_is_the_mean_over_all_samples_at_any_number_of_ranks() -> None:
    task = ByteTask(
        ByteTask.Config(
            layers=1,
            width=16,
            heads=2,
            context=16,
            text=str(ROOT / "LICENSE"),
            num_segments=3,
            num_validation_windows=11,
        ),
        seed=0,
    )
    data = task.validation_data()
    model = task.model()
    with torch.no_grad():
        expected = sum(float(model(*(part[None] for part in data[i]))) for i in range(11)) / 11

    def job(rank: int) -> float:
        torch.set_num_threads(1)
        config = {"train_batch_size": 12, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
        return validate(initialize(config, task.model())[0], data)

    for size in (1, 2, 4):
        found = sim.run(size, job)
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(expected, abs=1e-6)


def test_no_validation_byte_is_in_a_training_window() -> None:
    data = torch.arange(4000, dtype=torch.int64).to(torch.uint8)
    corpus = Corpus(data, "numbers", num_segments=7, held_out=0.1)
    seen = torch.zeros(4000, dtype=torch.int64)
    for ranges, mark in ((corpus.training_ranges(), 1), (corpus.validation_ranges(), 2)):
        windows = ByteWindows(data, ranges, 16)
        for index in range(len(windows)):
            start = int(windows.starts[index])
            seen[start : start + 17] |= mark
            x, y = windows[index]
            assert torch.equal(x[1:], y[:-1])
    assert not bool((seen == 3).any())
    assert 0.05 < float((seen >= 2).double().mean()) < 0.1


@pytest.mark.dear
def test_the_standard_librarys_text_is_always_the_same_and_large() -> None:
    first, second = standard_library_text(), standard_library_text()
    assert first.sha256 == second.sha256
    assert first.data.numel() > 4_000_000
    assert first.num_files > 200
    assert first.sha256[:16] in first.describe()


def test_the_bigram_counts() -> None:
    data = torch.tensor([1, 2, 1, 2, 1, 3], dtype=torch.uint8)
    bigram = Bigram(data, [(0, 6)])
    x, y = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
    expected = -(math.log(3 / 259) + math.log(3 / 258)) / 2
    assert bigram.loss(x, y) == pytest.approx(expected)
    assert torch.allclose(bigram.log_probability.exp().sum(dim=1), torch.ones(256, dtype=torch.float64))


def test_the_model_looks_only_back() -> None:
    model = ByteGPT(ModelConfig(layers=2, width=16, heads=2, context=12))
    x = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 7:] += 1
    with torch.no_grad():
        first, second = model(x), model(other % 256)
    assert torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(first[:, 7], second[:, 7])


def test_generated_text_is_the_same_on_all_ranks_and_stages() -> None:
    size = ModelConfig(layers=2, width=16, heads=2, context=8)

    def job(rank: int) -> bytes:
        torch.set_num_threads(1)
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
        engine, *_ = initialize(config, ByteGPT(size))
        return generate(engine.module, b"ab", 12, context=8)

    assert set(sim.run(2, job)) == {generate(ByteGPT(size), b"ab", 12, context=8)}


def test_history_forgets_what_comes_after_the_checkpoint(tmp_path: Path) -> None:
    first = History(tmp_path)
    for step in range(1, 6):
        first.add({"step": step, "loss": 1.0 / step, "rss_bytes": [1, 2]})
    first.close()
    second = History(tmp_path, resume_from=3)
    second.add({"step": 4, "loss": 9.0})
    second.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert second.series("loss") == ([1, 2, 3, 4], [1.0, 0.5, 1 / 3, 9.0])
    assert (tmp_path / "log.csv").read_text().splitlines()[1].split(",")[-2] == "2"


def test_running_mean_of_a_constant_is_that_constant() -> None:
    assert running_mean([2.0] * 5) == pytest.approx([2.0] * 5)
    assert running_mean([1.0, 0.0]) == pytest.approx([1.0, 0.9 / 1.9])


def test_a_picture_without_baseline_or_validation(tmp_path: Path) -> None:
    history = History(None)
    history.add({"step": 1, "loss": 1.0})
    draw(history, tmp_path / "a.png", unit="byte", baseline=None, title="one step")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_memory_is_measured() -> None:
    assert 0 < resident_bytes() <= peak_bytes() * 1.05


def test_the_example_is_a_configuration() -> None:
    config = read_config(ROOT / "examples" / "bytes" / "config.json")
    assert config.scheduler.params["total_num_steps"] == config.train.steps
    with pytest.raises(ConfigError, match="train: missing"):
        read_config({"train_batch_size": 1})


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_a_warm_start_takes_no_other_kind_of_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    path, model = tmp_path / "a.safetensors", torch.nn.Linear(1, 1)
    with TensorFile(path, {"bias": (dtype, (1,))}, {}) as file:
        file.put("bias", torch.ones(1, dtype=dtype))
        file.commit()
    with pytest.raises(ValueError, match=f"'bias' is torch.float32, and {dtype} in .*other kinds of numbers"):
        warm_start(model, WarmStart(path=str(path), partial=True), Communicator.alone())
