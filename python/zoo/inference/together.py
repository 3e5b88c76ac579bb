"""Ranks that keep parts of one model's parameters: each forward gathers from all of them, so all run as many."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


class Together:
    """Counts forwards with the other ranks. Where this rank has all parameters, at ZeRO stages 0 to 2, there is nothing
    to count and nothing is sent; else 4 bytes before each forward.

    Args:
        model: in eval mode, without gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        buckets = [getattr(p, "_zoo_bucket", None) for p in model.parameters()]
        worlds = [bucket.routes.axes.world for bucket in buckets if bucket is not None and bucket.partitioned]
        self._comm: Any = max(worlds, key=lambda comm: comm.size, default=None)  # experts have smaller ones
        self._device = next((p.device for p in model.parameters()), None)

    def goes_on(self, more: bool) -> bool:
        """Whether any rank has ``more`` to do: then each runs the model once. Collective."""
        if self._comm is None or self._comm.size == 1:
            return more
        flag = torch.tensor([int(more)], dtype=torch.int32, device=self._device)
        self._comm.all_reduce(flag, "max").wait()
        return bool(flag)

    def idle(self) -> None:
        """A forward for the others, whose result nobody wants."""
        keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._model(input_ids=token, use_cache=False, **({"logits_to_keep": 1} if keeps else {}))

    def finish(self) -> None:
        """This rank is done: run the model until all are. Collective."""
        while self.goes_on(False):
            self.idle()
