"""The ZeRO optimizers: one implementation, a placement for each stage.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and 7.
Symbols: Ψ parameters, N data-parallel ranks, K bytes of optimizer state a parameter. Bytes of model states a rank with
16-bit parameters: stage 0 (2+2+K)Ψ, stage 1 (2+2+K/N)Ψ, stage 2 (2+(2+K)/N)Ψ, stage 3 (2+2+K)Ψ/N.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn

from zoo import io
from zoo.comm import Communicator, raise_in_next, raise_together
from zoo.shard.agreement import CONSTRUCTION, all_ranks, check_group, of_groups
from zoo.shard.config import ZeroConfig
from zoo.shard.gradients import BucketGradients
from zoo.shard.guard import refuse_copy
from zoo.shard.placement.units import UnitChoice, check_parameters
from zoo.shard.runtime.without_graph import go_backward
from zoo.shard.sharded import ShardedModel
from zoo.zero.options.arguments import (
    cannot_train,
    find_optimizer,
    resolve_config,
    resolve_optimizer,
    tell_of_gradients,
)
from zoo.zero.options.keywords import options_of, shows_keywords, stage_of
from zoo.zero.state.optimizer_states import OptimizerStates
from zoo.zero.state.saved import SavedState
from zoo.zero.update.alike import Alike, Comparison
from zoo.zero.update.clipping import Clipping, Nonfinite
from zoo.zero.update.instances import retire
from zoo.zero.update.loss_scale import LossScaler, make_scaler
from zoo.zero.update.probe import Tried, Wrapped, try_out
from zoo.zero.update.updater import Updater

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zoo.shard.placement.precision import Precision
    from zoo.zero.options.keywords import Keywords


class ZeroOptimizer(SavedState):
    """Trains a model data-parallel, with its training state split over the ranks as the stage says.

    After each backward of every rank the gradient is g = 1/N Σ_r g_r, and ``step`` applies the wrapped optimizer to it
    exactly as one process would that sees the mean of the ranks' losses. At one world size all stages compute the same
    bits in fp32. Use it the PyTorch way::

        optimizer = Stage3Optimizer(model, optimizer=torch.optim.AdamW, lr=3e-4)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: the module to train. Its parameter objects stay; their memory moves to flat buffers, and the values of
            rank 0 are broadcast.
        stage: 0 to 3, see :class:`~zoo.zero.ZeroConfig`.
        optimizer: a class of ``zoo.optim`` or ``torch.optim``, or anything with the same interface, whose update is
            elementwise or that takes parts (``zoo.optim.whole``); or a name in the registry (kind "optimizer"), which
            has the arguments and defaults of that name in a configuration. Or an instance that has made no step: its
            class, arguments and parameter groups are taken over, the groups as the same dicts, so that schedules made
            from it go on working. It cannot make steps itself any more.
        group: process group, DeviceMesh (one-dimensional or of the axes ("node", "local")) or Communicator of the
            data-parallel ranks; None for the default group. A :class:`~zoo.zero.DryRun` makes a plan only.
        mesh, data_axes: instead of ``group``: a DeviceMesh with names for all axes of the job, and those over which
            losses are averaged. Experts and tensor-parallel layers declare the axes along which they are parts
            (``zoo.layout.declare_split``), DTensors have placements that say it; their gradients are summed over the
            data axes without these.
        layer_axes: with ``mesh``: axes along which ranks have other layers, as stages of a pipeline do. Each stage has
            an optimizer of its own; the norm, and whether there is something to step with, are those of all of them.
        params: parameters, (name, parameter) pairs, or groups of them, as for ``torch.optim``; by default one group of
            all trainable parameters.
        units: which modules are gathered as one (classes, modules, or a predicate); see
            :func:`~zoo.shard.placement.units.find_units`.
        clip_norm: clip the global gradient norm to this before each step; 0 for no clipping, ``math.inf`` to have
            ``grad_norm`` without clipping.
        loss_scale: for fp16: "dynamic", a number, or a :class:`~zoo.zero.LossScaler`. Use :meth:`backward` then.
        nonfinite_gradients: what a step does whose gradients have a norm that is not finite, where the norm is known
            (with clipping or a loss scale): "skip" it and count it, or raise an "error", which change nothing; or "use"
            them, as torch does: without a loss scale only.
        precision: in which dtypes the model computes, and gradients are kept and sent: a :class:`~zoo.zero.Precision`.
            With ``Precision(param=torch.bfloat16)`` of a model in fp32 :meth:`close` gives the exact values back,
            trained.
        sparse_gradients: the gradient of an ``nn.Embedding`` or ``nn.EmbeddingBag`` travels as the rows that were
            touched wherever that takes at most half of the bytes; the mean has the same bits.
        check: agree on a fingerprint of each collective before it, for debugging.
        config: a :class:`~zoo.zero.ZeroConfig`, or a mapping of its options; single ones may be keywords instead.
        aio: how to reach NVMe: options, or an engine that is used and left open.
        optimizer_options: arguments of the wrapped optimizer; those that type checkers know may be keywords as well.
        options: options of ``ZeroConfig``, and the wrapped optimizer's own arguments.

    Parameters in bf16 or fp16 get an fp32 master copy, which is what the optimizer updates. A trainable parameter that
    receives no gradient counts as having a zero gradient, as with torch's ``zero_grad(set_to_none=False)``.

    Raises:
        ValueError: options or parameters that cannot work; the message says what to change.
        NotImplementedError: the optimizer's update is not elementwise, and it takes no parts.
    """

    _stage: ClassVar[int | None] = None
    """Of a class that is one stage."""

    @shows_keywords
    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int | None = None,
        optimizer: Any = torch.optim.AdamW,
        group: Any = None,
        mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        layer_axes: Sequence[str] = (),
        params: Iterable[Any] | None = None,
        units: UnitChoice | None = None,
        clip_norm: float = 0.0,
        loss_scale: float | str | LossScaler | None = None,
        nonfinite_gradients: Nonfinite = "skip",
        precision: Precision | None = None,
        sparse_gradients: bool = False,
        check: bool = False,
        config: ZeroConfig | Mapping[str, Any] | None = None,
        aio: io.AioConfig | io.Handle | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        with raise_in_next(lambda: all_ranks(group, mesh), CONSTRUCTION):
            check_group(group)
            given = options_of(type(self), options, optimizer_options)
            self._scaler = make_scaler(loss_scale)
            self.config = resolve_config(config, stage_of(type(self), self._stage, stage), given)
            optimizer, given, clip_norm = resolve_optimizer(optimizer, given, clip_norm, owner=type(self))
            self.clipping = Clipping(clip_norm, self._scaler, nonfinite_gradients)
            if self.config.update_in_backward and (clip_norm or loss_scale is not None):
                other = f"clip_norm={clip_norm}" if clip_norm else f"loss_scale={loss_scale!r}"
                raise ValueError(
                    f"update_in_backward=True with {other}, which needs all gradients before the first update. Drop "
                    "one of the two."
                )
            check_parameters(model, dry=isinstance(group, Communicator) and group.is_dry)
            tell_of_gradients(model)
            wrapped = find_optimizer(model, optimizer, params, given, owner=type(self))
            self.model = model
            self.num_updates = 0  # that all ranks have made together; of a state that was loaded, at least its own
            # Before the model is touched: what the wrapped optimizer refuses.
            tried = try_out(wrapped)
            alike = {
                **{name: value for name, value in wrapped.options.items() if name not in (*tried.groups[0], "peers")},
                "optimizer": wrapped.make, **of_groups(tried.groups), "clip_norm": clip_norm,
                "loss_scale": self._scaler, "nonfinite_gradients": nonfinite_gradients,
            }  # fmt: skip
            self.alike = Alike(tried.groups)
            group_of = {id(p): i for i, g in enumerate(wrapped.groups) for p in g["params"]}
            switch = None
            if getattr(wrapped.make, "synchronises", False):
                from zoo.zero.update.synced import switch_for

                switch = switch_for(wrapped.make, wrapped.groups, wrapped.options)
        self.sharded = ShardedModel(
            model, config=self.config, group=group, mesh=mesh, data_axes=data_axes, layer_axes=layer_axes, units=units,
            group_of=lambda p: group_of.get(id(p), -1), precision=precision,
            sparse_gradients=sparse_gradients, check=check, aio=aio, keep_norms=self.clipping.measures,
            arguments=alike, switch=switch,
        )  # fmt: skip
        try:
            with raise_together(self.sharded.everyone, CONSTRUCTION):
                self._adopt(wrapped, tried)
        except BaseException as error:
            if isinstance(error, Exception) or self.sharded.everyone.size == 1:  # else this rank alone is here
                self.sharded.close()
            raise

    def _adopt(self, wrapped: Wrapped, tried: Tried) -> None:
        sharded = self.sharded
        self.comm, self.runtime, self.buckets = sharded.comm, sharded.runtime, sharded.buckets
        self._trainable = sharded.trainable
        self._feedback = [f for f in (b.routes.feedback for b in self._trainable) if f is not None]
        sharded.refuse_together(cannot_train(wrapped, tried, sharded, scaled=self._scaler is not None))
        sharded.dtensors.replace_in(wrapped.groups)
        self._gradients: list[BucketGradients] = [b.gradients for b in self.buckets if b.gradients is not None]
        self.clipping.adopt(self._gradients, sharded.layers)
        unsplit = self._is_unsplit(wrapped, tried)
        self.updater = Updater(sharded, wrapped, tried, unsplit=unsplit, multiplies=self._scaler is not None)
        self._comparison = Comparison(
            self.alike, sharded, self._gradients, self.updater.give_up,
            counts=not self.config.update_in_backward,
        )  # fmt: skip
        self.clipping.refuses = self._comparison.refuse
        self._in_backward = None
        if self.config.update_in_backward:
            from zoo.zero.update.in_backward import UpdateInBackward

            self._in_backward = UpdateInBackward(
                self.updater, self._options_of_update, self._publish, sharded.writes.take
            )
        self.runtime.contexts.count_by(self._count_updates)
        reductions, early = self.runtime.reductions, self._in_backward
        reductions.follower = early
        reductions.begins = partial(self.updater.expect, weakref.ref(self)) if early is None else early.begin
        self.runtime.backward.scale = self.loss_scale
        late = self._reads_late
        self._late = sharded.buckets[0].device.type == "cuda" if late is None else late
        if not self._late:
            sharded.writes.watch()
        self.inner = self.updater.inner
        self.states = OptimizerStates(self)
        self.seal(wrapped.groups, self.inner, self.states.look)
        if wrapped.instance is not None:
            self.updater.follows = retire(wrapped.instance, self, self.inner)
        if sharded.switch is not None and self.comm.rank == 0 and self._feedback and not sharded.switch.own:
            from zoo.zero.update.synced import tell_ratio

            sent = sum(self.forecast().wire_bytes.values())
            tell_ratio(self._trainable, wrapped.make.__name__, sent, sharded.precision.reduce)

    def _is_unsplit(self, wrapped: Wrapped, tried: Tried) -> bool:
        """Whether the wrapped optimizer gets parameters whole and in their shapes."""
        if not tried.quantises:
            return tried.why_whole is not None
        from zoo.zero.update.unsplit import has_whole_blocks

        first = self.sharded.everyone.rank == 0
        return has_whole_blocks(wrapped, self._trainable, in_backward=self.config.update_in_backward, tells=first)

    # Training --------------------------------------------------------------------------------------------------------

    @property
    def shard_group(self) -> Communicator:
        """The ranks that split what is split: all of them but with shard groups (MiCS)."""
        return self.sharded.axes.shard

    @property
    def clip_norm(self) -> float:
        """Each step clips the gradients to it; 0 for no clipping. May be set between steps, on all ranks, where steps
        measure the norm: 0 becomes ``math.inf`` then. Another value on another rank is an error of the next step.

        Setting it raises ValueError: it is no norm, or steps do not measure.
        """
        return self.clipping.max_norm

    @clip_norm.setter
    def clip_norm(self, norm: float) -> None:
        self.clipping.change(norm)

    def backward(self, loss: torch.Tensor) -> None:
        """``(loss * loss_scale).backward()``. Without loss scaling plain ``loss.backward()`` is the same, but for a
        loss that leads to no parameter on this rank, and to some on others: here it adds zeros to the mean.

        Raises:
            NoGraphError: a RuntimeError; the loss has no graph. The other ranks hear of it in the next step, if that
                measures the norm over all of them (stages 1 to 3), else when they have waited for this one.
        """
        compares = self.clipping.may_skip and self.config.stage > 0 and self.shard_group.size == self.comm.size
        go_backward(self.runtime.backward, loss, self.scale_loss, joins=compares)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss * loss_scale``, of which ``backward()`` may be called."""
        self.check_open()
        if self._scaler is None:
            return loss
        scaled = loss * self.loss_scale
        if scaled.requires_grad:
            backward = self.runtime.backward

            def begun(gradient: torch.Tensor) -> None:
                backward.note_scaled()

            scaled.register_hook(begun)  # type: ignore[no-untyped-call]
        return scaled

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on each rank without communicating; the next one outside reduces the sum.

        At stages 2 and 3 the whole local gradient exists meanwhile. All ranks must do it for the same backwards.
        """
        with self.sharded.no_sync():
            yield

    # What torch calls its state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state, for a checkpoint read back at the same world size, stage and options.

        Parameters are part of it (role "parameter"), because at stage 3 nobody else has them. For a checkpoint that can
        be read under another placement use :meth:`state_slices`, or the functions of
        ``torch.distributed.checkpoint.state_dict``, for which the result also has ``["state"]``: asking for that is
        collective, and makes the states by parameter (:mod:`zoo.zero.state.by_parameter`).
        """
        from zoo.zero.state.rank_state import rank_state  # three files that training does without

        return rank_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned on this rank, or states by parameter. Collective.

        The latter are what torch's optimizers have, ``{"state": …, "param_groups": …}``, with whole tensors or
        DTensors, of any world size; parameters then stay what they are, but for a state "master".

        Raises:
            ValueError: (on every rank, before anything changes) it is of another rank, world size, model or layout; or
                ranks give states of other moments, or other values of what several of them hold.
        """
        from zoo.zero.state.rank_state import load_rank_state

        load_rank_state(self, state_dict)

    # The end ---------------------------------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are kept for the next forward or backward (stage 3). Call it on all ranks."""
        self.runtime.residency.clear()

    def close(self) -> None:
        """Give the model back: ordinary parameters with memory of their own, no hooks. Collective at stage 3.

        See :meth:`~zoo.shard.sharded.ShardedModel.close` for what it is with ``Precision.param``. The memory of
        buffers and states is free when the optimizer is dropped.
        """
        self.read_outcome()
        self.sharded.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Neither copies nor pickles have the model's memory."""
        refuse_copy(self)


class Stage0Optimizer(ZeroOptimizer):
    """Plain data parallelism: nothing is split, gradients are all-reduced. See :class:`ZeroOptimizer`."""

    _stage = 0


class Stage1Optimizer(ZeroOptimizer):
    """Optimizer states are split over the ranks (P_os). See :class:`ZeroOptimizer`."""

    _stage = 1


class Stage2Optimizer(ZeroOptimizer):
    """Optimizer states and gradients are split over the ranks (P_os+g). See :class:`ZeroOptimizer`."""

    _stage = 2


class Stage3Optimizer(ZeroOptimizer):
    """Optimizer states, gradients and parameters are split over the ranks (P_os+g+p). See :class:`ZeroOptimizer`."""

    _stage = 3
