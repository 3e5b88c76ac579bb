"""Models of transformers for every family: small, with random weights, heads that do not divide among them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

COMMON = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 22, "vocab_size": 53}
GROUPED = {**COMMON, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
GPT = {"vocab_size": 53, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 32}
FALCON = {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 9, "bias": True}
EXPERTS = {"moe_intermediate_size": 10, "num_experts_per_tok": 2, "experts_implementation": "eager"}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**COMMON, "num_attention_heads": 6}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 53, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
                    {**COMMON, **EXPERTS, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 12,
                     "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                     "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    "deepseek_v3-direct": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
                           {**COMMON, **EXPERTS, "num_attention_heads": 6, "num_key_value_heads": 6,
                            "q_lora_rank": None, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                            "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                            "first_k_dense_replace": 0}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                   {"vocab_size": 53, "dim": 48, "n_layers": 2, "n_heads": 6, "hidden_dim": 22}),
    "falcon-one": ("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon-heads": ("FalconForCausalLM", "FalconConfig",
                     {**FALCON, "multi_query": False, "alibi": True, "parallel_attn": False}),
    "falcon-groups": ("FalconForCausalLM", "FalconConfig",
                      {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "sliding_window": 3}),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextConfig",
                    {**GROUPED, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig",
                {"vocab_size": 53, "hidden_size": 48, "num_layers": 2, "num_heads": 6, "window_size": 3,
                 "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON, "num_attention_heads": 6}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig",
                {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager",
                 "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
                 "attn_implementation": "eager", "max_position_embeddings": 32,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 3}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
                {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}),
    "opt": ("OPTForCausalLM", "OPTConfig",
            {"vocab_size": 53, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_dim": 22,
             "word_embed_proj_dim": 24, "max_position_embeddings": 32}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "max_position_embeddings": 32}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                  {**GROUPED, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 14,
                   "mlp_only_layers": [1]}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**GROUPED, **EXPERTS, "num_experts": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 53, "d_model": 48, "d_kv": 4, "d_ff": 22, "num_layers": 2, "num_heads": 6}),
    "t5-gated": ("T5ForConditionalGeneration", "T5Config",
                 {"vocab_size": 53, "d_model": 48, "d_kv": 4, "d_ff": 22, "num_layers": 2, "num_heads": 6,
                  "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def config_of(name: str, **more: Any) -> Any:
    _, config, given = FAMILIES[name]
    tokens = {"decoder_start_token_id": 0} if name.startswith("t5") else NO_TOKENS
    return getattr(transformers, config)(**{**tokens, **given, **more})


def class_of(name: str) -> Any:
    return getattr(transformers, FAMILIES[name][0])


def model_of(name: str, **more: Any) -> nn.Module:
    """In fp64, random: the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = class_of(name)(config_of(name, **more)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return model
