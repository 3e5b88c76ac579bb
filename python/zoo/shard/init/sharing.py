"""Where the parts of an Init live and how they travel: placements, routes and stores of buckets of one parameter.

Legend: see ``placement/axes.py``; n elements of a part, G elements that share a scale (``collectives/quantised.py``).

n = ceil(numel / p), rounded up to whole groups where something is quantised and else to 64 elements: so it does not
depend on the dtype, and a rank converts what it has without asking others.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from zoo.comm import Communicator, Recovery
from zoo.shard.collectives.routes import Packer, Routes, plain_routes
from zoo.shard.memory import Memory
from zoo.shard.offload.scratch import NvmeFile, Scratch
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.packing import BucketSpec, layout_of
from zoo.shard.placement.placements import Placements

_UNIT = 64  # elements: a cache line of the smallest dtype, and whole units of the quantisation kernels


_local = threading.local()


def active() -> list[Any]:
    """Each :class:`~zoo.shard.init.session.Session` that is active on this thread, the innermost last."""
    if not hasattr(_local, "sessions"):
        _local.sessions = []
    found: list[Any] = _local.sessions
    return found


def current() -> Any:
    """The innermost of them; None without."""
    return sessions[-1] if (sessions := active()) else None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What the parts of one Init have in common.

    Attributes:
        axes: all ranks, those that split a value, and which chunk each of them keeps.
        placements: of every part.
        scratch: buffers of host memory, None where parts stay on the device.
        store: where they are on NVMe.
        quantised_reads: what is gathered to be read travels as int8.
        quantised_frozen: what does not require a gradient is kept as int8.
    """

    axes: Axes
    placements: Placements
    scratch: Scratch | None = None
    store: NvmeFile | Swapped | None = None
    quantised_reads: bool = False
    quantised_frozen: bool = False
    memory: Memory = field(default_factory=Memory)

    @property
    def comm(self) -> Communicator:
        """All ranks that share the model."""
        return self.axes.world

    # What its parts belong to: with the verbs of a ``ShardedModel``, and to ``GatheredParameters`` what holds them.

    def wait(self, parts: Sequence[Any]) -> None:
        """Gather these. Collective."""
        for part in parts:
            part.make_whole()

    def reshard(self, parts: Sequence[Any]) -> None:
        """Release them."""
        for part in parts:
            part.drop_whole()

    @property
    def writes(self) -> Sharing:
        """It keeps no account of writes of its own."""
        return self

    @cached_property
    def _recovery(self) -> Recovery | None:
        return Recovery(self.comm) if self.comm.size > 1 else None

    def settle(self) -> None:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        if self._recovery is not None:
            self._recovery.settle()

    def failed_anywhere(self, error: BaseException | None) -> str:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        device = torch.device("cuda" if "nccl" in self.comm.backend else "cpu")
        return self._recovery.agree_on(error, device) if self._recovery is not None else ""

    def hold(self, part: Any, *, writes: bool) -> bool:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        session = current()
        if writes and session is not None and session.uses(part):
            session.settle()  # what initialisers wrote is kept, whatever becomes of what is written now
        part.active += 1
        part.make_whole(exact=writes)
        part.writers += writes
        return writes

    def let_go(self, part: Any, held: bool, *, forget: bool) -> None:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        session = current()
        part.active -= 1
        part.writers -= held
        if part.active:
            return
        if forget and session is not None:
            session.forget(part)
        if session is None or not session.uses(part):
            part.drop_whole()

    def noted(self, part: Any) -> list[int]:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        return [part.version]

    def publish(self, slots: Mapping[Any, Sequence[int]], rank: int, seen: Mapping[Any, Sequence[int]]) -> None:
        """See :class:`~zoo.shard.values.gathered.Holder`."""
        for part in slots:
            part.store(rank)

    # How a part is made.

    @cached_property
    def _plain(self) -> Routes:
        return plain_routes(self.axes)

    def spec_of(self, parameter: nn.Parameter, name: str, dtype: torch.dtype, group_size: int = 0) -> BucketSpec:
        """The plan of a bucket of one parameter; ``group_size``: G of an earlier one, whose layout it keeps.

        Raises:
            NotImplementedError: a floating-point dtype that cannot be quantised, where that is asked for.
        """
        parameters = _Weakly(parameter)
        spec = BucketSpec(dtype, False, False, [name], parameters, [0], [name])  # type: ignore[arg-type]
        spec.group_size = group_size or _UNIT
        quantises = self.quantised_reads or self.quantised_frozen
        if not group_size and quantises and dtype.is_floating_point:
            from zoo.shard.collectives import quantised  # the only part that needs zoo-kernels

            quantised.check_dtypes([name], dtype)
            length = layout_of(spec, self.axes.shard.size).size // self.axes.shard.size
            spec.group_size = quantised.group_size_of(length)
        return spec

    def routes_of(self, spec: BucketSpec) -> Routes:
        """How it travels."""
        plain = self._plain
        if not self.quantised_reads or not _can_be_quantised(spec.dtype):
            return plain
        from zoo.shard.collectives.quantised import quantised_routes

        return quantised_routes(plain, spec.group_size, weights=True, stored=False, gradient_bits=None)

    def packer_of(self, spec: BucketSpec, *, frozen: bool) -> Packer | None:
        """What keeps it as int8; None: it is kept as it is."""
        if not (frozen and self.quantised_frozen and _can_be_quantised(spec.dtype)):
            return None
        from zoo.shard.collectives import quantised

        return quantised.Packer(self._plain.exact, spec.group_size)


def _can_be_quantised(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 8  # fp64 travels as it is


class _Weakly:
    """A list of one parameter that does not keep it: what is dropped while a model is built is freed at once."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def __getitem__(self, index: int) -> nn.Parameter:
        found = self._parameter() if index == 0 else None
        if found is None:
            raise IndexError("there is no such parameter (any more).")
        return found

    def __len__(self) -> int:
        return 1


class ParamSwapper(Protocol):
    """Keeps the parts of an Init outside of memory: what ``Init(param_swapper=)`` takes.

    Init calls it on each rank for the parts of that rank alone, from the thread that builds the model. A key is a
    number that is not used again after ``drop``. What it raises ends the construction.
    """

    def swap_out(self, key: int, values: torch.Tensor) -> None:
        """Keep (n,) ``values``, on the CPU, under ``key``, in the place of what was there; when it returns they are
        written or copied."""

    def swap_in(self, key: int, out: torch.Tensor) -> None:
        """Fill (n,) ``out``, on the CPU, with what ``key`` holds; it is there when this returns."""

    def drop(self, key: int) -> None:
        """What ``key`` holds is needed no longer."""


class Swapped:
    """A store with a swapper. Regions are its keys, and are read and written whole."""

    def __init__(self, swapper: ParamSwapper) -> None:
        self._swapper, self._keys = swapper, itertools.count()

    def add(self, num_bytes: int) -> int:
        """A new region."""
        return next(self._keys)

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        self._swapper.swap_in(region, tensor)

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        self._swapper.swap_out(region, tensor)

    def finish(self, future: Any) -> None:
        """It is done already."""

    def drop(self, region: int) -> None:
        """A region is needed no longer."""
        self._swapper.drop(region)
