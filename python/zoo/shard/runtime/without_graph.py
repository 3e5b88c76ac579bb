"""A backward of which this rank has nothing: its loss has no graph, or one that leads to no parameter of the model.

Other ranks' losses may lead to all of them, and their backwards gather and reduce with this rank. So it goes through
the same with zeros. A loss without a graph is an error all the same, which the other ranks hear of in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zoo.shard.runtime.backward import Backward


class NoGraphError(RuntimeError):
    """Backward of a loss without a graph; ``told``: the other ranks go on, and hear of it in the next step."""

    def __init__(self, rank: int, *, told: bool) -> None:
        super().__init__(
            f"the loss of rank {rank} does not require grad and does not have a grad_fn: it was made under no_grad(), "
            "detached, or of constants alone, so that there is nothing to go backward through. Compute it from the "
            "model's output, or leave the backward out on all ranks."
        )
        self.told = told


def go_backward(
    backward: Backward, loss: torch.Tensor, scaled: Callable[[torch.Tensor], torch.Tensor], *,
    retain_graph: bool = False, joins: bool = True,
) -> None:  # fmt: skip
    """``scaled(loss).backward()``, together with the other ranks wherever the loss leads to.

    Args:
        scaled: multiplies by the loss scale.
        joins: the next step compares what ranks have refused; otherwise a rank without a graph goes nowhere, and only
            leaves word of that.

    Raises:
        NoGraphError: ``loss`` has no graph.
    """
    begun, wrong = backward.num_begun, not loss.requires_grad
    if not wrong:
        scaled(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    if backward.num_begun != begun or torch._C._current_graph_task_id() != -1:
        return
    goes = backward.comm.size > 1 and (joins or not wrong)
    told = goes and _take_part(backward, scaled, loss.device, retain_graph=retain_graph)
    if wrong:
        backward.refused += told
        error = NoGraphError(backward.comm.rank, told=told)
        if backward.recovery is not None and not told:
            backward.recovery.failed(error)
        raise error


def _take_part(backward: Backward, scaled: Any, device: torch.device, *, retain_graph: bool) -> bool:
    """Whether this rank knows what the others' backward does: that takes a record of a forward where it gathers."""
    if not backward.knows_what_others_do():
        return False
    loss = scaled(torch.zeros((), device=device, requires_grad=True) * 1.0)
    loss.register_hook(lambda gradient: backward.begin_without_graph())
    loss.backward(retain_graph=retain_graph)
    return True
