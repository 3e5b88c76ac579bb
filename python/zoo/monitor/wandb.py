"""The section ``wandb``: a run of Weights & Biases."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from zoo.monitor.events import events, scales_loss
from zoo.monitor.places import package, reason
from zoo.monitor.section import MonitorSection
from zoo.parts import Environment, StepRecord

__all__ = ["WandbMonitor", "WandbSection"]

_log = logging.getLogger("zoo.monitor")
_begun: weakref.WeakSet[Any] = weakref.WeakSet()  # runs of engines of this process


class WandbSection(MonitorSection):
    """A run of Weights & Biases. Needs the package wandb, whose own variables (``WANDB_MODE=offline``, ``WANDB_DIR``,
    ``WANDB_NAME``, ``WANDB_RUN_ID`` with ``WANDB_RESUME``, ...) count as everywhere."""

    group: str | None = None
    """Runs that belong together have the same group."""

    team: str | None = None
    """Team or user that the run belongs to; null: the user who is logged in."""

    project: str = "deepspeed"
    """Project that the run belongs to."""


class WandbMonitor:
    """Logs each step's events at the step ``record.total_samples``.

    The run becomes ``wandb.run``, so that a script's own ``wandb.log`` goes there too. Where the script has begun a run
    already, events go to that, and it is not finished here. A second engine of a process has a run of its own, and so
    has each rank with ``ranks`` "all", named ``rank_<n>``.

    The latest row stays open, so that further events of its step go into it; the next one, or :meth:`close`, hands it
    to W&B's own process. What that holds back is lost when both are killed: the open row, and of an offline run a block
    of its file, 32 KiB, which is some tens of steps. To continue a run, set ``WANDB_RUN_ID`` and
    ``WANDB_RESUME=allow``. W&B takes no step below the latest: when training goes back to a checkpoint, nothing is
    written until it is where it was before, and the log says so.
    """

    def __init__(self, section: WandbSection, environment: Environment) -> None:
        wandb = package("wandb", "wandb", "wandb")
        self._scaled = scales_loss(environment.config)
        self._told = self._open = False
        active = wandb.run
        alone = section.ranks == "first"
        self._joined = alone and active is not None and active not in _begun
        if self._joined:
            self.run, self._latest = active, -1
            return
        apart: dict[str, Any] = {} if alone else {"name": f"rank_{environment.rank}"}
        if active is not None or not alone:
            apart["reinit"] = "create_new"
        try:
            self.run = wandb.init(project=section.project, entity=section.team, group=section.group, **apart)
        except Exception as error:  # whatever stands between here and its server
            raise ValueError(
                f"wandb: no run could be begun ({reason(error)}); log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error
        _begun.add(self.run)
        self._latest = self.run.starting_step - 1  # of a run that is continued

    def write(self, record: StepRecord) -> None:
        """Log a row, or more of the latest one."""
        if record.total_samples < self._latest + (not self._open):
            if not self._told:
                self._told = True
                _log.warning(
                    "wandb: a step ends at %d samples, and the run has %d already; W&B takes no earlier steps, so "
                    "nothing is written there until these are passed.",
                    record.total_samples, self._latest,
                )  # fmt: skip
            return
        self._latest, self._open = record.total_samples, True
        self.run.log(events(record, scaled=self._scaled), step=record.total_samples)

    def close(self) -> None:
        """Finish the run, unless somebody else began it."""
        if not self._joined:
            self.run.finish()
