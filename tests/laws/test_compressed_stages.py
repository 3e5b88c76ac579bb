"""Laws 2 and 3 for compressed stages of a pipeline: under any schedule and ZeRO stage they have the masks, ranges and
numbers of one process, and a run goes on with another number of stages. In fp64, for the reason that test_compression
gives."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compression.models import inputs, weights
from tests.laws.test_pruning import masks
from tests.profiles import examples
from torch import Tensor, nn

import zoo.engine
from zoo import sim
from zoo.compression import transforms_of
from zoo.compression.techniques.activation_quantization import StaticInputQuantizer
from zoo.engine import Engine
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, NUM_MICRO, STEPS = 8, 4, 4


class Dense(nn.Module):
    """Of the outputs of ``fc`` the first two are never used: their scores are zero, and equal."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x)) * (torch.arange(WIDTH) > 1)


def transposed(module: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = module(x.roll(1, -1))
    return found


@dataclass(frozen=True)
class Case:
    pipe: int = 2
    data: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    tied: bool = False


def engine_of(case: Case, section: dict[str, Any], *, replicas: int, seed: int = 0) -> Engine:
    """``replicas``: whose data this process has."""
    torch.set_num_threads(1)
    layers: list[Any] = [LayerSpec(Dense) for _ in range(8)]
    if case.tied:
        layers[1], layers[6] = (TiedLayerSpec("fc", nn.Linear, WIDTH, WIDTH, forward_fn=f) for f in (None, transposed))
    model = PipelineModule(
        layers, num_stages=case.pipe, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True,
        base_seed=seed, schedule=case.schedule,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": NUM_MICRO * replicas, "seed": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "compression_training": section,
    }  # fmt: skip
    return zoo.engine.initialize(config, model.double())[0]


def train(engine: Engine, steps: range, replicas: list[int]) -> list[float]:
    losses = []
    for step in steps:
        batches = []
        for replica in replicas:
            for micro in range(NUM_MICRO):
                dice = torch.Generator().manual_seed(100 * step + 10 * replica + micro)
                x = torch.randn(2, WIDTH, generator=dice, dtype=torch.float64)
                batches.append((x, x.roll(1, 0)))
        losses.append(float(engine.train_batch(iter(batches))))
    return losses


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def outcome(engine: Engine, losses: list[float]) -> Outcome:
    """Losses, parameters, and masks and ranges."""
    found = masks(engine)
    for transform in transforms_of(engine.module):
        if isinstance(transform, StaticInputQuantizer) and transform.range is not None:
            found[transform.key] = transform.range
    return losses, engine.optimizer.consolidated_parameters(), found


def on_ranks(case: Case, section: dict[str, Any]) -> list[Outcome]:
    def job(rank: int) -> Outcome:
        engine = engine_of(case, section, replicas=1)
        return outcome(engine, train(engine, range(STEPS), [engine.batch_rank]))

    return sim.run(case.pipe * case.data, job)


def alone(case: Case, section: dict[str, Any]) -> Outcome:
    def job(rank: int) -> Outcome:
        engine = engine_of(Case(pipe=1, tied=case.tied), section, replicas=case.data)
        return outcome(engine, train(engine, range(STEPS), list(range(case.data))))

    return sim.run(1, job)[0]


def compare(found: list[Outcome], wanted: Outcome) -> None:
    names: set[str] = set()
    for losses, values, made in found:
        torch.testing.assert_close(losses, wanted[0], rtol=1e-9, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-8, atol=1e-11, msg=name)
        for name, value in made.items():
            # Of ranges too: what is seen is the same but for the order of sums in the weights.
            torch.testing.assert_close(value, wanted[2][name], rtol=1e-6, atol=1e-7, msg=name)
        names |= made.keys()
    assert names == wanted[2].keys(), "every mask is somewhere"


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """Of compression_training: what has a state."""
    offset = draw(st.integers(0, 2))
    method = draw(st.sampled_from(["l1", "topk", "snip_momentum"]))
    shared: dict[str, Any] = {"enabled": True, "method": method, "schedule_offset": offset}
    groups: dict[str, Any] = {"g": {"modules": [draw(st.sampled_from(["fc", "^3"]))], "params": {"dense_ratio": 0.3}}}
    if method == "snip_momentum":
        shared |= {
            "schedule_offset_end": offset + 2, "schedule_offset_stride": draw(st.integers(1, 2)), "dense_ratio": 0.3,
            "block_pattern": draw(st.sampled_from(["1x1", "4x1", "2:4"])),
        }  # fmt: skip
        if shared["block_pattern"] == "2:4":
            del shared["dense_ratio"]
        groups = {} if draw(st.booleans()) else {"g": {"modules": ["fc", "^3"]}}
    found = {"sparse_pruning": {"shared_parameters": shared, "different_groups": groups}}
    if draw(st.booleans()):
        found["weight_quantization"] = weights("fc", start=7, target=5, rounding="stochastic", schedule_offset=1)
    if draw(st.booleans()):
        found["activation_quantization"] = inputs("fc", bits=9, range_calibration="static")
    return found


def snip(*patterns: str, **shared: Any) -> dict[str, Any]:
    shared = {
        "enabled": True, "method": "snip_momentum", "schedule_offset": 0, "schedule_offset_end": 3,
        "dense_ratio": 0.3, "block_pattern": "1x1", **shared,
    }  # fmt: skip
    if ":" in shared["block_pattern"]:
        del shared["dense_ratio"]  # the pattern says it
    groups = {"g": {"modules": list(patterns)}} if patterns else {}
    return {"sparse_pruning": {"shared_parameters": shared, "different_groups": groups}}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pipe, data = draw(st.sampled_from([(2, 1), (4, 1), (2, 2)]))
    return Case(
        pipe=pipe, data=data, stage=draw(st.integers(0, 3)), tied=draw(st.booleans()),
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb_v", "interleaved_1f1b"])),
    )  # fmt: skip


FIXED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1},
        "different_groups": {"g": {"modules": ["fc"], "params": {"dense_ratio": 0.3}}},
    },
    "activation_quantization": inputs("fc", bits=9, range_calibration="static"),
}


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(case=cases(), section=sections())
@example(case=Case(pipe=2, data=2, stage=1, tied=True), section=snip())
@example(case=Case(pipe=4, stage=0), section=snip("^3"))  # three stages have none of the weights that are ranked
@example(case=Case(pipe=2, data=2, stage=3, tied=True), section=FIXED)
@example(case=Case(pipe=2, schedule="zb_v", tied=True), section=snip(schedule_offset_stride=2))
@example(
    case=Case(pipe=2, stage=3, schedule="zb_v"), section=snip()
)  # scores' gradients need the weight while it is whole
def test_stages_have_the_masks_and_ranges_of_one_process(case: Case, section: dict[str, Any]) -> None:
    compare(on_ranks(case, section), alone(case, section))


@pytest.mark.slow
@examples(times=0.5)
@given(before=cases(), after=cases(), section=sections(), stop=st.integers(1, 3))
@example(before=Case(pipe=4), after=Case(pipe=2), section=snip(), stop=2)
@example(before=Case(pipe=2, tied=True), after=Case(pipe=4, tied=True, stage=1), section=FIXED, stop=2)
@example(before=Case(pipe=4), after=Case(pipe=4), section=snip("^3"), stop=1)
def test_a_run_goes_on_with_another_number_of_stages(
    before: Case, after: Case, section: dict[str, Any], stop: int
) -> None:
    before, after = replace(before, data=1), replace(after, data=1, tied=before.tied)
    with tempfile.TemporaryDirectory() as folder:

        def saves(rank: int) -> None:
            engine = engine_of(before, section, replicas=1)
            train(engine, range(stop), [0])
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()

        def resumes(rank: int) -> Outcome:
            engine = engine_of(after, section, replicas=1, seed=99)
            engine.load_checkpoint(folder)
            return outcome(engine, train(engine, range(stop, STEPS), [0]))

        sim.run(before.pipe, saves)
        found = sim.run(after.pipe, resumes)
    losses, *rest = alone(before, section)
    compare(found, (losses[stop:], *rest))
