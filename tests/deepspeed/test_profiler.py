"""DeepSpeed's profiler by its names: alone, and by the section of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.profiling import flops_profiler
from zoo.deepspeed.profiling.flops_profiler import profiler as module

import zoo.deepspeed as deepspeed
from zoo.profiling import FlopsProfiler


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))


def test_names_are_zoos() -> None:
    assert flops_profiler.FlopsProfiler is module.FlopsProfiler is FlopsProfiler
    assert module.get_model_profile(small(), (4, 10), print_profile=False) == ("880 ", "440 MACs", "121")
    assert module.flops_to_string(1.5e12) == "1.5 TFLOPS"
    with pytest.raises(NotImplementedError, match="replaces no functions of torch"):
        module.wrapFunc(torch.mm, None)


def test_numbers_of_a_module() -> None:
    net = small()
    with pytest.raises(ValueError, match="no profile of this Linear: call start_profile"):
        module.get_module_flops(net[0])
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(4, 10))
    assert (module.get_module_macs(net[0]), module.get_module_flops(net), module.get_module_macs(net)) == (
        400,
        880,
        440,
    )
    profiler.end_profile()
    assert 0 < module.get_module_duration(net[2]) < module.get_module_duration(net)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_section_of_a_configuration(enabled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    document: dict[str, Any] = {
        "train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "flops_profiler": {"enabled": enabled, "profile_step": 2, "top_modules": 3, "detailed": False},
    }  # fmt: skip
    engine = deepspeed.initialize(model=small(), config=document)[0]
    assert engine.flops_profiler_enabled() is enabled
    assert (engine.flops_profiler_profile_step(), engine.flops_profiler_top_modules()) == (2, 3)
    assert (engine.flops_profiler_detailed(), engine.flops_profiler_module_depth()) == (False, -1)
    assert (engine.flops_profiler is not None) is enabled
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 10)).square().mean())
        engine.step()
    shown = capsys.readouterr().out
    assert ("Profile at step 2" in shown) is enabled
    if enabled:
        assert (engine.flops_profiler.flops, engine.flops_profiler.macs, engine.flops_profiler.params) == (
            880,
            440,
            121,
        )
        assert engine.flops_profiler.get_total_flops(as_string=True) == "880 "
    engine.destroy()
