"""What a step came to, and whether it was skipped: numbers that the device has and the host does not know yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Groups = Sequence[Mapping[str, Any]]


class Outcome:
    """The norm of the gradients and sums over ranks, on their way to the host.

    On a GPU they are copied to pinned memory behind the work that makes them, and nothing waits until :meth:`read`,
    which waits for this copy alone and not for what was launched after it.

    Args:
        norm: () fp64, without the loss scale; None where it was not measured.
        sums: (k,) fp64, of a tally; None without one.
        rows: (1 + N A,) fp64, what ranks have to have alike (:meth:`~zoo.zero.update.norms.Tally.rows`).

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


class SkipsOnDevice:
    """Whether the next update may have ``found_inf``, by which the wrapped optimizer skips a step on the device so that
    the host need not wait.

    Args:
        takes: whether the wrapped optimizer takes it; asked at most once, and where it matters.
        option: of a group, without which it does not.
    """

    def __init__(self, takes: Callable[[], bool], option: str = "fused") -> None:
        self._ask, self._option = takes, option
        self._takes: bool | None = None
        self._coming: list[dict[str, bool]] | None = None
        self._made: list[dict[str, bool]] | None = None  # with these on the latest update has made all states

    def possible(self, groups: Groups) -> bool:
        """For an update with the options of ``groups``.

        Not for the first one, nor where an option is on that was off: such an update makes states, which one that is
        skipped has to leave unmade, and torch's SGD leaves memory that nobody has written.
        """
        if self._takes is None:
            self._takes = self._ask()
        if not self._takes:
            return False
        # But for the learning rate, which warm-ups begin with at 0: it makes none.
        self._coming = [
            {k: v != 0 for k, v in g.items() if k != "lr" and isinstance(v, (bool, int, float))} for g in groups
        ]
        return self._made == self._coming and all(group.get(self._option) for group in groups)

    def updated(self) -> None:
        """The update is over."""
        self._made = self._coming

    def loaded(self) -> None:
        """States came from elsewhere, and perhaps not all."""
        self._made = self._coming = None
