"""What a ZeRO optimizer tells of itself: what a step came to, gradients and their norm, whole values, bytes, costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.shard.config import ZeroConfig
from zoo.shard.gradients import GradientPhase
from zoo.zero.update.step import Stepping

if TYPE_CHECKING:
    from zoo.cost import Forecast
    from zoo.plan import Actions
    from zoo.shard.buckets import Bucket
    from zoo.shard.runtime.planning import Drive
    from zoo.zero.update.alike import Alike
    from zoo.zero.update.loss_scale import LossScaler


class Inspection(Stepping):
    """The part of :class:`~zoo.zero.ZeroOptimizer` beside construction, training and state.

    What depends on the norm of the latest step's gradients waits for it, where the step has not (:meth:`read_outcome`).

    Attributes:
        buckets: what travels and lives together.
    """

    model: nn.Module
    comm: Communicator
    config: ZeroConfig
    inner: Any
    alike: Alike
    buckets: Sequence[Bucket]

    # What the latest step came to ----------------------------------------------------------------------------------

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

    # Gradients -----------------------------------------------------------------------------------------------------

    @property
    def holds_gradients(self) -> bool:
        """There are gradients since ``zero_grad``, on this rank, reduced or not."""
        return any(g.reduced or g.phase is not GradientPhase.IDLE for g in self._gradients)

    def settle_gradients(self) -> None:
        """Reduce what ``no_sync()`` left on each rank, unless that is an update. Collective if there is any."""
        self.read_outcome()  # gradients that were kept may get another scale
        if self._in_backward is None:
            self._settle()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale the mean gradient to a norm (Σ |g|^p)^(1/p) of at most ``max_norm``. Collective.

        As ``torch.nn.utils.clip_grad_norm_``, over the parameters of all ranks, but for norms that are not finite:
        gradients stay as they are then, and the next step is skipped, or an error (``nonfinite_gradients``).

        Args:
            max_norm: in units of the gradient, without the loss scale.
            norm_type: p > 0, or ``math.inf`` for the largest |g|.
            error_if_nonfinite: raise at once.

        Returns:
            The norm before; 0.0 where there was no backward since ``zero_grad``.

        Raises:
            ValueError: arguments out of range, or updates that are made in backward.
            NonFiniteGradientsError: see there; a RuntimeError, as torch's.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_(max_norm={max_norm}); it must be a norm >= 0.")
        if not self._can_measure("clip_grad_norm_"):
            return 0.0
        return self.clipping.clip(max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def global_norm(self, norm_type: float = 2.0) -> float:
        """(Σ |g|^p)^(1/p) of the mean gradient over the parameters of all ranks; nothing changes. Collective.

        For every step ``clip_norm=math.inf`` does it: the norm is ``grad_norm`` then.
        """
        return self.clipping.measured(norm_type) if self._can_measure("global_norm") else 0.0

    def _can_measure(self, what: str) -> bool:
        """Whether there are gradients; what was accumulated is reduced first."""
        self.check_open()
        if self._in_backward is not None:
            raise ValueError(f"{what}() with update_in_backward=True: backward has used the gradients already.")
        self.read_outcome()
        self.runtime.check()
        self.sharded.wait_for_layers()
        self._settle()
        return self._has_gradients()

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

    def memory(self) -> dict[str, int]:
        """Bytes of model states in this rank's memory now, by role: parameters, gradients, optimizer, total.

        Beside them "feedback": errors of quantised reductions; "nvme": bytes of this rank's files; "buffers": host
        memory of the buffers that serve them.
        """
        optimizer = sum(t.nbytes for segment in self.updater.segments for t in segment.in_memory().values())
        parameters = sum(b.parameters.memory_bytes() for b in self.buckets)
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

    def plan(
        self, drives: Sequence[Drive] | None = None, *, max_bytes: int | None = None,
        reduces: Sequence[bool] = (True,), like: Actions | None = None,
    ) -> Actions:  # fmt: skip
        """What the next step will do, from its first forward to the end of its update: what ``sharded.record()`` would
        list, action by action.

        So it is where its passes are like the latest one, nothing is recomputed in backward, and each forward's
        backward comes before the next forward. Before the first pass units are taken in turn.

        Args:
            drives: of a step in a window, what its schedule does; ``max_bytes``: of the window.
            reduces: otherwise for each micro-batch whether its backward reduces (others are within ``no_sync()``).
            like: a recording of an earlier step with its computations: they are in the plan too, with FLOPs and bytes.

        Raises:
            ValueError: ``like`` is the recording of another step.
        """
        from zoo.shard.runtime.planning import plan_step

        self.check_open()
        return plan_step(self.runtime, drives, max_bytes, reduces=reduces, like=like).actions

    def forecast(
        self, drives: Sequence[Drive] | None = None, *, max_bytes: int | None = None, micro_batches: int = 1,
        reductions: int | None = None,
    ) -> Forecast:  # fmt: skip
        """What a step will cost this rank, from the plan and the wrapped optimizer's states.

        The order of the units is the recorded one where a training forward has run, else that of ``named_modules``.
        Exact where the next forwards are like it and nothing is recomputed in backward.

        Args:
            drives: of a step in a window, what its schedule does from the window's beginning to its end; None:
                forwards that are each followed by their backward. max_bytes: of the window.
            micro_batches: of a step outside of a window. reductions: how many of their backwards reduce gradients (the
                others are within ``no_sync()``); all by default.
        """
        from zoo.shard.runtime.planning import plan_of
        from zoo.zero.costs import forecast_step

        self.updater.decide(self.param_groups)
        plan = plan_of(self.runtime, drives, max_bytes)
        if drives is None:
            plan = plan.times(micro_batches, micro_batches if reductions is None else reductions)
        return forecast_step(self.sharded, self.updater, plan, clips=self.clipping.measures, num_alike=self.alike.size)
