"""Tables as text: one line a rank, one cell a slot."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table

__all__ = ["CsvSchedule", "from_csv", "to_csv"]


def to_csv(table: Table) -> str:
    """One line a rank, one cell a slot: ``2F5`` is F of stage 2 for micro-batch 5; empty where nothing runs."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(c or "") for c in row] for row in table.rows)
    return out.getvalue()


def from_csv(text: str, *, name: str = "csv") -> Table:
    """The other way round. Short lines are filled up, and lines without any computation are left out; the sizes and the
    placement are those that the cells show.

    Raises:
        ScheduleError: a cell that is no computation, a stage on two ranks, stages or micro-batches that are left out.
    """
    try:
        lines = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=None)))  # what spreadsheets begin with
    except csv.Error as error:
        raise ScheduleError(f"{name}: this is no CSV: {error}.") from error
    cells = [row for row in lines if any(cell.strip() for cell in row)]
    num_slots = max(map(len, cells), default=0)
    rows: list[tuple[Computation | None, ...]] = []
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(cells):
        found: list[Computation | None] = [None] * num_slots
        for slot, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                c = found[slot] = Computation.parse(cell)
            except ScheduleError as error:
                raise ScheduleError(f"{name}: rank {rank}, slot {slot}: {error}") from None
            if rank_of.setdefault(c.stage, rank) != rank:
                raise ScheduleError(
                    f"{name}: rank {rank}, slot {slot}: {c}: stage {c.stage} is on rank {rank_of[c.stage]} already; a "
                    "stage is on one rank."
                )
        rows.append(tuple(found))
    _check_all_there(name, "stage", set(rank_of))
    micro_batches = {c.micro_batch for row in rows for c in row if c is not None}
    _check_all_there(name, "micro-batch", micro_batches)
    return Table(
        name=name,
        rank_of=tuple(rank_of[s] for s in sorted(rank_of)),
        num_micro_batches=len(micro_batches),
        rows=tuple(rows),
        trains=any(c is not None and c.kind is not Kind.FORWARD for row in rows for c in row),
    )


def _check_all_there(name: str, what: str, numbers: set[int]) -> None:
    if not numbers:
        raise ScheduleError(f"{name}: no cell has a computation; write one line a rank with cells such as 0F0,0B0.")
    if max(numbers) >= len(numbers):
        missing = next(number for number in range(len(numbers)) if number not in numbers)
        raise ScheduleError(f"{name}: there is a {what} {max(numbers)} and no {what} {missing}; both count from 0.")


class CsvSchedule:
    """A table of the user's own, from a file; the sizes of a run must be those of the file."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """path: of the file."""

        path: str

    def __init__(self, config: Config) -> None:
        try:
            text = Path(config.path).read_text(encoding="utf-8")
        except OSError as error:
            raise ScheduleError(f"the schedule csv cannot read path={config.path!r}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ScheduleError(
                f"the schedule csv cannot read path={config.path!r}: it is no text in UTF-8."
            ) from error
        self.table = from_csv(text, name=f"csv {Path(config.path).name}")

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """As the cells show it."""
        if num_ranks != self.table.num_ranks:
            raise ScheduleError(
                f"{self.table.name} has {self.table.num_ranks} lines, one a pipeline rank; there are {num_ranks}."
            )
        return self.table.rank_of

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table of the file."""
        self.placement(num_ranks)
        if num_micro_batches != self.table.num_micro_batches:
            raise ScheduleError(
                f"{self.table.name} is for {self.table.num_micro_batches} micro-batches; there are {num_micro_batches}."
            )
        return self.table
