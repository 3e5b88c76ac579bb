"""What a ZeRO optimizer tells of itself: what a step came to, whole values, bytes, and what a step will cost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.shard.collectives.routes import Hop
from zoo.shard.config import ZeroConfig
from zoo.shard.gradients import Phase

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket
    from zoo.shard.collectives.feedback import Feedback
    from zoo.shard.gradients import BucketGradients
    from zoo.shard.runtime.hooks import Runtime
    from zoo.shard.runtime.planning import Drive
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.forecast.costs import Forecast
    from zoo.zero.update.alike import Alike
    from zoo.zero.update.clipping import Clipping, LossScaler, Outcome
    from zoo.zero.update.updater import Updater


class Inspection:
    """The part of :class:`~zoo.zero.ZeroOptimizer` that changes nothing.

    What depends on the norm of the latest step's gradients waits for it, where the step has not (:meth:`read_outcome`).

    Attributes:
        num_updates: that all ranks have made together; of a state that was loaded, at least its own.
        outcome: of the latest step, while nobody has read it; else None.
    """

    num_updates: int
    outcome: Outcome | None = None

    model: nn.Module
    config: ZeroConfig
    sharded: ShardedModel
    clipping: Clipping
    _scaler: LossScaler | None
    _runtime: Runtime
    _updater: Updater
    _alike: Alike
    _buckets: Sequence[Bucket]
    _gradients: list[BucketGradients]
    _feedback: list[Feedback]
    param_groups: list[dict[str, Any]]

    # What the latest step came to ----------------------------------------------------------------------------------

    def read_outcome(self) -> None:
        """Wait for what the latest step came to, where it has not waited itself: the norm and the tally.

        What follows from them happens here: the loss scale moves, and gradients that were kept get the new one.
        Everything that needs it calls this; a second call does nothing. Starts no collective.
        """
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            if not self.clipping.learn(outcome) and outcome.made:
                self.num_updates -= 1  # it was counted before that was known
            self.clipping.rescale()
            self._runtime.backward.scale = self.loss_scale

    @property
    def grad_norm(self) -> float | None:
        """Of the latest step, before clipping; None where it is not computed, or there was nothing to step with."""
        self.read_outcome()
        return self.clipping.norm

    @property
    def skipped(self) -> bool:
        """The latest step changed nothing, because of gradients that are not finite."""
        self.read_outcome()
        return self.clipping.skipped

    @property
    def num_skipped(self) -> int:
        """Such steps since construction."""
        self.read_outcome()
        return self.clipping.num_skipped

    @property
    def tallied(self) -> Sequence[float]:
        """Sums over ranks of what the latest step was given to add up."""
        self.read_outcome()
        return self.clipping.sums

    @property
    def scaler(self) -> LossScaler | None:
        """Has the loss scale and moves it; None without one."""
        self.read_outcome()
        return self._scaler

    @property
    def loss_scale(self) -> float:
        """The factor :meth:`~zoo.zero.ZeroOptimizer.backward` multiplies the loss by; 1.0 without loss scaling."""
        if self._scaler is None:
            return 1.0
        self.read_outcome()
        return self._scaler.scale

    # Values, bytes, plans ------------------------------------------------------------------------------------------

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
        """Full copies of all parameters by name, on the CPU of every rank. Collective; gathers bucket by bucket.

        Of tensors that are split along further mesh axes (experts, tensor-parallel layers) they are the whole ones, by
        their names in the whole model: see :meth:`~zoo.shard.sharded.ShardedModel.whole_model`. Along ``layer_axes``
        each rank has those of its own layers.
        """
        if all(axes.parts is None for axes in self.sharded.families.values()):
            found = {name: value.to("cpu", dtype, copy=True) for name, value in self.whole_parameters()}
            return {name: found[name] for name, _ in self.model.named_parameters()}
        whole = self.sharded.whole_model(layers=False)
        return {name: value.to("cpu", dtype, copy=True) for name, value in whole}

    @property
    def holds_gradients(self) -> bool:
        """There are gradients since ``zero_grad``, on this rank, reduced or not."""
        return any(g.reduced or g.phase is not Phase.IDLE for g in self._gradients)

    def memory(self) -> dict[str, int]:
        """Bytes of model states in this rank's memory now, by role: parameters, gradients, optimizer, total.

        Beside them "feedback": errors of quantised reductions; "nvme": bytes of this rank's files; "buffers": host
        memory of the buffers that serve them.
        """
        optimizer = sum(t.nbytes for segment in self._updater.segments for t in segment.in_memory().values())
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

    def _row_hops(self) -> list[Hop]:
        """The options of the groups, which go with the norm where the same ranks exchange it."""
        comm, sharded = self.sharded.comm, self.sharded
        axes = {b.routes.axes for b in sharded.trainable if b.placements.states.is_split and b.shard_group.size > 1}
        if sharded.layers is not None or not any(tuple(a.shard.ranks) == tuple(comm.ranks) for a in axes):
            return []
        return [Hop("all_gather", comm, 8 * self._alike.size * comm.size)]

    def forecast(self, drives: Sequence[Drive] | None = None, *, max_bytes: int | None = None) -> Forecast:
        """What a step will cost this rank, from the plan and the wrapped optimizer's states.

        The order of the units is the recorded one where a training forward has run, else that of ``named_modules``.
        Exact where the next forwards are like it and nothing is recomputed in backward.

        Args:
            drives: of a step in a window, what its schedule does from the window's beginning to its end; None: one
                forward and its backward. max_bytes: of the window.
        """
        from zoo.zero.forecast.costs import forecast as make_forecast
        from zoo.zero.forecast.costs import gathered_from_shards, nvme_traffic, tier_bytes

        self._updater.decide(self.param_groups)
        states, runtime = self._updater.expected.num_bytes(self._updater.segments), self._runtime
        plan = runtime.plan() if drives is None else runtime.plan_window(drives, max_bytes)
        clips = self.clipping.measures
        found = make_forecast(
            self._buckets,
            plan=plan,
            reduce_dtype=self.sharded.precision.reduce,
            optimizer_bytes=states,
            clips=clips,
            others=self.sharded.hops_of_step(clips=clips) + self._updater.hops() + (self._row_hops() if clips else []),
        )
        tiers, buffers = tier_bytes(self._buckets, states), self._updater.buffer_bytes()
        read, written = nvme_traffic(self._buckets, self._updater, lambda weigh: gathered_from_shards(plan, weigh))
        pins = self.config.offload_param.pin_memory or self.config.offload_optimizer.pin_memory
        return dataclasses.replace(
            found, tiers=tiers, buffers_bytes=buffers, pinned_bytes=(buffers + tiers["host"]) * pins,
            nvme_files_bytes=self.sharded.scratch.nvme_bytes() if self.sharded.scratch is not None else 0,
            nvme_read_bytes=read, nvme_written_bytes=written,
        )  # fmt: skip
