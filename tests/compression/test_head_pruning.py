"""Heads: what is masked, and that they really go away."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.compression.test_masks import reference
from tests.compression.test_unit_pruning import cleaned, flops, size
from torch import Tensor, nn

from zoo.compression import init_compression, redundancy_clean
from zoo.compression.attach import transforms_of
from zoo.compression.pruning.attention import FewerHeads

WHERE = "compression_training.head_pruning"


def heads(
    modules: list[str], related: list[list[str]] | None, *, num: int, ratio: float = 0.5, method: str = "l1",
    **shared: Any,
) -> dict[str, Any]:  # fmt: skip
    group = {"modules": modules, "related_modules": related, "params": {"dense_ratio": ratio}}
    section = {
        "shared_parameters": {"enabled": True, "num_heads": num, "method": method, **shared},
        "different_groups": {"h": group},
    }
    return {"compression_training": {"head_pruning": section}}


class Attention(nn.Module):
    """Grouped-query attention that knows the size of a head."""

    def __init__(self, num: int = 4, shared: int = 4, head_dim: int = 3, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.num_kv_heads, self.head_dim = num, shared, head_dim
        self.q, self.o = nn.Linear(width, num * head_dim), nn.Linear(num * head_dim, width)
        self.k, self.v = (nn.Linear(width, shared * head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.q(x).view(n, t, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (m(x).view(n, t, self.num_kv_heads, self.head_dim).transpose(1, 2) for m in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class NoSize(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim: int = self.q.out_features  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.head_dim = self.q.out_features // self.num_heads
        out = super().forward(x)
        self.head_dim = self.q.out_features
        return out


class Slopes(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.ones(4))


QKV = [["q$", "k$", "v$"]]


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_heads_of_the_largest_norm_stay(method: str) -> None:
    plain, x = Attention(), torch.randn(2, 5, 10)
    config = heads(["o$"], None, num=4, method=method)
    model = init_compression(copy.deepcopy(plain), config)
    norms = plain.o.weight.detach().abs().reshape(10, 4, 3).sum((0, 2))
    stays = torch.from_numpy(reference(norms.numpy(), 2)).repeat_interleave(3)
    wanted = copy.deepcopy(plain)
    wanted.o.weight.data *= stays
    torch.testing.assert_close(model(x), wanted(x))
    if method == "topk":
        model(x).sum().backward()
        assert model.o.weight_head_scores.shape == (4,)
        assert model.o.weight_head_scores.grad.ne(0).all()
    model = redundancy_clean(model, config)
    assert torch.equal(model.o.weight, wanted.o.weight)
    assert model.q.out_features == 12, "without related modules nothing goes"


def test_heads_go_from_queries_keys_values_and_output() -> None:
    x = torch.randn(2, 5, 10)
    clean, _ = cleaned(Attention(), heads(["o$"], QKV, num=4), x)
    assert [getattr(clean, n).out_features for n in "qkv"] == [6, 6, 6]
    assert (clean.o.in_features, clean.num_heads, clean.num_kv_heads) == (6, 2, 2)
    assert size(clean) == 3 * (10 * 6 + 6) + 6 * 10 + 10
    assert flops(clean, x) < 0.6 * flops(Attention(), x)


def test_heads_that_share_keys_and_values_go_together(caplog: pytest.LogCaptureFixture) -> None:
    model = Attention(num=6, shared=3)
    for i, norm in enumerate((3.0, 3.1, 0.1, 5.0, 0.2, 0.3)):
        model.o.weight.data[:, 3 * i : 3 * i + 3] = norm * torch.randn(10, 3).sign()
    with caplog.at_level(logging.WARNING, "zoo.compression"):
        clean, _ = cleaned(model, heads(["o$"], QKV, num=6), torch.randn(2, 5, 10))
    assert (clean.num_heads, clean.num_kv_heads, clean.k.out_features) == (4, 2, 6)
    assert f"{WHERE}.different_groups.h: 1 of the 3 heads of 'o' that are zero stay" in caplog.text


@pytest.mark.parametrize(
    ("model", "reason"),
    [(NoSize(), "says nowhere that a head has 3 elements"), (Slopes(), r"has 'slopes' of the shape \(4,\) besides")],
)
def test_what_is_not_known_of_an_attention_stays(
    model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "zoo.compression"):
        clean, _ = cleaned(model, heads(["o$"], QKV, num=4), torch.randn(2, 5, 10))
    assert clean.o.in_features == 12
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{WHERE}.different_groups.h: the heads of 'o' stay, as zeros")
    assert re.search(reason, record.getMessage()), record.getMessage()


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"batch_first": True}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True},
])  # fmt: skip
def test_torchs_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 4, **options).eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    model = init_compression(nn.ModuleDict({"a": attention}), heads(["a"], [[]], num=4))["a"]
    query = torch.randn(*((2, 3) if options.get("batch_first") else (3, 2)), 12)
    length = 4
    shape = (2, length) if options.get("batch_first") else (length, 2)
    key, value = torch.randn(*shape, options.get("kdim", 12)), torch.randn(*shape, options.get("vdim", 12))
    padding = torch.tensor([[False, False, False, True], [False, True, False, False]])
    causal = torch.randn(3, length)
    by_head = torch.randn(2 * 4, 3, length) > 1.5
    calls: list[dict[str, Any]] = [
        {}, {"need_weights": False}, {"key_padding_mask": padding}, {"attn_mask": causal, "need_weights": False},
        {"attn_mask": by_head}, {"attn_mask": causal > 1, "key_padding_mask": padding, "need_weights": False},
    ]  # fmt: skip
    with torch.no_grad():
        masked = [model(query, key, value, **call)[0] for call in calls]
        clean = redundancy_clean(
            copy.deepcopy(nn.ModuleDict({"a": model})), heads(["a"], [[]], num=4)
        )["a"]  # fmt: skip
        found = [clean(query, key, value, **call)[0] for call in calls]
    assert isinstance(clean, FewerHeads)
    assert clean.num_heads == 2
    assert clean.out_proj.weight.shape == (12, 6)
    for one, other in zip(found, masked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    weights = clean(query, key, value, average_attn_weights=False)[1]
    assert weights.shape[:2] == (2, 2)
    again = pickle.loads(pickle.dumps(clean))
    assert torch.equal(again(query, key, value)[0], clean(query, key, value)[0])
    if not options:
        single = clean(query[:, 0], key[:, 0], value[:, 0])
        torch.testing.assert_close(single[0], clean(query, key, value)[0][:, 0])


@pytest.mark.parametrize("grad", [True, False])
def test_torchs_encoder(grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    config = heads(["self_attn"], [[]], num=4, ratio=0.25)
    x, mask = torch.randn(2, 3, 8), nn.Transformer.generate_square_subsequent_mask(3)
    model = init_compression(model, config).eval()
    with torch.set_grad_enabled(grad):
        masked = model(x, mask=mask), model(x)
        clean = redundancy_clean(model, config)
        found = clean(x, mask=mask), clean(x)
    torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-5)
    assert [m.self_attn.num_heads for m in clean.layers] == [1, 1]


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_hugging_face_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 13, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**common, intermediate_size=16))
        names = (["attention.output.dense"], [["self.query", "self.key", "self.value"]])
        mlp = (["intermediate.dense"], [["layer.\\d+.output.dense"]])
    elif family == "llama":
        options = {**common, "num_key_value_heads": 4, "intermediate_size": 16}
        model = transformers.LlamaModel(transformers.LlamaConfig(**options))
        names = (["o_proj"], [["q_proj", "k_proj", "v_proj"]])
        mlp = (["gate_proj"], [["up_proj", "down_proj"]])
    else:
        model = transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=13, n_embd=24, n_layer=2, n_head=4, n_inner=16)
        )
        names = (["attn.c_proj"], [["attn.c_attn"]])
        mlp = (["mlp.c_fc"], [["mlp.c_proj"]])
    config = heads(*names, num=4)
    config["compression_training"]["row_pruning"] = {
        "shared_parameters": {"enabled": True},
        "different_groups": {"r": {"modules": mlp[0], "related_modules": mlp[1], "params": {"dense_ratio": 0.25}}},
    }
    model, ids = model.eval(), torch.arange(10).reshape(2, 5)
    before = size(model)
    init_compression(model, config)
    with torch.no_grad():
        masked = model(ids).last_hidden_state
        clean = redundancy_clean(model, config)
        found = clean(ids).last_hidden_state
    torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-5)
    attention = 4 * 24 * 12 + (0 if family == "llama" else 3 * 12)
    rows = {"bert": 12 * (2 * 24 + 1), "llama": 12 * 3 * 24, "gpt2": 12 * (2 * 24 + 1)}[family]
    assert before - size(clean) == 2 * (attention + rows)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (heads(["o$"], QKV, num=5),
         rf"{WHERE}.shared_parameters.num_heads = 5 does not divide the 12 inputs of 'o' \(Linear\), which {WHERE}"),
        (heads(["o$"], [["x$", "k$", "v$"]], num=4), r"'x' \(Linear\) has 7 outputs, and the heads are 4 of 3"),
        (heads(["mha"], [[]], num=6), r"num_heads = 6, and 'mha' \(MultiheadAttention\) has 2 heads"),
        (heads(["mha"], [["q$"]], num=2), r"'mha' \(MultiheadAttention\) has its queries, keys and values inside"),
    ],
)  # fmt: skip
def test_errors_name_section_group_and_module(config: dict[str, Any], sentence: str) -> None:
    model = Attention()
    model.x = nn.Linear(10, 7)
    model.mha = nn.MultiheadAttention(12, 2)
    with pytest.raises(ValueError, match=sentence):
        init_compression(model, config)
    assert not transforms_of(model)


def test_a_share_that_would_leave_no_head_leaves_one() -> None:
    clean, _ = cleaned(Attention(), heads(["o$"], QKV, num=4, ratio=0.01), torch.randn(2, 5, 10))
    assert clean.num_heads == 1
    assert np.isfinite(size(clean))
