"""The bytes of a tensor, checked."""

from __future__ import annotations

import torch


def num_bytes_of(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def memory_of(tensor: torch.Tensor, *, verb: str, gpus: bool = False) -> tuple[int, int]:
    """Address and size in bytes of a tensor that can be transferred as it is.

    Args:
        gpus: a tensor of a GPU can be.

    Raises:
        TypeError: not a tensor.
        ValueError: on a device that is not reached, not dense, not contiguous, without memory or with less than its
            elements need, or its values are not what is stored.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cannot {verb} a {type(tensor).__name__}; give a torch.Tensor")
    if tensor.device.type != "cpu" and not (gpus and tensor.device.type == "cuda"):
        allowed, more = (
            ("the CPU and CUDA", "") if gpus else ("the CPU", ", or ask for GPUDirect Storage (use_gds=True)")
        )
        raise ValueError(
            f"cannot {verb} a tensor on {tensor.device}; allowed is {allowed}: copy it through a buffer of a pool "
            f"(handle.empty){more}"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"cannot {verb} a tensor of layout {tensor.layout}; allowed is torch.strided")
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot {verb} a non-contiguous tensor (shape {tuple(tensor.shape)}, stride {tensor.stride()}); "
            f"{verb} tensor.contiguous(), or a contiguous buffer and copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"cannot {verb} a lazily conjugated or negated view; call tensor.resolve_conj().resolve_neg() first"
        )
    size = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if size and not address:
        raise ValueError(
            f"cannot {verb} a tensor of shape {tuple(tensor.shape)} that has no memory (its storage is freed)"
        )
    _check_storage(tensor, address, size)
    return address, size


def _check_storage(tensor: torch.Tensor, address: int, size: int) -> None:
    """A transfer would go on in memory that is not the tensor's."""
    storage = tensor.untyped_storage()
    left = storage.data_ptr() + storage.nbytes() - address
    if size > left:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} should have {size} bytes, and its storage has "
            f"{max(left, 0)} for it: it was made smaller, or an element has less than a byte; give a uint8 tensor with "
            "the bytes that there are"
        )


def mark_changed(tensor: torch.Tensor) -> None:
    """Let autograd know that a read changes the tensor, as any in-place operation does."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
