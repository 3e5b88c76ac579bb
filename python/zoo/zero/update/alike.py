"""What all ranks have to have alike in every step: the options of parameter groups, and what the caller adds.

A shard that is updated at a learning rate of its own is no error of any tensor: nothing would tell. So each rank has a
row of numbers, which goes with the numbers that a step sends anyway (:class:`~zoo.zero.update.norms.Tally`), and every
rank compares all rows. What is alike at construction, where all options are compared, has to stay so.
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

from zoo.comm import CollectiveMismatchError
from zoo.shard.agreement import described, listed, told_by_rank
from zoo.zero.update.norms import Tally

if TYPE_CHECKING:
    from zoo.shard.gradients import BucketGradients
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.clipping import Clipping, Outcome

CHANGES = "changes of reduced gradients since they were dropped"
"""How often any was reduced or cleared: ranks that step with others' sums, or with none, have another number."""
WRITES = "the values that were written into parameters"
"""What stands for them: ranks that write others have another number."""
SCALE = "the loss scale"
CLIPPED = "what clip_grad_norm_() has multiplied gradients by"
NORM = "the norm of gradients that every rank has whole"
"""Of whole gradients that were reduced: where ranks have changed them otherwise, the last place that tells. To 16 bits,
so that other instruction sets, which may round a sum in fp64 otherwise, are none."""
REFUSED = "losses without a graph"
"""How many backward() has refused: the ranks that had others have the gradients of these alone."""
ADDED = (REFUSED, CHANGES, WRITES, SCALE, CLIPPED, NORM)
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


class Comparison:
    """Sends this rank's row with a step, and refuses the step where ranks do not have alike what they have to.

    Args:
        alike: makes the rows.
        sharded, clipping, gradients: of the optimizer that makes the step.
        give_up: called with why, where the update was made before that was known.
        counts: what happened to gradients counts; in backward they are used up before the step.
    """

    def __init__(
        self, alike: Alike, sharded: ShardedModel, clipping: Clipping, gradients: Sequence[BucketGradients],
        give_up: Callable[[str], None], *, counts: bool,
    ) -> None:  # fmt: skip
        self._alike, self._sharded, self._clipping, self._gradients = alike, sharded, clipping, gradients
        self._give_up, self._counts = give_up, counts

    def tally(
        self, mine: torch.Tensor | None, alike: Mapping[str, float], groups: list[dict[str, Any]], loss_scale: float
    ) -> Tally | None:  # fmt: skip
        """What a step sends beside norms; with ``mine`` it may take a collective of its own."""
        sharded, clipping = self._sharded, self._clipping
        comm, layers = sharded.comm, sharded.layers
        if mine is None and (layers is not None or not clipping.may_skip):
            return None
        if comm.size == 1 and layers is None:  # nobody to be alike with
            return None if mine is None else Tally(mine, comm, layers)
        added: dict[str, float | torch.Tensor] = dict.fromkeys(ADDED, 0.0)
        added[REFUSED] = float(sharded.runtime.backward.refused)
        if self._counts:
            added[CHANGES] = float(sum(g.num_changes for g in self._gradients))
            added[WRITES] = sharded.writes.digest()
            added |= {SCALE: loss_scale, CLIPPED: clipping.clipped}
        row = self._alike.row(groups, {**alike, **added}, sharded.buckets[0].device)
        return Tally(row.new_empty(0) if mine is None else mine, comm, layers, row)

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
