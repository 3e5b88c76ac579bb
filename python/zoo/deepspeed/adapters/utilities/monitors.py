"""``deepspeed.monitor``: ``write_events([(name, value, samples), ...])`` over the sinks of ``zoo.monitor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, Field

from zoo.monitor.comet import CometSection
from zoo.monitor.csv_monitor import CsvSection
from zoo.monitor.tensorboard import TensorBoardSection
from zoo.monitor.wandb import WandbSection
from zoo.parts import Environment

Event = tuple[str, Any, int]


class _Strict:
    """``strict``: "auto" is a value like others; otherwise it counts as not given."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**(data if strict else {key: value for key, value in data.items() if value != "auto"}))


# Built at once, because a section that is built on first use shows the signature of its base until then.
class TensorBoardConfig(_Strict, TensorBoardSection, defer_build=False):
    """The section ``tensorboard``."""


class WandbConfig(_Strict, WandbSection, defer_build=False):
    """The section ``wandb``."""


class CSVConfig(_Strict, CsvSection, defer_build=False):
    """The section ``csv_monitor``."""


class CometConfig(_Strict, CometSection, defer_build=False):
    """The section ``comet``."""


class DeepSpeedMonitorConfig(BaseModel):
    """The sections of a configuration that are monitors', by name."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**data)

    @property
    def enabled(self) -> bool:
        """Whether any of them is."""
        return any(section.enabled for section in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a whole configuration, as a dict."""
    return DeepSpeedMonitorConfig(**{k: param_dict[k] for k in DeepSpeedMonitorConfig.model_fields if k in param_dict})


@dataclass
class _Events:
    """What a sink is handed: metrics alone, of no step. ``total_samples`` is the x that the program says."""

    total_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    lr: tuple[float, ...] = ()
    tokens: int = 0
    total_tokens: int = 0
    loss = loss_scale = grad_norm = skipped = step = step_s = None
    samples_per_s = tokens_per_s = wire_bytes = memory_bytes = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, the step being None; an event that is called as one of these two is "events/<name>"."""
        own = {"step": None, "total_samples": self.total_samples}
        return {**own, **{f"events/{name}" if name in own else name: value for name, value in self.metrics.items()}}


def _records(events: Sequence[Event]) -> list[Any]:
    """Records that give each event in its order: what comes again under a name is in a record of its own."""
    found: list[_Events] = []
    for name, value, samples in events:
        if not found or found[-1].total_samples != int(samples) or name in found[-1].metrics:
            found.append(_Events(int(samples)))
        found[-1].metrics[name] = float(value)
    return found


class Monitor:
    """One sink, on rank 0, or on each where ``ranks`` of its section is "all".

    Args:
        monitor_config: its section, or any object with the same attributes.

    Attributes:
        enabled: as the section says.
        sink: that of ``zoo.monitor``; None where nothing is written, on other ranks too.
    """

    _home, _section = "", TensorBoardConfig

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config, self.enabled = monitor_config, bool(monitor_config.enabled)
        self.sink: Any = None
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.enabled and (rank == 0 or getattr(monitor_config, "ranks", "first") == "all"):
            module, _, name = self._home.partition(":")
            fields = (f for f in self._section.model_fields if hasattr(monitor_config, f))
            section = self._section(**{name: getattr(monitor_config, name) for name in fields})
            size = dist.get_world_size() if dist.is_initialized() else 1
            place = Environment(config=None, rank=rank, world_size=size, batch_rank=rank, batch_ranks=size)
            self.sink = getattr(import_module(module), name)(section, place)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, number, samples so far) triples."""
        if self.sink is None:
            return
        for record in _records(event_list):
            self.sink.write(record)


class FeedMonitor:
    """``engine.monitor``: the sinks that get each step's record take events of the program too.

    Attributes:
        enabled: whether there are any, on this rank.
    """

    def __init__(self, feed: Any) -> None:
        self._feed, self.enabled = feed, bool(feed)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write (name, number, samples so far) triples."""
        for record in _records(event_list):
            self._feed.put(record)


class TensorBoardMonitor(Monitor):
    """Into event files."""

    _home, _section = "zoo.monitor.tensorboard:TensorBoardMonitor", TensorBoardConfig

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name


class csvMonitor(Monitor):
    """Into a CSV file for each name."""

    _home, _section = "zoo.monitor.csv_monitor:CsvMonitor", CSVConfig  # type: ignore[assignment]

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name


class WandbMonitor(Monitor):
    """Into a run of Weights & Biases."""

    _home, _section = "zoo.monitor.wandb:WandbMonitor", WandbConfig  # type: ignore[assignment]

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project


class CometMonitor(Monitor):
    """Into an experiment of Comet."""

    _home, _section = "zoo.monitor.comet:CometMonitor", CometConfig  # type: ignore[assignment]

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.samples_log_interval = comet_config.samples_log_interval

    @property
    def experiment(self) -> Any:
        """Comet's own object; None where nothing is written."""
        return self.sink.experiment if self.sink is not None else None


class MonitorMaster:
    """All monitors that a :class:`DeepSpeedMonitorConfig` enables."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config, self.enabled = monitor_config, bool(monitor_config.enabled)
        self.tb_monitor = self._made(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = self._made(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = self._made(csvMonitor, monitor_config.csv_monitor)
        self.comet_monitor = self._made(CometMonitor, monitor_config.comet)

    @staticmethod
    def _made(cls: type[Any], section: Any) -> Any:
        return cls(section) if section.enabled else None

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, number, samples so far) triples into each."""
        for one in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if one is not None:
                one.write_events(event_list)
