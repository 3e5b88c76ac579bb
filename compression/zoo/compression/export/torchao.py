"""Quantised layers as torchao's tensor subclasses, code for code, and back. Needs ``torchao``, from 0.18 on.

c are zoo's codes, s scales, lo minima; q torchao's codes, of b bits, z its zero points:

====== ========================== ============================ ======================================================
layout what                       class                        value
====== ========================== ============================ ======================================================
plain  8 bits, symmetric          ``Int8Tensor``               s·q, q = c
plain  2 to 8 bits otherwise      ``IntxUnpackedToInt8Tensor`` s·(q - z): q = c and z = 0; with minima q = c - 2^(b-1)
                                                               and z = -2^(b-1) - lo/s
packed 4 bits                     ``Int4Tensor``               s·q + z: q = c and z = 0; q = c - 8 and z = lo + 8·s
cpu    4 bits in groups of 32, 64 ``Int4OpaqueTensor``         as packed, in the order of torch's kernel for CPUs
       or 128
====== ========================== ============================ ======================================================

``packed`` computes on a GPU, with the package ``mslk`` and bf16; ``cpu`` on a CPU and cannot be read back; ``plain``
everywhere, on a weight that is made anew for each call, a byte a code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zoo.compression.attach import class_of
from zoo.compression.packed import PackedLinear, packed_of, put
from zoo.compression.packed.linear import more_than_linear, with_transforms_of
from zoo.compression.post_training import Layer, Quantised, Uniform
from zoo.kernels.packed_linear import unpack

Tensor = torch.Tensor
Layout = Literal["plain", "packed", "cpu"]
LAYOUTS = ("plain", "packed", "cpu")
_CPU_GROUPS = (32, 64, 128)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def to_torchao(
    model: nn.Module, layers: Mapping[str, Layer] | None = None, *, layout: Layout = "plain",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:  # fmt: skip
    """Puts an ``nn.Linear`` with a weight of torchao in the place of each packed or quantised layer. What changes their
    inputs and outputs (:func:`~zoo.compression.post_training.tokens.quantise_inputs`) stays, and files do not keep it.

    Args:
        model: itself changed.
        layers: of :func:`zoo.compression.post_training.quantise`, of any bits; None: the packed layers of the model.
        layout: see above.
        dtype: of the weight, fp32, bf16 or fp16: torchao multiplies inputs of this dtype. Values are zoo's, rounded to
            it; with minima z is rounded to it too, so that they move by up to some ε·(\\|lo\\| + 2^b·s).

    Returns:
        The model.

    Raises:
        ImportError: torchao is not installed.
        ValueError: a layer that torchao has no tensor for, or that has hooks or a forward of its own, named, before
            anything is changed.
    """
    if layout not in LAYOUTS or dtype not in _FLOATS:
        raise ValueError(
            f"layout={layout!r}, dtype={dtype}; the layout must be one of {', '.join(LAYOUTS)}, the dtype "
            "torch.float32, torch.bfloat16 or torch.float16."
        )
    made = {}
    for name, found in (_packed_in(model) if layers is None else layers).items():
        module = model.get_submodule(name)
        if why := more_than_linear(model, module):
            raise ValueError(f"{name} is a {class_of(module).__name__}{why}.")
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        linear = _linear(tensor_of(found, name, layout=layout, dtype=dtype), bias, module.training)
        made[name] = with_transforms_of(module, linear, name)
    return put(model, made)


def from_torchao(model: nn.Module) -> nn.Module:
    """Puts a :class:`PackedLinear` in the place of each ``nn.Linear`` whose weight is one of torchao's of 8 or 4 bits.

    Weight-only ``Int8Tensor``, ``IntxUnpackedToInt8Tensor`` and ``Int4Tensor``, with the same codes and scales; minima
    are computed, (-2^(b-1) - z)·s or z - 8·s in fp32. What changes the layers' inputs and outputs stays.

    Args:
        model: itself changed.

    Returns:
        The model.

    Raises:
        ImportError: torchao is not installed.
        ValueError: a weight of torchao of another kind, or a layer with hooks or a forward of its own, named, before
            anything is changed.
    """
    base = _torchao().utils.TorchAOBaseTensor
    made = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, base):
            found = packed_of(Layer(quantised=quantised_of(module.weight, name)), module.bias, name)
            if why := more_than_linear(model, module):
                raise ValueError(f"{name} is a {class_of(module).__name__}{why}.")
            made[name] = with_transforms_of(module, found.train(module.training), name)
    return put(model, made)


def tensor_of(layer: Layer, name: str = "the layer", *, layout: Layout = "plain", dtype: torch.dtype) -> Tensor:
    """The weight of :func:`to_torchao`, which has the arguments and errors."""
    found, grid = layer.quantised, layer.quantised.grid
    if not isinstance(grid, Uniform) or layer.low_rank is not None:
        raise ValueError(
            f"{name} has the grid {grid}{' and a low-rank part' if layer.low_rank else ''}; torchao holds equal steps "
            "of 2 to 8 bits and nothing besides."
        )
    if layout != "plain" and grid.bits != 4:
        raise ValueError(f"{name} has {grid.bits} bits; the layout {layout!r} is for 4, layout='plain' for others.")
    size = found.group_size
    if layout == "cpu" and (size not in _CPU_GROUPS or found.codes.device.type != "cpu"):
        raise ValueError(
            f"{name} has groups of {size} on {found.codes.device.type}; torch's kernel of 4 bits for CPUs has groups "
            f"of {', '.join(map(str, _CPU_GROUPS))} on the CPU. layout='plain' takes any."
        )
    if layout == "packed":
        return _int4(found, dtype)
    return _opaque(found, dtype) if layout == "cpu" else _plain(found, grid, dtype)


def quantised_of(weight: Any, name: str = "the layer") -> Quantised:
    """The codes of a weight of torchao. Errors are those of :func:`from_torchao`."""
    q = _torchao().quantization
    if isinstance(weight, q.Int8Tensor):
        plain = all(t is None for t in (weight.act_quant_kwargs, weight.act_quant_scale, weight.act_pre_scale))
        bits, codes, scale, zero = 8, weight.qdata, weight.scale, weight.zero_point
    elif isinstance(weight, q.IntxUnpackedToInt8Tensor):
        plain = weight.activation_quantization is None
        bits = int(str(weight.target_dtype).removeprefix("torch.int"))
        codes, scale, zero = weight.qdata, weight.scale, weight.zero_point
    elif isinstance(weight, q.Int4Tensor):
        plain = weight.act_pre_scale is None and weight.activation_dtype is torch.bfloat16
        bits, codes, scale, zero = 4, _signed(weight.qdata), weight.scale.T, weight.zero_point.T
    else:
        raise ValueError(
            f"{name} has a weight of {type(weight).__name__}, whose codes are not read here; Int8Tensor, "
            "IntxUnpackedToInt8Tensor and Int4Tensor are. Quantise with one of their layouts."
        )
    block = tuple(weight.block_size)
    if not plain or len(block) != 2 or block[0] != 1:
        raise ValueError(
            f"{name} has a {type(weight).__name__} in blocks of {block}"
            f"{'' if plain else ' that rounds or scales inputs too'}; only weights in groups of a row are read, of "
            "layers that leave inputs as they are."
        )
    symmetric = zero is None or not bool((zero != 0).any())
    rows, columns = codes.shape
    shape = (rows, columns // block[1])
    scale = scale.float().reshape(shape).contiguous()
    if symmetric and not (bits == 8 and bool((codes == -128).any())):  # of which kernels have no symmetric code
        return Quantised(grid=Uniform(bits=bits), codes=codes.short(), params=(scale,), group_size=block[1])
    zero = torch.zeros(shape, device=scale.device) if zero is None else zero.reshape(shape)
    least, zero, step = -(1 << (bits - 1)), zero.double(), scale.double()
    low = (zero + least * step if isinstance(weight, q.Int4Tensor) else (least - zero) * step).float()
    return Quantised(
        grid=Uniform(bits=bits, symmetric=False), codes=codes.short() - least, params=(scale, low), group_size=block[1]
    )


def save_torchao(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the ``state_dict`` of a model with weights of torchao to a safetensors file, in torchao's own layout of
    such files; no pickles. A file of that name is replaced, whole or not at all.

    Raises:
        ImportError: torchao is not installed.
        ValueError: a tensor that torchao has no place in a file for, such as those of ``layout="cpu"``.
    """
    from safetensors.torch import save_file

    files = _torchao().prototype.safetensors.safetensors_support
    state = {name: value.detach() for name, value in model.state_dict().items()}
    if top := [name for name in state if "." not in name]:
        raise ValueError(f"the model has the tensors {top} itself; torchao writes those of modules inside of a model.")
    try:
        tensors, about = files.flatten_tensor_state_dict(state)
    except ValueError as error:
        raise ValueError(f"torchao writes no such file: {error}. The layouts plain and packed have one.") from error
    place = Path(path)
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial, metadata=about)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


