"""A module whose parameters are split over ranks: units, buckets, and what gathers, releases and reduces them.

It knows no optimizer. :class:`~zoo.zero.ZeroOptimizer` is one user of it; forward alone, with parameters on the host or
on NVMe, is another::

    model = ShardedModel(module, config=ZeroConfig(stage=3, offload_param=...), trains=False)
    with torch.no_grad():
        logits = module(tokens)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from zoo import io
from zoo.comm import Communicator, Recovery, raise_in_next, raise_together, report_uncaught
from zoo.comm.failures import report
from zoo.layout import enter_mesh
from zoo.shard.agreement import CONSTRUCTION, all_ranks, of_object
from zoo.shard.buckets import Bucket, table_of
from zoo.shard.choosing import choose, told_of_parts
from zoo.shard.config import ZeroConfig
from zoo.shard.dtensors import DTensors
from zoo.shard.guard import ShardedParameter, refuse_copy
from zoo.shard.guard import release as release_parameter
from zoo.shard.members import Members
from zoo.shard.memory import StepMemory
from zoo.shard.offload.stores import open_stores
from zoo.shard.partitioned import ReadPolicy
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.families import check_ranks, ranks_of
from zoo.shard.placement.plan import check_rows
from zoo.shard.placement.precision import Precision, resolve_precision
from zoo.shard.placement.units import UnitChoice, UnitSpec, check_parameters
from zoo.shard.runtime.executor import Executor
from zoo.shard.runtime.hooks import Runtime
from zoo.shard.runtime.residency import budgets_of
from zoo.shard.values.whole import WholeModel, parameter_rows, whole_parameters, whole_values
from zoo.shard.values.writes import Writes

if TYPE_CHECKING:
    from zoo.plan import Actions
    from zoo.shard.collectives.routes import Routes, Switch
    from zoo.shard.module_buffers import ModuleBuffers
    from zoo.shard.offload.scratch import Scratch
    from zoo.shard.runtime.gather_votes import GatherVotes
    from zoo.shard.runtime.residency import ResidencyPolicy
    from zoo.shard.runtime.window import Window


class ShardedModel:
    """Splits a module's parameters over ranks as ``config`` says, and runs it.

    The parameter objects stay; their memory moves to flat buffers, and the values of rank 0 are broadcast.

    Args:
        module: built already, or partitioned by :class:`~zoo.zero.Init`.
        config: the stage, what lives where, and budgets.
        group: process group, DeviceMesh or Communicator of the ranks; None for the default group.
        mesh, data_axes: instead of ``group``: a DeviceMesh with names for all axes of the job, and those of them over
            which losses are averaged. Needed where layers declare parts along axes (``zoo.layout.declare_split``), or
            parameters are DTensors.
        layer_axes: with ``mesh``: axes along which ranks have other layers, as stages of a pipeline do.
        units: which modules are gathered as one; see :func:`~zoo.shard.placement.units.find_units`.
        trains: False: there will be no backward; no gradients are kept, and no parameter requires one.
        group_of: the parameter group of a parameter; parameters of one group lie together.
        precision: in which dtypes it computes, and gradients are kept and sent. Without training parameters are
            converted, and :meth:`close` leaves them so.
        sparse_gradients: see :class:`~zoo.zero.ZeroOptimizer`.
        keep_norms: of gradients that leave the device.
        check: agree on a fingerprint of each collective before it.
        aio: how to reach NVMe.
        arguments: what else all ranks have to give alike, by name.
        switch: whether gradients are left to an optimizer that brings ranks together by itself; None: they never are.

    Attributes:
        module, config, comm, precision: as given.
        axes: which ranks split what, for dense parameters; families: for each set of axes along which they are parts.
        layers: the ranks with the other layers of the model, None where there are none.
        everyone: all ranks that have some of the model.
        buckets: what travels and lives together. executor: gathers, releases and reduces them.
        runtime: what gathers, releases and reduces.
        tied_anywhere: some parameters are those of several stages, on any of the ranks of ``layers``.
        scratch: files and buffers of offloading, None without.
        writes: finds what the user writes in place.
        module_buffers: what keeps buffers alike on all ranks, None where each rank keeps its own.
        dtensors: the parameters that were DTensors, and what stands for them.
        members: finds parameters that came after construction. reads: what programs get that read what is not here.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: ZeroConfig,
        group: Any = None,
        mesh: Any = None,
        data_axes: Sequence[str] | None = None,
        layer_axes: Sequence[str] = (),
        units: UnitChoice | None = None,
        trains: bool = True,
        group_of: Callable[[nn.Parameter], int] = lambda parameter: 0,
        precision: Precision | None = None,
        sparse_gradients: bool = False,
        keep_norms: bool = False,
        check: bool = False,
        aio: io.AioConfig | io.Handle | None = None,
        arguments: Mapping[str, Any] | None = None,
        switch: Switch | None = None,
    ) -> None:
        with raise_in_next(lambda: all_ranks(group, mesh), CONSTRUCTION):
            check_parameters(module, dry=isinstance(group, Communicator) and group.is_dry)
            self.precision = resolve_precision(precision)
            self.precision.check(module)
            check_rows(sparse_gradients, config)
            check_ranks(group, mesh, data_axes, layer_axes)
        self.module, self.config, self.sparse_gradients = module, config, sparse_gradients and trains
        self._ranks = ranks_of(group, mesh, data_axes, layer_axes, check=check, nodes=config.ranks_per_node)
        self.comm, self.layers, self.everyone = self._ranks.data, self._ranks.layers, self._ranks.everyone
        if mesh is not None:
            enter_mesh(module, mesh)
        if self.comm.backend in ("gloo", "nccl"):
            report_uncaught()  # what ends one rank is told to those that wait for it
        self.closed, self.switch, self._splits, self.reads = False, switch, False, ReadPolicy()
        self.buckets, self.executor = list[Bucket](), Executor()
        self._to_give: list[Bucket] | None = None  # while it is being closed
        self.scratch: Scratch | None = None
        self.dtensors = DTensors(module, mesh)
        self._trains = trains
        self._frozen_here = [] if trains else [p for p in module.parameters() if p.requires_grad]
        for parameter in self._frozen_here:
            parameter.requires_grad_(False)
        alike = {
            **dict(config), **{f"Precision.{key}": value for key, value in vars(self.precision).items()},
            "sparse_gradients": sparse_gradients, "check": check, "trains": trains, **(arguments or {}),
        }  # fmt: skip
        try:
            self._build(units, lambda p: group_of(self.dtensors.original(p)), keep_norms, aio, alike)
            self.dtensors.moved()
        except BaseException as error:
            told = self._undo(error)
            if self._splits and self.comm.size > 1 and not self.comm.is_dry:
                report(told)  # others may be in the collectives of splitting
            if told is error:
                raise
            raise told from error

    def _undo(self, error: BaseException) -> BaseException:
        """Give back what no other rank is needed for: these may be anywhere. The error, which says where that is not
        all of the model."""
        with contextlib.suppress(Exception):
            self._give_back([b for b in self.buckets if b.is_here])
        return told_of_parts(error, self.module)

    def _build(
        self, units: UnitChoice | None, group_of: Callable[[nn.Parameter], int], keep_norms: bool,
        aio: io.AioConfig | io.Handle | None, arguments: Mapping[str, Any],
    ) -> None:  # fmt: skip
        cfg = self.config
        found = choose(
            self.module, self._ranks, units, cfg, self.precision, group_of, sparse=self.sparse_gradients,
            trains=self._trains, switch=self.switch, arguments=arguments, on_any_layer=self.on_any_layer,
            refuse_together=self.refuse_together,
        )  # fmt: skip
        self.families, self.tied_anywhere = found.families, found.tied_anywhere
        self.axes: Axes = self.families[()]
        plan, placements, routes = found.plan, found.placements, found.routes
        self.module_buffers: ModuleBuffers | None = None
        if cfg.buffers != "own":
            from zoo.shard.module_buffers import ModuleBuffers

            self.module_buffers = ModuleBuffers(self.module, cfg.buffers, self.families)
        self.step_memory = memory = StepMemory()
        off = cfg.offload_param.device != "none" or cfg.offload_optimizer.device != "none"
        with raise_together(self.everyone if off else None, "opening what offloaded state lives in"):
            self.scratch, stores = open_stores(plan, placements, routes, cfg, comm=self.comm, aio=aio)
        self._splits = True
        for i, spec in enumerate(plan):
            bucket = Bucket(
                i, spec, placements[i], routes[i], memory, scratch=self.scratch, stores=stores[i],
                keep_norms=keep_norms, executor=self.executor,
            )  # fmt: skip
            bucket.owner = weakref.ref(self)
            self.buckets.append(bucket)
        if cfg.offload_host_bytes is None:  # under a cap blocks go back when they are freed
            memory.begin()
        self._hook(found.specs)
        self.writes = Writes(self.buckets, self.runtime)
        self.members = Members(self.module, self.buckets, self.runtime.units)

    def pool_bytes(self) -> int:
        """What pools have of the host's memory now: for gathered parameters, gradients, and what is offloaded."""
        return self.step_memory.reserved_bytes() + (
            self.scratch.pool.stats().reserved_bytes if self.scratch is not None else 0
        )

    def _hook(self, specs: Sequence[UnitSpec]) -> None:
        cfg = self.config
        spans = any(axes.shard.size > 1 for axes in self.families.values())
        self.votes: GatherVotes | None = None
        if cfg.divergent:
            from zoo.shard.runtime.gather_votes import GatherVotes

            self.votes = GatherVotes(self.comm, self.buckets)
            for bucket in self.buckets:
                bucket.in_turn = self.votes.unshard if bucket.partitioned else None
        recovers = self.comm.size > 1 and self.votes is None and not self.comm.is_dry
        self._budgets = budgets_of(self.buckets, specs, cfg, spans=spans)
        self.runtime = Runtime(
            specs,
            self.buckets,
            comm=self.comm,
            config=cfg,
            precision=self.precision,
            votes=self.votes,
            policy=self._budgets,
            executor=self.executor,
            recovery=Recovery(self.comm) if recovers else None,
        )

    @property
    def obeyed(self) -> dict[str, int]:
        """Options whose default follows from the model, as they are obeyed: key → elements, 0 below stage 3."""
        itemsize, policy = self.buckets[0].spec.dtype.itemsize, self._budgets
        sizes = {"prefetch_bucket_size": policy.prefetch_bytes, "max_live_parameters": policy.keep_bytes}
        gathers = any(bucket.partitioned for bucket in self.buckets)
        return {key: size // itemsize if gathers else 0 for key, size in sizes.items()}

    # Values ----------------------------------------------------------------------------------------------------------

    @property
    def trainable(self) -> list[Bucket]:
        """The buckets with gradients."""
        return [b for b in self.buckets if b.spec.trainable]

    def rows(self, bucket: Bucket, slot: int) -> torch.Tensor:
        """This rank's rows of a partitioned parameter, as a DTensor. Collective."""
        self._begin_reading()
        return parameter_rows(bucket, slot)

    def on_any_layer(self, here: bool, device: torch.device | None = None) -> bool:
        """Whether ``here`` is true on this rank or on one that has other layers. Collective over those."""
        if self.layers is None:
            return here
        found = torch.tensor([float(here)], device=self.buckets[0].device if device is None else device)
        self.layers.all_reduce(found).wait()
        return bool(found.item() > 0)

    def refuse_together(self, wrong: Exception | None) -> None:
        """Raise ``wrong``, or what a rank with other layers refuses: these would wait for this one. Collective over
        them."""
        for found in [wrong] if self.layers is None else self.layers.all_gather_object(wrong):
            if found is not None:
                raise found

    # Verbs -----------------------------------------------------------------------------------------------------------

    def unshard(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Begin to gather these buckets (default: all); :meth:`wait` makes them usable. Collective."""
        self.refuse_closed()
        for bucket in self.buckets if buckets is None else buckets:
            self.executor.unshard(bucket)

    def wait(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait until these buckets are whole, gathering what nobody has begun to gather. Collective."""
        self.refuse_closed()
        for bucket in self.buckets if buckets is None else buckets:
            self.executor.wait(bucket)

    def reshard(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Release what is gathered of these buckets and not in use."""
        for bucket in self.buckets if buckets is None else buckets:
            self.runtime.residency.forget(bucket)

    def use_residency(self, policy: ResidencyPolicy) -> None:
        """From now on ``policy`` says which buckets are gathered ahead, and which stay gathered (stage 3). Collective.

        It takes the place of ``prefetch_bucket_size`` and ``max_live_parameters``.

        Raises:
            CollectiveMismatchError: ranks gave policies of different classes, or with other numbers.
            RuntimeError: inside of a window, which has a policy of its own until it ends.
        """
        self.refuse_closed()
        self.runtime.check_between("use_residency()")
        if self.runtime.window is not None:
            raise RuntimeError(
                "use_residency() inside of a window, at whose end the policy from before it comes back: call it "
                "before the window."
            )
        # Ranks that decide otherwise would wait for each other's gathers.
        self.comm.agree("the residency policy:", of_object(policy), self.buckets[0].device)
        self.settle()
        self.runtime.residency.clear()
        self.runtime.residency.use(policy)

    def use_routes(self, choose: Callable[[Bucket], Routes]) -> None:
        """From now on each bucket travels, and is packed, as ``choose(bucket)`` says. Collective.

        It returns ``dataclasses.replace(bucket.routes, gather=..., reduce=...)``, of whatever has the methods of
        :class:`~zoo.shard.collectives.routes.Gather` and ``Reduce``; forecasts ask them too.

        Raises:
            ValueError: a bucket's routes cannot be changed so. CollectiveMismatchError: ranks chose otherwise.
        """
        from zoo.shard.collectives.choice import use_routes

        self.refuse_closed()
        self.runtime.check_between("use_routes()")
        self.settle()
        self.runtime.residency.clear()
        use_routes(self.buckets, choose, self.comm)

    def reduce(self) -> None:
        """Bring gradients that ``no_sync()`` or a window left on each rank to their mean. Collective.

        Those of parameters that ranks with other layers have too (``zoo.layout.declare_tied``) wait for this, or for
        the step; it is collective over those ranks then.
        """
        self.refuse_closed()
        self.runtime.check_between("reduce()")
        if self.votes is not None:  # only some ranks may have gradients
            self.settle()
            self.runtime.unreduced = self.votes.any(self.runtime.unreduced)
        if self.runtime.unreduced:
            self.runtime.reduce_all()
        if self.runtime.waiting:
            self.runtime.reduce_tied()

    def wait_for_layers(self) -> None:
        """Before a step: ranks with other layers may have gradients of what this one has too. Collective over them."""
        if self.tied_anywhere:
            self.runtime.waiting = self.on_any_layer(self.runtime.waiting) and self.runtime.reductions.waits

    def sync_buffers(self) -> None:
        """Bring the model's buffers to what ``buffers=`` says, as ``step()`` does. Collective."""
        self.refuse_closed()
        if self.module_buffers is not None:
            self.module_buffers.sync()

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add ``gradient`` to what this rank has for ``parameter``, as autograd would: ``p.grad += gradient``.

        For schedules that compute gradients of weights by themselves (:meth:`Window.backward_weights`). The next
        reduction takes it; every rank must come to that.

        Raises:
            ValueError: no trainable parameter of this model, or another shape, dtype or device.
            RuntimeError: the latest backward failed.
        """
        self.runtime.accumulate(parameter, gradient)

    def window(self, *, max_bytes: int | None = None) -> Window:
        """Micro-batches that a schedule drives, any number of them in flight and in any order: ``runtime/window.py``.

        ::

            with sharded.window(max_bytes=2**30) as window:
                with window.forward(0):
                    loss = module(x)
                with window.backward(0):
                    loss.backward()

        Args:
            max_bytes: parameters that are gathered stay so until the window ends, as long as all that is whole has at
                most this many bytes; None: what the model does otherwise (``max_live_parameters``, prefetching).
        """
        from zoo.shard.runtime.window import Window

        self.refuse_closed()
        return Window(self.runtime, max_bytes=max_bytes, updates_in_backward=self.config.update_in_backward)

    def settle(self) -> None:
        """With ``divergent=True``: serve other ranks until no rank needs a gather. Every rank calls it.

        ``step()`` does it; call it before collectives of your own between two steps.
        """
        self.runtime.settle_failure()
        if self.votes is not None:
            self.votes.settle()
            # What is whole on some ranks only is released: all take part in the gathers that follow, or none does.
            self.runtime.residency.clear()

    def record(self, work: Callable[..., Any] | None = None) -> contextlib.AbstractContextManager[Actions]:
        """``with sharded.record() as actions:`` lists what happens inside; ``print(actions)`` shows it.

        The list is the same on every rank. With ``work`` (:class:`zoo.profiling.WorkCounter`) it has computations too.
        """
        from zoo.shard.runtime.recording import recording

        self.refuse_closed()
        return recording(self.runtime, work)

    def table(self) -> str:
        """One line a bucket: what it is, what of it is here now, and where it lives when it is not."""
        return table_of(self.buckets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`zoo.zero.ZeroOptimizer.no_sync`."""
        self.refuse_closed()
        backward = self.runtime.backward
        before, backward.sync = backward.sync, False
        try:
            yield
        finally:
            backward.sync = before

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters whole on every rank, for reading. Collective; changes made inside are lost at stage 3."""
        self._begin_reading()
        held: list[Bucket] = []
        try:
            for bucket in self.buckets:
                self.executor.wait(bucket, exact=True)
                bucket.active += 1
                held.append(bucket)
            yield
        finally:
            for bucket in held:
                bucket.active = max(bucket.active - 1, 0)  # an abandoned pass has set it to zero
            self.runtime.residency.clear()

    def whole_parameters(self, *, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of now, whole value) of every parameter, gathered bucket by bucket: there is never more than one.

        Collective: every rank goes to the end. A tensor is valid until the next one is asked for; ``frozen=False``
        leaves frozen parameters out. Parameters that are tied come once.
        """
        self._begin_reading()
        self.members.check()
        return whole_parameters(self._to_read(frozen=frozen))

    def whole_model(self, *, frozen: bool = True, layers: bool = True) -> WholeModel:
        """As :meth:`whole_parameters`, under their names in the whole model, and with what other ranks have of tensors
        that are split along further mesh axes (experts, tensor-parallel layers), and other layers. Collective, and so
        is the iteration.
        """
        self._begin_reading()
        self.members.agree(self.comm, self.everyone if layers else self.comm, "reading the whole model")
        return WholeModel(self._to_read(frozen=frozen), self.families, self.layers if layers else None)

    def _begin_reading(self) -> None:
        self.refuse_closed()
        self.settle()

    def _to_read(self, *, frozen: bool) -> list[Bucket]:
        buckets = [b for b in self.buckets if frozen or b.spec.trainable]
        for bucket in buckets:
            bucket.read_whole = True
        return buckets

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Neither copies nor pickles have the model's memory."""
        refuse_copy(self)

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the module back: ordinary parameters with memory of their own, no hooks. Collective at stage 3.

        With ``Precision.param`` it is collective at every stage, and parameters have the dtype again in which they
        came: trained ones the values of their masters, frozen ones what they were.

        Raises:
            OffloadError: values cannot be read. What is given back already stays so; another call goes on from there.
            RuntimeError: inside of ``GatheredParameters``, where ranks may have values of their own.
        """
        if not self.closed:
            self.writes.check_not_held()
            if self.votes is not None:
                self.settle()
            self.closed = True
            self.runtime.remove()
            self._to_give = list(self.buckets)
        if self._to_give is not None:
            self._give_back(self._to_give)
            self._to_give = None

    def refuse_closed(self) -> None:
        """Raise ValueError after :meth:`close`."""
        if self.closed:
            raise ValueError("this model was closed: its parameters are ordinary ones again. Construct a new one.")

    def _give_back(self, buckets: list[Bucket]) -> None:
        while buckets:
            bucket = buckets[0]
            self.executor.wait(bucket, exact=True)
            whole = whole_values(bucket, trains=self._trains)
            for parameter, value in zip(bucket.spec.parameters, bucket.views(whole), strict=True):
                release_parameter(parameter)
                parameter.data = value.clone()
            del buckets[0]
        if not any(isinstance(parameter, ShardedParameter) for parameter in self._frozen_here):
            for parameter in self._frozen_here:
                parameter.requires_grad_(True)
        self.dtensors.give_back()
        if self.scratch is not None:
            self.scratch.close()
