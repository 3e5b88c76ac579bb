"""Small models of transformers, of families whose layers are injected and of others."""

from __future__ import annotations

from typing import Any

import torch

from zoo.tensor.proof import exact

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
INJECTED: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 4}, "Qwen2": {}, "Qwen3": {}, "Gemma": {}, "Phi3": {},
    "Granite": {}, "Ministral": {"sliding_window": 4},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Helium": ({}, "it computes something else than its kind"),
    "Granite": ({"residual_multiplier": 0.5}, "it computes something else than its kind"),
    "Gemma2": ({"attn_implementation": "eager"}, "there is pre_feedforward_layernorm besides"),
    "Olmo2": ({}, "there is no input_layernorm"),
    "Cohere": ({}, "there is no post_attention_layernorm"),
    "Starcoder2": ({}, "there is no mlp.gate_proj"),
    "GPTNeoX": ({}, "there is no self_attn"),
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """With random weights, the same ones each time, norms and biases too."""
    import transformers

    sizes = {name: value for name, value in (SIZES | options).items() if name != "head_dim" or value is not None}
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._attn_implementation = options.get("attn_implementation", "sdpa")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return model


def with_exact_positions(model: Any) -> Any:
    """Angles are computed in fp64, which transformers computes in fp32."""
    own = model.model.rotary_emb.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with exact():
            return own(*args, **kwargs)

    model.model.rotary_emb.forward = forward
    return model


def prompts(side: str | None = None) -> dict[str, torch.Tensor]:
    """Three rows of seven tokens; with ``side`` the second has two of padding there, the third three."""
    ids = torch.randint(3, SIZES["vocab_size"], (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :2] = mask[2, :3] = 0
    elif side == "right":
        mask[1, -2:] = mask[2, -3:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
