"""Quantisation after training and packed layers, given what they were not made for: a sentence, and nothing changed."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compression.models import weights
from torch import Tensor, nn

from zoo.compression import init_compression
from zoo.compression.export import write_gguf
from zoo.compression.packed import PackedLinear, load_packed, pack_model, save_packed
from zoo.compression.post_training import Recipe, Uniform, nearest, quantise

RECIPE = Recipe(group_size=16)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


def packed(**options: Any) -> nn.Module:
    model = network()
    return pack_model(model, quantise(model, Recipe(group_size=16, **options)))


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    model = network()
    change(model)
    return model


def set_nan(model: nn.Sequential) -> None:
    model[2].weight.data[3, 3] = float("nan")


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# -- quantise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_nan, "2 has elements that are NaN or infinite"),
        (lambda m: m.to("meta"), '0 is on "meta" and has no values to round'),
        (lambda m: nn.utils.parametrizations.weight_norm(m[2]), "2 computes its weight from others"),
        (lambda m: m.append(nn.Linear(24, 3)), "3 has rows of 24, no whole number of groups of 16"),
        (
            lambda m: init_compression(m, {"compression_training": {"weight_quantization": weights("2")}}),
            "2 has transforms of its weight; call redundancy_clean first",
        ),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_rounded_is_named_before_others_are(change: Any, sentence: str) -> None:
    model = changed(change)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        quantise(model, RECIPE)
    for name, value in model.state_dict().items():
        if not value.is_meta:
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"group_size": 16.0}, "group_size=16.0; it must be a whole number"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"grid": "int4"}, "grid='int4'; it must be a grid, such as"),
    ],
)
def test_recipes_that_cannot_be_meant(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Recipe(**options)


def test_bits_are_a_whole_number() -> None:
    with pytest.raises(ValueError, match=r"bits=4.0; equal steps take 2 to 8 bits"):
        Uniform(bits=4.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("half", "size"), [(True, 1e6), (False, 3e38)])
def test_numbers_of_groups_that_overflow_are_refused(half: bool, size: float, symmetric: bool) -> None:
    weight, grid = torch.tensor([[-size, size] * 8]), Uniform(bits=4, symmetric=symmetric, half=half)
    if symmetric and not half:  # a scale is smaller than what it scales
        assert torch.isfinite(nearest(weight, grid, group_size=16).values).all()
        return
    with pytest.raises(ValueError, match=r"a group has a scale or minimum beyond what fp(16|32) holds"):
        nearest(weight, grid, group_size=16)


@pytest.mark.parametrize(
    ("tensors", "metadata", "sentence"),
    [
        ({"x" * 64: torch.ones(2)}, {}, "names of less than 64 bytes"),
        ({"x": torch.ones(1, 1, 1, 1, 2)}, {}, "x cannot be written: .* at most 4 dimensions"),
        ({"x": torch.ones(2, device="meta")}, {}, "x cannot be written"),
        ({"x": torch.ones(2)}, {"general.architecture": "y"}, "give it as the argument architecture"),
        ({"x": torch.ones(2)}, {"y": [1, 1 << 40]}, "'y' has 1099511627776; lists have whole numbers of 32 bits"),
    ],
)
def test_what_readers_of_gguf_have_no_room_for_is_refused(
    tensors: dict[str, Tensor], metadata: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match=sentence):
        write_gguf(tmp_path / "m.gguf", "llama", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)))


@pytest.mark.parametrize(("rows", "fill"), [(4, float("nan")), (4, float("inf")), (0, 0.0)])
def test_batches_that_say_nothing_are_refused(rows: int, fill: float) -> None:
    model = blocks()
    before = model[0][0].weight.detach().clone()
    for batches in ([torch.full((rows, 32), fill)], [torch.randn(4, 32), torch.full((rows, 32), fill)]):
        with pytest.raises(ValueError, match=r"a batch gives the first block inputs of shape .*nothing can be learned"):
            quantise(model, Recipe(group_size=16, method="gptq"), blocks=list(model), batches=batches)
    assert torch.equal(model[0][0].weight, before)


def test_batches_may_come_from_a_loader_and_modes_and_gradients_are_kept() -> None:
    data = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(group_size=16, method="gptq", distil_steps=2)
    one, other = blocks(), blocks()
    for model, batches in ((one, torch.utils.data.DataLoader(data, batch_size=4)), (other, list(data.split(4)))):  # type: ignore[arg-type, var-annotated]
        model[1].eval()
        model[0][0].weight.grad = torch.ones(32, 32)
        quantise(model, recipe, blocks=list(model), batches=batches)
        assert [model.training, model[0].training, model[1].training] == [True, True, False]
        assert torch.equal(model[0][0].weight.grad, torch.ones(32, 32))
    assert torch.equal(one[1][0].weight, other[1][0].weight)


# -- pack_model -------------------------------------------------------------------------------------------------------


def doubled(model: nn.Sequential) -> None:
    model[0].__class__ = Twice


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (doubled, "0 is a Twice with a forward of its own, which the layer in its place has not"),
        (hooked, "0 is a Linear with hooks"),
    ],
)
def test_what_a_packed_layer_would_not_do_is_refused(change: Any, sentence: str) -> None:
    model = changed(change)
    layers = quantise(model, RECIPE)
    with pytest.raises(ValueError, match=sentence):
        pack_model(model, layers)
    assert not any(isinstance(m, PackedLinear) for m in model)


def test_attention_reads_its_projection_and_it_stays() -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    layers = quantise(model, Recipe(group_size=16))
    assert list(layers) == []


@pytest.mark.parametrize("grad", [True, False])
def test_the_fused_encoder_layer_calls_packed_layers(grad: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    empty = copy.deepcopy(model)
    layers = quantise(model, RECIPE)
    assert list(layers) == ["linear1", "linear2"]
    x = torch.randn(2, 5, 32)
    with torch.set_grad_enabled(grad):
        y = model(x)
        pack_model(model, layers)
        torch.testing.assert_close(model(x), y)
        save_packed(model, tmp_path / "m")
        torch.testing.assert_close(load_packed(empty, tmp_path / "m")(x), y)


def test_a_layer_under_two_names_and_a_model_that_is_a_layer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(32, 32)
        return nn.Sequential(layer, nn.ReLU(), layer)

    model, x = make(), torch.randn(3, 32)
    layers = quantise(model, RECIPE)
    y = model(x)
    pack_model(model, layers)
    assert model[0] is model[2]  # type: ignore[index]
    torch.testing.assert_close(model(x), y)
    save_packed(model, tmp_path / "m")
    back = load_packed(make(), tmp_path / "m")
    assert back[0] is back[2]  # type: ignore[index]
    assert torch.equal(back(x), model(x))
    with pytest.raises(ValueError, match=r"lacks \['2.bias', '2.weight'\]"):
        load_packed(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), tmp_path / "m")
    other = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    save_packed(pack_model(other, quantise(other, RECIPE)), tmp_path / "two")
    with pytest.raises(ValueError, match="of their own, which are others' in this model"):
        load_packed(make(), tmp_path / "two")
    alone = nn.Linear(32, 16)
    alone = pack_model(alone, quantise(alone, RECIPE))  # type: ignore[assignment]
    assert isinstance(alone, PackedLinear)
    save_packed(alone, tmp_path / "one")
    assert torch.equal(load_packed(nn.Linear(32, 16), tmp_path / "one")(x), alone(x))


# -- files ------------------------------------------------------------------------------------------------------------


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def about(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Other metadata of save_packed."""

    def work(header: dict[str, Any]) -> None:
        found = json.loads(header["__metadata__"]["zoo.packed"])
        change(found)
        header["__metadata__"]["zoo.packed"] = json.dumps(found)

    return work


HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (about(lambda a: a["layers"]["0"].update(rank=10**9)), "packed layer '0' of 4 bits"),
    (about(lambda a: a["layers"]["2"].update(rank=17)), "packed layer '2' of 4 bits"),
    (about(lambda a: a["layers"]["0"].update(group_size=0)), "packed layer '0' of 4 bits in groups of 0"),
    (about(lambda a: a["layers"]["0"].update(group_size=10**12)), "packed layer '0' of 4 bits in groups of 10000"),
    (about(lambda a: a["layers"]["0"].update(group_size=32)), "0.scales is torch.float32 of shape .64,., and in this"),
    (about(lambda a: a["layers"]["0"].update(bits=8)), "0.q is torch.int8 of shape .512,., and in this"),
    (about(lambda a: a["layers"].update({"": a["layers"]["0"]})), "packed layer ''"),
    (about(lambda a: a["layers"].pop("0")), r"lacks \['0.weight'\]"),
    (about(lambda a: a["tied"].update({"0.q": "2.q"})), "0.q is torch.int8 of shape .256,., and in this"),
    (lambda h: h["__metadata__"].update({"zoo.packed": "[" * 100_000}), "names no packed layers"),
    (lambda h: h["0.bias"].update(dtype="I32"), "0.bias is torch.int32 of shape"),
    (lambda h: h["0.scales"].update(dtype="I32"), "0.scales is torch.int32 of shape"),
    (lambda h: h["2.bias"].update(shape=[4, 4]), "2.bias is torch.float32 of shape .4, 4."),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_files_that_lie_are_refused_and_the_model_is_as_it_was(tmp_path: Path, number: int) -> None:
    change, sentence = HOSTILE[number]
    file = tmp_path / "m.safetensors"
    save_packed(packed(), file)
    header, body = split(file.read_bytes())
    change(header)
    file.write_bytes(joined(header, body))
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        load_packed(model, file)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("keep", [0, 7, 8, 50, -1])
def test_files_that_are_cut_short_say_so(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "m.safetensors"
    save_packed(packed(), file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m.safetensors is no whole safetensors file"):
        load_packed(network(), file)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grid": Uniform(bits=8)}, "the packed layer '0': q is torch.int8 of shape"),
        ({"grid": Uniform(bits=4, symmetric=False)}, "the packed layer '0': q is torch.uint8 of shape"),
    ],
)
def test_states_of_other_bits_name_the_layer(options: dict[str, Any], sentence: str) -> None:
    """As torch does: all that is wrong in one RuntimeError."""
    with pytest.raises(RuntimeError, match=sentence):
        packed().load_state_dict(packed(**options).state_dict())
