"""Where a bool is meant in a document "true", "false", 0 and 1 are read as that, whoever reads it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.deepspeed.test_document_values import NO, YES
from torch import nn
from torch.utils.data import TensorDataset
from zoo.deepspeed.elasticity import elasticity_enabled
from zoo.deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from zoo.deepspeed.runtime.config import DeepSpeedConfig, get_dataloader_drop_last, get_prescale_gradients

import zoo.deepspeed as deepspeed
from zoo.config import Config, ConfigError
from zoo.config.fates import Fate, fates_of
from zoo.config.section import fields_by_key, section_of
from zoo.config.tree import Tree
from zoo.deepspeed import comm
from zoo.registry import DEFAULT

DOCUMENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}  # fmt: skip


def _of_fates(fates: dict[str, Fate], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, fate in fates.items():
        if fate.keys:
            yield from _of_fates(dict(fate.keys), (*path, key))
        elif fate.kind is bool:
            yield (*path, key)


def _of_section(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys that are bools."""
    for key, name in fields_by_key(section).items():
        annotation = section.model_fields[name].annotation
        inner = section_of(annotation)
        if inner is not None:
            yield from _of_section(inner, (*path, key))
        elif annotation in (bool, bool | None):
            yield (*path, key)
    yield from _of_fates(dict(fates_of(section)), path)


KEYS = sorted({("managed_gradient_accumulation",), *_of_section(Tree.of(Config, DEFAULT).whole().root)})


def read(document: dict[str, Any]) -> str:
    """All that ``DeepSpeedConfig`` makes of it, or what it refuses."""
    try:
        found = DeepSpeedConfig(copy.deepcopy(document))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    said = repr(sorted((k, vars(v) if isinstance(v, SimpleNamespace) else v) for k, v in vars(found).items()))
    return re.sub(r" at 0x[0-9a-f]+", "", said)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([*YES[1:], *NO[1:]])), min_size=1, max_size=40))
def test_every_key_that_is_a_bool(given: list[tuple[tuple[str, ...], Any]]) -> None:
    assert len(KEYS) > 150
    words: dict[str, Any] = {"train_batch_size": 1}
    bools: dict[str, Any] = {"train_batch_size": 1}
    for (*folders, last), word in given:
        for document, value in ((words, word), (bools, word in YES)):
            for folder in folders:
                document = document.setdefault(folder, {})
            document[last] = value
    assert read(words) == read(bools)


@pytest.mark.parametrize(("values", "meant"), [(YES, True), (NO, False)])
def test_what_an_engine_says_and_does(values: tuple[Any, ...], meant: bool) -> None:
    for value in values:
        document = {
            **DOCUMENT, "managed_gradient_accumulation": value, "dataloader_drop_last": value,
            "gradient_accumulation_steps": 2, "data_efficiency": {"enabled": 0, "data_sampling": {"enabled": value}},
            "timers": {"throughput": {"enabled": value}},
        }  # fmt: skip
        model, data = nn.Linear(3, 1), TensorDataset(torch.ones(5, 3))
        engine, _, loader, _ = deepspeed.initialize(model=model, config=document, training_data=data)
        assert engine.managed_gradient_accumulation() is engine.dataloader_drop_last() is meant
        assert engine.data_sampling_enabled() is engine.tput_timer.config.enabled is meant
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
        assert engine.global_steps == (0 if meant else 1)  # each second is a whole one, or each
        assert len(loader) == (2 if meant else 3)
        assert isinstance(engine.config["managed_gradient_accumulation"], bool)


@pytest.mark.parametrize("value", ["maybe", 2, "", None, []])
def test_what_is_neither(value: Any) -> None:
    document = {**DOCUMENT, "managed_gradient_accumulation": value}
    with pytest.raises(ConfigError, match=r"managed_gradient_accumulation = .*; allowed are true and false"):
        deepspeed.initialize(model=nn.Linear(3, 1), config=document)


@pytest.mark.parametrize("value", NO)
def test_an_optimizer_that_is_not_allowed(value: Any) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": "1"},
        "zero_allow_untested_optimizer": value,
    }  # fmt: skip
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="is not on DeepSpeed's list"):
        deepspeed.initialize(model=model, config=document, optimizer=torch.optim.RAdam(model.parameters()))


def test_samples_are_deepspeeds_where_nothing_chooses_them(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.arange(8.0).reshape(8, 1).expand(8, 3))
    orders = []
    for section in ({}, {"data_efficiency": {"enabled": "false"}}, {"curriculum_learning": {"enabled": 0}}):
        torch.manual_seed(0)
        config = {**DOCUMENT, **section}
        loader = deepspeed.initialize(model=nn.Linear(3, 1), config=config, training_data=data)[2]
        orders.append([batch[0][:, 0].tolist() for batch in loader])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize(("values", "meant"), [(YES, True), (NO, False)])
def test_readers_of_a_part(values: tuple[Any, ...], meant: bool) -> None:
    for value in values:
        assert get_dataloader_drop_last({"dataloader_drop_last": value}) is meant
        assert get_prescale_gradients({"prescale_gradients": value}) is meant
        assert elasticity_enabled({"elasticity": {"enabled": value}}) is meant
        found = DeepSpeedFlopsProfilerConfig({"flops_profiler": {"enabled": value, "detailed": value}})
        assert found.enabled is found.detailed is meant
        comm.configure({"comms_logger": {"enabled": value, "debug": value}})
        assert comm.comms_logger.enabled is comm.comms_logger.debug is meant
    comm.configure(enabled=False, debug=False)


@pytest.mark.parametrize("value", ["false", 0])
def test_options_of_optimizers_that_torch_alone_has(value: Any) -> None:
    params = {"lr": 0.1, "foreach": value, "decoupled_weight_decay": value}
    made = deepspeed.initialize(
        model=nn.Linear(3, 1), config={**DOCUMENT, "optimizer": {"type": "NAdam", "params": params}}
    )
    assert made[1].param_groups[0]["foreach"] is made[1].param_groups[0]["decoupled_weight_decay"] is False
