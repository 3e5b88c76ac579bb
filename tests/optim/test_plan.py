"""What a plan holds from step to step, and what makes it another one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from zoo import optim
from zoo.kernels import loading
from zoo.kernels.update import reference
from zoo.optim.plan import same_tensors

native = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


@native
def test_rows_that_are_held_natively_follow_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer, seen = optim.AdamW([p]), []
    monkeypatch.setattr(reference, "update_row", lambda *args: seen.append(args[2]))
    for mode, expected in (("native", 0), ("reference", 1), ("native", 1)):
        p.grad = torch.ones(3)
        with loading.use_mode(mode):
            optimizer.step()
        assert len(seen) == expected, mode


def test_lists_are_the_same_if_their_tensors_are_the_very_same() -> None:
    one, other, large = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
    assert same_tensors([one, large], [one, large])
    assert not same_tensors([one, large], [other, large])  # though their numbers are equal
    assert not same_tensors([one, large], [one, nn.Parameter(torch.ones(3))])
    assert not same_tensors([one], [one, large])
    assert not same_tensors([large], [one])
    assert torch.equal(one == other, torch.ones(1, dtype=torch.bool))


def made() -> tuple[optim.AdamW, list[nn.Parameter]]:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = optim.AdamW(params)
    step(optimizer, params)
    return optimizer, params


def step(optimizer: optim.AdamW, params: list[nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_another_parameter_of_the_same_value_in_the_place_of_one_is_noticed() -> None:
    optimizer, params = made()
    new = nn.Parameter(params[1].detach().clone())
    optimizer.param_groups[0]["params"][1] = new
    before = params[1].detach().clone()
    step(optimizer, [*params, new])
    assert torch.equal(params[1], before)
    assert not torch.equal(new, before)


@pytest.mark.parametrize("change", ["set", "delete", "update", "pop", "all", "nothing"])
def test_states_that_are_replaced_are_noticed(change: str) -> None:
    optimizer, params = made()
    p, states = params[1], optimizer.state
    zero = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
    (plan,) = optimizer._plans.values()
    {
        "set": lambda: states.__setitem__(p, zero),
        "delete": lambda: states.__delitem__(p),
        "update": lambda: states.update({p: zero}),
        "pop": lambda: states.pop(p),
        "all": lambda: setattr(optimizer, "state", {q: zero if q is p else states[q] for q in params}),
        "nothing": lambda: states[p],
    }[change]()
    step(optimizer, params)
    assert [float(optimizer.state[q]["step"]) for q in params] == [2.0, 2.0 if change == "nothing" else 1.0, 2.0]
    assert (plan in optimizer._plans.values()) is (change == "nothing")


def test_the_states_are_there_from_the_beginning_and_stay_the_same_object() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([p])
    states = optimizer.state
    step(optimizer, [p])
    assert optimizer.state is states
    optimizer.load_state_dict(optimizer.state_dict())
    states = optimizer.state
    step(optimizer, [p])
    assert optimizer.state is states
    assert states[nn.Parameter(torch.ones(1))] == {}  # as torch's


def test_copies_of_the_states_are_those_of_torch() -> None:
    optimizer, _ = made()
    for made_ in (
        copy.copy(optimizer.state), optimizer.state.copy(), optimizer.state | {}, copy.deepcopy(optimizer).state,
        copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state)),
    ):  # fmt: skip
        assert len(made_) == 3
        assert made_["another"] == {}
    assert len(optimizer.state) == 3
