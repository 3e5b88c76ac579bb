"""What ranks tell each other in a step beside gradients: numbers to add up, and such as all of them have to have alike,
the options of parameter groups and what the caller adds.

A shard that is updated at a learning rate of its own is no error of any tensor: nothing would tell. So each rank has a
row of numbers, which goes with the numbers that a step sends anyway (:class:`Tally`), and every rank compares all rows.
What is alike at construction, where all options are compared, has to stay so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import CollectiveMismatchError, Communicator
from zoo.shard.agreement import described, listed, told_by_rank

if TYPE_CHECKING:
    from zoo.shard.gradients import BucketGradients
    from zoo.shard.sharded import ShardedModel

CHANGES = "changes of reduced gradients since they were dropped"
"""How often any was reduced or cleared: ranks that step with others' sums, or with none, have another number."""
WRITES = "the values that were written into parameters"
"""What stands for them: ranks that write others have another number."""
SCALE = "the loss scale"
CLIP = "clip_norm"
CLIPPED = "what clip_grad_norm_() has multiplied gradients by"
NORM = "the norm of gradients that every rank has whole"
"""Of whole gradients that were reduced: where ranks have changed them otherwise, the last place that tells. To 16 bits,
so that other instruction sets, which may round a sum in fp64 otherwise, are none."""
REFUSED = "losses without a graph"
"""How many backward() has refused: the ranks that had others have the gradients of these alone."""
ADDED = (REFUSED, CHANGES, WRITES, SCALE, CLIP, CLIPPED, NORM)
_OF_PARAMETERS = ("params", "param_names")
_NUMBERS = frozenset({bool, int, float, str})
_STANDS = -(2.0**48)
"""From here down to twice as much are numbers that stand for something else."""


