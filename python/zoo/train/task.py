"""What a training task offers."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.utils.data import Dataset


class Task(Protocol):
    """A model, its data, and what to compare it with.

    Built on every rank as ``registry.build("task", name, params, seed=seed)``; every method must give the same on all
    ranks (the job shards the data). Batches of the data sets, given to the model as ``zoo.engine`` unpacks them, must
    make it return its mean loss in nats.

    A task may have ``export(folder: Path) -> str`` as well: on rank 0 it writes beside the weights,
    ``folder/model.safetensors``, what others need to load the model, and returns how they do it.
    """

    @property
    def unit(self) -> str:
        """What the loss is counted per, such as "byte"."""

    @property
    def units_per_sample(self) -> int:
        """Predictions in one sample, for tokens per second."""

    def describe(self) -> list[str]:
        """Lines for the head of the log, on rank 0."""

    def model(self) -> nn.Module:
        """A fresh model."""

    def training_data(self) -> Dataset[Any]:
        """Map-style."""

    def validation_data(self) -> Dataset[Any]:
        """Map-style, never trained on."""

    def baseline(self) -> tuple[str, float] | None:
        """Name and validation loss of what the model must beat; called on rank 0 only."""

    def sample(self, model: nn.Module) -> str:
        """Something made by the model, or "". Called on all ranks together, because a forward may be a collective."""
