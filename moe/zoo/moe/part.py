"""What an engine does for a model with mixtures of experts: the part "moe"."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.comm import Communicator
from zoo.layout import logical_name
from zoo.moe.counted import CountedLayer
from zoo.moe.statistics import read, summary
from zoo.parts import Clock, Environment, StepRecord, drawn


def layers_of(model: nn.Module) -> dict[str, CountedLayer]:
    """The layers with experts of a model by their names in the whole model."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, CountedLayer)]
    return {logical_name(model, path): module for path, module in found}


def commit_balance(model: nn.Module, comm: Communicator | None = None) -> None:
    """After an update: move the biases of loss-free gates, and begin to count anew. Collective.

    An engine does it by itself; this is for a training loop of one's own.

    Args:
        comm: the ranks that see different tokens; None for all ranks of the job.
    """
    layers = list(layers_of(model).values())
    if comm is None and dist.is_initialized() and dist.get_world_size() > 1:
        comm = Communicator()
    commit(layers, comm)
    for layer in layers:
        if layer.tally is not None:
            layer.tally.zero_()


def commit(layers: list[CountedLayer], comm: Communicator | None) -> None:
    """Biases move by what all ranks have counted."""
    moving = [layer for layer in layers if layer.has_bias]
    if not moving:
        return
    device = next(moving[0].parameters()).device
    nothing = [torch.zeros(layer.num_experts, dtype=torch.int64, device=device) for layer in moving]
    counts = [n if layer.tally is None else layer.tally[0] for layer, n in zip(moving, nothing, strict=True)]
    whole = torch.cat(counts)
    if comm is not None and comm.size > 1:
        comm.all_reduce(whole).wait()
    sizes = [layer.num_experts for layer in moving]
    for layer, demand in zip(moving, torch.split(whole, sizes), strict=True):
        layer.commit(demand)


class MoEPart:
    """Sets what noise is drawn by, commits the bias of loss-free gates with each update that is made, and reports for
    each layer ``load``, ``entropy`` and ``dropped`` (:func:`zoo.moe.statistics.summary`; this rank's).

    Args:
        model: with mixtures.
        environment: of the engine.
    """

    def __init__(self, model: nn.Module, environment: Environment) -> None:
        self._environment = environment
        self._layers = layers_of(model)
        self._comm: Communicator | None = None

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins: seed, layer, step, micro-batch and share of the batch say what is drawn."""
        seed, place = int(self._environment.config.seed), self._environment.batch_rank
        for name, layer in self._layers.items():
            number = drawn(seed, zlib.crc32(name.encode()), clock.step, clock.micro_batch, place) >> 1
            layer.draw_by(number)
        return args, kwargs

    def metrics(self) -> Mapping[str, float]:
        """Of the step that is over."""
        counted = {name: layer.tally for name, layer in self._layers.items() if layer.tally is not None}
        found: dict[str, float] = {}
        for name, tally in zip(counted, read(list(counted.values())), strict=True):
            found |= {f"{name}/{key}": value for key, value in summary(tally).items()}
        return found

    def after_update(self, record: StepRecord) -> None:
        """Biases move, unless nothing was updated, and counts begin anew."""
        layers = list(self._layers.values())
        if not record.skipped:
            commit(layers, self._ranks())
        for layer in layers:
            if layer.tally is not None:
                layer.tally.zero_()

    def _ranks(self) -> Communicator | None:
        """All that see different tokens."""
        there = self._environment
        if self._comm is None and there.world_size > 1:
            config = there.config.mesh
            self._comm = (
                Communicator(there.group) if there.mesh is None else Communicator.of_axes(there.mesh, config.data_axes)
            )
        return self._comm
