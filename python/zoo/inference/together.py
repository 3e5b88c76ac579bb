"""Ranks that keep parts of one model's parameters: each forward gathers from all of them, so all run as many."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from zoo.comm import raise_together
from zoo.comm.failures import agree_none_failed, report

_DONE, _MORE, _FAILED = 0, 1, 2


class Together:
    """Counts forwards with the other ranks. Where this rank has all parameters, at ZeRO stages 0 to 2, there is nothing
    to count and nothing is sent; else 8 bytes before the first forward and 4 before each.

    What one rank refuses, or fails with between two forwards, ends it on all: the others raise a
    ``zoo.comm.RankFailedError`` that names the rank and what it says, and the next call finds them together.

    Args:
        model: in eval mode, without gradients.
        what: who calls, the subject of an error's sentence.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        self._model, self._what, self._has_run = model, what, False
        given: Any = model  # what is no model is refused later
        parameters = list(model.parameters()) if isinstance(given, nn.Module) else []
        buckets = [getattr(p, "_zoo_bucket", None) for p in parameters]
        worlds = [bucket.routes.axes.world for bucket in buckets if bucket is not None and bucket.partitioned]
        widest: Any = max(worlds, key=lambda comm: comm.size, default=None)  # experts have smaller ones
        self._comm: Any = None if widest is None or widest.size == 1 else widest
        self._device = next((p.device for p in parameters), None)

    def checking(self) -> AbstractContextManager[None]:
        """For the time of what may refuse a call, before the first forward. Collective."""
        return raise_together(self._comm, self._what)

    def goes_on(self, more: bool) -> bool:
        """Whether any rank has ``more`` to do: then each runs the model once, in a :meth:`turn`. Collective.

        Raises:
            zoo.comm.RankFailedError: another rank has failed.
        """
        if self._comm is None:
            return more
        most = self._most(_MORE if more else _DONE)
        if most == _FAILED:
            agree_none_failed(self._comm, self._what)
        return most == _MORE

    def _most(self, mine: int) -> int:
        flag = torch.tensor([mine], dtype=torch.int32, device=self._device)
        self._comm.all_reduce(flag, "max").wait()
        return int(flag)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around one forward, which calls :meth:`ran`, and what is made of its result."""
        self._has_run = False
        try:
            yield
        except Exception as error:
            if self._comm is not None and self._has_run:
                self._most(_FAILED)
                agree_none_failed(self._comm, self._what, error)
            elif self._comm is not None:
                report(error)  # the others are in the midst of the forward
            raise

    def ran(self) -> None:
        """The forward of this turn is done."""
        self._has_run = True

    def idle(self) -> None:
        """A forward for the others, whose result nobody wants."""
        keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._model(input_ids=token, use_cache=False, **({"logits_to_keep": 1} if keeps else {}))
        self.ran()

    def finish(self) -> None:
        """This rank is done: run the model until all are. Collective."""
        while self.goes_on(False):
            with self.turn():
                self.idle()
