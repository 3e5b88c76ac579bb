"""A transformer's shape from the configuration that a model of Hugging Face has beside its weights (config.json)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.cost.transformer import Transformer

__all__ = ["longest_of", "read_config", "read_transformer", "transformer_of"]

_LLAMA = ("llama", "mistral", "ministral", "smollm3", "granite", "olmo", "qwen2", "qwen3", "phi3", "gemma", "helium")
_MAX_BYTES = 4 << 20
_MOST = 1 << 48  # of a size
_PROJECTED = ("llama", "granite", "smollm3", "gemma", "olmo", "qwen3")  # attention_bias is of the last product too


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
        raise ValueError(
            f"a model with {experts[0]}={config[experts[0]]}: experts have no formula of time; zoo forecast CONFIG "
            "--hardware NAME runs a job of them under virtual time."
        )
    found = {"llama": _llama, "gpt2": _gpt2, "gpt_neox": _neox, "opt": _opt}.get("llama" if kind in _LLAMA else kind)
    if found is None:
        known = ", ".join((*_LLAMA, "gpt2", "gpt_neox", "opt"))
        raise ValueError(f"a model of type {kind!r} has no reader here; there is one for {known}.")
    made = found(config, seq)
    if made.positions and seq > (rows := longest_of(config) or made.positions):
        raise ValueError(
            f"a model of type {kind!r} got seq={seq} and a table of {rows} positions: choose shorter ones."
        )
    return made


def read_transformer(path: str | Path, *, seq: int) -> Transformer:
    """The same from a ``config.json``, or from the folder that has one.

    Raises:
        ValueError: there is none, or it is no configuration.
    """
    return transformer_of(read_config(path), seq=seq)


def longest_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that the model states; None where it does not."""
    return _count(config.get("n_positions") or config.get("max_position_embeddings")) or None


def read_config(path: str | Path) -> dict[str, Any]:
    """A ``config.json``, or that of a folder, as it is.

    Raises:
        ValueError: there is none, or it is no object of JSON.
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
    return config


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not 1 <= _count(value) <= _MOST:
        raise ValueError(
            f"a model of type {config.get('model_type')!r} got {name}={repr(value)[:40]}; a whole number is needed, "
            f"from 1 to {_MOST:,}."
        )
    return int(value)  # type: ignore[arg-type]


def _llama(config: Mapping[str, Any], seq: int) -> Transformer:
    heads = _number(config, "num_attention_heads")
    kind = config["model_type"]
    return _with_vectors(config, Transformer(
        hidden=_number(config, "hidden_size"), heads=heads, layers=_number(config, "num_hidden_layers"), seq=seq,
        vocab=_number(config, "vocab_size"), kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", _number(config, "hidden_size") // heads),
        ffn=_number(config, "intermediate_size"), gated=True, dropout=False, attention="flash",
        tied=bool(config.get("tie_word_embeddings", kind == "gemma")), bias="qkv" if kind == "qwen2" else "none",
    ))  # fmt: skip


def _with_vectors(config: Mapping[str, Any], plain: Transformer) -> Transformer:
    """With what kinds of Llama's have beside matrices and two norms of a layer."""
    kind, h = config["model_type"], plain.hidden
    norms = 0 if kind == "olmo" else 2 * h  # OLMo's have no numbers
    vectors = norms + (2 * plain.dim if kind == "qwen3" else 0)  # of queries and of keys
    if kind == "qwen2" or (config.get("attention_bias") and kind in (*_PROJECTED, "helium")):
        vectors += plain.heads * plain.dim + 2 * plain.kv_width + (h if kind in _PROJECTED else 0)
    if config.get("mlp_bias") and kind in ("llama", "granite", "smollm3", "helium"):
        vectors += 2 * plain.inner + h
    return dataclasses.replace(plain, vectors=vectors, final=norms // 2)


def _gpt2(config: Mapping[str, Any], seq: int) -> Transformer:
    hidden = _number(config, "n_embd")
    return Transformer(
        hidden=hidden, heads=_number(config, "n_head"), layers=_number(config, "n_layer"), seq=seq,
        vocab=_number(config, "vocab_size"), ffn=_number(config, "n_inner", 4 * hidden), attention="flash",
        positions=_number(config, "n_positions"), tied=bool(config.get("tie_word_embeddings", True)),
        dropout=bool(config.get("resid_pdrop", 0.1)),
    )  # fmt: skip


def _neox(config: Mapping[str, Any], seq: int) -> Transformer:
    found = Transformer(
        hidden=_number(config, "hidden_size"), heads=_number(config, "num_attention_heads"), attention="flash",
        layers=_number(config, "num_hidden_layers"), seq=seq, vocab=_number(config, "vocab_size"),
        ffn=_number(config, "intermediate_size"), tied=bool(config.get("tie_word_embeddings", False)),
        dropout=bool(config.get("hidden_dropout", 0.0)),
    )  # fmt: skip
    if config.get("attention_bias", True):
        return found
    return dataclasses.replace(found, vectors=found.inner + 5 * found.hidden)  # both norms and the second half


def _opt(config: Mapping[str, Any], seq: int) -> Transformer:
    if (wide := config.get("word_embed_proj_dim", config.get("hidden_size"))) != config.get("hidden_size"):
        raise ValueError(
            f"a model of type 'opt' got word_embed_proj_dim={wide!r} and hidden_size={config.get('hidden_size')!r}: "
            "embeddings of another width have no formula."
        )
    found = Transformer(
        hidden=_number(config, "hidden_size"), heads=_number(config, "num_attention_heads"), attention="flash",
        layers=_number(config, "num_hidden_layers"), seq=seq, vocab=_number(config, "vocab_size"),
        ffn=_number(config, "ffn_dim"), positions=_number(config, "max_position_embeddings") + 2,
        tied=bool(config.get("tie_word_embeddings", True)), dropout=bool(config.get("dropout", 0.1)),
    )  # fmt: skip
    norm = 2 * found.hidden if config.get("layer_norm_elementwise_affine", True) else 0
    biases = 5 * found.hidden + found.inner if config.get("enable_bias", True) else 0
    last = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    return dataclasses.replace(found, vectors=2 * norm + biases, final=norm if last else 0)
