"""``max_out_tokens`` and ``min_out_tokens``: how long what is generated may be, and has to be able to be.

Legend: L layers, H heads of keys and values, D their size; B rows, T tokens of a row, prompt included.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator

_PROMPTS = "inputs", "input_ids", "inputs_embeds"


class Lengths(NamedTuple):
    """Most tokens of a row, prompt included; fewest that there is room for behind it; who was told so; ranks that share
    heads."""

    most: int
    least: int
    told: str
    degree: int = 1


def check_lengths(model: nn.Module, lengths: Lengths, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of ``generate`` whose rows would be longer than ``max_out_tokens``, or that has no room for
    ``min_out_tokens`` more.

    Raises:
        ConfigError: with the numbers.
    """
    prompt, rows = _prompt_of(args, kwargs)
    most, least, told, degree = lengths
    given = {**kwargs, "generation_config": args[1]} if len(args) > 1 else kwargs
    asked = _new_tokens(model, prompt, given)
    new = asked if asked is not None else 0 if prompt > most else _by_default(model, prompt)
    if prompt + new > most:
        raise ConfigError(
            f"generate() got a prompt of {prompt} tokens and is to add {new}, {prompt + new} in all, which exceeds "
            f"maximum length: max_out_tokens={most}, prompt included. Shorten one of them, or give {told} a larger "
            "max_out_tokens."
        )
    if prompt + least > most:
        raise ConfigError(
            f"generate() got a prompt of {prompt} tokens, and max_out_tokens={most} leaves {most - prompt} for what is "
            f"generated, fewer than min_out_tokens={least}. Raise the first or lower the second."
        )
    check_memory(model, degree, rows, prompt + least)


def _prompt_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(tokens of a row, rows)."""
    given = [*args[:1], *(kwargs.get(name) for name in _PROMPTS)]
    found = [value.shape for value in given if isinstance(value, torch.Tensor) and value.dim() >= 2]
    begun = kwargs.get("decoder_input_ids")
    more = begun.shape[1] if isinstance(begun, torch.Tensor) and begun.dim() == 2 else 0
    return max((shape[1] for shape in found), default=0) + more, max((shape[0] for shape in found), default=1)


def _new_tokens(model: nn.Module, prompt: int, kwargs: dict[str, Any]) -> int | None:
    """How many tokens a call asks for, by arguments or by a generation config; None where neither says it."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        prompt = 0  # max_length is the decoder's
    for said in (kwargs, *(vars(config) for config in configs if config is not None)):
        if said.get("max_new_tokens") is not None:
            return int(said["max_new_tokens"])
        if said is kwargs and said.get("max_length") is not None:
            return max(int(said["max_length"]) - prompt, 0)
    for config in configs:
        if getattr(config, "max_length", None) is not None:
            return max(int(config.max_length) - prompt, 0)  # type: ignore[union-attr]
    return None


def _by_default(model: nn.Module, prompt: int) -> int:
    """What transformers adds unasked: 20 tokens, up to the positions that the model has; 0 of other models."""
    ask = getattr(getattr(model, "generation_config", None), "_get_default_generation_params", None)
    new = 0 if ask is None else int(ask().get("max_length") or 0)
    last = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return new if last is None else max(min(new, last - prompt), 0)


def cache_bytes(model: nn.Module, rows: int, tokens: int) -> int:
    """2 · L · B · H · T · D numbers of the model's dtype; 0 where its configuration does not say L, H or D."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not layers or not heads or not width or first is None:
        return 0
    kept = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    dim = getattr(config, "head_dim", None) or width // heads
    return int(2 * layers * rows * kept * tokens * dim * first.element_size())


def check_memory(model: nn.Module, degree: int, rows: int, tokens: int) -> None:
    """Refuse keys and values that do not fit into the memory that is free now.

    Raises:
        ConfigError: with the numbers.
    """
    asked = cache_bytes(model, rows, tokens) // degree
    if not asked:
        return
    accelerator: Any = get_accelerator()
    free = accelerator.available_memory()
    if accelerator.device_name().startswith("cuda"):  # what torch holds and nobody uses
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if asked > free:
        raise ConfigError(
            f"keys and values of {rows} rows of {tokens} tokens, min_out_tokens among them, take {asked:,} bytes, and "
            f"{free:,} are free. Lower min_out_tokens, or give fewer rows or a shorter prompt."
        )