class Alike:
    """A row of A numbers for the options of parameter groups.

    The number of an option is its value, where there is one group and it is a number; else it stands for the values in
    all groups, and equal values have equal numbers. 1, 1.0 and True are equal, as are numbers of NumPy and tensors of
    one element; of a tensor on a device nothing waits.

    Args:
        groups: with the options that count: later ones ("initial_lr" of a schedule) are compared by nobody.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._options = sorted({key for group in groups for key in group if key not in _OF_PARAMETERS})
        self._latest: dict[str, tuple[list[Any], float, bool]] = {}
        self._names: list[str] = []
        self._shown: set[str] = set()
        self._groups: Sequence[Mapping[str, Any]] = groups

    @property
    def size(self) -> int:
        """A, without what the caller of a step adds: the options, and what every step adds."""
        return len(self._options) + len(ADDED)

    def row(
        self, groups: Sequence[Mapping[str, Any]], more: Mapping[str, float | torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        """(A,) fp64 on ``device``: the options of ``groups`` now, and ``more`` numbers by name."""
        self._names, self._shown, self._groups = [*self._options, *more], set(more) - {WRITES}, groups
        given = [[group.get(key) for group in groups] for key in self._options]
        numbers = list(map(self._number, self._options, given))
        numbers += [0.0 if isinstance(value, torch.Tensor) else value for value in more.values()]
        row = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
        row = row.to(device, non_blocking=True)
        for place, values in enumerate(given):
            if any(map(isinstance, values, repeat(torch.Tensor))) and any(map(_on_device, values)):
                row[place] = _together(values, device)
        for place, value in enumerate(more.values(), len(self._options)):
            if isinstance(value, torch.Tensor):
                row[place] = value
        return row

    def _number(self, key: str, given: list[Any]) -> float:
        """What stands for the values of an option, in fp64. Of those that were the same objects before nothing is
        looked at again, if they cannot have changed."""
        latest = self._latest.get(key)
        if latest is not None and len(latest[0]) == len(given) and all(map(is_, latest[0], given)):
            if latest[2]:
                self._shown.add(key)
            return latest[1]
        number = self._of_values(key, [_plain(value) for value in given])
        if all(map(_is_constant, given)):
            self._latest[key] = given, number, key in self._shown
        return number

    def _of_values(self, key: str, values: list[Any]) -> float:
        one = values[0] if len(values) == 1 else None
        if isinstance(one, float) and math.isfinite(one):
            self._shown.add(key)
            return one
        digest = hashlib.blake2b(repr(values).encode(), digest_size=6).digest()  # 48 bits are exact in fp64
        return _STANDS - int.from_bytes(digest, "little")

    def told(self, rows: Sequence[float], ranks: Sequence[int]) -> str:
        """What ranks do not have alike, from the N A numbers of the rows of ``ranks``; empty if nothing."""
        size = len(rows) // len(ranks)
        first = rows[:size]
        if all(rows[start : start + size] == first for start in range(size, len(rows), size)):
            return ""
        columns = [list(rows[place::size]) for place in range(size)]
        return "; ".join(
            self._of(name, column, ranks)
            for name, column in zip(self._names, columns, strict=True)
            if len(set(column)) > 1
        )

    def _of(self, name: str, values: list[float], ranks: Sequence[int]) -> str:
        if name in self._shown:
            return told_by_rank(name, [_shown(value) for value in values], ranks)
        others = [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]
        if name not in self._options:
            return f"{name}: {listed(others)} wrote others than rank {ranks[0]}"
        here = ", ".join(described(group.get(name)) for group in self._groups)
        return f"{name} ({here} in the groups of this rank): {listed(others)} other than rank {ranks[0]}"


class Tally:
    """Numbers of each rank that a step adds up over all of them, and such as have to be alike.

    Args:
        mine: (k,) of this rank, to add up; None for nothing. alike: (A,) of this rank (:meth:`Alike.row`).
        comm: all ranks that have numbers; layers: those with other layers of the model, None for none.
    """

    def __init__(
        self, mine: torch.Tensor | None, comm: Communicator, layers: Communicator | None,
        alike: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.comm, self._layers = comm, layers
        self._adds, self._num = mine is not None, 0 if mine is None else mine.numel()
        given = [t for t in (mine, alike) if t is not None]
        self.mine = torch.cat([t.double().to(given[0].device) for t in given])
        self._sums: torch.Tensor | None = None
        self._everyone: torch.Tensor | None = None

    def ride(self, comm: Communicator, others: torch.Tensor) -> torch.Tensor | None:
        """(N m,) the (m,) ``others`` of every rank, if these go to the same ranks and the tally is not on its way."""
        if self._everyone is not None or tuple(comm.ranks) != tuple(self.comm.ranks):
            return None
        both = of_all(comm, torch.cat([others, self.mine.to(others.device)])).view(comm.size, -1)
        self._everyone = both[:, others.numel() :]
        return both[:, : others.numel()].reshape(-1)

    def have_measured(self, powers: Sequence[torch.Tensor]) -> None:
        """What each rank has added up by itself over gradients that all of them have whole becomes the last of the
        numbers that have to be alike."""
        if powers and self._everyone is None and self.mine.numel() > self._num:
            mantissa, exponent = torch.frexp(torch.stack(list(powers)).sum().double())
            coarse = torch.ldexp((mantissa * 2.0**16).round(), exponent - 16).sqrt()
            self.mine[-1] = coarse.nan_to_num(nan=-1.0, posinf=-2.0)

    def sums(self) -> torch.Tensor:
        """(k,) fp64 on the device. Collective, unless it was ridden or asked for before."""
        if self._sums is None:
            if self._everyone is None:
                self._everyone = of_all(self.comm, self.mine).view(self.comm.size, -1)
            sums, rows = self._everyone[:, : self._num].sum(0), self._everyone[:, self._num :]
            if self._layers is not None:
                # Whether any of them finds rows that are not alike goes with their sums.
                found = torch.cat([sums, (rows != rows[:1]).any().double().reshape(1)])
                found = of_all(self._layers, found).view(self._layers.size, -1).sum(0)
                sums, self._elsewhere = found[:-1], found[-1:]
            self._sums = sums
        return self._sums

    _elsewhere: torch.Tensor | None = None

    def told(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The sums, None where there was nothing to add up, and the rows. Collective where :meth:`sums` is."""
        return self.sums() if self._adds else None, self.rows()

    def rows(self) -> torch.Tensor | None:
        """(1 + N A,) fp64 on the device: how many groups of ranks have rows that are not alike, where that is known of
        other layers too, else 0; and the rows of all ranks. None where they were not sent. Starts no collective."""
        if self._everyone is None or self._everyone.shape[1] == self._num:
            return None
        rows = self._everyone[:, self._num :].reshape(-1)
        return torch.cat([rows.new_zeros(1) if self._elsewhere is None else self._elsewhere, rows])


