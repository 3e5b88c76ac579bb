"""A transformer layer as a composition of torch's functions, with the parameters of a TransformerLayer: the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.kernels.bias_dropout_residual import reference
from zoo.nn import TransformerLayer, TransformerLayerConfig

Tensor = torch.Tensor
OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def make(dtype: torch.dtype = torch.float64, init: int = 0, **fields: Any) -> TransformerLayer:
    """A layer of no round values: biases and weights of normalisations are random too."""
    fields = {"hidden_size": 12, "heads": 3, "attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0, **fields}
    layer = TransformerLayer(TransformerLayerConfig(**fields), dtype=torch.float64)
    generator = torch.Generator().manual_seed(init)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else parameter + 0.2 * noise)
    return layer.to(dtype)


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def next_offset() -> int:
    """The place of the random words of the layer's next call, from torch's generator, which stays as it is."""
    state = torch.get_rng_state()
    offset = int(torch.randint(2**62, ()))
    torch.set_rng_state(state)
    return offset


def composed(
    config: TransformerLayerConfig, w: Mapping[str, Tensor], x: Tensor, mask: Tensor | None, offset: int | None
) -> Tensor:
    """y; ``offset``: where the random words begin, None: nothing is dropped."""

    def dropped(t: Tensor, p: float, place: int) -> Tensor:
        if offset is None:
            return t
        ones = torch.ones(t.shape, dtype=torch.float64)
        return t * reference.dropped(ones, p, config.seed or 0, offset + place).to(t.dtype)

    def normed(t: Tensor, name: str) -> Tensor:
        return F.layer_norm(t, t.shape[-1:], w[f"{name}w"], w[f"{name}b"], config.layer_norm_eps)

    batch, tokens, size = x.shape
    source = normed(x, "norm_") if config.pre_layer_norm else x
    qkv = F.linear(source, w["attn_qkvw"], w["attn_qkvb"]).view(batch, tokens, 3, config.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(size // config.heads)
    p = dropped(torch.softmax(scores if mask is None else scores + mask, -1), config.attn_dropout_ratio, 0)
    context = (p @ v).transpose(1, 2).reshape(x.shape)
    total = x + dropped(F.linear(context, w["attn_ow"], w["attn_ob"]), config.hidden_dropout_ratio, 1)
    middle = normed(total, "attn_n")
    active = F.gelu(F.linear(middle, w["inter_w"], w["inter_b"]), approximate=config.gelu)
    fed = dropped(F.linear(active, w["output_w"], w["output_b"]), config.hidden_dropout_ratio, 2)
    return total + fed if config.pre_layer_norm else normed(middle + fed, "norm_")


def results(layer: nn.Module, x: Tensor, mask: Tensor | None, dy: Tensor, *, oracle: bool = False) -> dict[str, Tensor]:
    """y, dx and the gradients of the parameters that want one, by the layer or by the oracle, of the same dropout."""
    assert isinstance(layer, TransformerLayer)
    x = x.detach().clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if oracle:
        config = layer.layer_config
        dropping = layer.training and config.attn_dropout_ratio + config.hidden_dropout_ratio > 0
        y = composed(config, parameters, x, mask, next_offset() if dropping else None)
    else:
        y = layer(x, mask)
    grads = torch.autograd.grad(y, [x, *wanted.values()], dy)
    return {"y": y.detach(), "x": grads[0], **dict(zip(wanted, grads[1:], strict=True))}
