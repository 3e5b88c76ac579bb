"""Quantised layers as GGUF tensors, code for code.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Blocks have 32 elements of a row,
d and m are fp16:

===== ===== =============================================================== ==============================
type  bytes value                                                           grid, with half=True
===== ===== =============================================================== ==============================
Q8_0  34    d·q, q int8                                                     Uniform(bits=8)
Q4_0  18    d·(q - 8); element i < 16 low half of byte i, i + 16 high half  Uniform(bits=4)
Q4_1  20    d·q + m, halves as Q4_0                                         Uniform(bits=4, symmetric=False)
===== ===== =============================================================== ==============================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zoo.compression.post_training import Layer, Uniform

Tensor = torch.Tensor
BLOCK = 32
_NAME, _DIMS = 64, 4  # what readers (ggml's GGML_MAX_NAME, GGML_MAX_DIMS) have room for
_TYPES = {(8, True): "Q8_0", (4, True): "Q4_0", (4, False): "Q4_1"}
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def type_of(layer: Layer, name: str = "the layer") -> str:
    """The GGUF type that holds a layer exactly.

    Raises:
        ValueError: there is none; the sentence says what would have one.
    """
    found = layer.quantised
    grid = found.grid
    kind = _TYPES.get((grid.bits, grid.symmetric)) if isinstance(grid, Uniform) else None
    if kind is None or not isinstance(grid, Uniform) or not grid.half or found.group_size != BLOCK or layer.low_rank:
        raise ValueError(
            f"{name} has the grid {grid} in groups of {found.group_size}"
            f"{' and a low-rank part' if layer.low_rank else ''}, for which GGUF has no type: it has groups of {BLOCK} "
            "with fp16 numbers, Uniform(bits=8, half=True), Uniform(bits=4, half=True) and Uniform(bits=4, "
            "symmetric=False, half=True)."
        )
    return kind


def blocks_of(layer: Layer, name: str = "the layer") -> Tensor:
    """(N, K / 32 · bytes of a block) uint8.

    Raises:
        ValueError: see :func:`type_of`.
    """
    kind, found = type_of(layer, name), layer.quantised
    codes = found.codes.reshape(-1, BLOCK)
    heads = [_bytes(p.reshape(-1, 1).half()) for p in found.params]
    if kind == "Q8_0":
        body = codes.to(torch.int8).view(torch.uint8)
    else:
        stored = (codes + 8 if kind == "Q4_0" else codes).to(torch.uint8)
        body = stored[:, : BLOCK // 2] | stored[:, BLOCK // 2 :] << 4
    return torch.cat([*heads, body], 1).reshape(found.codes.shape[0], -1)


def write_gguf(
    path: str | os.PathLike[str], architecture: str, tensors: Mapping[str, Tensor | Layer],
    metadata: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Writes a GGUF file, whole or not at all. Needs the package ``gguf``.

    Names and the order of rows are those of the format: a Llama's queries and keys lie there otherwise than in torch.

    Args:
        architecture: "llama", for instance.
        tensors: fp32, fp16 or bf16 tensors as they are, and layers of :func:`zoo.compression.post_training.quantise`.
        metadata: values by key; bool, int, float, str, and lists of one of these.

    Raises:
        ValueError: a tensor or value that the format has nothing for, before anything is written.
    """
    import gguf

    place = Path(path)
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    prepared = {}
    if "general.architecture" in (metadata or {}):
        raise ValueError("general.architecture is among the metadata; give it as the argument architecture.")
    for name, value in tensors.items():
        if len(name.encode()) >= _NAME or (not isinstance(value, Layer) and (value.dim() > _DIMS or value.is_meta)):
            raise ValueError(
                f"{name} cannot be written: a GGUF file has names of less than {_NAME} bytes, and tensors of at most "
                f'{_DIMS} dimensions, not on "meta".'
            )
        if isinstance(value, Layer):
            prepared[name] = blocks_of(value, name).cpu().numpy(), type_of(value, name)
        elif value.dtype not in _PLAIN:
            raise ValueError(f"{name} is {value.dtype}; a GGUF file gets fp32, fp16 and bf16 tensors, or layers.")
        else:
            plain = value.detach().cpu().contiguous()
            raw = plain.view(torch.int16).numpy().view("uint8") if value.dtype is torch.bfloat16 else plain.numpy()
            prepared[name] = raw, _PLAIN[value.dtype]
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, (data, kind) in prepared.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def _add(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if type(value) in adders:
        if type(value) is int and not 0 <= value < 1 << 32:
            raise ValueError(f"the value {key!r} is {value}; whole numbers must lie within 0 and 2^32 - 1.")
        adders[type(value)](key, value)
    elif isinstance(value, list) and value and len({type(v) for v in value}) == 1 and type(value[0]) in adders:
        if type(value[0]) is int and not all(-(1 << 31) <= v < 1 << 31 for v in value):
            raise ValueError(f"the value {key!r} has {max(value, key=abs)}; lists have whole numbers of 32 bits.")
        writer.add_array(key, value)
    else:
        raise ValueError(
            f"the value {key!r} is {value!r}; it must be a bool, int, float or str, or a list of one kind."
        )
