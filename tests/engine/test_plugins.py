"""An optimizer, a schedule and a sink of another distribution, built and used by their names.

Optimizer, sink and entry points are CONTRIBUTING's example.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.registry.test_plugins import install
from torch import nn

from zoo import sim
from zoo.engine import initialize
from zoo.registry import CORE, Registry, installed
from zoo.zero import ZeroOptimizer

ROOT = Path(__file__).parents[2]
HALVING = """
from dataclasses import dataclass
from zoo.lr_schedules import Schedule


class Halving(Schedule):
    @dataclass(frozen=True)
    class Config:
        every: int = 2

    def rate(self, step, group):
        return self.base_rates[group] * 0.5 ** (step // self.config.every)
"""


def example(language: str) -> str:
    """What CONTRIBUTING.md shows of the package in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return "\n".join(textwrap.dedent("   " + block.lstrip(" ")) for block in found)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.syspath_prepend(str(tmp_path))
    points = dict(re.findall(r'^"(.*)" = "(.*)"$', example("toml"), re.MULTILINE))
    assert set(points) == {"optimizer.SignSGD", "config_section.prints", "sink.prints"}
    points["lr_schedule.Halving"] = "zoo_test_halving:Halving"
    install(tmp_path, "signs", points, my_package=example("python"), zoo_test_halving=HALVING)
    yield Registry(CORE, discover=installed)
    for module in ("my_package", "zoo_test_halving"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("stage", [0, 3])
def test_they_train_by_name(registry: Registry, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_batch_size": 8, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "signsgd", "params": {"lr": 0.25}},
        "scheduler": {"type": "halving", "params": {"every": 1}},
        "prints": {"enabled": True, "every": 1},
    }  # fmt: skip

    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))

    def fn(rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        engine = initialize(config, model, registry=registry)[0]
        for step in range(3):
            engine.backward(engine(batch(rank, step)).square().mean())
            engine.step()
        engine.feed.flush()
        return engine.optimizer.consolidated_parameters()["weight"]

    torch.manual_seed(0)
    twin, losses = nn.Linear(3, 1), []
    for step in range(3):
        loss = torch.cat([twin(batch(rank, step)).square() for rank in range(2)]).mean()
        loss.backward()
        losses.append(loss.item())
        for p in twin.parameters():
            assert p.grad is not None
            p.data -= 0.25 * 0.5**step * p.grad.sign()
            p.grad = None
    for weight in sim.run(2, fn):
        assert torch.allclose(weight, twin.weight, atol=1e-6)
    printed = re.findall(r"step (\d): loss (\d+\.\d+)", capsys.readouterr().out)  # by rank 0 alone
    assert [int(step) for step, _ in printed] == [1, 2, 3]
    assert [float(loss) for _, loss in printed] == pytest.approx(losses, abs=1e-3)


def test_its_options_are_checked_where_it_is_given_as_a_class(registry: Registry) -> None:
    cls = registry.get("optimizer", "SIGNSGD")
    optimizer = ZeroOptimizer(nn.Linear(2, 2), stage=1, optimizer=cls, lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match=r"lrr=0.5 is an option neither of ZeRO nor of SignSGD, which takes lr\."):
        ZeroOptimizer(nn.Linear(2, 2), stage=1, optimizer=cls, lrr=0.5)
