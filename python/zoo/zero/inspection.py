"""What a ZeRO optimizer tells of itself: whole values, bytes, and what a step will cost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zoo.zero.config import ZeroConfig
from zoo.zero.forecast.costs import Forecast, gathered_from_shards
from zoo.zero.forecast.costs import forecast as make_forecast
from zoo.zero.forecast.offload import nvme_traffic, tier_bytes
from zoo.zero.sharding.gradients import Phase

if TYPE_CHECKING:
    from zoo.zero.collectives.feedback import Feedback
    from zoo.zero.runtime.hooks import Runtime
    from zoo.zero.sharded import ShardedModel
    from zoo.zero.sharding.buckets import Bucket
    from zoo.zero.sharding.gradients import BucketGradients
    from zoo.zero.update.clipping import Clipping
    from zoo.zero.update.updater import Updater


class Inspection:
    """The part of :class:`~zoo.zero.ZeroOptimizer` that changes nothing."""

    model: nn.Module
    config: ZeroConfig
    sharded: ShardedModel
    clipping: Clipping
    _runtime: Runtime
    _updater: Updater
    _buckets: Sequence[Bucket]
    _gradients: list[BucketGradients]
    _feedback: list[Feedback]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters whole on every rank, for reading. Collective; changes made inside are lost at stage 3."""
        with self.sharded.gathered():
            yield

    def whole_parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole value) of every parameter, gathered bucket by bucket, so that there is never more than one.

        Collective: every rank goes to the end. A tensor is valid until the next one is asked for; ``frozen=False``
        leaves frozen parameters out. Parameters that are tied come once.
        """
        return self.sharded.whole_parameters(frozen=frozen)

    @torch.no_grad()
    def consolidated_parameters(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Full copies of all parameters by name, on the CPU of every rank. Collective; gathers bucket by bucket."""
        found = {name: value.to("cpu", dtype, copy=True) for name, value in self.whole_parameters()}
        now = [(name, cast("Any", p)._zoo_name) for name, p in self.model.named_parameters()]
        return {name: found[was] for name, was in now}  # they may have moved to another place of the model

    @property
    def holds_gradients(self) -> bool:
        """There are gradients since ``zero_grad``, on this rank, reduced or not."""
        return any(g.reduced or g.phase is not Phase.IDLE for g in self._gradients)

    def memory(self) -> dict[str, int]:
        """Bytes of model states in this rank's memory now, by role: parameters, gradients, optimizer, total.

        Beside them "feedback": errors of quantised reductions; "nvme": bytes of this rank's files; "buffers": host
        memory of the buffers that serve them.
        """
        optimizer = self._updater.state_bytes()
        parameters = sum(b.parameters.memory_bytes() for b in self._buckets)
        gradients = sum(g.memory_bytes() for g in self._gradients)
        total = parameters + gradients + optimizer
        found = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "total": total}
        if self._feedback:
            found["feedback"] = sum(feedback.memory_bytes() for feedback in self._feedback)
        if self.sharded.scratch is not None:
            found |= {
                "nvme": self.sharded.scratch.nvme_bytes(),
                "buffers": self.sharded.scratch.pool.stats().in_use_bytes,
            }
        return found

    def nvme_traffic(self) -> tuple[int, int]:
        """Bytes that this rank has read from and written to NVMe since construction."""
        return self.sharded.scratch.traffic() if self.sharded.scratch is not None else (0, 0)

    def forecast(self) -> Forecast:
        """What a step will cost this rank, from the plan and the wrapped optimizer's states.

        The order of the units is the recorded one where a training forward has run, else that of ``named_modules``.
        Exact where the next forwards are like it and nothing is recomputed in backward.
        """
        states, plan = self._updater.forecast_bytes(), self._runtime.plan()
        clips = self.clipping.measures
        found = make_forecast(
            self._buckets,
            plan=plan,
            reduce_dtype=self.sharded.reduce_dtype,
            optimizer_bytes=states,
            clips=clips,
            others=self.sharded.hops_of_step(clips=clips),
        )
        tiers, buffers = tier_bytes(self._buckets, states), self._updater.buffer_bytes()
        read, written = nvme_traffic(self._buckets, self._updater, lambda weigh: gathered_from_shards(plan, weigh))
        pins = self.config.offload_param.pin_memory or self.config.offload_optimizer.pin_memory
        return dataclasses.replace(
            found, tiers=tiers, buffers_bytes=buffers, pinned_bytes=(buffers + tiers["host"]) * pins,
            nvme_files_bytes=self.sharded.scratch.nvme_bytes() if self.sharded.scratch is not None else 0,
            nvme_read_bytes=read, nvme_written_bytes=written,
        )  # fmt: skip
