"""A mark on modules: each of these is gathered alone."""

from __future__ import annotations

from torch import nn


class UnitList(nn.ModuleList):
    """A list whose elements are each a unit, inside of other units too and whatever ``units=`` chooses.

    For modules that are too large to be gathered with their neighbours and run one after the other (tiles, experts).
    Where nothing is sharded it is an ``nn.ModuleList``.
    """

    elements_are_units = True
