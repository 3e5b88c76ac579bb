"""Optimizers that look at more of a parameter than its elements: plain torch's numbers at every stage, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.zero.update.rules import (
    KINDS,
    LR,
    WHOLE,
    Ruled,
    by_address,
    by_id,
    factored,
    in_one_process,
    loss_of,
    model_of,
    not_rebuilt,
    step_wrapped,
    under_zero,
    with_rule,
)
from torch import nn

from zoo import sim
from zoo.zero import ZeroOptimizer
from zoo.zero.update.trial import Trial


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_at_stage_0_any_optimizer_computes_plain_torchs_numbers(kind: str, world: int) -> None:
    expected = in_one_process(kind, world, 3, 0.0)
    for found in sim.run(world, lambda rank: under_zero(kind, rank, 3, 0.0, stage=0)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WHOLE)
def test_what_needs_whole_parameters_is_refused_where_ranks_split_them(kind: str) -> None:
    def fn(rank: int) -> str:
        model = model_of()
        with pytest.raises(NotImplementedError) as caught:
            ZeroOptimizer(model, optimizer=KINDS[kind](model), stage=2)
        assert torch.equal(next(model.parameters()), next(model_of().parameters()))
        return str(caught.value)

    for text in sim.run(2, fn):
        assert "whole and as they are" in text
        assert "2 ranks split the optimizer states" in text
        assert "Use stage 0" in text


@pytest.mark.dear
@examples(times=10)
@given(
    kind=st.sampled_from(sorted(KINDS)), world=st.integers(1, 3), stage=st.integers(0, 3),
    clip=st.sampled_from([0.0, 0.1]), bucket=st.sampled_from([10, 60, 10_000]),
)  # fmt: skip
def test_plain_torchs_numbers_or_a_refusal(kind: str, world: int, stage: int, clip: float, bucket: int) -> None:
    options = {"stage": stage, "reduce_bucket_size": bucket, "param_persistence_threshold": 0}
    if kind in WHOLE and stage and world > 1:
        with pytest.raises(sim.RankError) as caught:
            sim.run(world, lambda rank: under_zero(kind, rank, 1, clip, **options))
        assert isinstance(caught.value.__cause__, NotImplementedError)
        return
    # In fp64: sums of three ranks round in another order, and these rules divide a small gradient by its own size.
    expected = in_one_process(kind, world, 3, clip, torch.float64)
    for found in sim.run(world, lambda rank: under_zero(kind, rank, 3, clip, torch.float64, **options)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_rule_by_strides_is_refused_where_they_do_not_stay() -> None:
    def fn() -> None:
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rule = with_rule(lambda self, group, index, p: 0.1 if p.is_contiguous() else 1.0)
        with pytest.raises(NotImplementedError, match="order of a parameter's elements in memory"):
            ZeroOptimizer(model, optimizer=rule(model), stage=0)

    fn()


def test_an_attribute_that_comes_later_is_refused_by_name() -> None:
    def fn(rank: int, late: bool) -> None:
        model = model_of()
        make = with_rule(lambda self, group, index, p: getattr(p, "lr_scale", 1.0))
        optimizer = ZeroOptimizer(model, optimizer=make(model), stage=1)
        if late:
            model[2].weight.lr_scale = 0.1
        loss_of(model, rank, 0).backward()
        optimizer.step()

    sim.run(2, lambda rank: fn(rank, False))
    with pytest.raises(sim.RankError, match=r"'2.weight' has the attribute 'lr_scale' since"):
        sim.run(2, lambda rank: fn(rank, True))


@pytest.mark.parametrize("rows", [300_000, 30_000_000])
def test_a_rule_for_large_parameters_is_found_without_their_memory(rows: int) -> None:
    made = nn.Parameter(torch.zeros(1, 1).expand(rows, 8))
    small = nn.Parameter(torch.zeros(3))
    for most, refused in ((rows * 4, True), (rows * 16, False)):
        cls = type(
            "Large", (Ruled,), {"rule": lambda self, group, index, p, most=most: 1.0 if p.numel() < most else 2.0}
        )
        found = Trial(lambda groups, cls=cls: cls(groups), [{"params": [made, small]}], "Large").why_whole()
        assert (found is not None) == refused


def test_an_optimizer_of_torch_is_tried_once_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    original = Trial.why_whole
    monkeypatch.setattr(Trial, "why_whole", lambda self: (tried.append(self._name), original(self))[1])

    def make(**options: Any) -> int:
        tried.clear()
        sim.run(1, lambda rank: ZeroOptimizer(model_of(), optimizer=torch.optim.NAdam, lr=LR, **options))
        return len(tried)

    assert [make(eps=3e-7), make(eps=3e-7)] == [1, 0]
    assert [make(eps=4e-7), make(eps=4e-7)] == [1, 0]
    assert make(eps=4e-7, weight_decay=1) == 1
    assert make(eps=4e-7, weight_decay=1.0) == 1, "equal to 1, and not the same"
    assert [make(eps=4e-7, foreach=None), make(eps=4e-7, foreach=None)] == [1, 0]
    assert [make(eps=4e-7, betas=[0.5, 0.75]), make(eps=4e-7, betas=[0.5, 0.75])] == [1, 0]
    for _ in range(2):
        assert make(eps=torch.tensor(4e-7)) == 1, "a tensor's text is not all of it"

    class Mine(torch.optim.NAdam):
        pass

    for _ in range(2):
        tried.clear()
        sim.run(1, lambda rank: ZeroOptimizer(model_of(), optimizer=Mine, lr=LR, eps=4e-7))
        assert len(tried) == 1, "what a class of others does may depend on anything"

    step = torch.optim.NAdam.step
    monkeypatch.setattr(torch.optim.NAdam, "step", lambda self, closure=None: step(self, closure))
    assert make(eps=4e-7) == 1, "another step"


def test_what_a_trial_says_of_options_is_said_each_time() -> None:
    for _ in range(2):
        with pytest.raises(sim.RankError, match="Invalid epsilon value"):
            sim.run(1, lambda rank: ZeroOptimizer(model_of(), optimizer=torch.optim.NAdam, lr=LR, eps=-1.0))


# States --------------------------------------------------------------------------------------------------------------


def biased(model: nn.Module) -> torch.optim.Optimizer:
    """Keeps a state that is no row-major tensor, and one of another shape."""

    class Biased(Ruled):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "turned" not in state:
                        state["turned"] = torch.zeros(p.shape[::-1]).permute(*reversed(range(p.dim())))
                        state["rows"] = torch.zeros(3, p.shape[0])
                    state["turned"].add_(p.grad)
                    state["rows"].mul_(0.5).add_(p.grad.reshape(p.shape[0], -1).sum(1))
                    p.data.sub_(0.01 * state["turned"])
                    p.data.reshape(p.shape[0], -1).sub_(0.01 * state["rows"][1, :, None])

    return Biased(model.parameters())


OF_STATES = {"dim": KINDS["dim"], "Adafactor": factored, "id": by_id, "biased": biased, "wrapped step": step_wrapped}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OF_STATES)
@pytest.mark.parametrize("form", ["slices", "state_dict"])
def test_a_run_goes_on_from_its_saved_states(kind: str, form: str) -> None:
    def steps(model: nn.Module, optimizer: ZeroOptimizer, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def saved(rank: int) -> Any:
        model = model_of()
        optimizer = ZeroOptimizer(model, optimizer=OF_STATES[kind](model), stage=0, reduce_bucket_size=30)
        steps(model, optimizer, rank, 0, 2)
        slices = {(s.role, s.name, s.start): s.tensor.clone() for s in optimizer.state_slices()}
        state = optimizer.state_dict()
        scalars = optimizer.state_scalars()
        steps(model, optimizer, rank, 2, 4)
        return slices, scalars, state, optimizer.consolidated_parameters()

    runs = sim.run(2, saved)
    logical: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for slices, *_ in runs:
        for (role, name, start), tensor in slices.items():
            assert start not in logical.setdefault((name, role), {}), "two ranks own one element"
            logical[name, role][start] = tensor

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        parts = logical[name, role]
        return torch.cat([parts[s] for s in sorted(parts)])[start : start + length]

    def loaded(rank: int) -> dict[str, torch.Tensor]:
        model = model_of()
        optimizer = ZeroOptimizer(model, optimizer=OF_STATES[kind](model), stage=0, reduce_bucket_size=30)
        if form == "slices":
            optimizer.load_state(read, runs[0][1] | runs[1][1])
        else:
            optimizer.load_state_dict(runs[rank][2])
        steps(model, optimizer, rank, 2, 4)
        return optimizer.consolidated_parameters()

    for rank, found in enumerate(sim.run(2, loaded)):
        for name, value in found.items():
            assert torch.equal(value, runs[rank][3][name]), name


# The instance afterwards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", ["added attribute", "wrapped step"])
def test_an_attribute_set_on_the_instance_later_counts(stage: int, kind: str) -> None:
    world = 1 if kind in WHOLE else 2

    def run(instance: Any, step_with: Any, model: nn.Module, ranks: list[int]) -> list[torch.Tensor]:
        for step in range(3):
            instance.damping = 1.0 / (step + 1)
            for rank in ranks:
                (loss_of(model, rank, step) / len(ranks)).backward()
            step_with.step()
            step_with.zero_grad()
        return [p.detach() for p in model.parameters()]

    def make(model: nn.Module) -> Any:
        cls = type("Damped", (Ruled,), {"rule": lambda self, group, index, p: self.damping})
        return cls(model.parameters()) if kind not in WHOLE else step_wrapped(model)

    plain = model_of()
    optimizer = make(plain)
    optimizer.damping = 1.0
    expected = run(optimizer, optimizer, plain, list(range(world)))

    def fn(rank: int) -> list[torch.Tensor]:
        model = model_of()
        instance = make(model)
        instance.damping = 1.0
        zero = ZeroOptimizer(model, optimizer=instance, stage=stage)
        run(instance, zero, model, [rank])
        return list(zero.consolidated_parameters().values())

    for found in sim.run(world, fn):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_method_replaced_later_is_refused_by_name() -> None:
    model = model_of()
    instance: Any = Ruled(model.parameters())
    zero = ZeroOptimizer(model, optimizer=instance, stage=1)
    instance.rule = lambda group, index, p: 0.5
    loss_of(model, 0, 0).backward()
    with pytest.raises(ValueError, match=r"rule\(\) of the Ruled instance was replaced after"):
        zero.step()


def not_rebuilt_by_address(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = not_rebuilt(model)
    optimizer.slow = [p.data_ptr() for p in model.parameters()]
    return optimizer  # type: ignore[no-any-return]


ADDRESSES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "a tensor, for a kernel": lambda all_of: torch.tensor([p.data_ptr() for p in all_of]),
    "an array": lambda all_of: np.array([p.data_ptr() for p in all_of], dtype=np.uint64),
    "text": lambda all_of: {str(p.data_ptr()): 0.1 for p in all_of},
    "hexadecimal": lambda all_of: {hex(p.data_ptr()): 0.1 for p in all_of},
    "beside the parameters": lambda all_of: [(p, p.data_ptr()) for p in all_of],
}


@pytest.mark.parametrize("kept", ADDRESSES)
@pytest.mark.parametrize("holds", [False, True])
def test_addresses_are_found_in_whatever_form_they_are_kept(kept: str, holds: bool) -> None:
    model = model_of()
    optimizer: Any = not_rebuilt(model)
    if holds:
        optimizer.parameters = list(model.parameters())  # which would do, alone
    optimizer.slow = ADDRESSES[kept](list(model.parameters()))
    with pytest.raises(NotImplementedError, match=r"by its attribute 'slow' it knows parameters by their address"):
        ZeroOptimizer(model, optimizer=optimizer, stage=0)


def test_what_an_optimizer_keeps_besides_is_looked_at_and_does_not_matter() -> None:
    class Keeps(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = LR) -> None:
            super().__init__(params, lr=lr)
            self.texts = ["0x10", "12", "a", "9" * 5000]
            self.numbers = [0, -1, True, 10**400]
            self.tensors = [torch.arange(10), torch.zeros(0, dtype=torch.int64), torch.ones(2, dtype=torch.uint64)]
            self.odd = [torch.zeros(3, dtype=torch.int64, device="meta"), torch.eye(3, dtype=torch.int64).to_sparse()]
            self.nested = torch.nested.nested_tensor([torch.ones(2, dtype=torch.int64)])
            self.arrays = [np.arange(5), np.array(["a", None], dtype=object)]

    model = model_of()
    for stage in range(4):
        ZeroOptimizer(model, optimizer=Keeps, stage=stage).close()
        ZeroOptimizer(model, optimizer=Keeps(model.parameters()), stage=stage).close()


STORAGES: dict[str, Callable[..., float]] = {
    "the size": lambda self, group, index, p: 2.0 if p.untyped_storage().nbytes() == p.nbytes else 1.0,
    "the address": lambda self, group, index, p: self.__dict__.setdefault("seen", {}).setdefault(
        p.untyped_storage().data_ptr(), 1.0 + p.dim()
    ),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("what", STORAGES)
def test_a_rule_by_the_storage_of_a_parameter_is_refused(stage: int, what: str) -> None:
    model = model_of()
    with pytest.raises(NotImplementedError, match=r"its update depends on the storage of a parameter"):
        ZeroOptimizer(model, optimizer=with_rule(STORAGES[what])(model), stage=stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("make", [by_address, not_rebuilt_by_address])
def test_a_rule_by_addresses_is_refused_and_the_model_stays_what_it_was(stage: int, make: Any) -> None:
    model = model_of()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"by its attribute 'slow' it knows parameters by their address"):
        ZeroOptimizer(model, optimizer=make(model), stage=stage)
    assert [p.data_ptr() for p in model.parameters()] == before
