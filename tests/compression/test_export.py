"""What a GGUF file holds is what the layers hold, by our reader and by the format's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.compression.test_post_training import trained

from zoo.checkpointing.foreign import load_gguf
from zoo.compression.export import write_gguf
from zoo.compression.post_training import Floating, Grid, Layer, Recipe, Uniform, nearest, quantise

gguf = pytest.importorskip("gguf")
GRIDS = {
    "Q8_0": Uniform(bits=8, half=True), "Q4_0": Uniform(bits=4, half=True),
    "Q4_1": Uniform(bits=4, symmetric=False, half=True),
}  # fmt: skip


def layer(grid: Grid, size: int = 32, shape: tuple[int, int] = (6, 96)) -> Layer:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.3
    weight[0, :32] = 0.0
    return Layer(quantised=nearest(weight, grid, group_size=size))


@pytest.mark.parametrize("kind", GRIDS)
def test_values_are_the_same_bits(kind: str, tmp_path: Path) -> None:
    made, path = layer(GRIDS[kind]), tmp_path / "model.gguf"
    plain = {str(d): torch.randn(4, 5).to(d) for d in (torch.float32, torch.float16, torch.bfloat16)}
    about = {"general.name": "a model", "llama.block_count": 2, "x.rate": 0.5, "x.on": True, "x.names": ["a", "b"]}
    write_gguf(path, "llama", {"w": made, **plain}, about)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    found = load_gguf(path)
    assert found.meta["metadata"]["llama.block_count"] == 2
    assert found.meta["metadata"]["x.names"] == ["a", "b"]
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert theirs["w"].tensor_type.name == kind
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(theirs["w"].data, theirs["w"].tensor_type)), made.values)
    assert torch.equal(found.tensor("w"), made.values)
    for name, value in plain.items():
        assert theirs[name].shape.tolist() == [5, 4]
        assert torch.equal(found.tensor(name), value)


def test_fp16_numbers_of_groups() -> None:
    for grid in GRIDS.values():
        for numbers in layer(grid).quantised.params:
            assert torch.equal(numbers, numbers.half().float())


def test_a_whole_model(tmp_path: Path) -> None:
    model = trained(width=32)
    layers = quantise(model, Recipe(grid=GRIDS["Q4_0"], group_size=32, candidates=4))
    rest = {k: v for k, v in model.state_dict().items() if k.removesuffix(".weight") not in layers}
    tensors = {**rest, **{f"{name}.weight": of for name, of in layers.items()}}
    write_gguf(tmp_path / "m", "zoo", tensors)
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m").tensors}
    for name, value in model.state_dict().items():
        assert torch.equal(torch.from_numpy(found[name].copy()).reshape(value.shape), value), name


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (layer(Uniform(bits=4)), "for which GGUF has no type"),
        (layer(GRIDS["Q4_0"], size=16), "in groups of 16"),
        (layer(Floating(format="fp4_e2m1")), r"Uniform\(bits=4, half=True\)"),
        (Layer(quantised=layer(GRIDS["Q8_0"]).quantised, low_rank=(torch.ones(6, 1), torch.ones(1, 96))), "low-rank"),
        (torch.ones(2, dtype=torch.float64), "w is torch.float64"),
    ],
)
def test_what_the_format_has_nothing_for(made: Layer | torch.Tensor, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        write_gguf(tmp_path / "m", "llama", {"w": made})
    with pytest.raises(ValueError, match="a list of one kind"):
        write_gguf(tmp_path / "m", "llama", {}, {"x": [1, "a"]})
    with pytest.raises(ValueError, match="within 0 and 2"):
        write_gguf(tmp_path / "m", "llama", {}, {"x": -1})
    assert not list(tmp_path.iterdir())