class Outcome:
    """The norm of the gradients and sums over ranks, on their way to the host.

    On a GPU they are copied to pinned memory behind the work that makes them, and nothing waits until :meth:`read`,
    which waits for this copy alone and not for what was launched after it.

    Args:
        norm: () fp64, without the loss scale; None where it was not measured.
        sums: (k,) fp64, of a tally; None without one.
        rows: (1 + N A,) fp64, what ranks have to have alike (:meth:`Tally.rows`).

    Attributes:
        sums: as given, on the device.
        made: when it is read, the update has been made.
        rows: as given, once it has been read.
    """

    def __init__(
        self, norm: torch.Tensor | None, sums: torch.Tensor | None, rows: torch.Tensor | None = None, *,
        made: bool = False,
    ) -> None:  # fmt: skip
        self.sums, self._measured, self.made = sums, norm is not None, made
        self.rows: list[float] = []
        self._num_rows = 0 if rows is None else rows.numel()
        given = [t for t in (norm.reshape(1) if norm is not None else None, sums, rows) if t is not None]
        if not given:
            raise AssertionError("an outcome of nothing.")
        numbers = torch.cat(given) if len(given) > 1 else given[0]
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(numbers.device))
            numbers = host
        self._numbers = numbers

    def read(self) -> tuple[float | None, list[float]]:
        """(the norm or None, the k sums); ``rows`` are there from now on. Starts no collective."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        end = len(numbers) - self._num_rows
        self.rows = numbers[end:]
        return (numbers[0], numbers[1:end]) if self._measured else (None, numbers[:end])


class Comparison:
    """Sends this rank's row with a step, and refuses the step where ranks do not have alike what they have to.

    Args:
        alike: makes the rows.
        sharded, gradients: of the optimizer that makes the step.
        give_up: called with why, where the update was made before that was known.
        counts: what happened to gradients counts; in backward they are used up before the step.
    """

    def __init__(
        self, alike: Alike, sharded: ShardedModel, gradients: Sequence[BucketGradients],
        give_up: Callable[[str], None], *, counts: bool,
    ) -> None:  # fmt: skip
        self._alike, self._sharded, self._gradients = alike, sharded, gradients
        self._give_up, self._counts = give_up, counts

    def tally(
        self, mine: torch.Tensor | None, alike: Mapping[str, float], groups: list[dict[str, Any]], *, measures: bool,
        loss_scale: float, clip_norm: float, clipped: float,
    ) -> Tally | None:  # fmt: skip
        """What a step sends beside norms; with ``mine`` it may take a collective of its own.

        ``measures``: the step measures the norm. ``clipped``: what gradients have been multiplied by.
        """
        sharded = self._sharded
        comm, layers = sharded.comm, sharded.layers
        if mine is None and (layers is not None or not measures):
            return None
        if comm.size == 1 and layers is None:  # nobody to be alike with
            return None if mine is None else Tally(mine, comm, layers)
        added: dict[str, float | torch.Tensor] = dict.fromkeys(ADDED, 0.0)
        added[REFUSED] = float(sharded.runtime.backward.refused)
        if self._counts:
            added[CHANGES] = float(sum(g.num_changes for g in self._gradients))
            added[WRITES] = sharded.writes.digest()
            added |= {SCALE: loss_scale, CLIPPED: clipped}
        added[CLIP] = clip_norm if clip_norm < math.inf else 0.0  # both clip nothing
        row = self._alike.row(groups, {**alike, **added}, sharded.buckets[0].device)
        return Tally(mine, comm, layers, row)

    def refuse(self, outcome: Outcome) -> None:
        """Raise CollectiveMismatchError where ranks do not have alike what they have to; ``outcome`` was read."""
        if not outcome.rows:
            return
        elsewhere, *rows = outcome.rows
        told = self._alike.told(rows, self._sharded.comm.ranks)
        if not told and elsewhere:
            told = "they differ between ranks with other layers of the model, whose own messages say what"
        sharded, writes = self._sharded, told.startswith(WRITES) and "; " not in told
        # Ranks that have noticed other writes may have the same values. Collective where they have, and only then.
        alike = writes and not outcome.made and sharded.layers is None and sharded.writes.settle(sharded.comm)
        if alike or not told:
            return
        text = f"what all ranks need alike for a step differs: {told}"
        if outcome.made:
            self._give_up(text)
            raise CollectiveMismatchError(
                f"{text}. The update was made before that was known, so that this model is of no one set of options. "
                "Give all ranks the same and load a checkpoint."
            )
        raise CollectiveMismatchError(f"{text}. Nothing has changed. {how_to_be_alike(told)}")


def how_to_be_alike(told: str) -> str:
    """What :meth:`Alike.told` asks for, before an update."""
    if REFUSED in told:
        return (
            "There backward() has raised it, and gave zeros to the mean: call zero_grad() on all ranks, and take the "
            "step anew with losses that come from the model's output."
        )
    if CHANGES in told:
        return "Drop gradients on all ranks or on none, by zero_grad() or p.grad = None."
    if WRITES in told:
        return "Write the same on all of them: broadcast what one has drawn, read or computed, and call step() again."
    if CLIPPED in told or NORM in told:
        return "Clip and change gradients alike on all of them: call zero_grad(), and backward and step() again."
    return (
        "Give all ranks the same, and call step() again; what sets an option from a loss or a metric has to see the "
        "same number on all ranks, such as its mean."
    )


def _shown(value: float) -> str:
    if value.is_integer():
        return "no finite number" if 2 * _STANDS < value <= _STANDS else str(int(value))
    return str(value)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type not in ("cpu", "meta")


def _is_constant(value: Any) -> bool:
    """Whether an object is what it was as long as it is the same."""
    return value is None or type(value) in _NUMBERS or (type(value) is tuple and _NUMBERS.issuperset(map(type, value)))


def _plain(value: Any) -> Any:
    """What can be compared between processes."""
    if _on_device(value):
        return "on the device"
    if getattr(value, "ndim", None) == 0 and not getattr(value, "is_meta", False):  # of torch or NumPy
        value = value.item()
    return float(value) if isinstance(value, Real) else described(value)


def _together(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """() fp64 that stands for numbers of which some are on the device."""
    numbers = [v.detach().double().reshape(()) if isinstance(v, torch.Tensor) else v for v in values]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for place, number in enumerate(numbers):
        if isinstance(number, (torch.Tensor, Real)):
            total += (number.to(device) if isinstance(number, torch.Tensor) else float(number)) * (
                1.0 + math.sqrt(place)
            )
    return total


def of_all(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """(N k,) this (k,) of every rank."""
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine, label="norms of gradients").wait()
    return everyone
