"""The byte model as a training task: the component ``task: byte_lm``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from zoo.examples.byte_lm.bigram import Bigram
from zoo.examples.byte_lm.corpus import Corpus, file_text, standard_library_text
from zoo.examples.byte_lm.model import ByteGPT, MlpChoice, ModelConfig, generate
from zoo.examples.byte_lm.saved import write_config
from zoo.examples.byte_lm.windows import ByteWindows


class ByteTask:
    """Predict the next byte of text. The loss is in nats a byte.

    Args:
        config: the size of the model and where the text comes from.
        seed: of the initial weights, the choice of validation windows, and the generated text.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """``text`` is "stdlib" for the standard library of the running Python, or the path of a file. ``mlp`` is a
        component in the place of the blocks' perceptrons."""

        layers: int = 4
        width: int = 128
        heads: int = 4
        context: int = 128
        text: str = "stdlib"
        held_out: float = 0.05
        num_segments: int = 32
        num_validation_windows: int = 256
        sample_bytes: int = 320
        prompt: str = "def "
        mlp: MlpChoice | None = None

        def __post_init__(self) -> None:
            if self.num_validation_windows < 1 or self.sample_bytes < 0 or not self.prompt:
                raise ValueError(
                    f"byte_lm got num_validation_windows={self.num_validation_windows}, "
                    f"sample_bytes={self.sample_bytes} and "
                    f"prompt={self.prompt!r}; it needs at least one window, no negative size and some prompt."
                )

    def __init__(self, config: Config, *, seed: int) -> None:
        self.config, self.seed = config, seed
        self.size = ModelConfig(
            layers=config.layers, width=config.width, heads=config.heads, context=config.context, mlp=config.mlp
        )

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read when it is first needed."""
        division: dict[str, Any] = {"held_out": self.config.held_out, "num_segments": self.config.num_segments}
        if self.config.text == "stdlib":
            return standard_library_text(**division)
        return file_text(self.config.text, **division)

    @property
    def units_per_sample(self) -> int:
        """Predicted bytes in one sample."""
        return self.config.context

    unit = "byte"

    def describe(self) -> list[str]:
        """Lines for the head of the log."""
        return [self.corpus.describe()]

    def model(self) -> nn.Module:
        """A fresh model; the same on every rank."""
        return ByteGPT(self.size, seed=self.seed)

    def training_data(self) -> Dataset[Any]:
        """Windows of training text."""
        return ByteWindows(self.corpus.data, self.corpus.training_ranges(), self.config.context)

    @cached_property
    def _validation(self) -> Subset[Any]:
        windows = ByteWindows(self.corpus.data, self.corpus.validation_ranges(), self.config.context)
        # Evenly over all held-out slices, so that the few windows stand for all of them.
        count = min(self.config.num_validation_windows, len(windows))
        return Subset(windows, [len(windows) * i // count for i in range(count)])

    def validation_data(self) -> Dataset[Any]:
        """Windows of held-out text; always the same."""
        return self._validation

    def baseline(self) -> tuple[str, float]:
        """The bigram model's name and its loss on the same validation windows."""
        pairs = [self._validation[i] for i in range(len(self._validation))]
        x, y = (torch.stack(part) for part in zip(*pairs, strict=True))
        return "byte bigram", Bigram(self.corpus.data, self.corpus.training_ranges()).loss(x, y)

    def sample(self, model: nn.Module) -> str:
        """Text written by the model; every rank calls it."""
        if not self.config.sample_bytes:
            return ""
        text = generate(
            model, self.config.prompt.encode(), self.config.sample_bytes, context=self.config.context, seed=self.seed
        )
        return text.decode("utf-8", errors="replace")

    def export(self, folder: Path) -> str:
        """The model's size beside ``folder/model.safetensors``, and how to load both; rank 0 calls it."""
        write_config(folder, self.size)
        return f"zoo.examples.byte_lm.load({str(folder)!r})"
