"""Whether a model still has the parameters that it had when it was split over ranks.

A parameter that comes later lies in no bucket: it would be gathered, trained and saved by nobody. One that is taken
out, or found elsewhere in the model, goes on as it does in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from zoo.zero.sharding.buckets import Bucket


class Members:
    """The modules and parameters of a model as they were last found in order.

    A look costs two comparisons of identities a parameter and a module, in C; only a change is looked into.
    """

    def __init__(self, model: nn.Module, buckets: Collection[Bucket]) -> None:
        self._model, self._buckets = model, frozenset(buckets)
        self._note()

    def _note(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._dicts += (module._parameters, module._modules)
        self._known = list(self._now())

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def check(self) -> None:
        """Look for parameters that came after construction.

        Raises:
            ValueError: there are some; it names them.
        """
        if sum(map(len, self._dicts)) == len(self._known) and all(map(is_, self._now(), self._known)):
            return
        strangers = [
            name for name, p in self._model.named_parameters()
            if getattr(type(p), "_zoo_bucket", None) not in self._buckets
        ]  # fmt: skip
        if strangers:
            raise ValueError(
                f"{', '.join(map(repr, strangers[:5]))}: {len(strangers)} parameter(s) came into the model after the "
                "ZeRO optimizer was constructed (replaced, added, or made by a parametrisation such as "
                "weight_norm). They "
                "lie in no bucket, and would be neither trained nor saved. Give the old parameter new values instead "
                "(parameter.data = value), or close() the optimizer, change the model, and construct a new one."
            )
        self._note()
