"""Experts that are modules of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zoo.layout import declare_first
from zoo.moe.experts.base import Experts

Tensor = torch.Tensor


class ModuleExperts(Experts):
    """Expert e is ``modules[e - first]``, called with its (rows, D) and giving as much back.

    It has to know how many rows each expert has, which on a GPU is one readback. Experts without rows are not called.

    Args:
        modules: this rank's experts.
        num_experts: of the layer. ep_size, ep_rank: see :class:`Experts`.
        copies: they are copies of one module, on all ranks.

    Raises:
        ValueError: another number of them, or experts of one rank that ``zoo.zero.Init`` has split over all.
    """

    def __init__(
        self, modules: Iterable[nn.Module], num_experts: int | None = None, *, ep_size: int = 1, ep_rank: int = 0,
        copies: bool = False,
    ) -> None:  # fmt: skip
        modules = list(modules)
        super().__init__(num_experts or len(modules) * ep_size, ep_size=ep_size, ep_rank=ep_rank)
        if len(modules) != self.num_local:
            raise ValueError(
                f"{len(modules)} experts were given for one of {ep_size} ranks with {self.num_experts} in all; "
                f"{self.num_local} are expected."
            )
        taken = any(hasattr(type(p), "_zoo_adoptable") for module in modules for p in module.parameters())
        if taken and ep_size > 1 and not copies:
            raise ValueError(
                f"experts of ep_size={ep_size} that were built inside of zoo.zero.Init, which gives all ranks the "
                "values of rank 0. Build them outside of it, or use GroupedExperts."
            )
        self.list, self.alike = nn.ModuleList(modules), copies
        declare_first(self.list, self.first)
        self._declare(whole=False)

    def move(self, ep_rank: int) -> None:
        """See :class:`Experts`."""
        super().move(ep_rank)
        declare_first(self.list, self.first)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Where there are all experts of the layer this rank takes its own."""
        self.alike = False
        start = f"{prefix}list."
        given = {key: key[len(start) :].partition(".") for key in state_dict if key.startswith(start)}
        if self.num_local < self.num_experts and len({e for e, *_ in given.values()}) == self.num_experts:
            mine = {str(self.first + i): str(i) for i in range(self.num_local)}
            values = {key: state_dict.pop(key) for key in given}  # children look for theirs after this
            state_dict |= {f"{start}{mine[e]}.{rest}": values[k] for k, (e, _, rest) in given.items() if e in mine}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor, counts: Tensor, which: slice | None = None) -> Tensor:
        """See :class:`Experts`."""
        experts = list(self.list)
        return _run(experts if which is None else experts[which], x, counts)


def _run(experts: Sequence[nn.Module], x: Tensor, counts: Tensor) -> Tensor:
    found, end = [], 0
    for expert, count in zip(experts, counts.tolist(), strict=True):
        if count:
            found.append(_one(expert, x[end : end + count]))
        end += count
    if end < len(x):
        found.append(x[end:] * 0)
    return torch.cat(found) if found else x


def _one(expert: nn.Module, x: Tensor) -> Tensor:
    y = expert(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        what = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"the expert {type(expert).__name__} returned {what} for rows {tuple(x.shape)}; an expert returns one "
            "tensor of the shape of its input."
        )
    return y
