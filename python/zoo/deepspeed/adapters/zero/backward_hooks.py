"""What programs hook into backward: before it begins, into each gradient of an output, and what it will reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


class OutputBackwardHooks:
    """Hooks on the tensors of an output; see :func:`register_output_backward_hooks`. They end with the tensors."""

    def __init__(self, once: Callable[[], Any], each: Callable[[torch.Tensor], Any] | None) -> None:
        self._once, self._each = once, each
        self._running = False
        self._handles: list[Any] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hooks on those that backward can begin at."""
        for tensor in tensors:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: torch.Tensor) -> Any:
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.reset)
            self._once()
        return None if self._each is None else self._each(gradient)

    def reset(self) -> None:
        """The next gradient is the first of a backward; each backward does it at its end by itself."""
        self._running = False

    def remove_hooks(self) -> None:
        """End them before the tensors end."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def register_output_backward_hooks(
    outputs: Any, preprocess_once_fn: Callable[[], Any],
    preprocess_per_tensor_fn: Callable[[torch.Tensor], Any] | None = None,
) -> OutputBackwardHooks:  # fmt: skip
    """Call one function when a backward from ``outputs`` begins, and one with each gradient that comes to them.

    Args:
        outputs: a tensor, or tensors in tuples, lists and mappings; what else is in them is passed over.
        preprocess_once_fn: called without arguments, once in every backward, before the other one.
        preprocess_per_tensor_fn: its argument is the gradient of a tensor; a tensor that it returns takes its place.
    """
    hooks = OutputBackwardHooks(preprocess_once_fn, preprocess_per_tensor_fn)
    hooks.add(_tensors(outputs))
    return hooks


def count_used_parameters_in_backward(parameters: Sequence[torch.nn.Parameter]) -> int:
    """How many of the parameters the backward that is running will give a gradient.

    Raises:
        RuntimeError: none is running.
    """
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            "count_used_parameters_in_backward() asks the backward that is running, and none is; call it in a hook."
        )
    wanted = [p for p in parameters if p.requires_grad]
    with torch._C.DisableTorchFunctionSubclass():  # of a partitioned parameter the graph is there, the values are not
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in wanted]
    return sum(bool(torch._C._will_engine_execute_node(node)) for node in nodes)
