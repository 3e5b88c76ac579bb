"""Ids of tokens as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


def config_of(model: nn.Module) -> Any:
    """The configuration of what generates."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def check_model(model: nn.Module, use: str) -> None:
    """Raise ValueError unless it is a causal model of transformers in eval mode."""
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} is no causal model of transformers, which has a config and generates."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder; {use} is for decoders alone.")
    if model.training:
        raise ValueError("the model is in training mode, with dropout; call model.eval() first.")


def token_ids(
    model: nn.Module, given: Sequence[Tensor | Sequence[int]], what: str = "prompt", *, least: int = 1
) -> list[Tensor]:  # fmt: skip
    """Each of ``given`` as int64; ``what`` they are called; ``least`` tokens of each.

    Raises:
        ValueError: not 1-D, too short, or of other numbers than ids of tokens.
    """
    found: list[Tensor] = []
    ask: Any = getattr(model, "get_input_embeddings", None)  # a wrapper may have none
    embedding = None if ask is None else ask()
    words = max(getattr(config_of(model), "vocab_size", None) or 0, getattr(embedding, "num_embeddings", 0))
    for index, row in enumerate(given):
        try:
            one = torch.as_tensor(row)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{what} {index} is {row!r}; it must be token ids: call the tokenizer.") from error
        if one.dim() != 1 or len(one) < least:
            at_least = ", with at least one token" if least else ""
            raise ValueError(f"{what} {index} has shape {tuple(one.shape)}; it must be 1-D{at_least}.")
        if len(one):
            _check_ids(one, f"{what} {index}", words)
        found.append(one.to(torch.int64))
    return found


def _check_ids(one: Tensor, name: str, words: int) -> None:
    if one.is_floating_point() or one.is_complex() or one.dtype is torch.bool:
        raise ValueError(f"{name} is {one.dtype}; token ids are whole numbers.")
    least, most = int(one.min()), int(one.max())
    if least < 0 or (words and most >= words):
        raise ValueError(f"{name} has the token {least if least < 0 else most}; the model has {words}, from 0 on.")
