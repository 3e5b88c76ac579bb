"""Operations whose results are kept, so that they are not computed again: selective checkpointing by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zoo.registry import nearest

__all__ = ["GROUPS", "contexts_of", "operations"]

GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten._scaled_mm"),
    "convolution": ("aten.convolution", "aten._convolution"),
    "attention": (
        "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
}  # fmt: skip
"""Names for several operations at once: those that take most of the time."""


def operations(names: Iterable[str]) -> list[Any]:
    """Every overload of the operations of these names: a group, or "namespace.operation".

    Raises:
        ValueError: there is no such operation.
    """
    found: list[Any] = []
    for name in names:
        for one in GROUPS.get(name, (name,)):
            packet = _packet(one)
            if packet is None and name in GROUPS:
                continue  # of another version of torch
            if packet is None:
                raise ValueError(f"save has {name!r}: {_hint(name)}")
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


def contexts_of(names: Iterable[str]) -> Callable[[], Any]:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint``: results of these operations are kept, nothing else is.

    Kept results stay on their device, whatever the storage of arguments. Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models", section 5 (which keeps all but attention).

    Raises:
        ValueError: there is no such operation.
    """
    return functools.partial(create_selective_checkpoint_contexts, operations(names))


def _packet(name: str) -> Any:
    namespace, _, operation = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), operation)
    except (AttributeError, RuntimeError):
        return None
    return packet if hasattr(packet, "overloads") else None


def _hint(name: str) -> str:
    namespace, _, operation = name.partition(".")
    guess = nearest(name, GROUPS) or (nearest(operation, dir(torch.ops.aten)) if namespace == "aten" else None)
    known = f"did you mean {guess!r}? " if guess else ""
    return f"no such operation; {known}Allowed: {', '.join(GROUPS)}, or names such as 'aten.mm'."
