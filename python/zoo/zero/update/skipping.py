"""Steps that are skipped on the device: the wrapped optimizer is told by ``found_inf``, and the host need not wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Groups = Sequence[Mapping[str, Any]]


class SkipsOnDevice:
    """Whether the next update may have ``found_inf``.

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
