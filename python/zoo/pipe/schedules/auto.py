"""The schedule that the forecast puts first for a model, among those that fit into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo import registry
from zoo.cost.hardware import read_hardware
from zoo.cost.stages import LayerCosts, LayerSize, StageCosts, costs_of_stages, evenly, layer_costs
from zoo.pipe.choose import CANDIDATES, Candidate, Choice, choose
from zoo.pipe.schedules.builder import ScheduleBuilder
from zoo.pipe.schedules.table import ScheduleError, Table

__all__ = ["AutoSchedule"]

_log = logging.getLogger("zoo.pipe")
USUAL = 4
"""Micro-batches of a batch for each rank, where nobody has said how many."""


class AutoSchedule:
    """The fastest of some schedules, by their forecasts for this model and number of micro-batches.

    A model is cut for one placement of stages, so the first choice is made when it is built: by ``num_micro_batches``,
    or four for each rank. When a batch has another number, the choice is made again among the schedules with the same
    placement. Both are the same on all ranks, which have the same layers and options; rank 0 of the pipeline logs them
    with the reason (logger ``zoo.pipe``).

    Costs are those of ``zoo.cost.stages``, of the model's own partition, or those that are given by layer.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """What may be chosen, and by which costs.

        Attributes:
            max_activation_bytes: what a rank may keep for backwards; a number, or one a rank. None: any.
            candidates: names, or {"type": name, "params": {...}}; None: those of ``zoo.pipe.choose.CANDIDATES``.
            num_micro_batches: of a batch, where the stages are placed.
            tokens: of a micro-batch: samples · positions. Where it is not given, times are those of one token, which
                orders schedules alike as long as messages cost nothing.
            hardware: a name that zoo.cost knows ("h100") or a file: what products take, and messages between nodes.
            flops_per_s: of a rank, for the estimate, in the place of the hardware's. Without either, 1e12: times are
                then right to a factor, which orders schedules alike.
            forward_s, backward_s, kept_bytes: one number a layer and micro-batch, where that was measured, without
                activation checkpointing. The weights' part of a backward counts as half of it. (``zoo.pipe.measure``
                gives forward and backward in one number, mostly 1 : 2.)
            activation_bytes, latency_s, bytes_per_s: of messages; the hardware's, or nothing, by default.
        """

        max_activation_bytes: float | list[float] | None = None
        candidates: list[str | dict[str, Any]] | None = None
        num_micro_batches: int | None = None
        tokens: int | None = None
        hardware: str | None = None
        flops_per_s: float | None = None
        forward_s: list[float] | None = None
        backward_s: list[float] | None = None
        kept_bytes: list[float] | None = None
        activation_bytes: float = 0.0
        latency_s: float | None = None
        bytes_per_s: float | None = None

        def __post_init__(self) -> None:
            for name in ("num_micro_batches", "tokens", "flops_per_s"):
                value = getattr(self, name)
                if value is not None and not 0 < value < math.inf:
                    raise ValueError(f"schedule auto got {name}={value}; it takes a number above 0.")
            if (self.forward_s is None) != (self.backward_s is None):
                raise ValueError("schedule auto got one of forward_s and backward_s; it takes both, or neither.")
            if self.max_activation_bytes is not None and self.tokens is None and self.kept_bytes is None:
                raise ValueError(
                    "schedule auto got max_activation_bytes and cannot tell what a layer keeps: give tokens (of a "
                    "micro-batch), or kept_bytes (of each layer)."
                )
            if self.candidates is not None and not self.candidates:
                raise ValueError("schedule auto got no candidates; it takes one or more, such as '1f1b'.")
            for given in self.candidates or ():
                candidate = _candidate(given)
                if candidate.name == "auto":
                    raise ValueError("schedule auto got itself as a candidate; it takes other schedules.")
                registry.build("pipe_schedule", candidate.name, candidate.options)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._hardware = None if config.hardware is None else read_hardware(config.hardware)
        self._costs_of: Callable[[int], StageCosts] = evenly(StageCosts())
        self._placements: dict[int, tuple[int, ...]] = {}
        self._usable: Callable[[Sequence[int]], None] | None = None
        self._logs = False

    def for_model(
        self, sizes: Callable[[], Sequence[LayerSize]], bounds_of: Callable[[int], Sequence[int]], *,
        checkpoint_interval: int = 0, checkpointed: Callable[[range], bool] = lambda numbers: True,
        rank_of: tuple[int, ...] | None = None, usable: Callable[[Sequence[int]], None] | None = None,
        logs: bool = False,
    ) -> AutoSchedule:  # fmt: skip
        """The same for the layers of a model.

        Args:
            sizes: of the layers. bounds_of: number of stages → bounds.
            checkpoint_interval: of activation checkpointing. checkpointed: whether a run of layers is.
            rank_of: the placement of a model that has been cut. usable: raises a ValueError for a placement that the
                model cannot have. logs: this rank says what is taken, and why.

        Raises:
            ValueError: costs for another number of layers.
        """
        given, found = self.config, AutoSchedule(self.config)
        known = sizes()
        if given.max_activation_bytes is not None and given.kept_bytes is None and not any(s.kept_bytes for s in known):
            raise ValueError(
                "schedule auto got max_activation_bytes, and of a traced model nobody can tell what its layers keep: "
                "give kept_bytes (of each layer)."
            )
        layers = layer_costs(known, tokens=given.tokens or 1, flops_per_s=found._rate())
        found._costs_of = costs_of_stages(
            self._measured(layers), bounds_of, checkpoint_interval=checkpoint_interval, checkpointed=checkpointed,
            latency_s=found._latency_s, activation_bytes=given.activation_bytes, bytes_per_s=found._bytes_per_s,
        )  # fmt: skip
        found._usable, found._logs = usable, logs
        if rank_of is not None:
            found._placements[max(rank_of) + 1] = rank_of
        return found

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """That of the first choice."""
        if num_ranks not in self._placements:
            best = self._choose(num_ranks, self.config.num_micro_batches or USUAL * num_ranks).best.candidate
            self._placements[num_ranks] = tuple(_builder(best).placement(num_ranks))
        return self._placements[num_ranks]

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table of the schedule that is taken for so many micro-batches.

        Raises:
            ScheduleError: none can be taken; why not.
        """
        self.placement(num_ranks)
        return _builder(self._choose(num_ranks, num_micro_batches).best.candidate).build(num_ranks, num_micro_batches)

    def _choose(self, num_ranks: int, num_micro_batches: int) -> Choice:
        given = self.config.candidates
        candidates = CANDIDATES if given is None else tuple(map(_candidate, given))
        fitting = [c for c in candidates if self._placed(num_ranks, c)]
        if not fitting:
            raise ScheduleError(
                f"none of the schedules {', '.join(map(str, candidates))} has its stages on the ranks "
                f"{self._placements[num_ranks]}, for which the model was cut: give PipelineModule(schedule='auto'), or "
                "one of these."
            )
        limit = self.config.max_activation_bytes

        def usable(table: Table) -> None:
            try:
                if self._usable is not None:
                    self._usable(table.rank_of)
            except ValueError as error:
                raise ScheduleError(str(error)) from error

        found = choose(
            num_ranks, num_micro_batches, self._costs_of, limit_bytes=limit, candidates=fitting, usable=usable
        )
        best = found.best
        if self._logs:
            _log.info(
                "schedule auto takes %s for %d micro-batches (%s): %s", best.candidate, num_micro_batches,
                self._source(), found.why(),
            )  # fmt: skip
        return found

    def _placed(self, num_ranks: int, candidate: Candidate) -> bool:
        there = self._placements.get(num_ranks)
        return there is None or tuple(_builder(candidate).placement(num_ranks)) == there

    def _source(self) -> str:
        given = self.config
        if given.forward_s:
            return "measured times"
        tokens = "" if given.tokens else ", of one token"
        return f"times of parameters x tokens at {self._rate():.3g} FLOP/s{tokens}"

    def _rate(self) -> float:
        """FLOP/s of a rank."""
        if self.config.flops_per_s is not None:
            return self.config.flops_per_s
        if self._hardware is None:
            return 1e12
        device = self._hardware.device
        return max(device.flops_per_s.values()) * device.reached

    @property
    def _latency_s(self) -> float:
        given = self.config.latency_s
        return given if given is not None else self._hardware.between.latency_s if self._hardware is not None else 0.0

    @property
    def _bytes_per_s(self) -> float:
        given = self.config.bytes_per_s
        if given is not None:
            return given
        return self._hardware.between.bytes_per_s if self._hardware is not None else math.inf

    def _measured(self, layers: list[LayerCosts]) -> list[LayerCosts]:
        """With those costs in the place of estimates that were given."""
        given, found = self.config, layers
        for name in ("forward_s", "backward_s", "kept_bytes"):
            numbers = getattr(given, name)
            if numbers is None:
                continue
            if len(numbers) != len(layers):
                raise ValueError(
                    f"schedule auto got {len(numbers)} numbers as {name}; the model has {len(layers)} layers."
                )
            keys = {"backward_s": ("input_s", "weight_s")}.get(name, (name,))
            found = [
                replace(layer, **dict.fromkeys(keys, number / len(keys)))
                for layer, number in zip(found, numbers, strict=True)
            ]
        return found


def _candidate(given: str | Mapping[str, Any]) -> Candidate:
    if isinstance(given, str):
        return Candidate(given)
    if set(given) - {"type", "params"} or not isinstance(given.get("type"), str):
        raise ValueError(
            f"schedule auto got the candidate {given}; it takes a name, or {{'type': ..., 'params': ...}}."
        )
    return Candidate(given["type"], dict(given.get("params") or {}))


def _builder(candidate: Candidate) -> ScheduleBuilder:
    found: ScheduleBuilder = registry.build("pipe_schedule", candidate.name, candidate.options)
    return found
