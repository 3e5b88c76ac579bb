"""``zoo compile report``: what it prints and draws, and what it refuses in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from typer.testing import CliRunner

from zoo.cli.app import app

HERE = "tests.cli.test_compile"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Reads(nn.Module):
    """It reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return made if float(made.detach().sum()) > 0 else -made


class Names(nn.Module):
    """It takes a tensor by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x


class Number(nn.Linear):
    """It returns no tensor."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> float:  # type: ignore[override]
        return 1.0


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compile", "report", *arguments])


@pytest.mark.dear
def test_a_function_that_makes_a_model(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    found = run(f"{HERE}:small", "--shape", "500,8", "--out", str(picture), "--ranks", "4")
    assert found.exit_code == 0, found.output
    assert "training: 3 calls of units, 4 parameters, 2 bucket(s)" in found.output
    assert "place: backward: " in found.output
    forward = 500 * (8 * 16 + 16 * 4)
    assert f"{2 * (3 * forward - 500 * 8 * 16):,} FLOPs" in found.output
    assert "on 4 of h100-80" in found.output
    # Each of two ranks keeps a whole number of cache lines: 576 bytes are ten of them.
    assert f"gathered at most         {10 * 64} bytes, at 'enter 0'" in found.output
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_an_example_has_the_budgets_of_its_configuration() -> None:
    sizes = []
    for live in (0, 10**9):
        torch._dynamo.reset()
        more = [f"zero_optimization.max_live_parameters={live}", "zero_optimization.reduce_bucket_size=1"]
        found = run("byte_lm", *(word for key in more for word in ("--set", key)))
        assert found.exit_code == 0, found.output
        told = re.search(r"(\d+) starts of communication", found.output)
        assert told is not None
        sizes.append(int(told[1]))
    assert sizes[0] > sizes[1]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([f"{HERE}:small"], "give --shape"),
        (["nowhere"], "nowhere"),
        ([f"{HERE}:small", "--shape", "5,8", "--hardware", "none"], "no hardware is named 'none'"),
        ([f"{HERE}:Reads", "--shape", "5,8"], "no graph ran: the reason is above"),
        ([f"{HERE}:small", "--shape", "5,7"], "cannot be called with a tensor of 5,7: RuntimeError: "),
        ([f"{HERE}:Names", "--shape", "5,8"], "cannot be called with a tensor of 5,8: TypeError: "),
        ([f"{HERE}:Number", "--shape", "5,8"], "returns a float, without a tensor that has a gradient"),
        (["byte_lm", "--shape", "5,8"], "--shape is for MODULE:FUNCTION"),
        (["byte_lm", "--stage", "1"], "--stage is for MODULE:FUNCTION"),
        ([f"{HERE}:small", "--shape", "5,8", "--set", "seed=1"], "--set is for a configuration"),
    ],
)
def test_what_the_user_can_do_is_said(arguments: list[str], says: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert says in found.output
    assert "Traceback" not in found.output
    assert found.stderr.splitlines()[-1].startswith("zoo: ")
