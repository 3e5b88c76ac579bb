"""DeepSpeedTransformerConfig and DeepSpeedTransformerLayer: zoo's layer under their names and defaults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.nn import TransformerLayer, TransformerLayerConfig
from zoo.nn.transformer import kept_rows

DOCUMENTED = {
    "batch_size": -1, "hidden_size": -1, "intermediate_size": -1, "heads": -1, "attn_dropout_ratio": -1,
    "hidden_dropout_ratio": -1, "num_hidden_layers": -1, "initializer_range": -1, "layer_norm_eps": 1e-12,
    "local_rank": -1, "seed": -1, "fp16": False, "pre_layer_norm": True, "normalize_invertible": False,
    "gelu_checkpoint": False, "adjust_init_range": True, "attn_dropout_checkpoint": False, "stochastic_mode": False,
    "return_tuple": False, "training": True,
}  # fmt: skip
GIVEN = {
    "batch_size": 2, "hidden_size": 12, "heads": 3, "attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1,
    "num_hidden_layers": 2, "initializer_range": 0.02,
}  # fmt: skip
NAMES = [
    "attn_qkvw", "attn_qkvb", "attn_ow", "attn_ob", "attn_nw", "attn_nb", "inter_w", "inter_b", "output_w", "output_b",
    "norm_w", "norm_b",
]  # fmt: skip


def layer_of(**more: Any) -> DeepSpeedTransformerLayer:
    return DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**{**GIVEN, **more}))


def test_fields_and_defaults_are_the_documented_ones() -> None:
    assert deepspeed.DeepSpeedTransformerConfig is DeepSpeedTransformerConfig
    assert deepspeed.DeepSpeedTransformerLayer is DeepSpeedTransformerLayer
    assert len(DOCUMENTED) == 20
    config = DeepSpeedTransformerConfig()
    for name, value in DOCUMENTED.items():
        assert getattr(config, name) == (-4 if name == "intermediate_size" else value), name
    assert DeepSpeedTransformerConfig(hidden_size=8).intermediate_size == 32
    assert DeepSpeedTransformerConfig(hidden_size=8, intermediate_size=20).intermediate_size == 20
    positional = DeepSpeedTransformerConfig(*range(1, 21))
    assert [getattr(positional, name) for name in DOCUMENTED] == [*range(1, 21)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_documents_and_files(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "layer.json"
    file.write_text(json.dumps({**GIVEN, "gelu_checkpoint": True, "layer_id": 4}), encoding=encoding)
    config = DeepSpeedTransformerConfig.from_json_file(str(file))
    assert (config.hidden_size, config.gelu_checkpoint, config.intermediate_size) == (12, True, 48)
    assert vars(DeepSpeedTransformerConfig.from_dict(vars(config))) == vars(config)


def test_wrong_documents_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="by 'attn_dropout', 'hidden'; like it: attn_dropout_checkpoint, attn_dropout_ratio, hidden_",
    ):
        DeepSpeedTransformerConfig.from_dict({"attn_dropout": 0.1, "hidden": 12})
    file = tmp_path / "layer.json"
    for text, message in (("{", "is not JSON in UTF-8 or UTF-16"), ("[1]", "has a list; it must be an object")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            DeepSpeedTransformerConfig.from_json_file(file)


def test_null_is_what_is_not_given_and_another_object_is_no_configuration() -> None:
    config = DeepSpeedTransformerConfig.from_dict(
        {**GIVEN, "intermediate_size": None, "seed": None, "local_rank": None}
    )
    assert (config.intermediate_size, config.seed, config.local_rank) == (48, -1, -1)
    assert DeepSpeedTransformerLayer(config)(torch.randn(2, 5, 12)).shape == (2, 5, 12)
    with pytest.raises(ValueError, match=r"intermediate_size is '48'; it must be a whole number"):
        layer_of(intermediate_size="48")
    with pytest.raises(ValueError, match=r"the document is a list; it must be a mapping"):
        DeepSpeedTransformerConfig.from_dict([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"config is a dict; it must be a DeepSpeedTransformerConfig"):
        DeepSpeedTransformerLayer(GIVEN)  # type: ignore[arg-type]


def test_layers_are_counted_and_have_their_parameters() -> None:
    before = DeepSpeedTransformerLayer.layer_id
    layers = [layer_of() for _ in range(3)]
    assert [layer.config.layer_id for layer in layers] == [before, before + 1, before + 2]
    assert DeepSpeedTransformerLayer.layer_id == before + 3
    assert [name for name, _ in layers[0].named_parameters()] == NAMES
    assert layers[0].inter_w.shape == (48, 12)


@pytest.mark.parametrize("adjust", [True, False])
def test_initial_weights_are_adjusted_before_residuals(adjust: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "heads": 4, "num_hidden_layers": 8, "adjust_init_range": adjust}
    layer = layer_of(**sizes)
    for again in (None, not adjust, adjust):
        if again is not None:
            layer.init_transformer_weights(again)
        adjusted = adjust if again is None else again
        for name in ("attn_qkvw", "inter_w", "attn_ow", "output_w"):
            before_residual = name in ("attn_ow", "output_w")
            expected = 0.02 / math.sqrt(16) if adjusted and before_residual else 0.02
            weight = getattr(layer, name)
            assert abs(float(weight.detach().std()) / expected - 1) < 5 / math.sqrt(2 * weight.numel()), name


def test_each_field_reaches_the_layer() -> None:
    told = layer_of(
        intermediate_size=20, layer_norm_eps=1e-3, seed=7, fp16=True, pre_layer_norm=False, normalize_invertible=True,
        gelu_checkpoint=True, attn_dropout_checkpoint=True, adjust_init_range=False, training=False,
        stochastic_mode=True,
    )  # fmt: skip
    assert told.layer_config == TransformerLayerConfig(
        hidden_size=12, heads=3, intermediate_size=20, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1,
        layer_norm_eps=1e-3, seed=7, compute_dtype=torch.float16, pre_layer_norm=False, normalize_invertible=True,
        gelu_checkpoint=True, attn_dropout_checkpoint=True, adjust_init_range=False,
    )  # fmt: skip
    assert not told.training
    assert layer_of(local_rank=0).training
    names = [row.name for row in kept_rows(told.layer_config)]
    assert not {"activated", "probabilities", "attn_sum", "output_sum"} & {*names}


def test_outputs() -> None:
    """Of zoo's layer; in a tuple where that is asked for; in fp16 where that is; ``training`` follows the module."""
    x, mask = torch.randn(2, 5, 12), torch.zeros(2, 1, 1, 5)
    layer = layer_of(return_tuple=True)
    assert layer.config.training
    layer.eval()
    plain = TransformerLayer(layer.layer_config).eval()
    plain.load_state_dict(layer.state_dict())
    (y,) = layer(x, mask)
    assert torch.equal(y, plain(x, mask))
    assert not layer.config.training
    layer.train()
    assert not torch.equal(layer(x, mask)[0], y)
    assert layer.config.training
    half = layer_of(fp16=True).eval()
    assert half(x.half()).dtype is half.half()(x.half()).dtype is torch.float16


