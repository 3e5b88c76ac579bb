"""Grids, GPTQ and the recipe against NumPy in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo.compression.post_training import (
    Binary,
    Floating,
    Grid,
    Inputs,
    Recipe,
    Ternary,
    Uniform,
    gptq,
    low_rank,
    nearest,
    quantise,
)  # fmt: skip
from zoo.compression.post_training.grids import FORMATS, fitted

GRIDS: list[Grid] = [
    *(Uniform(bits=bits, symmetric=symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
    *(Floating(format=name) for name in FORMATS), Floating(format="fp4_e2m1", power_of_two=True), Ternary(), Binary(),
]  # fmt: skip
FINITE = st.floats(-1e4, 1e4, width=32)
ROWS = st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(FINITE, min_size=n, max_size=n), min_size=1, max_size=4))


def values_of(grid: Grid, params: tuple[torch.Tensor, ...]) -> np.ndarray:
    """All values that the first group may have."""
    if isinstance(grid, Uniform):
        codes = range(-grid.limit if grid.symmetric else 0, grid.limit + 1)
    elif isinstance(grid, Floating):
        codes = range(-len(grid.table), len(grid.table))
    else:
        codes = (-1, 0, 1) if isinstance(grid, Ternary) else (-1, 1)
    found = grid.decode(torch.tensor([list(codes)], dtype=torch.int16), tuple(p[:1] for p in params))
    return found[0].double().numpy()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@given(rows=ROWS)
def test_a_code_is_the_nearest_there_is(grid: Grid, rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    params = grid.fit(x)
    found = grid.decode(grid.encode(x, params), params)
    assert torch.isfinite(found).all()
    allowed = values_of(grid, params)
    here = x[0].double().numpy()
    least = np.abs(here[:, None] - allowed).min(1)
    # Quotients and products are rounded to fp32.
    slack = 4e-7 * (np.abs(here) + np.abs(allowed).max()) + 1e-37
    assert (np.abs(found[0].double().numpy() - here) <= least + slack).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_are_those_of_torch_and_of_ocp(name: str) -> None:
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp6_e3m2": 28.0, "fp6_e2m3": 7.5, "fp4_e2m1": 6.0}
    grid = Floating(format=name)
    assert float(grid.table[-1]) == largest[name]
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(name)
    if dtype is not None:
        x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)) * 10
        one = (torch.ones(1, 1),)
        assert torch.equal(grid.decode(grid.encode(x, one), one), x.to(dtype).float())


def test_ties_go_to_the_even_code() -> None:
    grid, one = Uniform(bits=4), (torch.ones(1, 1),)
    assert grid.encode(torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 9.0]]), one).tolist() == [[0, 2, 2, 0, -2, 7]]
    fp4 = Floating(format="fp4_e2m1")
    assert fp4.decode(fp4.encode(torch.tensor([[0.25, 0.75, 2.5, 5.0, -5.0]]), one), one).tolist() == [
        [0.0, 1.0, 2.0, 4.0, -4.0]
    ]


def test_a_power_of_two_scale() -> None:
    (scale,) = Floating(format="fp4_e2m1", power_of_two=True).fit(torch.tensor([[7.0, 1.0], [0.0, 0.0]]))
    assert scale.tolist() == [[2.0], [0.0]]


@given(rows=ROWS, candidates=st.integers(1, 5))
def test_a_searched_range_is_never_worse(rows: list[list[float]], candidates: int) -> None:
    x = torch.tensor(rows)
    for grid in (Uniform(bits=3), Uniform(bits=2, symmetric=False), Floating(format="fp4_e2m1")):
        plain, searched = (fitted(grid, x, candidates=n) for n in (0, candidates))
        errors = [(grid.decode(grid.encode(x, p), p) - x).square().sum(1) for p in (plain, searched)]
        assert (errors[1] <= errors[0]).all()


# GPTQ ----------------------------------------------------------------------------------------------------------------


def one_by_one(w: np.ndarray, h: np.ndarray, grid: Grid, size: int, damping: float, by_size: bool) -> np.ndarray:
    """Codes by elimination from the inverse, one column after the other (Frantar et al. 2022, "OBC", in this order)."""
    width = w.shape[1]
    first = nearest(torch.tensor(w, dtype=torch.float32), grid, group_size=size)
    params = [p.clone() for p in first.params]
    w, h = w.copy(), h.copy()
    dead = np.diag(h) == 0
    h[dead, dead] = 1.0
    inverse = np.linalg.inv(h + damping * np.diag(h).mean() * np.eye(width))
    order = np.argsort(-np.where(dead, 0.0, np.diag(h)), kind="stable") if by_size else np.arange(width)
    codes = np.zeros(w.shape, dtype=np.int16)
    for j in order:
        group = j // size
        if not by_size and j % size == 0:
            for of_all, found in zip(params, grid.fit(torch.tensor(w[:, j : j + size]).float()), strict=True):
                of_all[:, group] = found[:, 0]
        of_group = tuple(p[:, group : group + 1] for p in params)
        column = torch.tensor(w[:, j : j + 1]).float()
        code = grid.encode(column, of_group)
        codes[:, j] = code[:, 0].numpy()
        error = (w[:, j] - grid.decode(code, of_group)[:, 0].double().numpy()) / inverse[j, j]
        w -= np.outer(error, inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("grid", [Uniform(bits=4), Uniform(bits=3, symmetric=False), Floating(format="fp4_e2m1")])
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), size=st.sampled_from([1, 4, 6]), block=st.integers(1, 9))
def test_gptq_is_elimination_column_by_column(
    grid: Grid, by_size: bool, seed: int, groups: int, size: int, block: int
) -> None:
    dice = np.random.default_rng(seed)
    width = groups * size
    w = dice.standard_normal((5, width)).astype(np.float32).astype(np.float64)
    x = dice.standard_normal((20, width)) @ dice.standard_normal((width, width))
    x[:, dice.random(width) < 0.1] = 0
    inputs = Inputs(width)
    inputs.add(torch.tensor(x, dtype=torch.float32))
    found = gptq(
        torch.tensor(w, dtype=torch.float32), inputs.hessian, grid, group_size=size, by_size=by_size, block=block
    )
    if not x.any():
        return
    wanted = one_by_one(w, inputs.hessian.double().numpy(), grid, size, 0.01, by_size)
    # fp32 against fp64: a weight on the border between two codes may go to the other, and moves those after it.
    rows = (found.codes.numpy() == wanted).all(1)
    assert rows.mean() >= 0.6, (found.codes.numpy(), wanted)


def test_gptq_is_better_than_nearest_where_inputs_go_together() -> None:
    dice = torch.Generator().manual_seed(0)
    mixing = torch.randn(64, 64, generator=dice)
    x = torch.randn(512, 64, generator=dice) @ mixing
    w = torch.randn(32, 64, generator=dice)
    inputs = Inputs(64)
    for part in x.split(100):
        inputs.add(part)
    assert torch.allclose(inputs.hessian, 2 * x.T @ x / 512, rtol=1e-4, atol=1e-3)
    error = {}
    for name, found in (
        ("nearest", nearest(w, Uniform(bits=3), group_size=16)),
        ("gptq", gptq(w, inputs.hessian, Uniform(bits=3), group_size=16)),
        ("gptq in order", gptq(w, inputs.hessian, Uniform(bits=3), group_size=16, by_size=False)),
    ):
        error[name] = float(((found.values - w) @ x.T).square().sum())
    assert error["gptq"] < 0.6 * error["nearest"], error
    assert error["gptq in order"] < 0.8 * error["nearest"], error


def test_what_cannot_be_quantised() -> None:
    w, h = torch.randn(4, 12), torch.eye(12)
    with pytest.raises(ValueError, match=r"rows of 12, and group_size=5"):
        nearest(w, Uniform(bits=4), group_size=5)
    with pytest.raises(ValueError, match="NaN or infinite"):
        nearest(torch.full((2, 4), torch.nan), Uniform(bits=4), group_size=4)
    with pytest.raises(ValueError, match=r"layer\.7 has rows of 12, and its inputs gave a matrix of shape \(3, 3\)"):
        gptq(w, torch.eye(3), Uniform(bits=4), group_size=4, name="layer.7")
    with pytest.raises(ValueError, match="12 x 12 and finite"):
        gptq(w, h * torch.inf, Uniform(bits=4), group_size=4)
    with pytest.raises(ValueError, match=r"bits=9"):
        Uniform(bits=9)
    with pytest.raises(ValueError, match="fp8_e4m3, fp8_e5m2"):
        Floating(format="fp7")


def test_low_rank_is_the_best_there_is() -> None:
    w, rounded = torch.randn(9, 6), torch.zeros(9, 6)
    left, right = low_rank(w, rounded, 3)
    assert left.shape == (9, 3)
    assert right.shape == (3, 6)
    values = torch.linalg.svdvals(w)
    assert torch.isclose((w - left @ right).norm(), values[3:].norm(), rtol=1e-4)
    assert torch.allclose(sum(low_rank(w, rounded, 6)[0][:, i : i + 1] @ low_rank(w, rounded, 6)[1][i : i + 1]
                              for i in range(6)), w, atol=1e-5)  # fmt: skip
    with pytest.raises(ValueError, match="1 to 6"):
        low_rank(w, rounded, 7)


# Recipes -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, gain: float, *, add: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x + gain * self.down(torch.relu(self.up(x))) + add, "more"


class Model(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x, 0.5, add=torch.ones(()))
        return self.head(x)


def data(n: int = 4) -> list[torch.Tensor]:
    return [torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(i)) for i in range(n)]


def trained(seed: int = 0, **options: object) -> Model:
    torch.manual_seed(seed)
    return Model(**options)  # type: ignore[arg-type]


def distance(model: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        return float(sum((model(x) - other(x)).square().mean() for x in data()))


def test_without_batches_every_linear_layer_is_rounded() -> None:
    model = trained()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    layers = quantise(model, Recipe(grid=Uniform(bits=8), group_size=16))
    assert set(layers) == {"head", *(f"layers.{i}.{n}" for i in range(3) for n in ("up", "down"))}
    for name, layer in layers.items():
        w = before[f"{name}.weight"]
        assert torch.equal(layer.values, nearest(w, Uniform(bits=8), group_size=16).values)
        assert torch.equal(model.get_parameter(f"{name}.weight"), layer.values)
    assert torch.equal(model.embed.weight, before["embed.weight"])


@pytest.mark.dear
def test_what_helps_helps() -> None:
    """Outputs of the whole model, against the exact one: each of GPTQ, compensation and distillation comes nearer."""
    exact, found = trained(), {}
    common = {"grid": Uniform(bits=3), "group_size": 16, "leave_out": ["head"]}
    for name, recipe in {
        "nearest": Recipe(**common), "searched": Recipe(**common, candidates=8),
        "gptq": Recipe(**common, method="gptq"), "compensated": Recipe(**common, low_rank=6),
        "distilled": Recipe(**common, distil_steps=60, distil_lr=1e-3),
        "searched and distilled": Recipe(**common, candidates=8, distil_steps=60, distil_lr=1e-3),
    }.items():  # fmt: skip
        model = trained()
        quantise(model, recipe, blocks=model.layers, batches=data())
        found[name] = distance(model, exact)
        assert model.layers[0].up.weight.grad is None
        assert model.training
    for name in ("gptq", "compensated", "distilled", "searched and distilled"):
        assert found[name] < 0.8 * found["nearest"], found


def test_blocks_see_what_rounded_blocks_give() -> None:
    """The Hessian of the second block is that of the inputs it has when the first is rounded."""
    model, other = trained(), trained()
    quantise(model, Recipe(grid=Uniform(bits=2), group_size=16, method="gptq", leave_out=["head"]),
             blocks=model.layers, batches=data())  # fmt: skip
    with torch.no_grad():
        other.layers[0].load_state_dict(model.layers[0].state_dict())
        inputs = Inputs(16)
        for x in data():
            inputs.add(other.layers[0](other.embed(x), 0.5, add=torch.ones(()))[0])
        wanted = gptq(other.layers[1].up.weight, inputs.hessian, Uniform(bits=2), group_size=16)
    assert torch.equal(model.layers[1].up.weight, wanted.values)


def test_a_tied_head_is_left_alone() -> None:
    model = trained(tied=True)
    assert "head" not in quantise(model, Recipe(group_size=16))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipe": Recipe(method="gptq", group_size=16)}, "needs batches"),
        ({"batches": data(1)}, "blocks have to be named"),
        ({"recipe": Recipe(group_size=24)}, r"layers\.0\.up has rows of 16, no whole number of groups of 24"),
        ({"recipe": Recipe(group_size=16, leave_out=["lm_head"])}, "'lm_head' fits no linear layer"),
        ({"batches": data(1), "blocks": "reversed"}, r"in the order \[2, 1, 0\]"),
        ({"batches": data(1), "blocks": "skipping"}, "block 1 does not get what block 0 returns"),
        ({"batches": data(1), "blocks": "unused"}, "calls its blocks in the order"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be(change: dict[str, object], sentence: str) -> None:
    model = trained()
    blocks = {"reversed": list(model.layers)[::-1], "skipping": [model.layers[0], model.layers[2]],
              "unused": [nn.Identity()]}  # fmt: skip
    options = {"recipe": Recipe(group_size=16), **change}
    if "blocks" in options:
        options["blocks"] = blocks[options["blocks"]]  # type: ignore[index]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        quantise(model, **options)  # type: ignore[arg-type]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_blocks_that_get_no_tensor_are_refused() -> None:
    class Listed(nn.Linear):
        def forward(self, x: Any) -> Any:
            return [super().forward(x[0])]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Listed(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            given = [x]
            for block in self.blocks:
                given = block(given)
            return given[0]

    model = Model()
    with pytest.raises(ValueError, match="a block is called with a list; its input has to be a tensor"):
        quantise(model, Recipe(group_size=16, method="gptq"), blocks=list(model.blocks), batches=[torch.randn(4, 16)])
