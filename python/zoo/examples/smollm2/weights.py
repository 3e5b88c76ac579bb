"""From a GGUF file to a :class:`Llama`: sizes, names, and the order of rows in which GGUF stores queries and keys."""

from __future__ import annotations

import torch

from zoo.examples.smollm2.gguf_file import GGUFFile
from zoo.examples.smollm2.model import Llama, LlamaConfig

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_of(file: GGUFFile) -> LlamaConfig:
    """The sizes that the metadata says.

    Raises:
        ValueError: no Llama, or sizes that contradict each other.
        NotImplementedError: a Llama with scaled rotary positions.
    """
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise ValueError(f"{file.path.name} holds a model of architecture {architecture!r}; give a Llama's file.")
    if file.value("llama.rope.scaling.type", str, "none") != "none":
        raise NotImplementedError(f"{file.path.name} scales its rotary positions; files without that are supported.")
    width, heads = file.value("llama.embedding_length", int), file.value("llama.attention.head_count", int)
    if heads < 1 or (width % heads and not file.has("llama.attention.key_length")):
        raise ValueError(f"{file.path.name} says {heads} heads for a width of {width}; they must divide it.")
    head_dim = file.value("llama.attention.key_length", int, width // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.value(key, int, head_dim) != head_dim:
            raise ValueError(
                f"{file.path.name} says {key!r} as {file.value(key, int)}; only the size of a head, {head_dim}, is "
                f"supported."
            )
    tokens = len(file.strings("tokenizer.ggml.tokens"))
    vocabulary = file.value("llama.vocab_size", int, tokens)
    if vocabulary != tokens:
        raise ValueError(f"{file.path.name} says a vocabulary of {vocabulary} and lists {tokens} tokens.")
    return LlamaConfig(
        vocabulary=vocabulary, width=width, heads=heads, head_dim=head_dim,
        layers=file.value("llama.block_count", int),
        key_value_heads=file.value("llama.attention.head_count_kv", int, heads),
        mlp_width=file.value("llama.feed_forward_length", int),
        context=file.value("llama.context_length", int),
        rope_theta=_decimal(file.value("llama.rope.freq_base", float, 10_000.0)),
        norm_eps=_decimal(file.value("llama.attention.layer_norm_rms_epsilon", float)),
        tied="output.weight" not in file.tensor_names,
    )  # fmt: skip


def pretrained(file: GGUFFile, *, checkpoint_activations: bool = False) -> Llama:
    """The model with the file's weights, in fp32; without values where torch's default device is "meta".

    Raises:
        ValueError: a tensor is missing, left over or of another shape.
    """
    config = config_of(file)
    meta = torch.get_default_device().type == "meta"
    with torch.device("meta"):
        model = Llama(config, checkpoint_activations=checkpoint_activations)
    names = {gguf_name(name): name for name, _ in model.named_parameters()}
    if extra := sorted(file.tensor_names - set(names)):
        raise ValueError(f"{file.path.name} has tensors that no Llama has: {', '.join(extra[:3])}; give another file.")
    if meta:
        return model
    state = {}
    for stored, name in names.items():
        tensor = file.tensor(stored, model.get_parameter(name).shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = halves_from_pairs(tensor, config.head_dim)
        state[name] = tensor
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # one parameter, not two of the same values
    return model


def gguf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` of ``model.layers.3.self_attn.q_proj.weight``, and so on."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    stored = {theirs: ours for ours, theirs in _LAYER.items()}[rest.removesuffix(".weight")]
    return f"blk.{layer}.{stored}.weight"


def halves_from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head 0, 2, 4, … then 1, 3, 5, …; (heads · D, C) to the same.

    GGUF stores the two rows that rotary positions turn together next to each other; ``rotate`` of the model turns row i
    with row i + D/2.
    """
    rows, width = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, width).transpose(1, 2).reshape(rows, width).contiguous()


def _decimal(value: float) -> float:
    # GGUF stores fp32: 1e-5 comes back as 9.999999747378752e-06.
    return float(f"{value:.7g}")
