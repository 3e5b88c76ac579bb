"""What the loaders of engine parts promise whatever they pick: passes, one iteration at a time, states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.data_efficiency import DataAnalyzer
from zoo.data_efficiency.config import CurriculumMetric
from zoo.data_efficiency.curriculum import Growing
from zoo.data_efficiency.metric_loader import CurriculumLoader

COUNT = 60
NUMBERS = [torch.tensor([i]) for i in range(COUNT)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index")
    DataAnalyzer(NUMBERS, {"number": int}, path).run()  # type: ignore[arg-type]
    return path / "number"


def growing(index: Path, *, low: int, steps: int, batch: int = 2, **more: Any) -> CurriculumLoader:
    """Numbers up to a limit that grows to all of them, by one or more in each step."""
    section = CurriculumMetric(
        index_to_sample_path=str(index / "index_to_sample.safetensors"),
        index_to_metric_path=str(index / "index_to_metric.safetensors"), min_difficulty=low, max_difficulty=COUNT - 1,
        schedule_config={"total_curriculum_step": steps, "difficulty_step": 1},
    )  # fmt: skip
    return CurriculumLoader(
        NUMBERS, {"number": section}, {"number": Growing(section, "number")}, samples_a_step=batch,
        micro_batch_size=batch, rank=0, size=1, seed=1, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("low", "batch"), [(1, 2), (3, 20)])
def test_passes_are_counted_by_samples_and_not_by_shuffles(index: Path, low: int, batch: int) -> None:
    # The pool changes in every step, or is smaller than one: there are more shuffles than passes.
    loader, drawn = growing(index, low=low, steps=COUNT, batch=batch, num_epochs=4), 0
    while here := sum(len(rows) for rows in loader):
        drawn += here
    assert 4 * COUNT <= drawn < 4 * COUNT + batch
    assert loader.place.epoch > 4
