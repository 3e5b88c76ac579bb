"""The canonical form of a pipeline schedule: a table of computations by pipeline rank and time slot.

Vocabulary. The model is cut into *stages* 0 … S-1; a *placement* says on which pipeline rank each one is. A batch is
cut into *micro-batches* 0 … M-1. A *computation* is one of F, B, I, W of one stage for one micro-batch. A *slot* is
one column: each rank computes at most one thing in it, and what it produces is known everywhere after it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, total_ordering

__all__ = ["Computation", "Kind", "ScheduleError", "Table", "looped", "v_shaped"]


class ScheduleError(ValueError):
    """A schedule that is not right; says at which rank and slot, and which computation or message."""


class Kind(enum.Enum):
    """What is computed of a stage for a micro-batch. B is I and W in one."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    INPUT = "I"
    """The gradient of the input only, which the stage before waits for."""
    WEIGHT = "W"
    """The gradients of the weights only, at some time after I."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is in Python, and tables are large


@total_ordering
@dataclass(frozen=True)
class Computation:
    """One computation; as text ``2F5``: stage 2, F, micro-batch 5. Ordered by stage, kind (F B I W), micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Computation):
            return NotImplemented
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, int, int]:
        return self.stage, "FBIW".index(self.kind.value), self.micro_batch

    @classmethod
    def parse(cls, text: str) -> Computation:
        """The other way round: ``2F5``.

        Raises:
            ScheduleError: text that is no computation.
        """
        match = re.fullmatch(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is no computation; write stage, one of F B I W, micro-batch, such as 2F5.")
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


def looped(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: one stage a rank, or ``num_chunks`` of them, round after round."""
    return tuple(s % num_ranks for s in range(num_ranks * num_chunks))


def v_shaped(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, there and back: rank r has the stages r and 2 · ranks - 1 - r."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule of one batch.

    Attributes:
        name: for people.
        rank_of: the pipeline rank of each stage.
        num_micro_batches: M.
        rows: one row a rank, one column a slot; None where the rank has nothing to do.
        trains: with backwards; without, only forwards.

    Raises:
        ScheduleError: rows of different lengths, a stage on a rank where it is not, a micro-batch or stage beyond the
            sizes. That all is computed once and in an order that can be is for :func:`zoo.pipe.validate.validate`.
    """

    name: str
    rank_of: tuple[int, ...]
    num_micro_batches: int
    rows: tuple[tuple[Computation | None, ...], ...]
    trains: bool

    def __post_init__(self) -> None:
        if not self.rows or self.num_micro_batches < 1 or not self.rank_of:
            raise ScheduleError(
                f"{self.name}: a schedule has at least one rank, stage and micro-batch; got {len(self.rows)} ranks, "
                f"{len(self.rank_of)} stages, {self.num_micro_batches} micro-batches."
            )
        if len({len(row) for row in self.rows}) > 1:
            raise ScheduleError(
                f"{self.name}: rows have {[len(row) for row in self.rows]} slots; give all of them as many."
            )
        if set(self.rank_of) != set(range(len(self.rows))):
            raise ScheduleError(
                f"{self.name}: stages are on the ranks {self.rank_of}, and there are {len(self.rows)} rows; each is of "
                "a rank that has a stage."
            )
        for rank, slot, computation in self.placed():
            stage, micro_batch = computation.stage, computation.micro_batch
            where = f"{self.name}: rank {rank}, slot {slot}: {computation}"
            if not 0 <= stage < self.num_stages or not 0 <= micro_batch < self.num_micro_batches:
                raise ScheduleError(
                    f"{where}: there are {self.num_stages} stages and {self.num_micro_batches} micro-batches, both "
                    "counted from 0."
                )
            if self.rank_of[stage] != rank:
                raise ScheduleError(f"{where}: stage {stage} is on rank {self.rank_of[stage]}.")
            if computation.kind is not Kind.FORWARD and not self.trains:
                raise ScheduleError(f"{where}: a schedule with trains=False has forwards only.")

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Pieces of the model."""
        return len(self.rank_of)

    @property
    def num_slots(self) -> int:
        """Columns."""
        return len(self.rows[0])

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        return tuple(tuple(s for s, r in enumerate(self.rank_of) if r == rank) for rank in range(self.num_ranks))

    def placed(self) -> Iterator[tuple[int, int, Computation]]:
        """(rank, slot, computation), slot after slot, in each by rank."""
        for slot in range(len(self.rows[0])):
            for rank, row in enumerate(self.rows):
                if (computation := row[slot]) is not None:
                    yield rank, slot, computation

    def order(self, rank: int) -> tuple[Computation, ...]:
        """What a rank computes, one after the other."""
        return tuple(c for c in self.rows[rank] if c is not None)

    def __str__(self) -> str:
        width = max([2, *(len(str(c)) for _, _, c in self.placed())])
        head = f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_micro_batches} micro-batches"
        label = len(f"rank {self.num_ranks - 1}")
        lines = [
            f"rank {rank}".rjust(label) + "  " + " ".join(str(c or "").rjust(width) for c in row).rstrip()
            for rank, row in enumerate(self.rows)
        ]
        return "\n".join([head, *lines])
