"""Guesses: of models that no family knows, the cuts that somebody who knows them would write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from tests.profiles import examples
from tests.tensor.models import WIDTH, Decoder, Shape, plan_of
from tests.tensor.test_splitting import shapes
from torch import nn

from zoo.examples.byte_lm.model import ByteGPT, ModelConfig
from zoo.tensor import Plan, guess, prove_on

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 1]])


def same_cuts(model: nn.Module, found: Plan, expected: Plan) -> None:
    for path, module in model.named_modules():
        one, other = found.rule_of(path), expected.rule_of(path)
        assert (one is None) == (other is None), path
        if one is None or other is None or one.partial:
            assert one == other
            continue
        weight: Any = module.weight
        turned = not isinstance(module, nn.Linear | nn.Embedding)  # Conv1D of transformers
        total = weight.shape[int(bool(one.columns) != turned)]
        assert bool(one.columns) == bool(other.columns)
        for degree in range(2, 1 + min(dict(expected.sizes).get(name, 9) for name in ("head", "inner", "vocab"))):
            for rank in range(degree):
                assert found.cut(one, total, degree, rank) == expected.cut(other, total, degree, rank)


@pytest.mark.dear
@examples(times=2)
@given(shape=shapes())
@example(shape=Shape(heads=6, kv=2, layout="groups", norm=True, packed=True))
@example(shape=Shape(heads=4, kv=1, layout="parts"))
def test_it_is_what_somebody_who_knows_the_model_writes(shape: Shape) -> None:
    model = Decoder(shape)
    if shape.heads == 1 or shape.inner == 1:
        return
    found = guess(model, IDS % shape.vocab)
    same_cuts(model, found, plan_of(shape))
    assert {count.attribute: count.dims for count in found.counts}.keys() >= {"num_heads"}


def test_the_byte_model() -> None:
    model = ByteGPT(ModelConfig(layers=2, width=24, heads=6, context=8))
    same_cuts(model, guess(model, IDS), model.tensor_plan())


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-groups", "phi3", "gptj", "bert"])
def test_families(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.tensor.hub import model_of

    from zoo.tensor import plan_of as known

    model: Any = model_of(name)
    same_cuts(model, guess(model, input_ids=IDS, use_cache=False), known(model))


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["Roberta", "StableLm", "GPTBigCode"])
def test_models_of_transformers_without_a_plan(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from zoo.tensor import plan_of as known
    from zoo.tensor import prove

    kind = getattr(transformers, {"Roberta": "RobertaForMaskedLM"}.get(name, f"{name}ForCausalLM"))
    more = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48} if name == "StableLm" else {}
    config = getattr(transformers, f"{name}Config")(**more)
    with torch.device("meta"):
        model = kind(config)
    plan = known(model)
    assert dict(plan.sizes)["vocab"] == config.vocab_size
    assert any(rule.columns == "head dim" for rule in plan.rules)
    assert any(rule.columns == "inner" for rule in plan.rules)
    assert prove(model, config, plan, 3).outputs < 1e-13


@pytest.mark.dear
def test_what_the_proof_does_not_believe_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from zoo.tensor import plan_of as known

    with torch.device("meta"):
        model = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config())
    with pytest.raises(ValueError, match=r"none could be guessed \(.*is refused: .* differs"):
        known(model)


class Rectified(nn.Module):
    """Of its hidden features one never passes the rectifier, one has a slope of its own, and one layer has no pair."""

    def __init__(self, slopes: bool) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.slopes = nn.Parameter(torch.rand(8)) if slopes else None
        with torch.no_grad():
            self.up.bias[3] = -1e6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if self.slopes is not None:
            hidden = hidden * self.slopes
        out: torch.Tensor = self.last(torch.softmax(x + self.down(hidden), dim=-1))
        return out


def test_features_that_are_off_and_features_with_parameters_of_their_own() -> None:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    plan = guess(Rectified(False), x)
    assert [str(rule) for rule in plan.rules] == ["up: rows 'inner', cut 'inner'", "down: columns 'inner', cut 'inner'"]
    with pytest.raises(ValueError, match="nothing can be cut"):
        guess(Rectified(True), x)


class Two(nn.Module):
    def __init__(self, *shapes: Shape) -> None:
        super().__init__()
        self.models = nn.ModuleDict({f"m{i}": Decoder(shape) for i, shape in enumerate(shapes)})

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [model(ids) for model in self.models.values()]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.down(torch.relu(self.up(x)))
        return x


@pytest.mark.parametrize("model", [Twice(), nn.LSTM(4, 4), nn.LayerNorm(4)])
def test_models_without_layers_that_are_called_once(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__}: no linear layer reads features"):
        guess(model, torch.randn(2, 3, 4))


def test_a_model_without_values_is_told() -> None:
    with pytest.raises(ValueError, match=r"Twice .* meta device"):
        guess(Twice().to("meta"), torch.randn(2, 3, 4))


def test_two_numbers_of_heads() -> None:
    with pytest.raises(ValueError, match=r"different numbers of heads.*\[\(3, 3\), \(4, 2\)\]"):
        guess(Two(Shape(), Shape(heads=3, kv=3)), IDS)


def test_a_wrong_plan_of_any_model_is_told() -> None:
    shape = Shape(layout="parts")
    wrong = plan_of(Shape(layout="groups"))
    with pytest.raises(ValueError, match=r"at degree 2 is refused: output 0 differs"):
        prove_on(Decoder(shape), wrong, 2, IDS)
    assert prove_on(Decoder(shape), plan_of(shape), 2, IDS).outputs < 1e-13
