"""Laws 2, 3 and 8 for compressed models: the stage changes no bit, a run that is resumed anywhere goes on as if it had
never stopped, and whatever a user does computes what plain torch computes with the quantised weights.

In fp64, so that what ranks and one process round differently is far below the step of any quantiser, and hardly ever
moves a weight from one step to the next.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.compression.models import Words, document, inputs, masters, start, train, weights
from tests.profiles import examples
from torch import Tensor, nn

from zoo import sim
from zoo.compression import CompressionScheduler, detach, init_compression, redundancy_clean, transforms_of
from zoo.compression.quantisers import noise, symmetric
from zoo.compression.schedule import bits_at
from zoo.engine import Engine

STEPS = 4


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """Of compression_training: one or both quantisers, begun at different steps."""
    target = draw(st.integers(1, 6))
    found = {
        "weight_quantization": weights(
            draw(st.sampled_from(["*", "embed", "layer", "head|up"])),
            start=draw(st.integers(target, 9)), target=target, schedule_offset=draw(st.integers(0, 2)),
            rounding=draw(st.sampled_from(["nearest", "stochastic"])),
            quantization_type=draw(st.sampled_from(["symmetric", "asymmetric"])) if target > 2 else "symmetric",
            quantize_groups=draw(st.sampled_from([1, 4])),
            fp16_mixed_quantize={"enabled": draw(st.booleans()), "quantize_change_ratio": 0.3},
        ),
        "activation_quantization": inputs(
            draw(st.sampled_from(["*", "down"])), bits=draw(st.integers(3, 9)),
            range_calibration=draw(st.sampled_from(["static", "dynamic"])), schedule_offset=draw(st.integers(0, 2)),
            quantization_type=draw(st.sampled_from(["symmetric", "asymmetric"])),
        ),
    }  # fmt: skip
    for name in draw(st.sampled_from([(), ("weight_quantization",), ("activation_quantization",)])):
        del found[name]
    return found


BOTH = {
    "weight_quantization": weights(start=5, target=3, rounding="stochastic", schedule_offset=1),
    "activation_quantization": inputs(bits=5, range_calibration="static"),
}


def engine_of(
    stage: int, section: dict[str, Any], *, micro: int = 1, recompute: bool = False, seed: int = 0
) -> Engine:  # fmt: skip
    config = document(stage, compression=section, gradient_accumulation_steps=micro)
    return start(config, Words(recompute=recompute, seed=seed).double())


def run(
    world: int, stage: int, section: dict[str, Any], *, micro: int = 1, recompute: bool = False
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """The losses and the parameters afterwards, the same on every rank."""

    def job(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = engine_of(stage, section, micro=micro, recompute=recompute)
        return train(engine, STEPS), masters(engine)

    found = sim.run(world, job)
    for losses, values in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in values.items())
    return found[0]


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(section=sections(), world=st.sampled_from([2, 4]), micro=st.sampled_from([1, 2]), recompute=st.booleans())
@example(section=BOTH, world=2, micro=1, recompute=True)
def test_every_stage_computes_the_same_bits_and_what_one_process_computes(
    section: dict[str, Any], world: int, micro: int, recompute: bool
) -> None:
    alone = run(1, 0, section)
    first = run(world, 0, section, micro=micro, recompute=recompute)
    # fp64 rounds at 1e-16; Adam's division by the root of a tiny second moment, and 4 steps, make 1e-9 of it at most.
    torch.testing.assert_close(first[0], alone[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(first[1], alone[1], rtol=1e-7, atol=1e-9)
    for stage in (1, 2, 3):
        other = run(world, stage, section, micro=micro, recompute=recompute)
        if micro == 1:
            assert other[0] == first[0]
            assert all(torch.equal(value, first[1][name]) for name, value in other[1].items())
        else:  # stages 2 and 3 reduce after each backward, the others once: their sums are rounded otherwise
            torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(
    section=sections(), before=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)),
    after=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 3)), stop=st.integers(1, 3),
)  # fmt: skip
@example(section=BOTH, before=(2, 3), after=(4, 1), stop=2)
def test_a_run_that_is_resumed_at_any_size_and_stage_goes_on_as_if_it_had_never_stopped(
    section: dict[str, Any], before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def saves(rank: int) -> tuple[list[float], list[float]]:
            engine = engine_of(before[1], section, micro=2)
            first = train(engine, stop)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            return first, train(engine, STEPS)

        def resumes(rank: int) -> list[float]:
            engine = engine_of(after[1], section, micro=2, seed=3)
            engine.load_checkpoint(folder)
            return train(engine, STEPS)

        wanted = sim.run(before[0], saves)[0][1]
        found = sim.run(after[0], resumes)[0]
    if before[0] == after[0]:
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


class Users(RuleBasedStateMachine):
    """A user of one model, and a twin in plain torch that is told the weights to compute with."""

    @initialize(offset=st.integers(0, 3), stochastic=st.booleans())
    def begin(self, offset: int, stochastic: bool) -> None:
        torch.set_num_threads(1)
        self.section = {
            "weight_quantization": weights(
                start=4, target=3, period=1, schedule_offset=offset,
                rounding="stochastic" if stochastic else "nearest",
            )
        }  # fmt: skip
        self.document = {"compression_training": self.section, "seed": 3}
        self.offset, self.stochastic, self.step, self.number = offset, stochastic, 0, 0
        self.twin = Words().double()
        self.model = init_compression(Words().double(), self.document)
        self.on = True

    def quantised(self, name: str, value: Tensor) -> Tensor:
        if not self.on or value.dim() < 2 or self.step < self.offset:
            return value.detach()
        bits = bits_at(self.step, offset=self.offset, start_bits=4, target_bits=3, period=1)
        rows = value.detach().reshape(value.shape[0] if name == "embed.weight" else 1, -1)
        u = noise(rows, seed=3, step=self.step, name=name) if self.stochastic else None
        return symmetric(rows, bits, u)[0].reshape(value.shape)

    def check(self, *, backward: bool) -> None:
        self.number += 1
        dice = torch.Generator().manual_seed(self.number)
        x, y = (torch.randint(12, (2, 3), generator=dice) for _ in range(2))
        plain = copy.deepcopy(self.twin)
        for name, value in plain.named_parameters():
            value.data = self.quantised(name, value)
        with torch.set_grad_enabled(backward):
            found, wanted = self.model(x, y), plain(x, y)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        if backward:
            self.model.zero_grad()
            found.backward()
            wanted.backward()
            for (name, ours), theirs in zip(self.model.named_parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14, msg=name)
                assert torch.equal(ours, dict(self.twin.named_parameters())[name])

    @rule(backward=st.booleans())
    def computes(self, backward: bool) -> None:
        self.check(backward=backward)

    @rule(recompute=st.booleans())
    def recomputes(self, recompute: bool) -> None:
        self.model.recompute = recompute
        self.check(backward=True)

    @rule()
    def steps(self) -> None:
        for parameter, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            change = 0.01 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).reshape(parameter.shape)
            for value in (parameter, theirs):
                value.data.add_(change)
        self.step += 1
        CompressionScheduler(self.model).set_step(self.step)

    @rule(training=st.booleans())
    def changes_mode(self, training: bool) -> None:
        self.model.train(training)
        self.check(backward=False)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "state_dict"]))
    def copies(self, how: str) -> None:
        if how == "deepcopy":
            self.model = copy.deepcopy(self.model)
        elif how == "pickle":
            self.model = pickle.loads(pickle.dumps(self.model))
        else:
            self.model.load_state_dict(self.twin.state_dict())
        self.check(backward=True)

    @precondition(lambda self: self.on)
    @rule()
    def compresses_again(self) -> None:
        before = transforms_of(self.model)
        with pytest.raises(ValueError, match="changed twice in one way"):
            init_compression(self.model, self.document)
        assert [id(t) for t in transforms_of(self.model)] == [id(t) for t in before]
        self.check(backward=True)

    @rule()
    def fails_inside(self) -> None:
        with pytest.raises(IndexError):
            self.model(torch.full((1, 2), 99), torch.zeros(1, 2, dtype=torch.long))
        self.check(backward=True)

    @precondition(lambda self: self.on)
    @rule()
    def detaches(self) -> None:
        detach(self.model)
        self.on = False
        assert all(
            type(m).__mro__[1] is not type(n) for m, n in zip(self.model.modules(), self.twin.modules(), strict=True)
        )
        assert [type(m) for m in self.model.modules()] == [type(m) for m in self.twin.modules()]
        self.check(backward=True)

    @precondition(lambda self: not self.on)
    @rule()
    def compresses(self) -> None:
        init_compression(self.model, self.document)
        CompressionScheduler(self.model).set_step(self.step)
        self.on = True
        self.check(backward=True)

    @precondition(lambda self: self.on)
    @rule()
    def cleans(self) -> None:
        redundancy_clean(self.model, self.document)
        self.on = False
        for name, value in self.twin.named_parameters():
            if value.dim() >= 2:
                rows = value.detach().reshape(value.shape[0] if name == "embed.weight" else 1, -1)
                value.data.copy_(symmetric(rows, 3)[0].reshape(value.shape))
        assert all(torch.equal(*pair) for pair in zip(self.model.parameters(), self.twin.parameters(), strict=True))
        self.check(backward=True)


TestUsers = Users.TestCase


def test_a_name_of_the_model_is_hidden_for_no_longer_than_a_call() -> None:
    """The parameter is what ``module.weight`` says, before, after and between calls."""
    model = init_compression(Words(), {"compression_training": {"weight_quantization": weights()}})
    x = torch.zeros(1, 2, dtype=torch.long)
    for _ in range(2):
        model(x, x).backward()
        for module in itertools.chain([model.embed, model.head], (m for m in model.layer.modules())):
            if isinstance(module, nn.Linear | nn.Embedding):
                assert isinstance(module.weight, nn.Parameter)
                assert "weight" not in module.__dict__
