"""What a step came to: numbers that the device has and the host does not know yet."""

from __future__ import annotations

import torch


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
