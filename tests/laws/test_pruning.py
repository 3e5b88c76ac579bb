"""Laws 2 and 3 for masks and their scores: they are logical tensors, the same on every rank, at every stage, and after
a checkpoint is read at another world size. In fp64, for the reason that test_compression gives."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compression.models import Words, document, masters, start, train, weights
from tests.profiles import examples
from torch import Tensor

from zoo import sim
from zoo.compression import transforms_of
from zoo.compression.pruning.elements import ElementMask, LearnedElementMask
from zoo.compression.pruning.snip import SnipMask
from zoo.compression.pruning.units import UnitMask
from zoo.engine import Engine

STEPS = 4


def group(modules: list[str], ratio: float | None, **more: Any) -> dict[str, Any]:
    return {"g": {"modules": modules, "params": {} if ratio is None else {"dense_ratio": ratio}, **more}}


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """Of compression_training: one to three techniques, begun at different steps."""
    ratio, offset = st.sampled_from([0.1, 0.4, 0.8]), st.integers(0, 2)
    kind = draw(st.sampled_from(["l1", "topk", "2:4", "snip", "none"]))
    found: dict[str, Any] = {}
    if kind == "snip":
        begin = draw(offset)
        found["sparse_pruning"] = {
            "shared_parameters": {
                "enabled": True, "method": "snip_momentum", "schedule_offset": begin, "schedule_offset_end": begin + 2,
                "schedule_offset_stride": draw(st.integers(1, 2)), "dense_ratio": draw(ratio),
                "block_pattern": draw(st.sampled_from(["4x1", "1x1"])),
            },
            "different_groups": {},
        }  # fmt: skip
    elif kind != "none":
        shared = {"enabled": True, "schedule_offset": draw(offset), "method": "topk" if kind == "topk" else "l1"}
        blocks = {"block_pattern": "2:4"} if kind == "2:4" else {}
        found["sparse_pruning"] = {
            "shared_parameters": {**shared, **blocks},
            "different_groups": group([draw(st.sampled_from(["*", "up"]))], None if blocks else draw(ratio)),
        }
    if draw(st.booleans()) or not found:
        method = draw(st.sampled_from(["l1", "topk"]))
        found["row_pruning"] = {
            "shared_parameters": {"enabled": True, "schedule_offset": draw(offset), "method": method},
            "different_groups": group(["up"], draw(ratio), related_modules=[["down"]]),
        }
    if draw(st.booleans()):
        found["weight_quantization"] = weights("up|down", start=6, target=4, schedule_offset=draw(offset))
    return found


ALL = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "method": "snip_momentum", "schedule_offset": 0,
                              "schedule_offset_end": 3, "dense_ratio": 0.3},
        "different_groups": {},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, "method": "topk"},
        "different_groups": group(["up"], 0.5, related_modules=[["down"]]),
    },
    "weight_quantization": weights("up|down", start=6, target=4),
}  # fmt: skip
FIXED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1}, "different_groups": group(["*"], 0.3),
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 2},
        "different_groups": group(["up"], 0.5, related_modules=[["down"]]),
    },
}  # fmt: skip

LEARNED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk"},
        "different_groups": group(["*"], 0.3),  # the head too, which is tied to the table
    },
}


def engine_of(stage: int, section: dict[str, Any], *, micro: int = 1, recompute: bool = False, seed: int = 0) -> Engine:
    config = document(stage, compression=section, gradient_accumulation_steps=micro)
    return start(config, Words(recompute=recompute, seed=seed).double())


def masks(engine: Engine) -> dict[str, Tensor]:
    """What is no parameter."""
    found = {}
    for transform in transforms_of(engine.module):
        value = None
        if isinstance(transform, UnitMask):
            value = transform.stays
        elif isinstance(transform, (ElementMask, SnipMask)) and not isinstance(transform, LearnedElementMask):
            value = transform.mask
        if value is not None:
            found[f"{transform.site.name}/{transform.site.technique}"] = value.clone()
    return found


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def run(world: int, stage: int, section: dict[str, Any], *, micro: int = 1, recompute: bool = False) -> Outcome:
    """Losses, parameters and masks, the same on every rank."""

    def job(rank: int) -> Outcome:
        engine = engine_of(stage, section, micro=micro, recompute=recompute)
        return train(engine, STEPS), masters(engine), masks(engine)

    found = sim.run(world, job)
    for losses, values, stays in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())
        assert stays.keys() == found[0][2].keys()
        assert all(torch.equal(value, found[0][2][name]) for name, value in stays.items())
    return found[0]


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(section=sections(), world=st.sampled_from([2, 4]), micro=st.sampled_from([1, 2]), recompute=st.booleans())
@example(section=ALL, world=2, micro=1, recompute=True)
@example(section=FIXED, world=2, micro=1, recompute=False)
@example(section=LEARNED, world=2, micro=2, recompute=False)
def test_every_stage_has_the_same_masks_and_computes_the_same_bits(
    section: dict[str, Any], world: int, micro: int, recompute: bool
) -> None:
    alone = run(1, 0, section)
    first = run(world, 0, section, micro=micro, recompute=recompute)
    torch.testing.assert_close(first[0], alone[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(first[1], alone[1], rtol=1e-7, atol=1e-9)
    assert all(torch.equal(value, alone[2][name]) for name, value in first[2].items())
    for stage in (1, 2, 3):
        other = run(world, stage, section, micro=micro, recompute=recompute)
        assert all(torch.equal(value, first[2][name]) for name, value in other[2].items())
        if micro == 1:
            assert other[0] == first[0]
            assert all(torch.equal(value, first[1][name]) for name, value in other[1].items())
        else:  # stages 2 and 3 reduce after each backward, the others once: their sums are rounded otherwise
            torch.testing.assert_close(other[:2], first[:2], rtol=1e-9, atol=1e-12)


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(
    section=sections(), before=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)),
    after=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)), stop=st.integers(1, 3),
)  # fmt: skip
@example(section=ALL, before=(2, 3), after=(4, 1), stop=2)
@example(section=FIXED, before=(2, 3), after=(1, 0), stop=2)
@example(section=ALL, before=(2, 2), after=(2, 2), stop=1)
def test_a_run_that_is_resumed_at_any_size_and_stage_has_the_masks_that_it_had(
    section: dict[str, Any], before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def saves(rank: int) -> Outcome:
            engine = engine_of(before[1], section, micro=2)
            train(engine, stop)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            return train(engine, STEPS), masters(engine), masks(engine)

        def resumes(rank: int) -> Outcome:
            engine = engine_of(after[1], section, micro=2, seed=3)
            engine.load_checkpoint(folder)
            return train(engine, STEPS), masters(engine), masks(engine)

        wanted, found = sim.run(before[0], saves)[0], sim.run(after[0], resumes)[0]
    assert found[2].keys() == wanted[2].keys()
    assert all(torch.equal(value, wanted[2][name]) for name, value in found[2].items())
    if before == after:
        assert found[0] == wanted[0]
        assert all(torch.equal(value, wanted[1][name]) for name, value in found[1].items())
    else:
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=0)
