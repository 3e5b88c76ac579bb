"""Tiers: wherever the state lives, the same bits come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.laws.cases import Case, cases, train_zero

from zoo import sim
from zoo.io import Handle

TIERS = ["none", "cpu", "nvme"]


def section(device: str, path: Path, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": path} if device == "nvme" else {}), **more}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=cases(max_world=4), stage=st.integers(1, 3), states=st.sampled_from(TIERS), parameters=st.sampled_from(TIERS),
    ratio=st.sampled_from([1.0, 0.5]), max_in_cpu=st.sampled_from([0, 50]), pipelines=st.integers(0, 3),
    sub_group=st.sampled_from([1, 40, 10**6]), low=st.booleans(),
)  # fmt: skip
def test_every_tier_computes_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, case: Case, stage: int, states: str, parameters: str, ratio: float,
    max_in_cpu: int, pipelines: int, sub_group: int, low: bool,
) -> None:  # fmt: skip
    if low:
        case = Case(**{**case.__dict__, "dtype": torch.bfloat16})
    folder = tmp_path_factory.mktemp("nvme")
    optimizer = section(
        states, folder, ratio=ratio, pipeline_read=bool(pipelines & 1), pipeline_write=bool(pipelines & 2)
    )
    options: dict[str, Any] = {"offload_optimizer": optimizer, "sub_group_size": sub_group}
    if stage == 3:
        options["offload_param"] = section(parameters, folder, max_in_cpu=max_in_cpu)

    def offloaded(rank: int) -> Any:
        with Handle(backend="threads", direct="never") as handle:
            return train_zero(case, stage, rank, aio=handle, **options)

    expected = sim.run(case.world, lambda rank: train_zero(case, stage, rank, sub_group_size=sub_group))
    found = sim.run(case.world, offloaded)
    for (values, history), (other, other_history) in zip(found, expected, strict=True):
        assert history == other_history
        for name, value in values.items():
            assert torch.equal(value, other[name]), name
    assert list(folder.iterdir()) == []
