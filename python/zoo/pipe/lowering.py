"""From a table to what each rank runs: its computations, and after each slot the transfers of that slot.

What any rank computes in slot t and another rank needs is sent and received at the boundary after slot t, by both.
All transfers of a rank at one boundary are one batch. Both sides sort a batch alike, so that on every channel (from
one rank to another) the k-th send meets the k-th receive and nothing relies on tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from zoo.pipe.schedules.table import Computation, Kind, Table

__all__ = ["Program", "Step", "Transfer", "consumer", "lower", "message_of"]

What: TypeAlias = Literal["activation", "gradient"]


@dataclass(frozen=True)
class Transfer:
    """One side of a message.

    Attributes:
        sends: True at the sender, False at the receiver.
        what: the "activation" that F of ``stage`` produced, for stage + 1; or the "gradient" of the input of ``stage``,
            which its I or B produced, for stage - 1.
        stage: the stage that produced it.
        micro_batch: of which one.
        peer: the other pipeline rank.
    """

    sends: bool
    what: What
    stage: int
    micro_batch: int
    peer: int

    @property
    def message(self) -> tuple[What, int, int]:
        """What both sides have in common: (what, stage, micro_batch)."""
        return self.what, self.stage, self.micro_batch

    def __str__(self) -> str:
        to = f"to rank {self.peer}" if self.sends else f"from rank {self.peer}"
        return f"{'send' if self.sends else 'receive'} {self.what} {self.stage}:{self.micro_batch} {to}"


@dataclass(frozen=True)
class Step:
    """A computation (or none), and then the transfers at the boundary after its slot, which are one batch."""

    computation: Computation | None
    transfers: tuple[Transfer, ...]
    slot: int

    def __str__(self) -> str:
        return ", ".join(map(str, (self.computation or "-", *self.transfers)))


Program: TypeAlias = tuple[Step, ...]
"""What one rank runs, one step after the other."""


def message_of(c: Computation, num_stages: int) -> tuple[What, int, int] | None:
    """The message that a computation produces; None for the last stage's F, the first stage's I and every W."""
    if c.kind is Kind.FORWARD:
        return ("activation", c.stage, c.micro_batch) if c.stage + 1 < num_stages else None
    if c.kind in (Kind.BACKWARD, Kind.INPUT):
        return ("gradient", c.stage, c.micro_batch) if c.stage > 0 else None
    return None


def consumer(what: What, stage: int) -> int:
    """The stage that a message is for: the next one for an activation, the one before for a gradient."""
    return stage + 1 if what == "activation" else stage - 1


def lower(table: Table) -> tuple[Program, ...]:
    """One program a rank. Stages of one rank hand over without a transfer; steps with nothing to do are left out."""
    at: dict[tuple[int, int], list[Transfer]] = {}
    for rank, slot, computation in table.placed():
        message = message_of(computation, table.num_stages)
        if message is None:
            continue
        peer = table.rank_of[consumer(message[0], message[1])]
        if peer != rank:
            at.setdefault((rank, slot), []).append(Transfer(True, *message, peer))
            at.setdefault((peer, slot), []).append(Transfer(False, *message, rank))
    return tuple(
        tuple(
            Step(computation, tuple(sorted(at.get((rank, slot), ()), key=_order)), slot)
            for slot, computation in enumerate(row)
            if computation is not None or (rank, slot) in at
        )
        for rank, row in enumerate(table.rows)
    )


def _order(t: Transfer) -> tuple[int, int, int]:
    # By message alone: the same at both ends. Gradients first, because they wait in buffers that activations reuse.
    return int(t.what == "activation"), t.stage, t.micro_batch


def text(programs: Sequence[Program]) -> str:
    """All programs, for people."""
    return "\n".join(
        line
        for rank, program in enumerate(programs)
        for line in (f"rank {rank}", *(f"  slot {step.slot}: {step}" for step in program))
    )