def test_what_it_does_not_do_is_refused() -> None:
    layer, x = layer_of(), torch.zeros(2, 5, 12)
    for argument, value in (("head_mask", x), ("past_key_value", (x, x)), ("output_attentions", True), ("grads", [])):
        with pytest.raises(NotImplementedError, match=f"{argument} of a transformer layer"):
            layer(x, None, **{argument: value})
    layer(x, None, None, None, None, None, None, False, None)
    for missing in ("hidden_size", "heads", "attn_dropout_ratio", "num_hidden_layers", "initializer_range"):
        with pytest.raises(ValueError, match=f"{missing} is -1"):
            layer_of(**{missing: -1})


def test_values_of_other_types_are_told() -> None:
    for wrong, told in (({"local_rank": "0"}, "local_rank is '0'"), ({"seed": "7"}, "seed is '7'; it must be a whole")):
        with pytest.raises(ValueError, match=told):
            layer_of(**wrong)
    config = DeepSpeedTransformerConfig(**GIVEN)
    for weights in ([None] * 8, 5):
        with pytest.raises(ValueError, match=r"initial_weights is .*, and no tensors; it must have 8: query"):
            DeepSpeedTransformerLayer(config, weights)  # type: ignore[arg-type]


def test_given_weights_need_no_range() -> None:
    shapes = [(12, 12)] * 4 + [(12,), (48, 12), (12, 48), (12,)]
    config = DeepSpeedTransformerConfig(**{**GIVEN, "initializer_range": -1, "num_hidden_layers": -1})
    layer = DeepSpeedTransformerLayer(config, [torch.ones(shape) for shape in shapes], None)
    assert float(layer.norm_w.detach().sum()) == 12
    assert float(layer.attn_qkvb.detach().abs().sum()) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_of_it_train_at_every_stage(stage: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(layer_of(seed=3) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    def data(rank: int, step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + rank)
        return torch.randn(2, 5, 12)

    def fn(rank: int) -> list[float]:
        document = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine = deepspeed.initialize(model=Model(), config=document)[0]
        losses = []
        for step in range(3):
            loss = engine(data(rank, step))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    model = Model()
    plain, expected = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        plain.zero_grad()
        expected.append([model(data(rank, step)) for rank in range(2)])
        sum(expected[-1]).div(2).backward()
        plain.step()
    for rank, losses in enumerate(sim.run(2, fn)):
        # fp32: sums of some hundred numbers, in another order
        assert losses == pytest.approx([step[rank].item() for step in expected], rel=1e-5)
