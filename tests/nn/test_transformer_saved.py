"""What a transformer layer keeps for backward is what its table says, and less than its peers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.transformers_in_torch import OPTIONS, make
from tests.profiles import examples
from torch import nn

from zoo.nn import TransformerLayer, TransformerLayerConfig
from zoo.nn.transformer import kept_rows, saved_bytes

Tensor = torch.Tensor
BERT = {"hidden_size": 768, "heads": 12, "attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1}
ALL: dict[str, bool] = dict.fromkeys(OPTIONS, True)
UNIT = 2 * 128 * 768 * 4
"""Bytes of B·T·C numbers, for two sequences of 128."""


def kept_bytes(run: Callable[[], Tensor], without: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that autograd holds after a forward, without those of some tensors."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    for tensor in without:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(storages.values())


@examples(times=8)
@given(
    pre=st.booleans(), options=st.sets(st.sampled_from(OPTIONS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), batch=st.integers(1, 3),
    tokens=st.integers(1, 9), heads=st.sampled_from([1, 3]), inner=st.sampled_from([None, 5]),
    ratio=st.sampled_from([0.0, 0.1]), masked=st.booleans(), how=st.sampled_from(["plain", "autocast"]),
)  # fmt: skip
def test_it_keeps_what_the_table_says(
    pre: bool, options: set[str], dtype: torch.dtype, batch: int, tokens: int, heads: int, inner: int | None,
    ratio: float, masked: bool, how: str,
) -> None:  # fmt: skip
    """Under autocast the input is kept as it was cast; no cast copy of a weight is."""
    layer = make(
        torch.float32 if how == "autocast" else dtype, heads=heads, intermediate_size=inner, pre_layer_norm=pre,
        attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio, **dict.fromkeys(options, True),
    )  # fmt: skip
    x = torch.randn(batch, tokens, 12, dtype=layer.attn_ow.dtype, requires_grad=True)
    mask = torch.zeros(batch, 1, 1, tokens) if masked else None
    without = [*layer.parameters(), *([] if mask is None else [mask])]
    with torch.autocast("cpu", dtype, enabled=how == "autocast" and dtype is not torch.float32):
        found = kept_bytes(lambda: layer(x, mask), without)
    assert found == saved_bytes(layer.layer_config, batch, tokens, dtype)


@pytest.mark.dear
def test_units_of_bert() -> None:
    """17 with dropout, 11 with all options, beside four statistics a token; torch keeps 30, Hugging Face 24."""
    x = torch.randn(2, 128, 768, requires_grad=True)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
    torchs = kept_bytes(lambda: layer(x), layer.parameters()) / UNIT
    for options, units in (({}, 17), (ALL, 11)):
        config = TransformerLayerConfig(**BERT, pre_layer_norm=False, **options)
        statistics = sum(row.statistic for row in kept_rows(config)) / 768
        ours = TransformerLayer(config)
        found = kept_bytes(lambda layer=ours: layer(x), ours.parameters()) / UNIT
        assert found == pytest.approx(units + statistics)
        assert found <= torchs * 17 / 23
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    transformers = pytest.importorskip("transformers")
    peer = bert.BertLayer(transformers.BertConfig(attn_implementation="eager"))

    def theirs() -> Tensor:
        y = peer(x)
        return y[0] if isinstance(y, tuple) else y

    assert 23 <= kept_bytes(theirs, peer.parameters()) / UNIT < 24.1


@pytest.mark.dear
@pytest.mark.parametrize("pre", [True, False])
def test_each_option_drops_its_rows_and_an_inverted_output_is_the_next_layers_input(pre: bool) -> None:
    def per_layer(**options: bool) -> float:
        """Units that a layer more of a stack keeps."""
        config = TransformerLayerConfig(**BERT, pre_layer_norm=pre, **options)
        layers = [TransformerLayer(config) for _ in range(3)]
        x = torch.randn(2, 128, 768, requires_grad=True)
        parameters = [parameter for layer in layers for parameter in layer.parameters()]

        def run(depth: int) -> Tensor:
            y = x
            for layer in layers[:depth]:
                y = layer(y)
            return y

        few, many = (kept_bytes(lambda depth=depth: run(depth), parameters) for depth in (2, 3))
        return round((many - few) / UNIT, 1)

    plain = 16 if pre else 17
    assert per_layer() == plain
    assert per_layer(gelu_checkpoint=True) == plain - 4
    assert per_layer(attn_dropout_checkpoint=True) == plain - 2
    assert per_layer(normalize_invertible=True) == 16
    assert per_layer(**ALL) == 10


def test_nothing_is_kept_without_gradients() -> None:
    layer = make(torch.float32, attn_dropout_ratio=0.1)
    x = torch.randn(2, 5, 12)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert not layer(x).requires_grad
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        assert not layer(x).requires_grad
    assert not packed
