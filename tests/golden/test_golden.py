"""The first twenty losses of a small training run, written down.

Everything that decides them is made here from integers and Python's own ``random``: the text, the initial weights, the
order of the data. So they do not depend on the release of Python or on torch's random numbers, and the same twenty
losses are expected of every ZeRO stage and every number of ranks (a step's samples are the same, only dealt out
differently).

Tolerance. What differs between stages, world sizes, processors and releases of torch is the order of float32 additions,
each off by at most 2^-24 relative. Losses are near 5 and mean over some 250 terms, so a loss itself is good to about
1e-6. Adam divides by sqrt(v), which lets rounding noise through at full size where a gradient is tiny: within twenty
steps of learning rate 0.003 such noise moves a loss by some 1e-5 at most (measured over 1 to 4 ranks and stages 0 to 3:
1e-6). TOLERANCE is 1e-4 for other processors. A wrong scale, a missing reduction, a sample read twice moves them by
more than 1e-2.

``PYTHONPATH=. python tests/golden/test_golden.py write`` writes the file anew, on one rank at stage 0.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from tests.processes import run_ranks

from zoo import sim
from zoo.engine import initialize
from zoo.examples.byte_lm import ByteGPT, ByteWindows
from zoo.examples.byte_lm.model import ModelConfig

GOLDEN = Path(__file__).with_name("byte_lm.json")
TOLERANCE = 1e-4
STEPS = 20
CONTEXT = 32


def text(num_bytes: int = 6000) -> torch.Tensor:
    """Words of a made-up language: state' = 1103515245 state + 12345 mod 2^31, its upper bits choose the next word."""
    words = [b"ka", b"lo", b"miru", b"ten", b"vasa", b"-", b"ou", b"shi", b"\n", b"prel", b"zu", b"97", b"q", b"ette"]
    state, out = 42, bytearray()
    while len(out) < num_bytes:
        state = (1103515245 * state + 12345) % 2**31
        out += words[(state >> 16) % len(words)] + b" "
    return torch.frombuffer(out[:num_bytes], dtype=torch.uint8)


def model() -> ByteGPT:
    """Weights from Python's random, seeded by the parameter's name."""
    net = ByteGPT(ModelConfig(layers=2, width=32, heads=2, context=CONTEXT))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() == 2:
                dice = random.Random(name)
                values = [dice.gauss(0.0, 0.02) for _ in range(parameter.numel())]
                parameter.copy_(torch.tensor(values, dtype=torch.float64).view(parameter.shape))
    return net


def losses(stage: int) -> list[float]:
    """One rank's run."""
    torch.set_num_threads(1)
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "seed": 7,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": STEPS}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 40},
    }
    data = text()
    windows = ByteWindows(data, [(0, len(data))], CONTEXT)
    engine, *_ = initialize(config, model(), training_data=windows)
    return [float(engine.train_batch()) for _ in range(STEPS)]


def check(found: object) -> None:
    expected = json.loads(GOLDEN.read_text())["losses"]
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_two_simulated_ranks(stage: int) -> None:
    first, second = sim.run(2, lambda rank: losses(stage))
    assert first == second
    check(first)


@pytest.mark.matrix
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (4, 2), (4, 3)])
def test_other_numbers_of_ranks(world_size: int, stage: int) -> None:
    for found in sim.run(world_size, lambda rank: losses(stage)):
        check(found)


@pytest.mark.dear
def test_the_stages_agree_to_the_last_bit() -> None:
    runs = [sim.run(2, lambda rank, stage=stage: losses(stage))[0] for stage in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def losses_on_a_rank(rank: int, stage: int) -> list[float]:
    return losses(stage)


@pytest.mark.dear
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_processes_over_gloo(stage: int) -> None:
    found = run_ranks(2, losses_on_a_rank, stage)
    assert sorted(found) == [0, 1]
    for values in found.values():
        check(values)


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    about = "written by tests/golden/test_golden.py, which says what they are"
    GOLDEN.write_text(json.dumps({"about": about, "losses": losses(0)}, indent=1) + "\n", encoding="utf-8")
