"""The section ``comet``: an experiment of Comet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from zoo.monitor.events import events, scales_loss
from zoo.monitor.places import package, reason
from zoo.monitor.section import MonitorSection
from zoo.parts import Environment, StepRecord

__all__ = ["CometMonitor", "CometSection"]


class CometSection(MonitorSection):
    """An experiment of Comet. Needs the package comet_ml. What is null comes from Comet's own configuration: the file
    ``.comet.config`` or variables such as ``COMET_API_KEY``."""

    samples_log_interval: int = Field(default=100, ge=1)
    """Samples between two values of an event."""

    project: str | None = None
    """Project of the experiment."""

    workspace: str | None = None
    """Workspace of the project."""

    api_key: SecretStr | None = None
    """Key of the user; it is shown as asterisks wherever the configuration is printed or saved."""

    experiment_name: str | None = None
    """Name of the experiment."""

    experiment_key: str | None = None
    """Identifier of the experiment. Comet itself wants 32 to 50 letters and digits."""

    online: bool | None = None
    """Whether data goes to the server or into a file of this machine, which ``comet upload`` sends later; null: to the
    server."""

    mode: Literal["get_or_create", "create", "get"] | None = None
    """Whether the experiment is a new one ("create"), one that is there ("get"), or either ("get_or_create")."""


class CometMonitor:
    """Logs events at the step ``record.total_samples``: the first of each, and the next when
    ``samples_log_interval`` samples have passed.

    With ``ranks`` "all" each rank has an experiment of its own, with ``-rank_<n>`` after its name; an
    ``experiment_key`` belongs to one. To continue an experiment give its key. What a killed process loses is up to
    comet_ml, which sends in the background.
    """

    def __init__(self, section: CometSection, environment: Environment) -> None:
        comet = package("comet_ml", "comet", "comet")
        self._interval, self._scaled = section.samples_log_interval, scales_loss(environment.config)
        self._logged: dict[str, int] = {}
        name, every = section.experiment_name, section.ranks == "all"
        if every and section.experiment_key is not None:
            raise ValueError('comet: experiment_key names one experiment, and with ranks = "all" there are several.')
        try:
            self.experiment = comet.start(
                api_key=section.api_key.get_secret_value() if section.api_key is not None else None,
                workspace=section.workspace, project=section.project, experiment_key=section.experiment_key,
                mode="create" if every and section.mode is None else section.mode, online=section.online,
            )  # fmt: skip
        except Exception as error:  # whatever stands between here and its server
            raise ValueError(
                f"comet: no experiment could be begun ({reason(error)}); log in with `comet login`, or "
                "set comet.online to false."
            ) from error
        if every:
            name = f"{name}-rank_{environment.rank}" if name else f"rank_{environment.rank}"
        if name:
            self.experiment.set_name(name)

    def write(self, record: StepRecord) -> None:
        """Log the events whose turn it is."""
        now = record.total_samples
        due = {k: v for k, v in events(record, scaled=self._scaled).items() if self._is_due(k, now)}
        if due:
            self._logged.update(dict.fromkeys(due, now))
            self.experiment.log_metrics(due, step=now)

    def _is_due(self, name: str, now: int) -> bool:
        latest = self._logged.get(name)
        # now < latest: training went back to a checkpoint.
        return latest is None or now < latest or now - latest >= self._interval

    def close(self) -> None:
        """End the experiment: wait until everything is sent or written."""
        self.experiment.end()
