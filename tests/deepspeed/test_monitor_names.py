"""Sections of monitors under DeepSpeed's names."""

from __future__ import annotations

import inspect

import pytest
from zoo.deepspeed.monitor.config import (
    CometConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
    get_monitor_config,
)


@pytest.mark.parametrize("kind", [CSVConfig, CometConfig, TensorBoardConfig, WandbConfig])
def test_auto_counts_as_not_given_unless_the_section_is_strict(kind: type) -> None:
    assert not kind().enabled
    assert kind(enabled="auto") == kind()
    with pytest.raises(ValueError, match="enabled"):
        kind(True, enabled="auto")
    with pytest.raises(ValueError, match="foo"):
        kind(enabled=True, foo=1)


@pytest.mark.parametrize("kind", [CSVConfig, CometConfig, TensorBoardConfig, WandbConfig])
def test_the_signature_is_there_before_the_first_instance(kind: type) -> None:
    assert "__signature__" in vars(kind)
    assert "strict" in inspect.signature(kind).parameters


def test_a_document_gives_the_sections_of_its_monitors() -> None:
    config = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "auto"}})
    assert config.csv_monitor == CSVConfig(enabled=True, output_path="runs")
    assert config.enabled
    assert not DeepSpeedMonitorConfig().enabled
