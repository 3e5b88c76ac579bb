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

    Attributes:
        sums: as given, on the device.
    """

    def __init__(self, norm: torch.Tensor | None, sums: torch.Tensor | None) -> None:
        self.sums, self._measured = sums, norm is not None
        if norm is None or sums is None:
            numbers = sums if norm is None else norm.reshape(1)
        else:
            numbers = torch.cat([norm.reshape(1), sums])
        if numbers is None:
            raise AssertionError("an outcome of nothing.")
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(numbers.device))
            numbers = host
        self._numbers = numbers

    def read(self) -> tuple[float | None, list[float]]:
        """(the norm or None, the k sums). Starts no collective."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return (numbers[0], numbers[1:]) if self._measured else (None, numbers)
