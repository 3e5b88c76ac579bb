"""The ZeRO optimizers: one implementation, a placement for each stage.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and 7.
Symbols: Ψ parameters, N data-parallel ranks, K bytes of optimizer state a parameter. Bytes of model states a rank with
16-bit parameters: stage 0 (2+2+K)Ψ, stage 1 (2+2+K/N)Ψ, stage 2 (2+(2+K)/N)Ψ, stage 3 (2+2+K)Ψ/N.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.io import AioConfig, Handle
from zoo.zero import state as state_io
from zoo.zero.arguments import find_optimizer, param_groups_of, resolve_config
from zoo.zero.axes import make_axes
from zoo.zero.bucketing import STAGES, plan_buckets
from zoo.zero.buckets import Bucket
from zoo.zero.config import ZeroConfig
from zoo.zero.dry import DryRun
from zoo.zero.early import EarlyUpdate, LateUpdate
from zoo.zero.forecast import Forecast, gathered_by_units
from zoo.zero.forecast import forecast as make_forecast
from zoo.zero.guard import release as release_parameter
from zoo.zero.moving import Moved
from zoo.zero.offload.forecast import nvme_traffic, tier_bytes
from zoo.zero.offload.opening import open_stores
from zoo.zero.routing import choose_routes
from zoo.zero.runtime import Runtime
from zoo.zero.scaler import LossScaler, make_scaler
from zoo.zero.streaming import whole_parameters
from zoo.zero.units import UnitChoice, check_parameters, find_units
from zoo.zero.updater import Updater
from zoo.zero.working import WorkingMemory


class ZeroOptimizer(torch.optim.Optimizer):
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
            elementwise or that takes parts (``zoo.optim.whole``); or a name in the registry (kind "optimizer").
        group: process group, DeviceMesh (one-dimensional or of the axes ("node", "local")) or Communicator of the
            data-parallel ranks; None for the default group. A :class:`~zoo.zero.DryRun` makes a plan only.
        params: parameter groups as for ``torch.optim``; by default one group of all trainable parameters.
        units: which modules are gathered as one (classes, modules, or a predicate); see
            :func:`~zoo.zero.units.find_units`.
        clip_norm: clip the global gradient norm to this before each step; 0 for no clipping.
        loss_scale: for fp16: "dynamic", a number, or a :class:`~zoo.zero.LossScaler`. Use :meth:`backward` then.
        reduce_dtype: dtype in which gradients are sent and added, e.g. ``torch.float32``; None for the gradient's own.
        check: agree on a fingerprint of each collective before it, for debugging.
        config: a :class:`~zoo.zero.ZeroConfig`; single options of it may be given as keywords instead.
        aio: how to reach NVMe: options, or an engine that is used and left open.
        options: options of ``ZeroConfig``, and the wrapped optimizer's own arguments.

    Parameters in bf16 or fp16 get an fp32 master copy, which is what the optimizer updates. A trainable parameter that
    receives no gradient counts as having a zero gradient, as with torch's ``zero_grad(set_to_none=False)``.

    Raises:
        ValueError: options or parameters that cannot work; the message says what to change.
        NotImplementedError: the optimizer's update is not elementwise, and it takes no parts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int | None = None,
        optimizer: Any = torch.optim.AdamW,
        group: Any = None,
        params: Iterable[Any] | None = None,
        units: UnitChoice | None = None,
        clip_norm: float = 0.0,
        loss_scale: float | str | LossScaler | None = None,
        reduce_dtype: torch.dtype | None = None,
        check: bool = False,
        config: ZeroConfig | None = None,
        aio: AioConfig | Handle | None = None,
        **options: Any,
    ) -> None:
        self.config = resolve_config(config, stage, options)
        if not clip_norm >= 0:
            raise ValueError(f"clip_norm={clip_norm}; it must be a norm > 0, or 0 for no clipping.")
        if self.config.update_in_backward and (clip_norm or loss_scale is not None):
            given = f"clip_norm={clip_norm}" if clip_norm else f"loss_scale={loss_scale!r}"
            raise ValueError(
                f"update_in_backward=True with {given}, which needs all gradients before the first update. Drop one of "
                "the two."
            )
        check_parameters(model, dry=isinstance(group, DryRun))
        optimizer = find_optimizer(optimizer)
        self.model, self.clip_norm, self.scaler, self._aio = model, clip_norm, make_scaler(loss_scale), aio
        nodes = self.config.ranks_per_node
        self.comm = group if isinstance(group, Communicator) else Communicator(group, check=check, nodes=nodes)
        if self.comm is group and nodes is not None:
            self.comm.know_nodes(nodes)
        self.grad_norm: float | None = None
        self._moved: Moved | None = None
        self.skipped, self.num_skipped = False, 0
        groups = param_groups_of(model, params)
        self._build(model, groups, units, reduce_dtype)
        self._updater = Updater(
            self._trainable, optimizer, groups, options, comm=self._axes.shard,
            sub_group_size=self.config.sub_group_size, offload=self.config.offload_optimizer, scratch=self._scratch,
            in_backward=self.config.update_in_backward,
        )  # fmt: skip
        self._early = (
            EarlyUpdate(self._updater, self._options_of_update, self._publish)
            if self.config.update_in_backward else None
        )  # fmt: skip
        self._runtime.reductions.follower = self._early or LateUpdate(self._updater)
        self.inner = self._updater.inner
        self._sealed = False
        super().__init__(groups, self.inner.defaults)
        self._sealed = True
        self.state = self.inner.state

    def _build(
        self, model: nn.Module, groups: Sequence[dict[str, Any]], units: UnitChoice | None, dtype: torch.dtype | None
    ) -> None:
        cfg = self.config
        group_of = {id(p): i for i, g in enumerate(groups) for p in g["params"]}
        specs = find_units(model, units)
        plan = plan_buckets(
            specs,
            bucket_size=cfg.bucket_size,
            persistence_threshold=cfg.param_persistence_threshold,
            model_persistence_threshold=cfg.model_persistence_threshold,
            group_of=lambda p: group_of.get(id(p), -1),
        )
        described = [(b.names, [tuple(p.shape) for p in b.parameters], str(b.dtype), b.groups) for b in plan]
        digest = hashlib.blake2b(repr((described, cfg)).encode(), digest_size=8).hexdigest()
        device = plan[0].parameters[0].device
        self._reduce_dtype = dtype
        self.comm.agree("construction of a ZeRO optimizer with parameters and options", digest, device)
        placement = dataclasses.replace(STAGES[cfg.stage], keep_gradients=not cfg.update_in_backward)
        self._axes = make_axes(self.comm, cfg)
        shard = self._axes.shard
        routes = choose_routes(plan, placement, self._axes, cfg, dtype)
        norms = bool(self.clip_norm or self.scaler is not None)
        memory = WorkingMemory()
        self._scratch, stores = open_stores(
            plan, placement, routes, cfg, shard.size, comm=self.comm, aio=self._aio, keep_norms=norms
        )
        self._buckets = [Bucket(i, spec, placement, routes[i], stores[i], memory) for i, spec in enumerate(plan)]
        for bucket in self._buckets:
            bucket.owner = weakref.ref(self)
        self._trainable = [b for b in self._buckets if b.spec.trainable]
        self._gradients = [b.gradients for b in self._buckets if b.gradients is not None]
        largest = max((b.num_bytes for b in self._buckets if b.partitioned), default=0)
        reads = any(b.parameters_on_nvme for b in self._buckets)
        stages = 2 if reads or cfg.mics_hierarchical_params_gather else 1  # each has a unit's time
        itemsize = plan[0].dtype.itemsize

        def budget(elements: int | None, default: int) -> int:
            return default if elements is None else elements * itemsize

        self._runtime = Runtime(
            specs,
            self._buckets,
            reduce_dtype=dtype,
            overlap=cfg.overlap_comm,
            demand_all=not cfg.ignore_unused_parameters,
            # One rank gathers by copying its own shard from memory: there is nothing to overlap.
            prefetch_bytes=budget(cfg.prefetch_bucket_size, stages * largest) if shard.size > 1 or reads else 0,
            keep_bytes=budget(cfg.max_live_parameters, max(2 * largest, 2**22 * itemsize)),
        )

    # Training --------------------------------------------------------------------------------------------------------

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What travels and lives together."""
        return self._buckets

    @property
    def updater(self) -> Updater:
        """The wrapped optimizer on this rank's segments."""
        return self._updater

    @property
    def shard_group(self) -> Communicator:
        """The ranks that split what is split: all of them but with shard groups (MiCS)."""
        return self._axes.shard

    @property
    def runtime(self) -> Runtime:
        """What gathers, releases and reduces."""
        return self._runtime

    @property
    def loss_scale(self) -> float:
        """The factor :meth:`backward` multiplies the loss by; 1.0 without loss scaling."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """``(loss * loss_scale).backward()``. Without loss scaling plain ``loss.backward()`` is the same."""
        (loss * self.loss_scale if self.scaler is not None else loss).backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on each rank without communicating; the next one outside reduces the sum.

        At stages 2 and 3 the whole local gradient exists meanwhile. All ranks must do it for the same backwards.
        """
        before, self._runtime.sync = self._runtime.sync, False
        try:
            yield
        finally:
            self._runtime.sync = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, update this rank's segments, and bring the new parameters to every rank that keeps them whole.

        With loss scaling a step whose gradients are not finite on some rank is skipped on all (``skipped``).
        Does nothing when there was no backward since ``zero_grad``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.skipped = False
        groups = self._options_of_update()
        self._updater.check_whole()
        self._settle()
        if self._early is not None:
            self._early.step()
            return loss
        if not self._runtime.reduced:
            return loss
        factor = 1.0 / self.loss_scale
        if self.clip_norm or self.scaler is not None:
            norm = self._norm() * factor
            self.grad_norm = norm
            finite = norm == norm and norm != float("inf")
            if self.scaler is not None:
                self.scaler.update(overflow=not finite)
                if not finite:
                    self.skipped = True
                    self.num_skipped += 1
                    return loss
            if self.clip_norm:
                factor *= min(self.clip_norm / (norm + 1e-6), 1.0)
        self._updater.update(factor, groups)
        self._publish()
        return loss

    def _options_of_update(self) -> list[dict[str, Any]]:
        if self._moved is not None:
            raise ValueError("an update while states are offloaded; call reload_states() first.")
        return self.param_groups

    def settle_gradients(self) -> None:
        """Reduce what ``no_sync()`` left on each rank, unless that is an update. Collective if there is any."""
        if self._early is None:
            self._settle()

    def _settle(self) -> None:
        if self._runtime.unreduced:
            self._runtime.reduce_all()

    def _norm(self) -> float:
        """sqrt(Σ g²) over the whole mean gradient, summed bucket by bucket and chunk by chunk at every stage."""
        partials = [
            torch.stack([g.reduced_norm(c) for g in self._gradients]) for c in self._trainable[0].updated_chunks()
        ]
        mine = torch.cat(partials)
        shard = self._axes.shard
        if len(partials) < shard.size:
            everyone = mine.new_empty(shard.size * mine.numel())
            shard.all_gather(everyone, mine).wait()
            mine = everyone
        return float(mine.square().sum().sqrt())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most ``max_norm``; returns the norm before. Collective."""
        if self._early is not None:
            raise ValueError("clip_grad_norm_() with update_in_backward=True: backward has used the gradients already.")
        self._settle()
        if not self._runtime.reduced:
            return 0.0
        norm = self._norm() / self.loss_scale
        factor = min(max_norm / (norm + 1e-6), 1.0)
        for gradients in self._gradients:
            for chunk in gradients.bucket.updated_chunks():
                gradients.scale_reduced(chunk, factor)
        return norm

    def _publish(self) -> None:
        handles = [bucket.parameters.publish() for bucket in self._trainable]
        self._runtime.reset()
        for handle in handles:
            if handle is not None:
                handle.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. ``set_to_none`` makes no difference: the flat buffers are zeroed when next used."""
        if self._early is not None:
            self._early.check_dropped()
        self._runtime.abandon()
        for gradients in self._gradients:
            gradients.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only construction adds groups: buckets are laid out once."""
        if getattr(self, "_sealed", False):
            raise NotImplementedError("a ZeRO optimizer takes all its parameter groups at construction (params=...).")
        super().add_param_group(param_group)

    # Looking inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters whole on every rank, for reading. Collective; changes made inside are lost at stage 3."""
        for bucket in self._buckets:
            bucket.parameters.wait(exact=True)
            bucket.active += 1
        try:
            yield
        finally:
            for bucket in self._buckets:
                bucket.active -= 1
            self._runtime.reset()

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are kept for the next forward or backward (stage 3). Call it on all ranks."""
        self._runtime.reset()

    def offload_states(
        self, include: Iterable[str] | None = None, device: str = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:  # fmt: skip
        """Move state from the device to host memory until :meth:`reload_states`; returns its bytes. Stage 3.

        Args:
            include: of "optim_states", "hp_params" (fp32 masters), "lp_params" (shards of the parameters) and
                "lp_grads" (reduced gradients); None for all.
            device: "cpu"; where parameters are on the CPU anyway nothing has to move.
            pin_memory, non_blocking: of the copies, on a GPU.

        Raises:
            ValueError: another stage or device, or a name that is none.
        """
        if self.config.stage != 3 or device != "cpu":
            raise ValueError(
                f"offload_states(device={device!r}) at stage {self.config.stage}; it needs 'cpu', stage 3."
            )
        if self._moved is None:
            pins = pin_memory and torch.cuda.is_available()
            self._moved = Moved(
                self, tuple(include) if include is not None else None, pin_memory=pins, non_blocking=non_blocking
            )
        return self._moved.num_bytes()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` took away."""
        if self._moved is not None:
            self._moved.back(non_blocking=non_blocking)
            self._moved = None

    def whole_parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole value) of every parameter, gathered bucket by bucket, so that there is never more than one.

        Collective: every rank goes to the end. A tensor is valid until the next one is asked for; ``frozen=False``
        leaves frozen parameters out. Parameters that are tied come once.
        """
        return whole_parameters(b for b in self._buckets if frozen or b.spec.trainable)

    @torch.no_grad()
    def consolidated_parameters(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Full copies of all parameters by name, on the CPU of every rank. Collective; gathers bucket by bucket."""
        found = {name: value.to("cpu", dtype, copy=True) for name, value in self.whole_parameters()}
        return {name: found[name] for name, _ in self.model.named_parameters()}

    def memory(self) -> dict[str, int]:
        """Bytes of model states in this rank's memory now, by role: parameters, gradients, optimizer, total.

        Beside them "nvme": bytes of this rank's files, and "buffers": host memory of the buffers that serve them.
        """
        optimizer = self._updater.state_bytes()
        parameters = sum(b.parameters.memory_bytes() for b in self._buckets)
        gradients = sum(g.memory_bytes() for g in self._gradients)
        total = parameters + gradients + optimizer
        found = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "total": total}
        if self._scratch is not None:
            found |= {"nvme": self._scratch.nvme_bytes(), "buffers": self._scratch.pool.stats().in_use_bytes}
        return found

    def nvme_traffic(self) -> tuple[int, int]:
        """Bytes that this rank has read from and written to NVMe since construction."""
        return self._scratch.traffic() if self._scratch is not None else (0, 0)

    def forecast(self) -> Forecast:
        """What a step will cost this rank, from the plan and the wrapped optimizer's states.

        The order of the units is the recorded one where a training forward has run, else that of ``named_modules``.
        Exact for models whose partitioned units do not nest.
        """
        states, calls = self._updater.forecast_bytes(), self._runtime.calls()
        found = make_forecast(
            self._buckets,
            calls=calls,
            shard_group=self._axes.shard,
            reduce_dtype=self._reduce_dtype,
            optimizer_bytes=states,
            clips=bool(self.clip_norm or self.scaler is not None),
            keep_bytes=self._runtime.keep_bytes,
        )
        tiers, buffers = tier_bytes(self._buckets, states), self._updater.buffer_bytes()
        read, written = nvme_traffic(
            self._buckets, self._updater, lambda weigh: gathered_by_units(calls, self._runtime.keep_bytes, weigh)
        )
        pins = self.config.offload_param.pin_memory or self.config.offload_optimizer.pin_memory
        return dataclasses.replace(
            found, tiers=tiers, buffers_bytes=buffers, pinned_bytes=(buffers + tiers["host"]) * pins,
            nvme_files_bytes=self._scratch.nvme_bytes() if self._scratch is not None else 0,
            nvme_read_bytes=read, nvme_written_bytes=written,
        )  # fmt: skip

    def close(self) -> None:
        """Give the model back: ordinary parameters with memory of their own, no hooks. Collective at stage 3."""
        self._runtime.remove()
        for bucket in self._buckets:
            bucket.parameters.wait(exact=True)
            for parameter in bucket.spec.parameters:
                release_parameter(parameter)
                parameter.data = parameter.data.clone()
        if self._scratch is not None:
            self._scratch.close()

    # State -----------------------------------------------------------------------------------------------------------

    def state_slices(self) -> list[state_io.StateSlice]:
        """This rank's part of the training state. Every element of every tensor belongs to exactly one rank."""
        self._updater.settle()
        updater = self._updater
        return list(state_io.slices_of(updater.segments, self.inner.state, self._buckets, stored=updater.stored))

    def state_scalars(self) -> dict[str, float]:
        """``"<role>/<name>"`` → value for the scalar optimizer states, and ``"zero/<key>"`` for the loss scaler."""
        found = state_io.scalars_of(self._updater.segments, self.inner.state)
        if self.scaler is not None:
            found |= {f"zero/{key}": value for key, value in self.scaler.state().items()}
        return found

    @torch.no_grad()
    def load_state(self, read: state_io.Reader, scalars: Mapping[str, float]) -> None:
        """Continue from the state that ``read`` and ``scalars`` give, saved at any world size and stage. Collective.

        Args:
            read: ``read(name, role, start, length)`` returns these elements as a 1-D tensor, or raises KeyError when
                there is no such state (nothing but parameters exists before the first step).
            scalars: the union of :meth:`state_scalars` of all ranks that saved.
        """
        if self._early is not None:
            self._early.step()  # whatever it made is overwritten
        self.zero_grad()
        self._updater.load(lambda segment, state: state_io.fill_segment(segment, state, read, scalars))
        for bucket in self._buckets:
            if not bucket.spec.trainable:
                state_io.fill_frozen(bucket, read)
        self._publish()
        mine = {k.removeprefix("zero/"): v for k, v in scalars.items() if k.startswith("zero/")}
        if self.scaler is not None and mine:
            self.scaler.load(mine)

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer state, for a checkpoint read back at the same world size, stage and options.

        Parameters are part of it (role "parameter"), because at stage 3 nobody else has them. For a checkpoint that can
        be read under another placement use :meth:`state_slices`.
        """
        self._updater.settle()
        updater = self._updater
        held = state_io.slices_of(updater.segments, self.inner.state, self._buckets, owned=False, stored=updater.stored)
        slices = {f"{s.role}|{s.name}|{s.start}": s.tensor.clone() for s in held}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"slices": slices, "scalars": self.state_scalars(), "param_groups": groups, "rank": self.comm.rank,
                "world_size": self.comm.size}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned on this rank."""
        where = (state_dict.get("rank"), state_dict.get("world_size"))
        if where != (self.comm.rank, self.comm.size):
            raise ValueError(
                f"this state_dict is of rank {where[0]} of {where[1]}; this is rank {self.comm.rank} of "
                f"{self.comm.size} at stage {self.config.stage}. load_state() with the slices of all ranks "
                f"reads any placement into any other."
            )
        slices = state_dict["slices"]

        def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
            found: torch.Tensor = slices[f"{role}|{name}|{start}"]
            return found

        self.load_state(read, state_dict["scalars"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
