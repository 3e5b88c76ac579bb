"""Laws 2 and 3 for compressed experts: each rank has those of its own, and together they have the masks, scores and
ranges of one process with all of them; a run goes on with another number of expert-parallel ranks. Which experts are
called depends on the data: on some ranks a step passes by experts that others call.

In fp64, for the reason that test_compression gives."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compression.models import inputs, weights
from tests.laws.test_compressed_stages import sections, snip
from tests.laws.test_pruning import masks
from tests.profiles import examples
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.compression import transforms_of
from zoo.compression.techniques.activation_quantization import StaticInputQuantizer
from zoo.engine import Engine, initialize
from zoo.moe import MixtureOfExperts, ModuleExperts, Top1Gate
from zoo.moe.dispatch import place_of_rank

WIDTH, EXPERTS, STEPS, BATCH = 8, 4, 4, 8


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(number)
        self.fc = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.fc(x))
        return found


class Net(nn.Module):
    def __init__(self, ep_size: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        place, num = place_of_rank(ep_size), EXPERTS // ep_size
        self.first = nn.Linear(WIDTH, WIDTH)
        experts = [Expert(100 * seed + place * num + i) for i in range(num)]
        gate = Top1Gate(WIDTH, EXPERTS)
        self.mixture = MixtureOfExperts(gate, ModuleExperts(experts, EXPERTS, ep_size=ep_size, ep_rank=place))
        self.last = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(11 + seed)
        with torch.no_grad():
            for module in (self.first, gate, self.last):
                for parameter in module.parameters():
                    parameter.normal_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.mixture(h).output
        return (self.last(h) - y).square().mean()


@dataclass(frozen=True)
class Case:
    data: int = 2
    expert: int = 2
    stage: int = 0

    @property
    def world(self) -> int:
        return self.data * self.expert


def engine_of(case: Case, section: dict[str, Any], *, seed: int = 0) -> Engine:
    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(BATCH * STEPS, WIDTH, generator=dice, dtype=torch.float64) for _ in range(2)))
    config = {
        "train_batch_size": BATCH, "seed": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "compression_training": section,
    }  # fmt: skip
    return initialize(config, Net(case.expert, seed).double(), training_data=data)[0]


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def outcome(engine: Engine, steps: int) -> Outcome:
    losses = [float(engine.train_batch()) for _ in range(steps)]
    found = masks(engine)
    for transform in transforms_of(engine.module):
        if isinstance(transform, StaticInputQuantizer) and transform.range is not None:
            found[transform.key] = transform.range
    return losses, engine.optimizer.consolidated_parameters(), found


def run(case: Case, section: dict[str, Any]) -> list[Outcome]:
    return sim.run(case.world, lambda rank: outcome(engine_of(case, section), STEPS))


def compare(found: list[Outcome], wanted: Outcome) -> None:
    names: set[str] = set()
    for losses, values, made in found:
        torch.testing.assert_close(losses, wanted[0], rtol=1e-9, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-8, atol=1e-11, msg=name)
        for name, value in made.items():
            torch.testing.assert_close(value, wanted[2][name], rtol=1e-6, atol=1e-7, msg=name)
        names |= made.keys()
    assert names == wanted[2].keys()


def of_experts(section: dict[str, Any]) -> dict[str, Any]:
    """One expert has the number 3, which is on one of the ranks only; scores are learned of all."""
    learns = section["sparse_pruning"]["shared_parameters"]["method"] == "topk"
    found: dict[str, Any] = json.loads(json.dumps(section).replace("^3", "fc" if learns else r"list.3\\."))
    return found


CASES = st.builds(
    lambda sizes, stage: Case(*sizes, stage), st.sampled_from([(2, 1), (1, 2), (2, 2), (1, 4)]), st.integers(0, 3)
)
FIXED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1},
        "different_groups": {"g": {"modules": ["fc"], "params": {"dense_ratio": 0.3}}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 2},
        "different_groups": {"g": {"modules": ["fc"], "params": {"dense_ratio": 0.5}, "related_modules": [[]]}},
    },
    "activation_quantization": inputs("fc", bits=9, range_calibration="static"),
    "weight_quantization": weights("fc", start=7, target=5, rounding="stochastic"),
}
LEARNED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk"},
        "different_groups": {"g": {"modules": ["fc"], "params": {"dense_ratio": 0.3}}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk"},
        "different_groups": {"g": {"modules": ["fc"], "params": {"dense_ratio": 0.5}, "related_modules": [[]]}},
    },
}


@pytest.mark.slow
@examples(times=0.5, quick=0.34)
@given(case=CASES, section=sections().map(of_experts))
@example(case=Case(), section=snip())
@example(case=Case(stage=3), section=snip(r"list.3\.", block_pattern="4x1"))
@example(case=Case(data=4, expert=1), section=FIXED)
@example(case=Case(), section=FIXED)
@example(case=Case(stage=1), section=LEARNED)
def test_ranks_with_other_experts_have_the_masks_and_ranges_of_one_process(case: Case, section: dict[str, Any]) -> None:
    compare(run(case, section), run(Case(1, 1), section)[0])


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(before=CASES, after=CASES, section=sections().map(of_experts), stop=st.integers(1, 3))
@example(before=Case(), after=Case(1, 4, 2), section=FIXED, stop=2)
@example(before=Case(1, 4), after=Case(2, 1), section=snip(), stop=2)
@example(before=Case(1, 2), after=Case(1, 1), section=LEARNED, stop=2)
def test_a_run_goes_on_with_experts_on_other_ranks(
    before: Case, after: Case, section: dict[str, Any], stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def saves(rank: int) -> None:
            engine = engine_of(before, section)
            outcome(engine, stop)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()

        def resumes(rank: int) -> Outcome:
            engine = engine_of(after, section, seed=5)
            engine.load_checkpoint(folder)
            return outcome(engine, STEPS - stop)

        sim.run(before.world, saves)
        found = sim.run(after.world, resumes)
    losses, *rest = run(Case(1, 1), section)[0]
    compare(found, (losses[stop:], *rest))


def test_scores_that_only_some_ranks_would_learn_are_refused() -> None:
    section = json.loads(json.dumps(LEARNED["sparse_pruning"]).replace('"fc"', json.dumps(r"list.3\.")))

    def job(rank: int) -> None:
        with pytest.raises(ValueError, match="let the patterns mean the same of each expert"):
            engine_of(Case(), {"sparse_pruning": section})

    sim.run(4, job)
