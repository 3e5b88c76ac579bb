"""Whether a model still has the parameters that it had when it was split over ranks, and what they are called now.

A parameter that comes later lies in no bucket: it would be gathered, trained and saved by nobody. One that is taken
out, or found elsewhere in the model, goes on as it does in torch; whoever shows, saves or loads it by name finds the
name that it has in the model now (:meth:`Bucket.logical`, :meth:`Bucket.called`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from zoo.comm import Communicator, together
from zoo.layout import logical_name
from zoo.shard.agreement import listed, short_digest
from zoo.shard.buckets import Bucket


class Members:
    """The modules and parameters of a model as they were last found.

    A look costs a comparison of identities for each name, parameter and module, in C; only a change is looked into.

    Args:
        units: the units of the runtime, with a ``key``, by which buckets name them, a ``module``, and the ``name`` that
            messages have.
    """

    def __init__(self, model: nn.Module, buckets: Collection[Bucket], units: Iterable[Any] = ()) -> None:
        self._model, self._buckets, self._units = model, frozenset(buckets), list(units)
        self._note()

    def _note(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._dicts += (module._parameters, module._modules)
        self._known = list(self._now())

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(chain(self._dicts, map(dict.values, self._dicts)))

    def look(self) -> list[str]:
        """Every parameter is called by the name that it has now; the names of those that came after construction."""
        if 2 * sum(map(len, self._dicts)) == len(self._known) and all(map(is_, self._now(), self._known)):
            return []
        strangers = [
            name for name, p in self._model.named_parameters()
            if getattr(p, "_zoo_bucket", None) not in self._buckets
        ]  # fmt: skip
        self._rename()
        if strangers:
            self._known = []  # where they are taken out again, that is a change too
        else:
            self._note()
        return strangers

    def _rename(self) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        paths = {id(module): path for path, module in self._model.named_modules()}
        for unit in self._units:
            unit.name = paths.get(id(unit.module), unit.name)
        units = {unit.key: unit.name for unit in self._units}
        for bucket in self._buckets:
            bucket.renamed(names, lambda name: logical_name(self._model, name), units)

    def agree(self, data: Communicator, comm: Communicator, what: str) -> None:
        """As :meth:`check`, for ``what``, on all ranks of ``comm``; those of ``data`` have the same parameters by now,
        under the same names. Collective over ``comm``.

        Raises:
            ValueError: (on all ranks) parameters came after construction, or ranks have changed their models otherwise.
        """

        def found() -> tuple[tuple[int, ...], str]:
            self.check()
            # Of what is a part along mesh axes other ranks of `data` have other names.
            buckets = sorted(self._buckets, key=lambda bucket: bucket.index)
            names = [f"{len(b.in_model())} parts" if b.spec.axes else ", ".join(b.in_model()) for b in buckets]
            return tuple(data.ranks), short_digest(names)

        everyone = together(comm, what, found, error=lambda text, ranks: ValueError(text), plain=ValueError)
        for group in {ranks for ranks, _ in everyone}:
            kinds = [digest for ranks, digest in everyone if ranks == group]
            if len(set(kinds)) > 1:
                other = [rank for rank, digest in zip(group, kinds, strict=True) if digest != kinds[0]]
                raise ValueError(
                    f"{what} failed: since construction the model of {listed(other)} was"
                    f" changed otherwise than that of rank {group[0]}: its parameters "
                    "have other names. Swap, remove, rename or tie layers on all ranks alike."
                )

    def check(self) -> None:
        """Look for parameters that came after construction.

        Raises:
            ValueError: there are some; it names them.
        """
        strangers = self.look()
        if strangers:
            raise ValueError(
                f"{', '.join(map(repr, strangers[:5]))}: {len(strangers)} parameter(s) came into the model after the "
                "ZeRO optimizer was constructed (replaced, added, or made by a parametrisation such as "
                "weight_norm). They "
                "lie in no bucket, and would be neither trained nor saved. Give the old parameter new values instead "
                "(parameter.data = value), or close() the optimizer, change the model, and construct a new one."
            )
