"""What can go wrong with a transfer. Each exception says the path, the offset and the length, and carries them."""

from __future__ import annotations

__all__ = [
    "CancelledError",
    "ChecksumError",
    "PoolExhaustedError",
    "TransferError",
    "UnavailableError",
    "UnexpectedEndError",
]


class TransferError(OSError):
    """The kernel or the device refused: no such file, no space, an I/O error."""

    offset: int
    """First byte in the file."""
    length: int
    """Number of bytes."""
    others: tuple[BaseException, ...] = ()
    """Failures of other operations, when `Handle.wait` found several."""

    def __init__(self, message: str, errno: int | None, path: str, offset: int, length: int) -> None:
        super().__init__(errno, message, path)
        self.offset = offset
        self.length = length

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[object, ...]:
        # OSError's own leaves out offset and length: what another process raised could not be raised here.
        return type(self), (str(self), self.errno, self.filename, self.offset, self.length), {"others": self.others}


class UnexpectedEndError(TransferError, EOFError):
    """The file ends before the bytes that were asked for."""


class ChecksumError(TransferError):
    """The bytes read are not those the checksum was made of."""


class CancelledError(TransferError):
    """The operation had not begun when its handle was aborted."""


class UnavailableError(RuntimeError):
    """Something was explicitly asked for that this machine or file system does not have."""


class PoolExhaustedError(MemoryError):
    """A buffer does not fit under a pool's hard cap, or the system has no more memory."""
