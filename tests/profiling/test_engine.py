"""The section in an engine: what each key does, the same bits as without, ZeRO 0 to 3 on simulated ranks, pipelines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

import zoo.engine
from zoo import sim
from zoo.config import ConfigError, load
from zoo.pipe import LayerSpec, PipelineModule

WIDTH, ROWS = 6, 4
PER_BLOCK = 2 * 9 * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


FORWARD = ROWS * (3 * PER_BLOCK + WIDTH)
"""Multiply-accumulates of a micro-batch; each of them has two gradients but those of the first layer's input."""
BACKWARD = 2 * FORWARD - ROWS * 9 * WIDTH
PARAMS = 3 * (2 * 9 * WIDTH + 9 + WIDTH) + WIDTH + 1


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}  # fmt: skip


def train(rank: int, section: dict[str, Any] | None, steps: int = 3, **changes: Any) -> Any:
    """The engine after some steps, and the losses of its micro-batches."""
    torch.manual_seed(0)
    document = {**BASE, **changes, **({} if section is None else {"flops_profiler": {"enabled": True, **section}})}
    engine, *_ = zoo.engine.initialize(document, Net())
    losses = []
    for step in range(2 * steps):
        loss = engine(batch(rank, step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.destroy()
    return engine, torch.stack(losses)


def test_every_key_of_the_section_does_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, plain = train(0, None)
    assert "flops_profiler" not in engine.parts
    assert capsys.readouterr().out == ""
    engine, losses = train(0, {})
    assert torch.equal(losses, plain)
    profiler = engine.parts["flops_profiler"].profiler
    found = profiler.profile
    assert (found.model.forward.macs, found.model.backward.macs) == (FORWARD, BACKWARD), "one micro-batch"
    assert (profiler.flops, profiler.params, profiler.not_counted) == (2 * FORWARD, PARAMS, {})
    shown = capsys.readouterr().out
    assert "Profile at step 1" in shown
    assert "(blocks): ModuleList(" in shown
    assert "depth 3:" in shown
    assert re.search(r"^micro-batch of a rank:\s+4$", shown, re.MULTILINE)
    assert "utilisation" not in shown

    train(0, {"profile_step": 2, "detailed": False, "module_depth": 1, "top_modules": 2, "peak_tflops": 1e-3})
    shown = capsys.readouterr().out
    assert "Profile at step 2" in shown
    assert "(blocks)" not in shown
    assert "depth 1:" in shown
    assert "depth 2:" not in shown
    assert re.search(r"MACs +ModuleList \S+ MACs?|MACs +ModuleList .*, Linear ", shown)
    assert re.search(r"^model FLOPs utilisation \(MFU\):\s+\S+ %$", shown, re.MULTILINE)

    places = {name: str(tmp_path / "new" / name) for name in ("output_file", "json_file", "flame_file")}
    engine, _ = train(0, {"recompute_fwd_factor": 0.5, **places})
    assert capsys.readouterr().out == ""
    assert engine.parts["flops_profiler"].profiler.profile.recompute_fwd_factor == 0.5
    assert "Profile at step 1" in Path(places["output_file"]).read_text()
    assert json.loads(Path(places["json_file"]).read_text())["model"]["forward"]["macs"] == FORWARD
    assert "<html" in Path(places["flame_file"]).read_text()


@pytest.mark.parametrize("name", ["output_file", "json_file", "flame_file"])
def test_a_profile_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").touch()
    train(0, {name: str(tmp_path / "file/below")})
    assert "the profile could not be written" in caplog.text


def test_a_key_that_some_programs_write_changes_nothing() -> None:
    with pytest.warns(UserWarning, match="flops_profiler.step=7 has no effect: profile_step says which step"):
        found = load({**BASE, "flops_profiler": {"enabled": True, "step": 7}}, world_size=1)
    assert found.flops_profiler.profile_step == 1


def test_a_step_that_never_comes_is_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    engine, _ = train(0, {"profile_step": 9})
    assert capsys.readouterr().out == ""
    assert engine.parts["flops_profiler"].profiler.flops == 0


@pytest.mark.parametrize(
    ("section", "says"),
    [({"profile_step": -1}, "profile_step"), ({"top_modules": 0}, "top_modules"), ({"peak_tflops": 0}, "peak_tflops"),
     ({"recompute_fwd_factor": -0.5}, "recompute_fwd_factor"), ({"depth": 3}, "depth: unknown key")],
)  # fmt: skip
def test_what_cannot_be_is_said(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"flops_profiler.{says}"):
        load({**BASE, "flops_profiler": {"enabled": True, **section}})


@examples(times=0.2, quick=1)
@given(stage=st.integers(0, 3), ranks=st.integers(1, 3), threshold=st.sampled_from([0, 100_000]))
def test_every_stage_counts_alike_and_nothing_changes(stage: int, ranks: int, threshold: int) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": threshold}

    def job(rank: int, section: Any) -> Any:
        engine, losses = train(rank, section, zero_optimization=zero)
        part = engine.parts.get("flops_profiler")
        return losses, None if part is None or rank else part.profiler.profile

    plain = sim.run(ranks, lambda rank: job(rank, None))
    found = sim.run(ranks, lambda rank: job(rank, {"output_file": "/dev/null"}))
    for (one, _), (other, _) in zip(found, plain, strict=True):
        assert torch.equal(one, other)
    profile = found[0][1]
    assert profile.not_counted == {}
    assert (profile.model.forward.macs, profile.model.backward.macs) == (FORWARD, BACKWARD)
    parameters = profile.model.parameters
    assert parameters.numel == PARAMS
    if stage < 3 or ranks == 1 or threshold:
        assert parameters.kept == PARAMS
    else:
        assert parameters.kept < PARAMS
    assert [child.parameters.numel for child in profile.module("blocks").children] == [(PARAMS - WIDTH - 1) // 3] * 3


def test_recomputation_under_activation_checkpointing() -> None:
    engine, _ = train(0, {"output_file": "/dev/null"}, activation_checkpointing={"blocks": "auto"})
    found = engine.parts["flops_profiler"].profiler.profile
    assert (found.model.forward.macs, found.model.backward.macs) == (FORWARD, BACKWARD)
    # Three blocks are called again, up to what their last product needs.
    assert 0 < found.module("blocks").recomputation.macs == found.model.recomputation.macs <= 3 * ROWS * PER_BLOCK
    assert found.hardware_flops > found.model_flops


@pytest.mark.slow
def test_a_stage_of_a_pipeline_is_profiled_over_all_micro_batches() -> None:
    def job(rank: int) -> Any:
        torch.manual_seed(0)
        net = PipelineModule(
            [LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=lambda y, t: (y - t).square().mean()
        )
        document = {**BASE, "flops_profiler": {"enabled": True, "output_file": "/dev/null"}}
        engine, *_ = zoo.engine.initialize(document, net)
        data = iter([(batch(0, i), batch(1, i)) for i in range(6)])
        for _ in range(3):
            engine.train_batch(data)
        profiler = engine.parts["flops_profiler"].profiler
        engine.destroy()
        return profiler.profile if rank == 0 else None

    found = sim.run(2, job)[0]
    assert found.not_counted == {}
    assert found.model.forward.macs == 2 * 2 * ROWS * PER_BLOCK, "two micro-batches through the two layers here"
    assert found.model.backward.macs == 2 * found.model.forward.macs - 2 * ROWS * 9 * WIDTH


def test_a_rank_of_split_layers_counts_its_part() -> None:
    from tests.tensor.models import Decoder, Shape, plan_of
    from torch.nn import functional as F

    shape = Shape(heads=6, kv=2, inner=8, vocab=12, bias=False)

    class Model(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def job(rank: int, degree: int, stage: int) -> Any:
        section = {"autotp_size": degree, "plan": plan_of(shape).as_data()} if degree > 1 else {}
        document = {
            **BASE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "tensor_parallel": section,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "flops_profiler": {"enabled": True, "output_file": "/dev/null"},
        }  # fmt: skip
        engine, *_ = zoo.engine.initialize(document, Model(shape))
        for step in range(2):
            engine.backward(engine(torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(step))))
            engine.step()
        profiler = engine.parts["flops_profiler"].profiler
        engine.destroy()
        return profiler.profile if rank == 0 else None

    whole = job(0, 1, 0)
    for stage in (0, 3):
        part = sim.run(2, lambda rank, stage=stage: job(rank, 2, stage))[0]
        assert part.not_counted == {}
        for which in ("forward", "backward"):
            assert 2 * getattr(part.model, which).macs == getattr(whole.model, which).macs, "all cuts are even"
        assert part.model.parameters.numel < whole.model.parameters.numel
