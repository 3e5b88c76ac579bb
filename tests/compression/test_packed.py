"""Packed layers give what the rounded ones give, take the bytes that the formula says, and come back from files."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compression.test_post_training import Model, data, trained
from torch import nn

from zoo.compression.packed import PackedLinear, load_packed, pack_model, save_packed
from zoo.compression.post_training import Binary, Floating, Recipe, Uniform, quantise

KINDS = [
    {"grid": Uniform(bits=bits, symmetric=symmetric), "group_size": size, "low_rank": rank}
    for bits in (8, 4) for symmetric in (True, False) for size, rank in ((16, 0), (0, 3))
]  # fmt: skip


def packed_model(recipe: Recipe, model: Model | None = None) -> tuple[Model, Model]:
    """A rounded model and the packed one."""
    rounded = trained() if model is None else model
    layers = quantise(rounded, recipe)
    return rounded, pack_model(copy.deepcopy(rounded), layers)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_a_packed_model_gives_what_the_rounded_one_gives(kind: dict[str, object]) -> None:
    rounded, packed = packed_model(Recipe(**kind))  # type: ignore[arg-type]
    assert isinstance(packed.layers[1].up, PackedLinear)
    for x in data():
        assert torch.allclose(packed(x), rounded(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.layers[1].up.dense(), rounded.layers[1].up.weight)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_are_those_of_the_formula(kind: dict[str, object], tmp_path: Path) -> None:
    recipe = Recipe(**kind)  # type: ignore[arg-type]
    _, packed = packed_model(recipe)
    layer = packed.layers[0].down
    n, k = 16, 32
    groups, numbers = n * k // (recipe.group_size or k), 1 if recipe.grid.symmetric else 2  # type: ignore[attr-defined]
    wanted = n * k * recipe.grid.bits / 8 + 4 * numbers * groups + 4 * recipe.low_rank * (n + k) + 4 * n
    assert layer.num_bytes == wanted == sum(t.nbytes for t in layer.state_dict().values())
    save_packed(packed, tmp_path / "model")
    held = sum(t.nbytes for t in packed.state_dict().values())
    assert held < (tmp_path / "model").stat().st_size < held + 6000


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("into", ["dense", "packed", "meta"])
@torch.no_grad()
def test_a_file_brings_it_back(kind: dict[str, object], into: str, tmp_path: Path) -> None:
    _, packed = packed_model(Recipe(**kind), trained(tied=True))  # type: ignore[arg-type]
    save_packed(packed, tmp_path / "model.safetensors")
    other = trained(seed=1, tied=True)
    if into == "packed":
        _, other = packed_model(Recipe(**kind), other)  # type: ignore[arg-type]
    if into == "meta":
        with torch.device("meta"):
            other = Model(tied=True)
    load_packed(other, tmp_path / "model.safetensors")
    for x in data():
        assert torch.equal(other(x), packed(x))
    assert other.head.weight is other.embed.weight or torch.equal(other.head.weight, other.embed.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_the_file_has_codes_in_the_order_of_rows(tmp_path: Path) -> None:
    model = trained()
    layers = quantise(model, Recipe(grid=Uniform(bits=4), group_size=16))
    save_packed(pack_model(model, layers), tmp_path / "model")
    q = load_file(tmp_path / "model")["layers.0.up.q"].view(torch.uint8)
    codes = torch.stack([q & 15, q >> 4], 1).view(32, 16).to(torch.int16)
    codes = torch.where(codes > 7, codes - 16, codes)
    assert torch.equal(codes, layers["layers.0.up"].quantised.codes)


def test_modules_move_convert_copy_and_pickle() -> None:
    _, packed = packed_model(Recipe(group_size=16))
    x = data()[0]
    wanted = packed(x)
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    packed.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(packed(x), wanted)
    assert torch.equal(copy.deepcopy(packed)(x), wanted)
    half = copy.deepcopy(packed).bfloat16()
    assert half.layers[0].up.scales.dtype is torch.float32
    assert half(x).dtype is torch.bfloat16
    assert torch.allclose(half(x).float(), wanted, atol=0.05)
    assert "bits=4, group_size=16, symmetric" in repr(packed.layers[0].up)


def test_lora_trains_beside_a_packed_weight() -> None:
    class LoRA(nn.Module):
        def __init__(self, base: PackedLinear) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
            self.b = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    _, model = packed_model(Recipe(group_size=16))
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LoRA(layer.up), LoRA(layer.down)
    trainable = [p for p in model.parameters() if p.requires_grad]
    codes = model.layers[0].up.base.q.clone()
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    x, losses = data(1)[0], []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    assert torch.equal(model.layers[0].up.base.q, codes)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (Recipe(grid=Binary(), group_size=16), r"layers\.0\.up cannot be packed: its grid is Binary"),
        (Recipe(grid=Floating(format="fp4_e2m1"), group_size=16), "equal steps of 8 and 4 bits"),
        (Recipe(grid=Uniform(bits=3), group_size=16), "equal steps of 8 and 4 bits"),
        (Recipe(group_size=8), "groups have 8 elements; kernels need a multiple of 16"),
    ],
)
def test_what_cannot_be_packed(recipe: Recipe, sentence: str) -> None:
    model = trained()
    layers = quantise(model, recipe)
    with pytest.raises(ValueError, match=sentence):
        pack_model(model, layers)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    _, packed = packed_model(Recipe(group_size=16))
    path = tmp_path / "model"
    save_packed(packed, path)
    others = [
        (Model(layers=2), r"'layers\.2\.up', which this model lacks"),
        (Model(layers=4), r"lacks \['layers\.3\.down\.bias'"),
        (Model(width=8), r"'layers\.0\.up' of 4 bits in groups of 16; in this model that is Linear"),
    ]
    for other, sentence in others:
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(ValueError, match=sentence):
            load_packed(other, path)
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    for text in (None, "{", '{"layers": {"head": {"bits": "4"}}, "tied": {}}', '{"layers": [], "tied": {}}'):
        save_file({"x": torch.ones(1)}, path, metadata=None if text is None else {"zoo.packed": text})
        with pytest.raises(ValueError, match="not written by save_packed"):
            load_packed(trained(), path)
    huge = {"layers": {"head": {"bits": 4, "group_size": 16, "minima": False, "rank": 10**12}}, "tied": {}}
    save_file({"x": torch.ones(1)}, path, metadata={"zoo.packed": json.dumps(huge)})
    with pytest.raises(ValueError, match="in this model that is Linear"):
        load_packed(trained(), path)
