"""What a checkpoint has of a training beside tensors: counts, options, schedule, position in the data, parts."""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.engine.checkpoint.contents import AnyCheckpoint, meta_of
from zoo.engine.checkpoint.foreign import options_of_groups, tell_what_is_missing

if TYPE_CHECKING:
    from zoo.engine.batches import OwnBatches
    from zoo.engine.records import Boundary, Records
    from zoo.zero import ZeroOptimizer

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_log = logging.getLogger("zoo.engine")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Reads and writes what an engine's training consists of, but for tensors and random numbers."""

    module: nn.Module
    optimizer: ZeroOptimizer
    records: Records
    boundary: Boundary
    batches: OwnBatches
    parts: Mapping[str, Any]
    registered: Mapping[str, Any]
    """What the user has given by name, with ``state_dict`` and ``load_state_dict``, as parts may have."""

    def meta(self) -> dict[str, Any]:
        """A checkpoint's ``meta["engine"]``. What it cannot hold exactly is refused when it is written."""
        optimizer, records, boundary = self.optimizer, self.records, self.boundary
        loader, schedule = self.batches.loader, records.schedule
        return {
            "optimizer": type(optimizer.inner).__name__,
            "global_steps": records.global_steps,
            "skipped_steps": records.skipped_steps,
            "micro_steps": records.micro_steps - boundary.over,  # whoever loads it begins the step at hand anew
            "micro_batches": boundary.micro_batches,
            "zero_stage": optimizer.config.stage,
            "accumulation": boundary.micro_batches if boundary.was_set else None,
            "samples": records.global_samples,
            "tokens": records.global_tokens,
            "loader": loader.state_dict() if _has_state(loader) else None,
            "lr_scheduler": _state_of(schedule) if schedule is not None else None,
            "parts": {name: part.state_dict() for name, part in self.parts.items() if _has_state(part)},
            "registered": {name: item.state_dict() for name, item in self.registered.items()},
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        }

    def options_of(self, found: AnyCheckpoint) -> list[dict[str, Any]]:
        """Of each group of the optimizer, the options of a checkpoint that it goes on with. Another class of optimizer
        takes those that it has itself."""
        meta = meta_of(found)
        saved: list[dict[str, Any]] = meta["param_groups"]
        if meta.get("imported"):
            return options_of_groups(self.module, self.optimizer, saved, found)
        if meta.get("optimizer") in (None, type(self.optimizer.inner).__name__):
            return saved
        groups = zip(self.optimizer.param_groups, saved, strict=True)
        return [{key: value for key, value in theirs.items() if key in own} for own, theirs in groups]

    def restore_options(self, found: AnyCheckpoint) -> None:
        """Give the parameter groups the options of a checkpoint; which states there are depends on them. A schedule
        that the checkpoint has nothing of has set the rate of its own step."""
        begins = self.records.schedule is not None and meta_of(found)["lr_scheduler"] is None
        for group, saved in zip(self.optimizer.param_groups, self.options_of(found), strict=True):
            rate = group["lr"]
            group.update({key: _like(group.get(key), value) for key, value in saved.items()})
            if begins:
                group["lr"] = rate

    def restore(self, found: AnyCheckpoint, *, schedule: bool = True) -> None:
        """The reverse of :meth:`meta`, but for the options. Where gradient accumulation differs,
        micro-batches are counted as if it always had. ``schedule``: that of learning rates too."""
        meta, records, loader = found.meta["engine"], self.records, self.batches.loader
        if meta.get("accumulation") is not None:  # set by hand
            self.boundary.set(int(meta["accumulation"]))
        steps, n = int(meta["global_steps"]), self.boundary.micro_batches
        counted = int(meta["micro_steps"]) if meta.get("micro_batches") == n else steps * n
        records.restore_counts(
            steps=steps, skipped=int(meta["skipped_steps"]), samples=int(meta.get("samples", 0)),
            tokens=int(meta.get("tokens", 0)), micro_steps=counted,
        )  # fmt: skip
        records.restart_counts()
        if meta.get("imported"):
            tell_what_is_missing(found, steps, first=self.optimizer.sharded.everyone.rank == 0)
        if loader is not None and not _has_state(loader):
            _log.warning(
                "the loader, a %s, has no state_dict and load_state_dict: it begins anew, and not at the checkpoint's "
                "sample.", type(loader).__name__,
            )  # fmt: skip
        if _has_state(loader) and meta["loader"] is not None:
            loader.load_state_dict(meta["loader"])
        self.batches.forget()
        mine = {name: part for name, part in self.parts.items() if _has_state(part)}
        _restore("engine part", mine, meta.get("parts", {}), found)
        _restore("registered state", self.registered, meta.get("registered", {}), found)
        if schedule:
            self._restore_schedule(meta["lr_scheduler"], found)

    def _restore_schedule(self, saved: dict[str, Any] | None, found: AnyCheckpoint) -> None:
        schedule = self.records.schedule
        if schedule is not None and saved is not None:
            schedule.load_state_dict(saved)
        elif schedule is not None:
            schedule.load_state_dict(schedule.state_dict())  # what it has set beside the rate, such as momentum
            _log.warning(
                "checkpoint %r has nothing of a learning-rate schedule: the %s begins anew, at step %d of training.",
                found.tag, type(schedule).__name__, self.records.global_steps,
            )  # fmt: skip
        elif saved is not None:
            rates = ", ".join(f"{float(group['lr']):g}" for group in self.optimizer.param_groups)
            _log.warning(
                "checkpoint %r has a state of a learning-rate schedule, and there is none now: learning rates stay as "
                "they were, %s.", found.tag, rates,
            )  # fmt: skip


def _has_state(item: Any) -> bool:
    """Whether it can be saved and loaded."""
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _restore(what: str, mine: Mapping[str, Any], saved: Mapping[str, Any], found: AnyCheckpoint) -> None:
    for name, item in mine.items():
        if name in saved:
            item.load_state_dict(saved[name])
        else:
            _log.warning("checkpoint %r has nothing of the %s %r, which begins anew.", found.tag, what, name)
    for name in sorted(set(saved) - set(mine)):
        _log.warning("checkpoint %r has a state of the %s %r, which is not there now.", found.tag, what, name)


def _state_of(schedule: Any) -> dict[str, Any]:
    # The default state_dict of a schedule is its attributes, and those of the schedules that it is made of. Functions
    # among them are its code: whoever builds the schedule again gives them again, and load_state_dict() leaves what it
    # is not given.
    code: list[str] = []
    state: dict[str, Any] = _without_functions(dict(schedule.state_dict()), "", code)
    if code:
        _log.info(
            "the checkpoint does not hold %s of the learning-rate schedule %s: functions are code, not state, and are "
            "taken from the schedule that continues.",
            ", ".join(sorted(code)),
            type(schedule).__name__,
        )
    return state


def _without_functions(value: Any, path: str, left_out: list[str]) -> Any:
    if type(value) is list:
        return [_without_functions(item, f"{path}[{k}]", left_out) for k, item in enumerate(value)]
    if type(value) is not dict:
        return value
    places = {key: f"{path}.{key}" if path else str(key) for key in value}
    left_out += [places[key] for key, item in value.items() if isinstance(item, _FUNCTIONS)]
    return {
        key: _without_functions(item, places[key], left_out)
        for key, item in value.items()
        if not isinstance(item, _FUNCTIONS)
    }


def _like(old: Any, new: Any) -> Any:
    return new.to(old.device) if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) else new
