"""What can go wrong in a simulated run, one class each."""

from __future__ import annotations

__all__ = ["DeadlockError", "DivergenceError", "PeerLostError", "RankError", "SimTimeoutError", "WaitTimeoutError"]


class DeadlockError(RuntimeError):
    """No rank can go on: each one that has not returned waits for something that nobody will do.

    ``ranks`` are the blocked ranks; the message has one paragraph for each of them.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DivergenceError(RuntimeError):
    """Ranks of one group met at the same place of their sequences with operations that do not fit together.

    ``ranks`` are the ranks that disagree.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(RuntimeError):
    """The function given to ``run`` raised in a rank; ``ranks`` names it, ``__cause__`` is what it raised.

    When a ``Crash`` was injected and a survivor did not catch its ``PeerLostError``, ``ranks`` begins with the
    crashed ranks, and ``__cause__`` is the ``PeerLostError``.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerLostError(RuntimeError):
    """Raised in a surviving rank by an operation that needs a rank that has died; ``ranks`` are the dead ones."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SimTimeoutError(RuntimeError):
    """A rank held the baton for longer than ``timeout_s`` without communicating; the message has its stack."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WaitTimeoutError(RuntimeError):
    """A wait with a timeout is over and nobody can bring what it waits for; ``ranks`` are those that did not come."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Stop(BaseException):
    """Unwinds a rank when the run is over. Not an ``Exception``, so that ``except Exception`` lets it through."""


class Died(BaseException):
    """Unwinds a rank that an injected ``Crash`` has killed."""
