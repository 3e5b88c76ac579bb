"""Components that a document names: found, checked through all levels when it is read, and in the schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from zoo.config import ComponentChoice, ConfigError, Section, json_schema, load
from zoo.registry import Registry


class Gate(ComponentChoice):
    kind: ClassVar[str] = "gate"


class Layer(ComponentChoice):
    kind: ClassVar[str] = "layer"


class TopK:
    class Config(BaseModel):
        model_config = ConfigDict(extra="forbid")
        k: int = 2

    def __init__(self, config: Config) -> None: ...


def noise(*, sigma: float, seed: int) -> float:
    return sigma


class NoiseGate(ComponentChoice):
    kind: ClassVar[str] = "gate"
    runtime: ClassVar[tuple[str, ...]] = ("seed",)


class Mixture:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        gate: Gate
        more: list[NoiseGate] = field(default_factory=list)

    def __init__(self, config: Config) -> None: ...


class Stack:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        layers: list[Layer]

    def __init__(self, config: Config) -> None: ...


class Model(Section):
    layer: Layer
    others: dict[str, Layer] = Field(default_factory=dict)


def registry() -> Registry:
    return Registry(
        {
            "gate": {"TopK": TopK, "Noise": noise, "Broken": "zoo_no_such_module:Gate"},
            "layer": {"Mixture": Mixture, "Stack": Stack},
        }
    )


def read(model: dict[str, Any]) -> Any:
    document = {"train_batch_size": 1, "model": model}
    return load(document, sections={"model": Model}, world_size=1, registry=registry()).model


def problems(model: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(model)
    return caught.value.problems


def mixture(gate: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "Mixture", "params": {"gate": gate, **more}}


def test_choices_are_values_like_others() -> None:
    noisy = {"type": "noise", "params": {"sigma": 0.5}}
    model = read({"layer": mixture({"type": "topk"}, more=[noisy]), "others": {"last": mixture({"type": "TopK"})}})
    assert (model.layer.type, model.layer.params["gate"]) == ("Mixture", {"type": "topk"})
    assert model.others["last"].kind == "layer"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"layer": {"type": "Mixtur"}}, "model.layer.type: no layer is named 'Mixtur'; did you mean 'Mixture'?"),
        ({"layer": {"type": "Mixture"}}, "model.layer.params.gate: Field required"),
        ({"layer": mixture({"type": "Top"})}, "model.layer.params.gate.type: no gate is named 'Top'; did you"),
        ({"layer": mixture({"type": "Broken"})}, "model.layer.params.gate.type: gate 'Broken' (zoo_no_such"),
        (
            {"layer": mixture({"type": "TopK", "params": {"kk": 1}})},
            "model.layer.params.gate.params.kk: unknown key; did you mean 'k'? known: k",
        ),
        ({"layer": mixture({"type": "TopK", "params": {"k": "x"}})}, "model.layer.params.gate.params.k: Input"),
        ({"layer": mixture({"type": "TopK"}, gates=[])}, "model.layer.params.gates: unknown key; did you mean 'gate'?"),
        (
            {"layer": mixture({"type": "TopK"}, more=[{"type": "noise", "params": {"sigma": 1}}, {"type": "noise"}])},
            "model.layer.params.more.1.params.sigma: required and not given",
        ),
        (
            {"layer": mixture({"type": "TopK"}, more=[{"type": "noise", "params": {"sigma": 1, "seed": 1}}])},
            "model.layer.params.more.0.params.seed: unknown key; known: sigma",
        ),
        (
            {"layer": mixture({"type": "TopK"}), "others": {"a": {"type": "no"}}},
            "model.others.a.type: no layer is named 'no'",
        ),
    ],
)  # fmt: skip
def test_a_mistake_at_any_depth_is_one_sentence_with_its_path(model: dict[str, Any], said: str) -> None:
    (problem,) = problems(model)
    assert problem.startswith(said), problem


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"lr": "x"}, ["optimizer.params.lr: Input should be a valid number (given 'x')"]),
        ({"lr": "3"}, ["optimizer.params.lr: Input should be a valid number (given '3')"]),
        ({"nesterov": 1}, ["optimizer.params.nesterov: Input should be a valid boolean (given 1)"]),
        ({"betas": [0.9]}, ["optimizer.params.betas.1: Field required (given [0.9])"]),
        ({"params": 1}, ["optimizer.params.params: unknown key; known: lr, weight_decay, momentum"]),
        ({"lr": 1, "betas": [0.9, 0.95], "nesterov": True, "weight_decay": 0}, []),
    ],
)
def test_options_of_a_component_without_a_config_have_types(params: dict[str, Any], said: list[str]) -> None:
    document = {"train_batch_size": 1, "optimizer": {"type": "muon", "params": params}}
    found: list[str] = []
    try:
        load(document, world_size=1)
    except ConfigError as error:
        found = error.problems
    assert len(found) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(found, said, strict=True)), found


def test_whole_floats_are_integers_and_objects_are_left_to_the_component() -> None:
    def scale(*, size: int, ratio: float = 1.0, dtype: torch.dtype = torch.float32) -> None: ...

    registry = Registry({"scale": {"one": scale}})
    assert registry.parse("scale", "one", {"size": 5e8, "ratio": 3, "dtype": torch.float16})[1] == []
    assert registry.parse("scale", "one", {"size": 0.5})[1][0][0] == "size"
    assert registry.parse("scale", "one", {"size": 1, "dtype": "fp16"})[1] == []


@given(st.text("TopKtopk", min_size=4, max_size=4))
def test_a_name_is_found_in_any_case_and_no_other_is(name: str) -> None:
    model = {"layer": mixture({"type": name})}
    if name.lower() == "topk":
        assert read(model).layer.params["gate"]["type"] == name
    else:
        assert problems(model)[0].startswith("model.layer.params.gate.type: no gate is named")


def test_the_schema_has_names_and_options_of_all_levels() -> None:
    schema = json_schema({"model": Model}, registry=registry())
    check = jsonschema.Draft202012Validator(schema)

    def fits(model: dict[str, Any]) -> bool:
        return bool(check.is_valid({"train_batch_size": 1, "model": model}))

    assert fits({"layer": mixture({"type": "TopK", "params": {"k": 3}})})
    assert fits({"layer": mixture({"type": "Noise", "params": {"sigma": 3, "seed": 1}})})
    assert not fits({"layer": mixture({"type": "TopK", "params": {"k": "x"}})})
    assert not fits({"layer": mixture({"type": "TopK", "params": {"j": 3}})})
    assert not fits({"layer": mixture({"type": "TopK"}, gates=[])})
    assert fits({"layer": mixture({"type": "TopK", "params": {"k": "auto"}})})
    assert not fits({"layer": {"type": "Mixture", "params": {}}})
    assert not fits({"layer": {"type": "Mixture"}})
    inner: dict[str, Any] = {"type": "Stack", "params": {"layers": [mixture({"type": "TopK", "params": {"k": 3}})]}}
    assert fits({"layer": {"type": "Stack", "params": {"layers": [inner]}}})
    inner["params"]["layers"].append({"type": "Mixture", "params": {"gates": 1}})
    assert not fits({"layer": {"type": "Stack", "params": {"layers": [inner]}}})
    assert problems({"layer": {"type": "Stack", "params": {"layers": [inner]}}})[0].startswith(
        "model.layer.params.layers.0.params.layers.1.params.gates: unknown key; did you mean 'gate'?"
    )
    assert "x-component-kind" not in str(schema)
