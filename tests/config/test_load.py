"""What `load` promises: names, types, sources, contradictions, "auto", overrides."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from zoo.config import Config, ConfigError, Section, json_schema, load, read, register_section
from zoo.config.fates import Fate, translated
from zoo.registry import Registry


class Offload(Section):
    device: Literal["none", "cpu"] = "none"
    pin: bool = False


class Sharding(Section):
    stage: int = Field(default=0, ge=0, le=3)
    bucket_size: int = Field(default=500, ge=0, alias="stage3_bucket_size")
    offload: Offload | None = None
    mode: Literal["auto", "fixed"] = "fixed"

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.stage == 0 and self.offload:
            yield "sharding.offload needs sharding.stage 1 or more"


class Model(Section):
    width: int
    name: str = "byte"
    ratios: list[float] = Field(default_factory=list)


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    register_section("sharding", Sharding, registry=registry)
    register_section("absent", "zoo_no_such_module:Absent", registry=registry)
    registry.register("optimizer", "A", dict)
    return registry


def go(registry: Registry, document: dict[str, Any], **options: Any) -> Config:
    return load({"train_batch_size": 8, **document}, world_size=2, registry=registry, **options)


def problems(registry: Registry, document: dict[str, Any], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        go(registry, document, **options)
    return caught.value.problems


def test_values_are_typed_attributes(registry: Registry) -> None:
    config = go(registry, {"sharding": {"stage": 2, "offload": {"device": "cpu"}}, "fp16": {"enabled": True}})
    assert config.sharding.stage == 2
    assert config.sharding.offload.device == "cpu"
    assert config.fp16.enabled
    assert config.fp16.initial_scale_power == 16
    assert (config.steps_per_print, config.gradient_clipping, config.seed, config.optimizer) == (10, 0.0, 1234, None)
    assert config.world_size == 2


def test_it_is_frozen_and_survives_pickle(registry: Registry) -> None:
    config = go(registry, {"sharding": {"stage": 1}})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.explain() == config.explain()
    assert load(config.to_dict(), world_size=2, registry=registry) == config


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"sharding": {"stge": 1}}, "sharding.stge: unknown key; did you mean 'stage'?"),
        ({"sharding": {"offload": {"devise": "cpu"}}}, "sharding.offload.devise: unknown key; did you mean 'device'?"),
        ({"fp61": {}}, "fp61: unknown key; did you mean 'fp16'?"),
        ({"bf16": {"qqq": 1}}, "bf16.qqq: unknown key; known here: auto_cast, check_grad_overflow, enabled"),
        ({"model": {}}, "model: unknown key; it is a section of the application"),
        ({"absent": {}}, "absent: config_section 'absent' (zoo_no_such_module:Absent"),
        ({"sharding": {"stage": 1, "bucket_size": 1, "stage3_bucket_size": 2}}, "given twice, as 'bucket_size' and as"),
        ({"sharding": {"stage": "2"}}, "sharding.stage: given '2' (str); allowed: int"),
        ({"sharding": {"stage": 2.5}}, "sharding.stage: given 2.5 (float); allowed: a valid integer"),
        ({"sharding": {"stage": True}}, "sharding.stage: given True (bool); allowed: int"),
        ({"sharding": {"stage": 4}}, "sharding.stage: given 4 (int); allowed: less than or equal to 3"),
        (
            {"sharding": {"offload": {"device": "gpu"}}},
            "sharding.offload.device: given 'gpu' (str); allowed: 'none' or 'cpu'",
        ),
        ({"sharding": 3}, "sharding: given 3 (int); allowed:"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled: given 1 (int); allowed: bool"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: given 'yes' (str); allowed: bool"),
        ({"optimizer": {}}, "optimizer.type: required and not given"),
        ({"comm": {"timeout_s": 0}}, "comm.timeout_s: given 0 (int); allowed: greater than 0"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"fp16": {"initial_scale_power": 2, "min_loss_scale": 8}}, "fp16.min_loss_scale = 8 is above the first scale"),
        ({"comms_logger": {"debug": 3}}, "comms_logger.debug: given 3 (int); allowed: true or false"),
        ({"data_types": {"grad_accum_dtype": "float32"}}, "grad_accum_dtype: given 'float32' (str); allowed"),
        ({"sharding": {"offload": {}}}, "sharding.offload needs sharding.stage 1"),
    ],
)
def test_each_mistake_is_named_with_its_path(registry: Registry, document: dict[str, Any], said: str) -> None:
    (problem,) = problems(registry, document)
    assert said in problem


def test_all_mistakes_come_at_once(registry: Registry) -> None:
    found = problems(
        registry, {"train_batch_size": 9, "seed": -1, "sharding": {"stage": 7}, "fp16": {"hysteresis": "x"}}
    )
    assert [problem.split(":")[0] for problem in found[1:]] == ["seed", "fp16.hysteresis", "sharding.stage"]


def test_whole_floats_are_integers_and_infinity_is_never(registry: Registry) -> None:
    config = go(registry, {"sharding": {"stage": 1, "bucket_size": 5e8}, "steps_per_print": float("inf")})
    assert config.sharding.bucket_size == 500_000_000
    assert config.steps_per_print is None


def test_other_spellings(registry: Registry) -> None:
    config = go(registry, {"bfloat16": {"enabled": True}})
    assert config.bf16.enabled
    assert config.source("bf16.enabled") == "dict, alias 'bfloat16'"


def test_overrides_win_and_aliases_name_the_same_option(registry: Registry) -> None:
    document = {
        "sharding": {"stage": 3, "stage3_bucket_size": 7},
        "optimizer": {"type": "A", "params": {"lr": 1, "eps": 2}},
    }
    overrides = ["sharding.bucket_size=9", "sharding.offload.device=cpu", "optimizer.params.lr=1e-3", "seed=5"]
    config = go(registry, document, overrides=overrides)
    assert (config.sharding.bucket_size, config.sharding.offload.device, config.seed) == (9, "cpu", 5)
    assert config.optimizer.params == {"lr": 1e-3, "eps": 2}
    assert config.source("sharding.bucket_size") == config.source("optimizer.params.lr") == "override"
    assert config.source("optimizer.params.eps") == "dict"
    assert go(registry, document, overrides={"sharding.stage": 1}).sharding.stage == 1
    assert problems(registry, document, overrides=["sharding.stge=1"]) == [
        "sharding.stge: unknown key; did you mean 'stage'?"
    ]
    (problem,) = problems(registry, document, overrides=["sharding.stage"])
    assert "not of the form key.path=value" in problem


def test_auto_is_listed_or_filled_in(registry: Registry) -> None:
    document = {
        "train_batch_size": "auto",
        "sharding": {"stage": 1, "stage3_bucket_size": "auto", "mode": "auto"},
        "optimizer": {"type": "A", "params": {"lr": "auto"}},
    }
    found = problems(registry, document)
    paths = ["train_batch_size", "sharding.bucket_size", "optimizer.params.lr"]
    assert [problem.split(":")[0] for problem in found] == paths
    pending = read(document, registry=registry)
    assert pending.auto_paths() == paths
    values = {"train_batch_size": 16, "sharding.stage3_bucket_size": 3, "optimizer.params.lr": 0.1, "sharding.stage": 3}
    config = pending.resolve_auto(values).load(world_size=4)
    assert (config.train_batch_size, config.sharding.bucket_size, config.optimizer.params["lr"]) == (16, 3, 0.1)
    assert config.sharding.stage == 1  # was not "auto": the document wins
    assert config.source("sharding.bucket_size") == "resolved auto"
    assert config.sharding.mode == "auto"  # a value that the field itself lists
    with pytest.raises(ConfigError, match="did you mean 'stage'"):
        pending.resolve_auto({"sharding.stge": 1})


def test_application_sections(registry: Registry) -> None:
    config = go(registry, {"model": {"width": 3, "ratios": [1, 0.5]}}, sections={"model": Model})
    assert (config.model.width, config.model.name, config.model.ratios) == (3, "byte", [1.0, 0.5])
    assert problems(registry, {}, sections={"model": Model}) == ["model: required and not given"]
    assert problems(registry, {"model": {}}, sections={"model": Model}) == ["model.width: required and not given"]
    (problem,) = problems(registry, {"model": {"width": 1, "ratios": [1, "x"]}}, sections={"model": Model})
    assert problem.startswith("model.ratios.1: given 'x' (str)")
    for name in ("fp16", "sharding"):
        with pytest.raises(ConfigError, match="is taken"):
            go(registry, {}, sections={name: Model})
    with pytest.raises(ConfigError, match="derived from zoo\\.config\\.Section"):
        go(registry, {}, sections={"model": dict})


def test_explain_shows_every_value_and_its_source(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "sharding": {"stage": 1, "stage3_bucket_size": 2}}))
    text = load(path, world_size=2, registry=registry, overrides=["seed=1"]).explain()
    rows = {line.split("  (")[0].rstrip(): line.split("  (")[-1] for line in text.splitlines()}
    assert rows["train_batch_size = 8"] == "file ds.json)"
    assert rows["train_micro_batch_size_per_gpu = 4"] == "derived from train_batch_size and world_size = 2)"
    assert rows["sharding.bucket_size = 2"] == "file ds.json, alias 'stage3_bucket_size')"
    assert rows["seed = 1"] == "override)"
    assert rows["fp16.enabled = False"] == "default)"


class Renamed(Section):
    size: int = 1
    inner: Offload = Offload()

    fates: ClassVar[Mapping[str, Fate]] = {
        "old_size": translated({"size": None, "inner.device": {4: "cpu", 6: "cpu"}}, int),
    }


class Outer(Section):
    renamed: Renamed = Renamed()


def test_sections_translate_keys_of_former_times() -> None:
    registry = Registry()
    register_section("outer", Outer, registry=registry)
    note = "outer.renamed.old_size is deprecated: old_size=4 was read as size=4 and inner.device='cpu'."
    with pytest.warns(UserWarning, match=re.escape(note)):
        config = go(registry, {"outer": {"renamed": {"old_size": 4}}})
    assert (config.outer.renamed.size, config.outer.renamed.inner.device) == (4, "cpu")
    assert config.source("outer.renamed.size") == config.source("outer.renamed.inner.device") == "dict, translated"
    assert config.notes == (note,)
    assert config.explain().splitlines()[-1] == note
    again = pickle.loads(pickle.dumps(config))
    assert (again, again.notes) == (config, config.notes)
    with pytest.warns(UserWarning, match="read as size=6"):
        changed = go(registry, {"outer": {"renamed": {"size": 2}}}, overrides=["outer.renamed.old_size=6"])
    assert changed.outer.renamed.size == 6
    both = {"outer": {"renamed": {"old_size": 4, "size": 5, "nonsense": 1}}}
    clash, unknown = problems(registry, both)
    assert clash == "outer.renamed.old_size=4 and size=5 contradict each other; remove the former, it is deprecated"
    assert unknown.startswith("outer.renamed.nonsense: unknown key")
    assert "old_size" in json_schema(registry=registry)["$defs"]["Renamed"]["properties"]


def test_the_schema_has_both_spellings(registry: Registry) -> None:
    schema = json_schema({"model": Model}, registry=registry)
    assert {"sharding", "model", "bf16", "bfloat16"} <= set(schema["properties"])
    assert {"bucket_size", "stage3_bucket_size"} <= set(schema["$defs"]["Sharding"]["properties"])
    assert schema["additionalProperties"] is False
    assert "train_batch_size" not in schema["required"]
