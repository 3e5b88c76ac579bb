"""A transformer's shape from the configuration that a model of Hugging Face has beside its weights (config.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.cost.transformer import Transformer

__all__ = ["read_transformer", "transformer_of"]

_LLAMA = ("llama", "mistral", "ministral", "smollm3", "granite", "olmo", "qwen2", "qwen3", "phi3", "gemma", "helium")
_MAX_BYTES = 4 << 20


def transformer_of(config: Mapping[str, Any], *, seq: int) -> Transformer:
    """The shape of a causal language model, as zoo runs it: attention in one operation.

    Args:
        config: with ``model_type`` one of Llama's kind, GPT-2's, GPT-NeoX' or OPT's. seq: tokens of a sequence.

    Raises:
        ValueError: another kind of model, one with experts, a field that is missing or no number.
    """
    kind = str(config.get("model_type", ""))
    experts = [k for k in ("num_local_experts", "num_experts", "n_routed_experts") if _count(config.get(k)) > 1]
    if experts:
        raise ValueError(f"a model with {experts[0]}={config[experts[0]]}: experts have no forecast of time yet.")
    found = {"llama": _llama, "gpt2": _gpt2, "gpt_neox": _neox, "opt": _opt}.get("llama" if kind in _LLAMA else kind)
    if found is None:
        known = ", ".join((*_LLAMA, "gpt2", "gpt_neox", "opt"))
        raise ValueError(f"a model of type {kind!r} has no reader here; there is one for {known}.")
    return found(config, seq)


def read_transformer(path: str | Path, *, seq: int) -> Transformer:
    """The same from a ``config.json``, or from the folder that has one.

    Raises:
        ValueError: there is none, or it is no configuration.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"{path} is no config.json, and no folder that has one.")
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes; a config.json has at most {_MAX_BYTES:,}.")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {type(config).__name__}, where an object is expected.")
    return transformer_of(config, seq=seq)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if _count(value) < 1:
        raise ValueError(
            f"a model of type {config.get('model_type')!r} got {name}={value!r}; a whole number is needed."
        )
    return int(value)  # type: ignore[arg-type]


def _llama(config: Mapping[str, Any], seq: int) -> Transformer:
    heads = _number(config, "num_attention_heads")
    kind = config["model_type"]
    return Transformer(
        hidden=_number(config, "hidden_size"), heads=heads, layers=_number(config, "num_hidden_layers"), seq=seq,
        vocab=_number(config, "vocab_size"), kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", _number(config, "hidden_size") // heads),
        ffn=_number(config, "intermediate_size"), gated=True, dropout=False, attention="flash",
        tied=bool(config.get("tie_word_embeddings", kind == "gemma")),
        bias="qkv" if kind == "qwen2" or config.get("attention_bias") else "none",
    )  # fmt: skip


def _gpt2(config: Mapping[str, Any], seq: int) -> Transformer:
    hidden = _number(config, "n_embd")
    return Transformer(
        hidden=hidden, heads=_number(config, "n_head"), layers=_number(config, "n_layer"), seq=seq,
        vocab=_number(config, "vocab_size"), ffn=_number(config, "n_inner", 4 * hidden), attention="flash",
        positions=_number(config, "n_positions"), tied=bool(config.get("tie_word_embeddings", True)),
        dropout=bool(config.get("resid_pdrop", 0.1)),
    )  # fmt: skip


def _neox(config: Mapping[str, Any], seq: int) -> Transformer:
    return Transformer(
        hidden=_number(config, "hidden_size"), heads=_number(config, "num_attention_heads"), attention="flash",
        layers=_number(config, "num_hidden_layers"), seq=seq, vocab=_number(config, "vocab_size"),
        ffn=_number(config, "intermediate_size"), tied=bool(config.get("tie_word_embeddings", False)),
        dropout=bool(config.get("hidden_dropout", 0.0)),
    )  # fmt: skip


def _opt(config: Mapping[str, Any], seq: int) -> Transformer:
    return Transformer(
        hidden=_number(config, "hidden_size"), heads=_number(config, "num_attention_heads"), attention="flash",
        layers=_number(config, "num_hidden_layers"), seq=seq, vocab=_number(config, "vocab_size"),
        ffn=_number(config, "ffn_dim"), positions=_number(config, "max_position_embeddings") + 2,
        tied=bool(config.get("tie_word_embeddings", True)), dropout=bool(config.get("dropout", 0.1)),
    )  # fmt: skip
