"""``deepspeed.inference.quantization``: tensors in codes of 8 or 4 bits with a step and a least value for each group,
and the layers of a model that are packed by their names.

    q = round((x - lo) · s),  s = (2^bits - 1) / (max x - lo),  lo = min x,  of each group

Groups are ``group_size`` elements along ``group_dim``. The tensor (…, K, …) of G groups gives q, uint8, of its shape,
two codes of 4 bits a byte along the last dim, the first in the high half; and s and lo (…, G, 1, …) in its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters import asserting
from zoo.deepspeed.adapters.inference.codes import pack_named
from zoo.kernels.packed_linear import pack_weight
from zoo.nn import PackedLinear

Tensor = torch.Tensor


class _Groups:
    """Which elements share a step."""

    @asserting
    def __init__(self, config: Mapping[str, Any]) -> None:
        missing = [key for key in ("num_bits", "group_size", "group_dim", "symmetric") if key not in config]
        if missing:
            raise ConfigError(f"the configuration of codes lacks {', '.join(missing)}; it is {dict(config)}.")
        if config["num_bits"] not in (4, 8):
            raise ConfigError(f"num_bits={config['num_bits']}; codes have 4 or 8 bits.")
        if config["symmetric"]:
            raise ConfigError("symmetric=True: codes here count from the least value of a group; set it to False.")
        self.config = config

    @property
    def most(self) -> int:
        """The largest code."""
        return int(2 ** self.config["num_bits"]) - 1

    def grouped(self, x: Tensor) -> tuple[Tensor, int]:
        """(…, G, group_size, …), and the dim of the last."""
        dim, size = self.config["group_dim"] % x.dim(), self.config["group_size"]
        if x.shape[dim] % size:
            raise ConfigError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} elements along dim {dim}, which are no whole "
                f"number of groups of {size}."
            )
        return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim + 1


class Quantizer(_Groups):
    """Makes codes.

    Args:
        config: ``num_bits`` (8 or 4), ``group_size``, ``group_dim``, ``symmetric`` (False).
    """

    @asserting
    def quantize(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(q, s, lo); a group of equal elements has s = 1, and none a larger one than its dtype holds."""
        x, dim = self.grouped(tensor)
        low = x.amin(dim, keepdim=True)
        span = x.amax(dim, keepdim=True) - low
        scale = torch.where(span > 0, self.most / span, 1.0).clamp(max=torch.finfo(tensor.dtype).max)
        codes = ((x - low) * scale).float().round().clamp(0, self.most).to(torch.uint8).reshape(tensor.shape)
        if self.config["num_bits"] == 4:
            if codes.shape[-1] % 2:
                raise ConfigError(
                    f"codes of 4 bits are two a byte, and the last dim has {codes.shape[-1]}; give pairs."
                )
            codes = codes[..., 0::2] << 4 | codes[..., 1::2]
        return codes, scale, low


class DeQuantizer(_Groups):
    """Makes numbers of codes: x = q / s + lo.

    Args:
        config: as of :class:`Quantizer`. dtype: of the numbers.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype = dtype

    @asserting
    def dequantize(self, tensor: Tensor, quant_scale: Tensor, quant_min: Tensor) -> Tensor:
        """The numbers, of the shape that was quantised."""
        if self.config["num_bits"] == 4:
            tensor = torch.stack([tensor >> 4, tensor & 15], dim=-1).flatten(-2)
        x, _ = self.grouped(tensor)
        return (x.to(self.dtype) / quant_scale.to(self.dtype) + quant_min.to(self.dtype)).reshape(tensor.shape)


class QuantizedLinear(PackedLinear):
    """:class:`zoo.nn.PackedLinear` of a linear layer.

    Args:
        config: as of :class:`Quantizer`; groups lie along rows, dim 1, and have a multiple of 16 elements.
        pre_quant_layer: the layer, which stays as it is.
    """

    @asserting
    def __init__(self, config: Mapping[str, Any], pre_quant_layer: nn.Linear) -> None:
        _Groups(config)
        if config["group_dim"] not in (1, -1):
            raise ConfigError(f"group_dim={config['group_dim']}; groups of a linear layer lie along rows, dim 1.")
        weight = pack_weight(
            pre_quant_layer.weight.detach(), bits=config["num_bits"], group_size=config["group_size"], symmetric=False
        )
        super().__init__(weight, pre_quant_layer.bias)
        self.config = config


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """The model with packed layers where ``weight_quantization.post_init_quant`` of a document has a part of their
    name; as ``quant.weight.post_init_quant`` of ``init_inference``.

    Raises:
        ConfigError: there is no such section, a part of a name is in none, or two of them are in one.
    """
    section = ds_config.get("weight_quantization")
    if not isinstance(section, Mapping) or not section.get("post_init_quant"):
        raise ConfigError(
            "the document has no weight_quantization.post_init_quant, which says what is packed: {'fc': {'num_bits': "
            "4, 'group_size': 64, 'group_dim': 1, 'symmetric': False}}."
        )
    pack_named(model, section["post_init_quant"])
    return model


init_group_wise_weight_quantization = asserting(_init_group_wise_weight_quantization)
