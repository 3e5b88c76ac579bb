"""From a section to transforms: patterns, groups, tied weights, and errors that say where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.compression.doubles import Times, Timesing
from torch import nn

from zoo.compression import CompressionConfig
from zoo.compression.attach import transforms_of
from zoo.compression.patterns import matches
from zoo.compression.planning import compress, techniques_of
from zoo.config import load
from zoo.registry import Registry

WQ = "compression_training.weight_quantization"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": nn.Linear(4, 4), "output": nn.Linear(4, 4)})
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.ModuleList(Layer() for _ in range(2))
        self.mha = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer[0].attention["self"](self.embed(ids)))


def section(groups: dict[str, Any], **shared: Any) -> CompressionConfig:
    shared = {"enabled": True, **shared}
    return CompressionConfig(weight_quantization={"shared_parameters": shared, "different_groups": groups})


def group(*modules: str, bits: int = 3) -> dict[str, Any]:
    return {"params": {"start_bits": bits, "target_bits": bits}, "modules": list(modules)}


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    made.register("compression_technique", "weight_quantization", Timesing)
    return made


def names(model: nn.Module, config: CompressionConfig, registry: Registry) -> list[str]:
    return [t.site.name for t in compress(model, techniques_of(config, registry=registry))]


def test_patterns() -> None:
    yes = [
        ("*", "layer.0.fc"), ("attention.self", "layer.0.attention.self.query"), ("layer.\\w+.fc", "layer.11.fc"),
        ("layer....conv1", "layer2.0.conv1"), ("*.fc", "layer.0.fc"), ("^head$", "head"), ("h.*.mlp", "h.3.mlp.up"),
    ]  # fmt: skip
    no = [("^head$", "heads"), ("*.fc", "layer.0.fc1"), ("attention.self", "layer.0.attention.output")]
    assert all(matches(*pair) for pair in yes)
    assert not any(matches(*pair) for pair in no)


def test_groups_find_their_modules_and_all_means_whatever_has_a_weight(registry: Registry) -> None:
    pair = {"a": group("attention.self", bits=4), "b": group("attention.output", "mha", bits=5)}
    model = Model()
    found = compress(model, techniques_of(section(pair), registry=registry))
    assert {t.site.name: t.factor for t in found if isinstance(t, Times)} == {
        "layer.0.attention.self.weight": 4.0, "layer.1.attention.self.weight": 4.0,
        "layer.0.attention.output.weight": 5.0, "layer.1.attention.output.weight": 5.0,
        "mha.in_proj_weight": 5.0, "mha.out_proj.weight": 5.0,
    }  # fmt: skip
    assert found[0].site.group == f"{WQ}.different_groups.a"
    everything = names(Model(tied=False), section({"all": group("*")}), registry)
    assert len(everything) == 8
    assert "embed.weight" in everything
    assert "layer.0.norm.weight" not in everything


@pytest.mark.parametrize("pattern", ["embed", "head", "*"])
def test_a_tied_weight_has_one_transform_in_all_its_modules(pattern: str, registry: Registry) -> None:
    model, ids = Model(), torch.tensor([1, 2])
    plain = copy.deepcopy(model)
    compress(model, techniques_of(section({"g": group(pattern)}), registry=registry))
    if pattern == "*":
        plain.layer[0].attention["self"].weight.data *= 3
    plain.embed.weight.data *= 3
    torch.testing.assert_close(model(ids), plain(ids))
    tied = [t for t in transforms_of(model) if t.site.name in ("embed.weight", "head.weight")]
    assert len(tied) == 1


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"g": group("attentoin.self")},
         f"{WQ}.different_groups.g.modules: the pattern 'attentoin.self' matches no module .* nearest of 7 names are "
         "'layer.0.attention.self'"),
        ({"g": group("norm")}, r"the pattern 'norm' matches only what cannot be compressed so \(LayerNorm\)"),
        ({"g": group("mha"), "h": group("mha|head")},
         "different_groups.h.modules: 'mha.in_proj_weight' belongs to the group 'g' too"),
        ({"g": group("embed"), "h": group("head")}, "'head.weight' belongs to the group 'g' too as 'embed.weight'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_names_section_group_and_pattern(
    groups: dict[str, Any], sentence: str, registry: Registry
) -> None:
    model = Model()
    with pytest.raises(ValueError, match=sentence):
        compress(model, techniques_of(section(groups), registry=registry))
    assert not transforms_of(model)
    assert type(model.head) is nn.Linear


def test_after_an_error_half_way_nothing_is_attached(registry: Registry) -> None:
    model = Model()
    model.head.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has a forward of its own"):
        compress(model, techniques_of(section({"g": group("*")}), registry=registry))
    assert not transforms_of(model)
    assert type(model.embed) is nn.Embedding
    assert type(model.mha) is nn.MultiheadAttention


def test_compressing_twice_is_refused(registry: Registry) -> None:
    model, config = Model(), section({"g": group("mha")})
    compress(model, techniques_of(config, registry=registry))
    with pytest.raises(ValueError, match=r"mha.in_proj_weight is changed twice in one way"):
        compress(model, techniques_of(config, registry=registry))
    assert len(transforms_of(model)) == 2, "the first ones stay"


def test_a_technique_that_is_not_there_is_an_error(registry: Registry) -> None:
    config = CompressionConfig(row_pruning={"shared_parameters": {"enabled": True}, "different_groups": {"g": {}}})
    with pytest.raises(NotImplementedError, match=r"compression_training.row_pruning: asked for, and there is no tech"):
        techniques_of(config, registry=registry)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"weight_quantization": {"different_groups": {"g": group("*", bits=17)}}}, "17 bits; allowed are 1 to 16"),
        ({"weight_quantization": {"different_groups": {"g": group("*", bits=0)}}}, "greater than or equal to 1"),
        ({"weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 4, "target_bits": 8}}}}},
         "target_bits = 8 is more than start_bits = 4"),
        ({"weight_quantization": {"different_groups": {"g": {"params": {
            "start_bits": 8, "target_bits": 4, "quantization_period": 0}}}}}, "quantization_period = 0"),
        ({"weight_quantization": {"shared_parameters": {"quantization_type": "asymmetric"},
                                  "different_groups": {"g": group("*", bits=2)}}}, "ternary and binary weights are"),
        ({"activation_quantization": {"different_groups": {"g": {"params": {"bits": 1}}}}},
         "greater than or equal to 2"),
        ({"sparse_pruning": {"shared_parameters": {"block_pattern": "4by1"}}}, "allowed is NxM or N:M"),
        ({"sparse_pruning": {"shared_parameters": {"block_pattern": "4:2"}}}, "leaves nothing of 2"),
        ({"sparse_pruning": {"shared_parameters": {"enabled": True, "method": "snip_momentum"}}}, "give a later end"),
        ({"row_pruning": {"different_groups": {"g": {"params": {"dense_ratio": 0.0}}}}}, "greater than 0"),
        ({"row_pruning": {"different_groups": {"g": {"modules": ["a", "b"], "related_modules": [["c"]]}}}},
         "related_modules has 1 lists and modules 2 patterns"),
        ({"head_pruning": {"shared_parameters": {"enabled": True}}}, "num_heads is missing"),
        ({"layer_reduction": {"enabled": True}}, "neither teacher_layer nor other_module_name"),
        ({"layer_reduction": {"enabled": True, "teacher_layer": [1]}}, "module_name_prefix is missing"),
        ({"layer_reduction": {"enabled": True, "teacher_layer": [1], "module_name_prefix": "h",
                              "keep_number_layer": 2}}, "keep_number_layer = 2, and teacher_layer lists 1"),
    ],
)  # fmt: skip
def test_options_out_of_range(what: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CompressionConfig(**what)


def test_every_documented_key_is_known() -> None:
    def technique(shared: dict[str, Any], params: dict[str, Any], **more: Any) -> dict[str, Any]:
        group = {"params": params, "modules": ["attention.self", "layer.\\w+.fc"], **more}
        return {
            "shared_parameters": {"enabled": True, "schedule_offset": 30, **shared},
            "different_groups": {"g": group},
        }

    mixed, related = {"enabled": False, "quantize_change_ratio": 1}, {"related_modules": [["a", "b"], ["c"]]}
    quantised = {
        "quantizer_kernel": False, "quantize_groups": 64, "quantize_verbose": True, "quantization_type": "asymmetric",
        "rounding": "stochastic", "quantize_weight_in_forward": True, "fp16_mixed_quantize": mixed,
    }  # fmt: skip
    snip = {
        "method": "snip_momentum", "schedule_offset_end": 90, "schedule_offset_stride": 15, "block_pattern": "2:4",
        "dense_ratio": 0.4, "excluded_modules": ["classifier"],
    }  # fmt: skip
    section = {
        "weight_quantization": technique(quantised, {"start_bits": 8, "target_bits": 8, "quantization_period": 0}),
        "activation_quantization": technique(
            {"quantization_type": "symmetric", "range_calibration": "dynamic"}, {"bits": 8}
        ),
        "sparse_pruning": technique(snip, {"dense_ratio": 0.5}),
        "row_pruning": technique({"method": "topk"}, {"dense_ratio": 0.5}, **related),
        "head_pruning": technique({"method": "topk", "num_heads": 12}, {"dense_ratio": 0.5}, **related),
        "channel_pruning": technique({"method": "l1"}, {"dense_ratio": 0.5}, **related),
        "layer_reduction": {
            "enabled": True, "keep_number_layer": 2, "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [2, 4], "other_module_name": ["bert.pooler"],
        },
    }  # fmt: skip
    config = load({"train_batch_size": 1, "compression_training": section}, world_size=1)
    assert config.asks_for("compression_training")
    assert set(config.compression_training.techniques) == set(section) - {"layer_reduction"}
    assert config.compression_training.sparse_pruning.shared_parameters.block_pattern == "2:4"
    assert config.compression_training.row_pruning.different_groups["g"].related_modules == [["a", "b"], ["c"]]
