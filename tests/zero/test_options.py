"""The table of documented options: every one is taken at its default, and old names mean what they meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import Field

from zoo.config import Config, ConfigError, Section, json_schema, load, register_section
from zoo.registry import Registry
from zoo.zero import ZeroConfig
from zoo.zero.options.documents import OPTIONS, Option, schema_of_translated, status, translate

TOP = [option for option in OPTIONS if not option.section]


class Offload(Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    pin_memory: bool = False


class Sharding(Section):
    """A section that carries out some of the options, whatever ZeroConfig does."""

    stage: int = 0
    prefetch_bucket_size: int | None = None
    gather_16bit_weights_on_model_save: bool = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    overlap_comm: bool = True
    offload_param: Offload = Offload()
    offload_optimizer: Offload = Offload()


class Wired(ZeroConfig):
    @classmethod
    def translate(cls, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        return translate(raw, cls)

    @classmethod
    def translated_keys(cls) -> dict[str, dict[str, Any]]:
        return schema_of_translated(cls)


def go(section: dict[str, Any]) -> Config:
    registry = Registry()
    register_section("zero_optimization", Wired, registry=registry)
    return load({"train_batch_size": 1, "zero_optimization": section}, world_size=1, registry=registry)


@pytest.mark.parametrize("option", TOP, ids=lambda option: option.name)
@pytest.mark.filterwarnings("error")
def test_every_option_is_taken_at_its_documented_default(option: Option) -> None:
    for key in (option.name, *option.aliases):
        if option.deprecated and option.default is not None:
            continue  # accepted with a warning, below
        config = go({key: option.default}).zero_optimization
        said = status(option, Wired) == "carried out" and option.default is not None
        assert config == Wired(**({option.name: option.default} if said else {}))


@pytest.mark.filterwarnings("error")
def test_a_document_that_spells_out_everything_is_the_default() -> None:
    inner = {
        section: {option.name: option.default for option in OPTIONS if option.section == section}
        for section in ("offload_param", "offload_optimizer")
    }
    everything = {option.name: option.default for option in TOP if not option.deprecated} | inner
    config = go(everything).zero_optimization
    carried = {o.name for o in TOP if status(o, Wired) == "carried out" and o.default is not None}
    for name in carried:
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
    with pytest.raises(ConfigError, match=rf"{field}: given -1 \(int\); allowed: greater than or equal to 0"):
        go({name: -1})


def test_the_table_and_the_section_agree_on_names() -> None:
    names = [(option.section, key) for option in OPTIONS for key in (option.name, *option.aliases)]
    assert len(names) == len(set(names))
    for option in TOP:
        field = ZeroConfig.model_fields.get(option.name)
        if field is not None:
            assert option.aliases == ((field.alias,) if field.alias else ())
            assert not option.deprecated
    # Of what a document can say, the section has no field that the table does not know, but zoo's own.
    own = {
        "offload_host_bytes", "ranks_per_node", "hierarchical_all_reduce", "quantized_gradients_bits",
        "quantized_gradients_feedback", "divergent",
        "update_in_backward", "buffers",
    }  # fmt: skip
    assert set(ZeroConfig.model_fields) - {option.name for option in TOP} <= own


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
    values, sentences = translate(section, Sharding)
    assert values == expected
    assert section == before
    old = [key for key in section if key.startswith(("cpu_", "stage3_gather_fp16"))]
    assert [sentence.split(" ")[0] for sentence in sentences] == old
    assert all("is deprecated" in sentence for sentence in sentences)
    assert Sharding.model_validate(values)


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
        ({"cpu_offload_param": True, "cpu_offload_params": True}, "cpu_offload_param and cpu_offload_params"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes'; allowed: true or false"),
        ({"contiguous_gradients": 1}, "contiguous_gradients=1; allowed: true or false"),
        ({"max_reuse_distance": True}, "max_reuse_distance=True; allowed: a number"),
        ({"ignore_unused_parameters": False}, "ignore_unused_parameters=False is not supported"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients=True is not supported"),
        ({"mics_shard_size": 8}, "mics_shard_size=8 is not supported .*; allowed: -1"),
    ],
)
def test_contradictions_and_what_nobody_does_are_errors(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate(section, Sharding)


@pytest.mark.parametrize("option", [o for o in TOP if o.unnecessary], ids=lambda option: option.name)
def test_an_option_without_effect_says_so_when_it_asks_for_something_else(option: Option) -> None:
    other = not option.default if isinstance(option.default, bool) else option.default + 1
    for key in (option.name, *option.aliases):
        values, sentences = translate({key: other}, Sharding)
        assert values == {}
        assert sentences == ([] if other in option.silent else [f"{key}={other!r} has no effect: {option.zoo}."])
        assert translate({key: "auto"}, Sharding) == ({}, [])


def test_what_is_carried_out_or_unknown_is_left_to_the_section() -> None:
    section = {
        "stage": 9,
        "stage3_prefetch_bucket_size": "auto",
        "nonsense": 1,
        "offload_param": 3,
        "cpu_offload_param": True,
    }
    values, _ = translate(section, Sharding)
    assert values == {"stage": 9, "stage3_prefetch_bucket_size": "auto", "nonsense": 1, "offload_param": 3}
    assert translate({"overlap_comm": None, "offload_param": None}, Sharding) == ({}, [])


def test_a_document_with_old_keys_warns_and_explains() -> None:
    with pytest.warns(UserWarning, match="zero_optimization.round_robin_gradients=True has no effect"):
        config = go({"stage": 2, "round_robin_gradients": True})
    assert config.zero_optimization.stage == 2
    assert "zero_optimization.round_robin_gradients=True has no effect" in config.explain().splitlines()[-1]
    with pytest.raises(ConfigError, match=re.escape("zero_optimization.zero_hpz_partition_size: given 'many'")):
        go({"zero_hpz_partition_size": "many"})


def test_editors_accept_the_keys_too() -> None:
    registry = Registry()
    register_section("zero_optimization", Wired, registry=registry)
    properties = json_schema(registry=registry)["$defs"]["Wired"]["properties"]
    for option in TOP:
        for key in (option.name, *option.aliases):
            assert (key in properties) == (status(option, Wired) != "refused")
    assert properties["cpu_offload"] == {
        "type": "boolean", "description": "Now offload_optimizer.device.", "deprecated": True,
    }  # fmt: skip
    assert properties["max_reuse_distance"]["type"] == "number"
