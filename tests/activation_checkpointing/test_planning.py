"""Which units to recompute: the forecast equals what is measured, and the choice is the best one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from benchmarks.activation_checkpointing.memory import Peak
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

from zoo.activation_checkpointing import Plan, UnitCosts, choose, measure, plan
from zoo.activation_checkpointing.planning import peak_bytes, waiting_bytes


class Wide(nn.Module):
    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(x)).exp())


WIDTH, BATCH = 32, 64
UNITS = {
    "wide": lambda: Wide(WIDTH, 4), "linear": lambda: nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh, "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1), "norm": lambda: nn.LayerNorm(WIDTH), "relu": nn.ReLU,
}  # fmt: skip
chains = st.lists(st.sampled_from(sorted(UNITS)), min_size=1, max_size=5)


class Waiting:
    """What autograd has saved and not given back: each memory once, without parameters and the model's input."""

    def __init__(self, *but: torch.Tensor) -> None:
        self.but = {x.untyped_storage().data_ptr() for x in but}
        self.refs: dict[int, list[Any]] = {}

    def pack(self, x: torch.Tensor) -> Any:
        storage = x.untyped_storage()
        key = storage.data_ptr()
        if key not in self.but:
            self.refs[key] = [storage.nbytes(), self.refs.get(key, [0, 0])[1] + 1]
        return x.detach(), _Counted(self, key)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed[0]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, uses in self.refs.values() if uses)


class _Counted:
    def __init__(self, of: Waiting, key: int) -> None:
        self.of, self.key = of, key

    def __del__(self) -> None:
        if self.key in self.of.refs:
            self.of.refs[self.key][1] -= 1


def gradient_of(units: list[Any], x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(forward_of(units, x).sum(), x)
    return found


def forward_of(units: list[Any], x: torch.Tensor) -> torch.Tensor:
    for unit in units:
        x = unit(x)
    return x


@examples(times=4)
@given(names=chains, chosen=st.sets(st.integers(0, 4)))
def test_forecast_bytes_are_those_that_are_measured(names: list[str], chosen: set[int]) -> None:
    units = [UNITS[name]() for name in names]
    chosen = {number for number in chosen if number < len(units)}
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    costs = measure(units, x)
    made = Plan(frozenset(chosen), 0, 0.0, costs).apply(units)
    waiting = Waiting(*(p for unit in units for p in unit.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(waiting.pack, waiting.unpack):
        y = forward_of(made, x)
    assert waiting.num_bytes == waiting_bytes(costs, chosen)
    y.sum().backward()


def test_the_peaks_of_steps_differ_by_what_is_forecast() -> None:
    units: list[nn.Module] = [Wide(WIDTH, 4) for _ in range(8)]
    for unit in units:
        unit.requires_grad_(False)  # gradients of parameters are not what is forecast
    x = torch.randn(256, WIDTH, requires_grad=True)
    costs = measure(units, x)
    over = []
    for chosen in (range(0), range(8), range(0, 8, 2), range(5)):
        with Peak() as seen:
            y = forward_of(Plan(frozenset(chosen), 0, 0.0, costs).apply(units), x)
            y.backward(torch.ones_like(y))
            del y
        over.append(seen.most - peak_bytes(costs, chosen))
    wide = 256 * 4 * WIDTH * 4  # bytes of the widest tensor, of which every unit keeps two
    assert min(over) > 0
    assert max(over) < 5 * wide  # gradients, and results of one operation: the same whatever is chosen
    assert max(over) - min(over) <= wide / 4


costs_of = st.builds(
    UnitCosts, saved_bytes=st.integers(0, 50), input_bytes=st.integers(0, 9), output_bytes=st.integers(0, 9),
    keeps_input=st.booleans(), keeps_output=st.booleans(), forward_s=st.integers(0, 7).map(float),
)  # fmt: skip


@examples(times=10)
@given(costs=st.lists(costs_of, min_size=1, max_size=7), budget=st.integers(0, 200))
def test_the_choice_is_the_best_of_all(costs: list[UnitCosts], budget: int) -> None:
    every = [set(c) for n in range(len(costs) + 1) for c in itertools.combinations(range(len(costs)), n)]
    fitting = [chosen for chosen in every if peak_bytes(costs, chosen) <= budget]
    if not fitting:
        with pytest.raises(ValueError, match=f"budget_bytes={budget} is less than any choice needs"):
            choose(costs, budget)
        return
    found = choose(costs, budget)
    assert found.peak_bytes == peak_bytes(costs, found.recomputed) <= budget
    assert found.recompute_s == min(sum(costs[i].forward_s for i in chosen) for chosen in fitting)
    assert found.recompute_s == sum(costs[i].forward_s for i in found.recomputed)


def test_many_units_are_chosen_from_in_time_and_fit() -> None:
    costs = [
        UnitCosts(saved_bytes=7919 * (i % 97 + 3), input_bytes=512, forward_s=(i * 37 % 101) / 7) for i in range(200)
    ]
    whole, least = peak_bytes(costs, ()), peak_bytes(costs, range(200))
    found = choose(costs, (whole + least) // 2)
    assert found.peak_bytes <= (whole + least) // 2
    assert 0 < found.recompute_s < sum(unit.forward_s for unit in costs) / 2


def test_a_planned_chain_computes_the_same() -> None:
    units = nn.Sequential(*[Wide(WIDTH, 3) for _ in range(5)])
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    state = torch.get_rng_state()
    whole = plan(units, 1 << 40, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not whole.recomputed
    assert all(p.grad is None for p in units.parameters())
    tight = plan(units, whole.peak_bytes // 2, x)
    assert 0 < len(tight.recomputed) < 5
    assert f"at most {tight.peak_bytes} bytes" in str(tight)
    assert torch.equal(*(gradient_of(chain, x) for chain in (list(units), tight.apply(list(units)))))


def test_units_that_change_their_input_are_not_computed_again() -> None:
    units = nn.Sequential(Wide(WIDTH, 3), nn.ReLU(inplace=True), Wide(WIDTH, 3), nn.ReLU(inplace=True))
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    before = x.detach().clone()
    costs = measure(units, x)
    assert torch.equal(x, before)
    assert [unit.changes_input for unit in costs] == [False, True, False, True]
    tight = choose(costs, peak_bytes(costs, (0, 2)))
    assert tight.recomputed <= {0, 2}
    assert torch.equal(*(gradient_of(chain, x) for chain in (list(units), tight.apply(list(units)))))
    with pytest.raises(ValueError, match=r"with each of the 2 units that keep their input recomputed \d+ bytes"):
        choose(costs, 1)
