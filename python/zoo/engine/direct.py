"""``loss.backward()`` on what an engine returned: the gradient is that of ``engine.backward(loss)``.

With G micro-batches in a step, ``engine.backward`` goes backward from loss / G. A loss that goes backward by itself is
not divided, so its gradient is: by G where it enters the model from the outputs, and times G again where it leaves
through inputs that need one (they may be outputs of an earlier call, where it is divided then).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.zero.runtime.outputs import tensors_in


def enter(arguments: Any, factor: Callable[[], float]) -> tuple[Any, dict[int, torch.Tensor]]:
    """The arguments with views of the tensors that need a gradient, which is divided by ``factor()``; and the views."""
    views: dict[int, torch.Tensor] = {}

    def view(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        seen = tensor.view_as(tensor)
        _multiply(seen, lambda: 1.0 / factor())
        views[id(seen)] = seen
        return seen

    return _mapped(arguments, view), views


def leave(outputs: Any, factor: Callable[[], float], entered: dict[int, torch.Tensor]) -> Any:
    """The outputs; gradients that come to their tensors are multiplied by ``factor()``, asked in backward.

    Args:
        entered: views that :func:`enter` made; one that is an output as well becomes another view.
    """
    if entered:
        outputs = _mapped(outputs, lambda tensor: tensor.view_as(tensor) if id(tensor) in entered else tensor)
    for tensor in tensors_in(outputs):
        if tensor.requires_grad and id(tensor) not in entered:
            _multiply(tensor, factor)
    return outputs


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def _multiply(tensor: torch.Tensor, factor: Callable[[], float]) -> None:
    def scaled(gradient: torch.Tensor) -> torch.Tensor | None:
        number = factor()
        return None if number == 1.0 else gradient * number

    tensor.register_hook(scaled)  # type: ignore[no-untyped-call]
