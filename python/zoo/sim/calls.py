"""One operation issued by one rank, and how it is told to a human."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zoo.sim.programs import Told
from zoo.sim.scheduler import ranks_text

if TYPE_CHECKING:
    from zoo.sim.matching import GroupState
    from zoo.sim.order import Entry

__all__ = ["Call", "user_line"]

_SKIP = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.abspath(contextlib.__file__),
    "<",
)


def user_line() -> str:
    """``file:line`` of the innermost frame outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIP):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"


@dataclass(eq=False)
class Call:
    """One rank's part of one communication.

    ``op`` is the name as in ``torch.distributed``; ``inputs`` and ``outputs`` what it gives and gets (the same tensors
    for an in-place operation); ``payload`` the tensors that describe it to a reader; ``agree`` what must be equal on
    all participants. ``root`` and ``peer`` are group ranks (``peer`` None for a receive from anyone).
    """

    op: str
    group: GroupState
    group_rank: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    payload: list[torch.Tensor]
    agree: tuple[Any, ...] = ()
    reduce_op: Any = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    in_splits: list[int] | None = None
    out_splits: list[int] | None = None
    delay: int = 0
    where: str = field(default_factory=user_line)
    done: bool = False
    error: BaseException | None = None
    source: int | None = None
    entry: Entry | None = None
    told: Told = field(default_factory=Told)
    absent = False  # its rank runs

    @property
    def rank(self) -> int:
        """The global rank that issued it."""
        return self.group.ranks[self.group_rank]

    def shape(self) -> tuple[Any, ...]:
        if len(self.payload) == 1:
            return tuple(self.payload[0].shape)
        return tuple(tuple(tensor.shape) for tensor in self.payload)

    def dtype(self) -> str:
        return str(self.payload[0].dtype).removeprefix("torch.") if self.payload else ""

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.payload)

    def describe(self) -> str:
        """``all_reduce SUM of (4,) float32 at file:line``."""
        words = [self.op]
        if self.reduce_op is not None:
            words.append(reduce_name(self.reduce_op))
        if self.payload:
            words.append(f"of {self.shape()} {self.dtype()}")
        if self.in_splits is not None and self.out_splits is not None:
            words.append(f"with input splits {self.in_splits}, output splits {self.out_splits}")
        if self.root is not None:
            words.append(f"with root rank {self.group.ranks[self.root]}")
        if self.op == "send" and self.peer is not None:
            words.append(f"to rank {self.group.ranks[self.peer]} with tag {self.tag}")
        if self.op == "recv":
            source = "any rank" if self.peer is None else f"rank {self.group.ranks[self.peer]}"
            words.append(f"from {source} with tag {self.tag}")
        return " ".join(words) + f" at {self.where}"

    def waiting_for(self) -> str:
        """One line for the deadlock report."""
        head = f"{self.describe()}, on the group of {ranks_text(self.group.ranks)}"
        return f"{head}; waiting for {self.group.missing(self)}"

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        # The data has moved: let go of the tensors that the result does not need.
        self.inputs = []


def reduce_name(op: Any) -> str:
    """``SUM``, ``PREMUL_SUM(0.5)``."""
    kind = getattr(op, "op", op)
    name = str(kind).rpartition(".")[2]
    return f"{name}({_factor(op)})" if name == "PREMUL_SUM" else name


def _factor(op: Any) -> Any:
    return getattr(op, "factor", "?")
