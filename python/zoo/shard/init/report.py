"""What ran on parameters that were partitioned already: the audit of an Init."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Touch:
    """``function`` ran ``num_calls`` times on the partitioned parameter ``parameter``; ``wrote``: it changed it."""

    parameter: str
    function: str
    num_calls: int
    wrote: bool


@dataclass(frozen=True)
class InitReport:
    """What an Init did.

    ``num_parameters`` parameters of together ``numel`` elements were partitioned; ``largest_numel`` is the largest
    module's, which is what is whole at one time. ``touches``: initialisers that ran on partitioned parameters, each of
    which cost a gather and, if it wrote, a broadcast.
    """

    num_parameters: int
    numel: int
    largest_numel: int
    touches: tuple[Touch, ...]

    def __str__(self) -> str:
        text = (
            f"{self.num_parameters} parameters of {self.numel:,} elements were partitioned as they were made, at most "
            f"{self.largest_numel:,} elements at a time"
        )
        written = sorted({t.parameter for t in self.touches if t.wrote})
        if written:
            text += f"; {len(written)} of them were written to again afterwards: {', '.join(written[:10])}"
            text += ", ..." if len(written) > 10 else ""
        return text + "."
