"""Models that no plan can cut, with the reason."""

from __future__ import annotations

from typing import Any, NoReturn


def codegen(config: Any) -> NoReturn:
    """Nijkamp et al. 2022 (arXiv:2203.13474)."""
    raise ValueError(
        "codegen has no tensor-parallel plan: its matrix of queries, values and keys is laid out for the four cores of "
        "the machine on which it was trained, so that its rows are in the order of no heads. Use ZeRO for it."
    )


def reformer(config: Any) -> NoReturn:
    """Kitaev et al. 2020 (arXiv:2001.04451), section 2."""
    raise ValueError(
        "reformer has no tensor-parallel plan: queries and keys share one projection, and buckets of all heads are "
        "chosen and sorted together. Use ZeRO for it."
    )
