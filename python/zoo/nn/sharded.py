"""Parameters that another package shards, whole for a while; without knowing who does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from zoo import registry

KIND = "parameter_gatherer"
"""Kind of the components that make parameters whole: ``component(parameters, modifier_rank)`` gives a context in which
those of its own are, and lets all others be. With a rank, the values that this rank wrote become everybody's when the
context ends; with None they are only read. Collective."""


@contextlib.contextmanager
def whole(parameters: Iterable[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
    """Inside, all of ``parameters`` have their values here. Collective if any of them is sharded.

    Ordinary parameters (of the class ``nn.Parameter`` itself) cost nothing, and nothing is imported for them.
    """
    sharded = [parameter for parameter in parameters if type(parameter) is not nn.Parameter]
    with contextlib.ExitStack() as stack:
        if sharded:
            for name in registry.names(KIND):
                stack.enter_context(registry.get(KIND, name)(sharded, modifier_rank))
        yield
