"""What lies in host memory and on NVMe costs time by the numbers of the hardware file, or is said to have none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo.cost import Forecast, offloading, read_hardware
from zoo.cost.hardware import CHANNELS, Channel
from zoo.optim import AdamW
from zoo.shard import DryRun
from zoo.zero import Stage1Optimizer, Stage2Optimizer, Stage3Optimizer

PLAIN = read_hardware("h100")
ALL = dataclasses.replace(
    PLAIN, channels={name: Channel(latency_s=1e-5, bytes_per_s=n * 1e9) for n, name in enumerate(CHANNELS, 1)}
)


def forecast(**bytes_of: Any) -> Forecast:
    return Forecast(parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, wire_bytes={}, **bytes_of)


def test_each_way_takes_its_bytes_by_its_rate_and_what_computing_hides_is_not_exposed() -> None:
    """to_device 1, to_host 2, disk_read 3, disk_write 4, host_memory 5 GB/s; each way begins once."""
    bytes_of = {"to_host_bytes": 4e9, "to_device_bytes": 5e9, "nvme_read_bytes": 6e9, "nvme_written_bytes": 4e9}
    found = offloading(
        forecast(**bytes_of, host_updated=5e8), ALL, forward_s=1.0, backward_s=1.5, update_bytes=20.0, offloads=True
    )
    assert found.ways == pytest.approx(
        {"to_host": 2.0, "to_device": 5.0, "disk_read": 2.0, "disk_write": 1.0}, rel=1e-4
    )
    assert found.host_update_s == pytest.approx(2.0, rel=1e-4)
    # 2 s to the host beside 1.5 s of backward; 5 s to the device beside 2.5 s; 3 s of files beside 2 s of updating.
    assert found.exposed_s == pytest.approx(0.5 + 2.5 + 1.0, rel=1e-4)
    assert found.not_counted == ()


@given(
    names=st.sets(st.sampled_from(["to_host", "to_device", "disk_read", "disk_write"])), updated=st.booleans(),
    stated=st.sets(st.sampled_from(CHANNELS)),
)  # fmt: skip
def test_what_moves_has_a_time_or_is_named(names: set[str], updated: bool, stated: set[str]) -> None:
    fields = {
        "to_host": "to_host_bytes", "to_device": "to_device_bytes", "disk_read": "nvme_read_bytes",
        "disk_write": "nvme_written_bytes",
    }  # fmt: skip
    machine = dataclasses.replace(PLAIN, channels={name: ALL.channels[name] for name in stated})
    planned = forecast(**{fields[name]: 10**9 for name in names}, host_updated=10**8 * updated)
    found = offloading(planned, machine, forward_s=0.1, backward_s=0.1, update_bytes=20.0, offloads=True)
    said = " ".join(found.not_counted)
    for name in names:
        assert (name in said) != (found.ways.get(name, 0.0) > 0)
    if updated:
        assert ("host_memory" in said) != (found.host_update_s > 0)
    assert ("has none" in said) == (not names)
    nothing = offloading(forecast(), machine, forward_s=0.1, backward_s=0.1, update_bytes=20.0, offloads=False)
    assert (nothing.exposed_s, nothing.host_update_s, nothing.not_counted) == (0.0, 0.0, ())


def planned(stage: int, *, device: str, reductions: int, params: str = "none") -> Forecast:
    """Of a model of 4 · 64 · 64 parameters in bf16 on 2 ranks."""
    kinds: list[Any] = [Stage1Optimizer, Stage2Optimizer, Stage3Optimizer]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).bfloat16()
    more: dict[str, Any] = {"offload_param": {"device": params}} if stage == 3 else {}
    optimizer = kinds[stage - 1](
        model, optimizer=AdamW, lr=1e-3, group=DryRun(2, 0, device_type=device),
        offload_optimizer={"device": "cpu"}, **more,
    )  # fmt: skip
    found: Forecast = optimizer.forecast(micro_batches=reductions, reductions=reductions)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reductions", [1, 3])
def test_what_is_copied_is_planned(stage: int, reductions: int) -> None:
    """Half of the parameters is updated on this rank's host: their gradients go there, and they come back."""
    mine = 4 * 64 * 64 // 2
    found = planned(stage, device="cuda", reductions=reductions)
    times = 1 if stage == 1 else reductions  # of a whole gradient one part goes, in the step
    assert found.host_updated == mine
    assert found.to_host_bytes == 2 * mine * times
    assert found.to_device_bytes == 2 * mine * (times - 1) + 2 * mine
    assert "copied to the host a step" in found.table()
    assert planned(stage, device="cpu", reductions=reductions).to_host_bytes == 0


def test_parameters_of_the_host_come_with_each_gather() -> None:
    """Forward and backward gather them, some once where they stay; nothing goes back after the step."""
    mine = 2 * 4 * 64 * 64 // 2
    found = planned(3, device="cuda", reductions=1, params="cpu")
    assert mine <= found.to_device_bytes <= 2 * mine
    assert found.to_device_bytes > planned(3, device="cuda", reductions=1).to_device_bytes - mine
