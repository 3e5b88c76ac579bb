"""What the techniques that prune know of layers: which dim of a weight is outputs, which inputs."""

from __future__ import annotations

from typing import TypeGuard

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from zoo.compression.attach import class_of
from zoo.compression.place import whole_shape

BatchNorm = _BatchNorm
_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    _BatchNorm, nn.SyncBatchNorm,
)  # fmt: skip


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in Hugging Face's transformers, "Conv1D", whose weight is (in, out)."""
    weight = module._parameters.get("weight")
    return class_of(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight is not None and weight.dim() == 2


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, of either orientation."""
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def is_convolution(module: nn.Module) -> TypeGuard[_ConvNd]:
    """Whether it is a convolution, transposed or not."""
    return isinstance(module, _ConvNd)


def is_plain(module: nn.Module) -> bool:
    """Whether the forward is that of the layer that it is, and not one that a subclass has written."""
    if is_transposed_linear(module):
        return True
    forward = class_of(module).forward
    return any(forward is kind.forward for kind in _LAYERS if isinstance(module, kind))


def out_dim_of(module: nn.Module) -> int:
    """The dim of its weight along which outputs are; inputs are along the other one of 0 and 1."""
    return 1 if is_transposed_linear(module) or isinstance(module, _ConvTransposeNd) else 0


def outputs_of(module: nn.Module) -> int:
    """How many outputs (units, channels) it has; of one that is split along mesh axes those of the whole."""
    weight = module._parameters["weight"]
    if weight is None:
        raise AssertionError(f"a {class_of(module).__name__} without a weight is no layer")
    return whole_shape(weight)[out_dim_of(module)] * (module.groups if isinstance(module, _ConvTransposeNd) else 1)


def inputs_of(module: nn.Module) -> int:
    """How many inputs (units, channels) it has; of one that is split along mesh axes those of the whole."""
    weight = module._parameters["weight"]
    if weight is None:
        raise AssertionError(f"a {class_of(module).__name__} without a weight is no layer")
    grouped = module.groups if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd) else 1
    return whole_shape(weight)[1 - out_dim_of(module)] * grouped
