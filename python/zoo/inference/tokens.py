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
    """Raise ValueError unless it is a causal model of transformers in eval mode, with values."""
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} is no causal model of transformers, which has a config and generates."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder; {use} is for decoders alone.")
    first = next(model.parameters(), None)
    if first is not None and first.is_meta:
        raise ValueError(
            f"parameters of {type(model).__name__} are on the meta device, without values; load them, or give it to "
            "zoo.inference.stream with weights."
        )
    if model.training:
        raise ValueError("the model is in training mode, with dropout; call model.eval() first.")


def token_ids(
    model: nn.Module, given: Sequence[Tensor | Sequence[int]], what: str = "prompt", *, least: int = 1
) -> list[Tensor]:  # fmt: skip
    """Each of ``given`` as int64; ``what`` they are called; ``least`` tokens of each.

    Raises:
        ValueError: they are no sequence; one is not 1-D, too short, or of other numbers than ids of tokens.
    """
    found: list[Tensor] = []
    ask: Any = getattr(model, "get_input_embeddings", None)  # a wrapper may have none
    embedding = None if ask is None else ask()
    words = max(getattr(config_of(model), "vocab_size", None) or 0, getattr(embedding, "num_embeddings", 0))
    for index, row in enumerate(rows_of(given, what)):
        try:
            one = torch.as_tensor(row)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{what} {index} is {row!r}; it must be token ids: call the tokenizer.") from error
        if one.dim() != 1 or len(one) < least:
            at_least = ", with at least one token" if least else ""
            raise ValueError(f"{what} {index} has shape {tuple(one.shape)}; it must be 1-D{at_least}.")
        found.append(_ids(one, f"{what} {index}", words) if len(one) else one.to(torch.int64))
    return found


def rows_of(given: Any, what: str) -> list[Any]:
    """As a list. Raise ValueError where there is none."""
    if not hasattr(given, "__iter__"):
        raise ValueError(f"{what}s={given!r}; give a list, with the token ids of each.")
    return list(given)


def check_positions(model: nn.Module, tokens: int, what: str) -> None:
    """Raise ValueError where a model has a table of positions that ends before so many tokens, as GPT-2 has.

    Args:
        what: which ``tokens`` they are, the subject of the sentence.
    """
    most = getattr(config_of(model), "max_position_embeddings", None)
    if type(most) is not int or tokens <= most:
        return
    tables = [
        (path, module.num_embeddings) for path, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    tables += [(path, len(buffer)) for path, buffer in model.named_buffers() if buffer.dim() == 2]
    for path, rows in tables:
        last = path.rpartition(".")[2]
        # Some models leave the first two rows unused. Without such a table positions go on behind ``most``.
        if (last == "wpe" or "pos" in last) and most <= rows <= most + 2:
            raise ValueError(
                f"{what} takes {tokens} positions, and {type(model).__name__} has {most} ({path}); shorten it, or "
                "generate fewer tokens."
            )


def _ids(one: Tensor, name: str, words: int) -> Tensor:
    if one.is_floating_point() or one.is_complex() or one.dtype is torch.bool:
        raise ValueError(f"{name} is {one.dtype}; token ids are whole numbers.")
    one = one.to(torch.int64)  # torch compares no unsigned numbers, of which files of tokens are
    least, most = int(one.min()), int(one.max())
    if least < 0 or (words and most >= words):
        raise ValueError(f"{name} has the token {least if least < 0 else most}; the model has {words}, from 0 on.")
    return one
