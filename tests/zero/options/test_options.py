"""The documented options: every one is taken at its default, and old names mean what they meant."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.config.documented import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO

from zoo.config import Config, ConfigError, json_schema, load
from zoo.config.fates import Fate, fates_of, of_today
from zoo.config.section import fields_by_key
from zoo.zero import ZeroConfig

TABLE = dict(ZeroConfig.fates.items())
FIELDS = fields_by_key(ZeroConfig)
UNNECESSARY = {name: fate for name, fate in TABLE.items() if fate.what == "unnecessary"}
REFUSED = {name: fate for name, fate in TABLE.items() if fate.what == "refused"}


def go(section: dict[str, Any]) -> Config:
    return load({"train_batch_size": 1, "zero_optimization": section}, world_size=1)


def problem(section: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        go(section)
    (only,) = caught.value.problems
    return only


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.filterwarnings("error")
def test_every_option_is_taken_at_its_documented_default(name: str) -> None:
    _, default, aliases = ZERO[name]
    for key in (name, *aliases):
        fate = fates_of(ZeroConfig).get(key)
        if fate is not None and fate.what == "translated" and default is not None:
            continue  # accepted with a warning, below
        config = go({key: default}).zero_optimization
        said = key in FIELDS and default is not None
        assert config == ZeroConfig(**({name: default} if said else {}))


@pytest.mark.filterwarnings("error")
def test_a_document_that_spells_out_everything_is_the_default() -> None:
    inner = {
        section: {name: default for name, (_, default, _) in keys.items()}
        for section, keys in (("offload_param", OFFLOAD_PARAM), ("offload_optimizer", OFFLOAD_OPTIMIZER))
    }
    everything = {
        name: default for name, (_, default, _) in ZERO.items() if name not in TABLE or TABLE[name].what != "translated"
    } | inner
    config = go(everything).zero_optimization
    for name in (name for name in everything if name in FIELDS and ZERO[name][1] is not None):
        assert getattr(config, name) == everything[name]
    assert config.stage == 0
    # What is not said is the same there, but that zoo reads and writes ahead unless it is told not to.
    plain = ZeroConfig()
    assert config.offload_param == plain.offload_param
    pipelines = {"pipeline_read": False, "pipeline_write": False}
    assert config.offload_optimizer == plain.offload_optimizer.model_copy(update=pipelines)


@pytest.mark.parametrize(
    "name",
    [
        "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "sub_group_size",
    ],
)  # fmt: skip
def test_a_number_of_elements_may_be_zero_and_not_less(name: str) -> None:
    field = name.removeprefix("stage3_")
    assert getattr(go({name: 0}).zero_optimization, field) == 0
    assert re.search(rf"{field}: given -1 \(int\); allowed: greater than or equal to 0", problem({name: -1}))


def test_the_tables_and_the_sections_agree_on_names() -> None:
    for section, documented in (
        (ZeroConfig, ZERO),
        (type(ZeroConfig().offload_param), OFFLOAD_PARAM),
        (type(ZeroConfig().offload_optimizer), OFFLOAD_OPTIMIZER),
    ):
        fields, table = fields_by_key(section), fates_of(section)
        assert not set(fields) & set(table)
        for name, (_, _, aliases) in documented.items():
            assert all(fields.get(key, name) == name for key in aliases)
            assert all(key in fields or key in table for key in (name, *aliases))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": False}, {"offload_optimizer": {"device": "none"}}),
        ({"cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}),
        ({"cpu_offload_params": True, "offload_param": None}, {"offload_param": {"device": "cpu"}}),
        (
            {"cpu_offload": True, "cpu_offload_use_pin_memory": True},
            {
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"pin_memory": True},
            },
        ),
        (
            {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "cpu_offload": True},
            {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
        ),
        ({"stage3_gather_fp16_weights_on_model_save": True}, {"gather_16bit_weights_on_model_save": True}),
        ({"stage3_gather_fp16_weights_on_model_save": False}, {"gather_16bit_weights_on_model_save": False}),
        (
            {"stage3_gather_fp16_weights_on_model_save": True, "gather_16bit_weights_on_model_save": True},
            {"gather_16bit_weights_on_model_save": True},
        ),
        (
            {"stage3_gather_fp16_weights_on_model_save": True, "stage3_gather_16bit_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
    ],
)
def test_deprecated_keys_become_present_ones_with_a_sentence_each(
    section: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = dict(section)
    values, sentences = of_today(ZeroConfig, section, "here")
    assert values == expected
    assert section == before
    old = [key for key in section if key.startswith(("cpu_", "stage3_gather_fp16"))]
    assert [sentence.split(" ")[0] for sentence in sentences] == old
    assert all("is deprecated" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}},
            "cpu_offload=True and offload_optimizer.device='nvme' contradict",
        ),
        (
            {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}},
            "cpu_offload=False and offload_optimizer.device='cpu' contradict",
        ),
        (
            {"offload_param": {"device": "cpu", "pin_memory": False}, "cpu_offload_use_pin_memory": True},
            "cpu_offload_use_pin_memory=True and offload_param.pin_memory=False",
        ),
        (
            {
                "stage3_gather_16bit_weights_on_model_save": False,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "stage3_gather_fp16_weights_on_model_save=True and stage3_gather_16bit_weights_on_model_save=False",
        ),
        (
            {"cpu_offload_param": True, "cpu_offload_params": True},
            "cpu_offload_params: given twice, as 'cpu_offload_param' and as 'cpu_offload_params'",
        ),
        ({"cpu_offload": "yes"}, r"cpu_offload: given 'yes' \(str\); allowed: true or false"),
        ({"contiguous_gradients": 1}, r"contiguous_gradients: given 1 \(int\); allowed: true or false"),
        ({"max_reuse_distance": True}, r"max_reuse_distance: given True \(bool\); allowed: a number"),
        ({"offload_optimizer": {"super_offload": True}}, "offload_optimizer.super_offload: given True; not supported"),
        ({"offload_param": {"buffer_cont": 3}}, "offload_param.buffer_cont: unknown key; did you mean 'buffer_count'"),
    ],
)
def test_contradictions_and_what_nobody_does_are_errors(section: dict[str, Any], said: str) -> None:
    assert re.search(said, problem(section))


@pytest.mark.parametrize("name", UNNECESSARY)
def test_an_option_without_effect_says_so_when_it_asks_for_something_else(name: str) -> None:
    fate = UNNECESSARY[name]
    other = not fate.default if isinstance(fate.default, bool) else fate.default + 1
    for key in (name, *fate.aliases):
        values, sentences = of_today(ZeroConfig, {key: other}, "here")
        assert values == {}
        assert sentences == ([] if other in fate.nothing else [f"{key}={other!r} has no effect: {fate.text}."])
        assert of_today(ZeroConfig, {key: "auto"}, "here") == ({}, [])


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_refused_says_why(name: str) -> None:
    fate: Fate = REFUSED[name]
    asked = {"x": 1} if fate.kind is dict else True
    assert problem({name: asked}).startswith(f"zero_optimization.{name}: given {asked!r}; not supported: {fate.text}")
    assert go({name: fate.default}).zero_optimization == ZeroConfig()


def test_a_document_with_old_keys_warns_and_explains() -> None:
    with pytest.warns(UserWarning, match="zero_optimization.round_robin_gradients=True has no effect"):
        config = go({"stage": 2, "round_robin_gradients": True})
    assert config.zero_optimization.stage == 2
    assert "zero_optimization.round_robin_gradients=True has no effect" in config.explain().splitlines()[-1]
    assert problem({"zero_hpz_partition_size": "many"}).startswith("zero_optimization.zero_hpz_partition_size: given")


@pytest.mark.dear
def test_editors_accept_the_keys_too() -> None:
    properties = json_schema()["$defs"]["ZeroConfig"]["properties"]
    for name, (_, _, aliases) in ZERO.items():
        assert all(key in properties for key in (name, *aliases))
    assert properties["cpu_offload"]["deprecated"] is True
    assert properties["cpu_offload"]["description"] == "Now offload_optimizer.device."
    assert properties["max_reuse_distance"]["$ref"] == "#/$defs/optional.number"