def load_torchao(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Weights of torchao from a file of :func:`save_torchao` into a model of the same architecture, on "meta" too.

    Raises:
        ImportError: torchao is not installed.
        ValueError: a file that is not of torchao, or of another model.
    """
    from safetensors import SafetensorError, safe_open

    files, name = _torchao().prototype.safetensors.safetensors_support, Path(path).name
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            state, rest = files.unflatten_tensor_state_dict(tensors, file.metadata() or {})
        if rest:
            raise ValueError(f"nothing says what {sorted(rest)[:3]} are")
        model.load_state_dict(state, assign=True)
    except (AssertionError, AttributeError, KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no file of torchao's weights of this model: {error}") from error
    return model


def _torchao() -> Any:
    try:
        import torchao
        import torchao.prototype.quantization.int4
        import torchao.prototype.safetensors.safetensors_support
        import torchao.quantization
        import torchao.utils
    except ImportError as error:
        raise ImportError(
            f"torchao 0.18 or newer is needed, and importing it failed: {error}. Install it: pip install "
            "'zoo-compression[torchao]'."
        ) from error
    return torchao


def _packed_in(model: nn.Module) -> dict[str, Layer]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    if not found:
        raise ValueError("the model has no packed layer, and no layers were given; see pack_model, or give layers=....")
    return {name: _layer_of(module) for name, module in found.items()}


def _layer_of(module: PackedLinear) -> Layer:
    q, scales, minima = unpack(module.packed)
    shape, symmetric = (module.out_features, module.in_features), minima is None
    if module.bits == 4:
        codes = _signed(q.view(torch.int8).view(shape[0], -1))
        codes = codes if symmetric else codes & 15
    else:
        codes = q.view(shape)
    groups = (shape[0], shape[1] // module.group_size)
    params = tuple(p.view(groups) for p in (scales, minima) if p is not None)
    quantised = Quantised(
        grid=Uniform(bits=module.bits, symmetric=symmetric), codes=codes.short(), params=params,
        group_size=module.group_size,
    )  # fmt: skip
    thin = None if module.left is None or module.right is None else (module.left, module.right)
    return Layer(quantised=quantised, low_rank=thin)


def _signed(q: Tensor) -> Tensor:
    """(N, K/2) int8 of two codes each, the even column in the low half → (N, K) int8 of -8 to 7."""
    return torch.stack([q << 4 >> 4, q >> 4], -1).flatten(1)


def _plain(found: Quantised, grid: Uniform, dtype: torch.dtype) -> Tensor:
    q, block = _torchao().quantization, [1, found.group_size]
    if grid.symmetric and grid.bits == 8:
        whole: Tensor = q.Int8Tensor(found.codes.to(torch.int8), found.params[0], block, dtype)
        return whole
    kind = getattr(torch, f"int{grid.bits}")
    if grid.symmetric:
        codes, scale = found.codes.to(torch.int8), found.params[0]
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        least = -(1 << (grid.bits - 1))
        scale, low = found.params
        # Groups of equal elements have no step: one code, and a scale that is their value.
        flat = scale == 0
        zero = torch.where(flat, least - 1.0, least - low / torch.where(flat, 1.0, scale))
        codes, scale = (found.codes + least).to(torch.int8), torch.where(flat, low, scale)
    made: Tensor = q.IntxUnpackedToInt8Tensor(codes, scale, zero, kind, tuple(block), dtype, None)
    return made


def _centred(found: Quantised, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q in -8 to 7, (N, K), and s and z, (K / group size, N), of s·q + z."""
    scale = found.params[0]
    if len(found.params) == 1:
        return found.codes, scale.T.to(dtype), torch.zeros_like(scale.T, dtype=dtype)
    return found.codes - 8, scale.T.to(dtype), (found.params[1] + 8 * scale).T.to(dtype)


def _int4(found: Quantised, dtype: torch.dtype) -> Tensor:
    codes, scale, zero = _centred(found, dtype)
    pairs = (codes[:, 0::2] & 15 | codes[:, 1::2] << 4).to(torch.int8)
    made: Tensor = _torchao().quantization.Int4Tensor(
        pairs.contiguous(), scale.contiguous(), zero.contiguous(), [1, found.group_size], found.codes.shape
    )
    return made


def _opaque(found: Quantised, dtype: torch.dtype) -> Tensor:
    codes, scale, zero = _centred(found, dtype)
    ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).int().contiguous(), 1)
    made: Tensor = _torchao().prototype.quantization.int4.Int4OpaqueTensor(
        ordered, torch.stack([scale, zero], -1).contiguous(), [1, found.group_size], found.codes.shape
    )
    return made


def _linear(weight: Tensor, bias: Tensor | None, training: bool) -> nn.Linear:
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, bias=False, device="meta").train(training)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=bias.requires_grad)
    return made
