"""How the parts of an Init are kept: by which ranks, in which form, and how they come together.

Legend: N ranks, n elements of a piece, P = N n; L ranks of the secondary group, m = P / L; G elements of a group that
shares a scale (``collectives/quantised.py``). Rank r keeps the flat value's elements [k n, (k + 1) n), k = places[r],
and with a secondary group [l m, (l + 1) m) besides, l its rank there.

n = ceil(numel / N), rounded up to whole groups where something is quantised, so that a group never lies in two pieces,
whatever group of ranks they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.comm import Communicator
from zoo.comm import Handle as Pending
from zoo.zero.collectives.routes import FlatGather
from zoo.zero.init.keeping import Keeper, Kept

_UNIT = 16  # of the kernels: a group is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What the parts of one Init have in common.

    Attributes:
        comm: the N ranks.
        keeper: where pieces live.
        places: which piece each rank keeps; a permutation of 0 to N - 1.
        secondary: values are kept a second time, split over these L ranks, and gathered among them.
        quantised_reads: what is gathered to be read travels as int8.
        quantised_frozen: what does not require a gradient is kept as int8.
    """

    comm: Communicator
    keeper: Keeper
    places: Sequence[int]
    secondary: Communicator | None = None
    quantised_reads: bool = False
    quantised_frozen: bool = False


class Share:
    """This rank's part of one value.

    Attributes:
        length: n.
        packed: kept as int8 and scales.
    """

    def __init__(self, sharing: Sharing, numel: int, dtype: torch.dtype, name: str) -> None:
        self.sharing, self.dtype, self._name = sharing, dtype, name
        length = -(-numel // sharing.comm.size)
        quantises = (sharing.quantised_reads or sharing.quantised_frozen) and dtype.is_floating_point
        self._group_size = 0
        if quantises and numel:
            from zoo.zero.collectives import quantised  # the only part that needs zoo-kernels

            quantised.check_dtypes([name], dtype)
            length = -(-length // _UNIT) * _UNIT
            self._group_size = quantised.group_size_of(length)
            length = -(-length // self._group_size) * self._group_size
        self.length, self.packed = length, False
        self._kept: list[Kept] = []

    @property
    def total(self) -> int:
        """P."""
        return self.length * self.sharing.comm.size

    def _groups(self) -> list[tuple[Communicator, int]]:
        """The groups that the value is split over, and this rank's piece in each."""
        comm, secondary = self.sharing.comm, self.sharing.secondary
        found = [(comm, self.sharing.places[comm.rank])]
        return [*found, (secondary, secondary.rank)] if secondary is not None else found

    def _packer(self, comm: Communicator) -> Any:
        from zoo.zero.collectives.quantised import Packer

        return Packer(FlatGather(comm), self._group_size)

    def store(self, flat: torch.Tensor, *, frozen: bool, rounded: bool) -> None:
        """Keep this rank's pieces of a whole (P,) value.

        Args:
            frozen: it is not trained.
            rounded: the value was gathered as int8. Elements that are still what arrived then keep what they were.
        """
        if flat.dtype.itemsize == 8:
            self._group_size = 0  # fp64 travels as it is
        pack = frozen and self._can_pack()
        for i, (comm, place) in enumerate(self._groups()):
            size = self.total // comm.size
            own = flat[place * size : (place + 1) * size]
            if rounded:
                before = self._values(i).to(own.device)
                arrived = self._rounded(before, comm)
                own = torch.where((own == arrived) | (own.isnan() & arrived.isnan()), before, own)
            kept = self._packer(comm)(own.contiguous()).raw if pack else own
            if i < len(self._kept):
                self._kept[i].replace(kept)
            else:
                self._kept.append(Kept(self.sharing.keeper, kept))
        self.packed, self.dtype = pack, flat.dtype

    def _can_pack(self) -> bool:
        return self.sharing.quantised_frozen and self._group_size > 0

    def _rounded(self, values: torch.Tensor, comm: Communicator) -> torch.Tensor:
        made: torch.Tensor = self._packer(comm)(values.contiguous()).values(values.dtype)
        return made

    def pack(self) -> None:
        """Keep as int8 what was frozen after it was stored."""
        if self.packed or not self._can_pack():
            return
        for kept, (comm, _) in zip(self._kept, self._groups(), strict=True):
            kept.replace(self._packer(comm)(kept.values()).raw)
        self.packed = True

    def _values(self, index: int) -> torch.Tensor:
        """This rank's piece in one of the groups, as plain values."""
        found = self._kept[index].values()
        if self.packed:
            plain: torch.Tensor = self._packer(self._groups()[index][0]).over(found).values(self.dtype)
            return plain
        return found

    def gather(self, flat: torch.Tensor, *, exact: bool) -> bool:
        """Fill (P,) ``flat`` with the whole value; returns whether it was rounded on the way. Collective.

        Among the ranks of the secondary group where there is one. ``exact``: as it is kept.
        """
        if not flat.numel():
            return False
        index = len(self._kept) - 1
        comm, place = self._groups()[index]
        kept = self._kept[index].values().to(flat.device)
        if self.packed:
            packed = self._packer(comm).over(kept)
            self._start(flat, comm, index, lambda full: packed.start(full, self._name))
            return False
        if self.sharing.quantised_reads and self._group_size and not exact and comm.size > 1:
            from zoo.zero.collectives.quantised import QuantisedGather

            route = QuantisedGather(FlatGather(comm), self._group_size)
            self._start(flat, comm, index, lambda full: route.start(full, kept, self._name))
            return True
        if self._in_order(index):
            size = self.total // comm.size
            own = flat[place * size : (place + 1) * size].copy_(kept)
            comm.all_gather(flat, own, label=self._name).wait()
        else:
            self._start(flat, comm, index, lambda full: comm.all_gather(full, kept, label=self._name))
        return False

    def _in_order(self, index: int) -> bool:
        return index > 0 or list(self.sharing.places) == list(range(self.sharing.comm.size))

    def _start(
        self, flat: torch.Tensor, comm: Communicator, index: int, start: Callable[[torch.Tensor], Pending]
    ) -> None:
        """Gather in the order of the ranks, and put the pieces in their places."""
        full = flat if self._in_order(index) else torch.empty_like(flat)
        start(full).wait()
        if full is not flat:
            pieces = flat.view(comm.size, -1)
            for piece, place in zip(full.view(comm.size, -1), self.sharing.places, strict=True):
                pieces[place].copy_(piece)

    def copy(self) -> Share:
        """The same elements once more, at places of their own."""
        made = Share.__new__(Share)
        made.__dict__.update(self.__dict__)
        made._kept = [kept.copy() for kept in self._kept]
        return made

    def convert(self, dtype: torch.dtype) -> None:
        """To another dtype, each rank its own elements."""
        if self.packed and dtype.is_floating_point and dtype.itemsize < 8:
            self.dtype = dtype  # int8 and scales stand for the same values
            return
        values = [self._values(i).to(dtype) for i in range(len(self._kept))]
        for kept, value in zip(self._kept, values, strict=True):
            kept.replace(value)
        self.packed, self.dtype = False, dtype
        if dtype.itemsize == 8:
            self._group_size = 0  # fp64 travels as it is

    def drop(self) -> None:
        """The elements are needed no longer."""
        for kept in self._kept:
            kept.drop()
