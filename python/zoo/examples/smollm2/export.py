"""What others need beside ``model.safetensors`` to load the model: configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zoo.examples.smollm2.gguf_file import GGUFFile
from zoo.examples.smollm2.model import Llama, LlamaConfig
from zoo.examples.smollm2.tokenizer import end_token, tokenizer_of

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def hub_config(config: LlamaConfig, *, dtype: str, bos: int | None, eos: int | None) -> dict[str, Any]:
    """``config.json`` as ``transformers`` reads it for a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **config.to_dict(),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def write_hub_files(folder: Path, file: GGUFFile, config: LlamaConfig) -> None:
    """``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` beside ``model.safetensors`` in ``folder``.

    Raises:
        ValueError: there are no weights, or they are not those of a Llama of this size.
    """
    dtype = _dtype_of(folder / "model.safetensors", config)
    bos_key = "tokenizer.ggml.bos_token_id"
    bos, eos = file.value(bos_key, int) if file.has(bos_key) else None, end_token(file)
    _write(folder / "config.json", hub_config(config, dtype=dtype, bos=bos, eos=eos))
    tokenizer = tokenizer_of(file)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
    about |= {"clean_up_tokenization_spaces": False}
    about |= {name: tokenizer.id_to_token(i) for name, i in (("bos_token", bos), ("eos_token", eos)) if i is not None}
    if file.has("tokenizer.chat_template"):
        about["chat_template"] = file.value("tokenizer.chat_template", str)
    _write(folder / "tokenizer_config.json", about)


def _dtype_of(path: Path, config: LlamaConfig) -> str:
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; save the weights there first (engine.save_16bit_model).")
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
    with safe_open(str(path), framework="pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  (no mapping)
        found = {name: tuple(part.get_shape()) for name, part in slices.items()}
        dtypes = {str(part.get_dtype()) for part in slices.values()}
    if config.tied:
        found.pop("lm_head.weight", None)
    if found != expected or len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        odd = sorted(found.items() ^ expected.items())
        raise ValueError(
            f"{str(path)!r} does not hold the weights of this Llama in one floating-point dtype: "
            f"{odd[0][0] if odd else ', '.join(sorted(dtypes))} differs; save them with engine.save_16bit_model."
        )
    return _DTYPES[dtypes.pop()]


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
