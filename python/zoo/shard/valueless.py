"""What reads no values of a tensor: its metadata, how it is shown, and where its memory would be."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["ALLOWED_WHEN_PARTITIONED", "MAKES", "UNREAD", "VIEWS", "look_at"]

_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_DATA: Any = torch.Tensor.data

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "names", "grad_fn", "itemsize", "nbytes", "_version", "output_nr", "retains_grad",
    "is_nested", "_backward_hooks", "is_xla", "is_xpu", "is_mkldnn", "is_mps", "is_mtia", "is_maia", "is_ipu",
    "is_vulkan", "is_sparse_csr",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "storage_offset", "ndimension",
    "get_device", "__len__", "is_inference", "__bool__", "is_signed", "is_conj", "is_neg",
    "is_distributed", "dim_order", "contiguous", "has_names", "is_coalesced",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided",
)  # fmt: skip
_FUNCTIONS = (
    torch._has_compatible_shallow_copy_type,  # modules compare types before they assign `data`
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type, torch.get_device,
    torch.is_signed, torch.is_conj, torch.is_neg, torch.is_inference, torch.is_distributed,
)  # fmt: skip


def _allowed() -> frozenset[Any]:
    # Hashing a slot wrapper is stable: torch passes these very objects to __torch_function__.
    found: list[Any] = [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    found.append(_REQUIRES_GRAD.__set__)
    found += [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name) and name != "__bool__"]
    return frozenset([*found, *_FUNCTIONS])


ALLOWED_WHEN_PARTITIONED = _allowed()
"""What reads metadata only."""
VIEWS = frozenset({_DATA.__get__, torch.Tensor.detach, torch.detach})
"""What gives the same values without a graph."""
MAKES = frozenset(
    {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
    | {getattr(torch.Tensor, name) for name in _METHODS if name.startswith("new_")}
)
"""What makes another tensor by the dtype, device and shape of this one."""
UNREAD: Any = object()
"""What :func:`look_at` gives for a function that reads values."""

# As of a tensor without memory: no address, a storage of the right size that gives no values.
_OF_MEMORY = frozenset(
    getattr(torch.Tensor, name)
    for name in ("data_ptr", "const_data_ptr", "is_pinned", "untyped_storage", "storage", "_typed_storage")
    if hasattr(torch.Tensor, name)
)


def look_at(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch that reads no values of its first argument, a tensor without values;
    :data:`UNREAD` for any other function."""
    tensor = args[0] if args else None
    if func in ALLOWED_WHEN_PARTITIONED or (func is torch.Tensor.type and len(args) == 1 and not kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not isinstance(tensor, torch.Tensor):
        return UNREAD
    if func in _OF_MEMORY:
        return func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    if func is torch.Tensor.is_shared:
        return bool(tensor.is_cuda)
    if func in (torch.Tensor.is_same_size, torch.is_same_size):
        return tensor.shape == (args[1] if len(args) > 1 else kwargs["other"]).shape
    if func is torch.Tensor.__format__ and args[1:] in ((), ("",)):
        return str(tensor)
    if func is torch.Tensor.__repr__:
        grad = ", requires_grad=True" if tensor.requires_grad else ""
        return (
            f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}{grad}), of "
            "which this rank holds a shard"
        )
    return UNREAD
