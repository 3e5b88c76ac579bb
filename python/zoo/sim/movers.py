"""What each collective computes. Every function gets the calls of one match in group-rank order.

All of them read everything before they write anything, so inputs and outputs may share memory. Reductions go through
``reduce_tensors`` alone, so that all forms of them agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from zoo.sim.calls import reduce_name

if TYPE_CHECKING:
    from zoo.sim.calls import Call

__all__ = ["MOVERS", "premul_factor", "reduce_tensors"]


def reduce_tensors(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """``((t0 + t1) + t2) + ...``: one operand after the other, in group-rank order, in the dtype of the operands.

    That holds for bf16 and fp16 as well: each partial sum is rounded to the dtype. AVG divides the sum by the number
    of ranks (integers: rounding towards zero); PREMUL_SUM multiplies each operand by its factor, then sums.
    """
    name = reduce_name(op).partition("(")[0]
    combine = _COMBINE.get(name)
    if combine is None:
        raise ValueError(f"reduce op {name} is not supported; allowed are {', '.join(sorted(_COMBINE))}")
    if name == "PREMUL_SUM":
        factor = premul_factor(op)
        tensors = [tensor * factor for tensor in tensors]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor if tensor.device == total.device else tensor.to(total.device))
    if name == "AVG":
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div_(len(tensors), rounding_mode="trunc") if whole else total.div_(len(tensors))
    return total


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": lambda total, tensor: total.add_(tensor),
    "AVG": lambda total, tensor: total.add_(tensor),
    "PREMUL_SUM": lambda total, tensor: total.add_(tensor),
    "PRODUCT": lambda total, tensor: total.mul_(tensor),
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": lambda total, tensor: total.bitwise_and_(tensor),
    "BOR": lambda total, tensor: total.bitwise_or_(tensor),
    "BXOR": lambda total, tensor: total.bitwise_xor_(tensor),
}


def premul_factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM, on any torch that tells it."""
    if hasattr(op, "factor"):
        return op.factor
    state = op.__getstate__()  # older torch shows the factor only here: (kind, factor)
    if isinstance(state, tuple) and len(state) == 2:
        return state[1]
    raise NotImplementedError(f"this torch ({torch.__version__}) does not tell the factor of a PREMUL_SUM")


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    # .data: a real backend writes to memory behind autograd's back, without counting a version.
    if target.is_inference():
        with torch.inference_mode():
            target.copy_(value if value.shape == target.shape else value.reshape(target.shape))
    else:
        target.data.copy_(value if value.shape == target.shape else value.reshape(target.shape))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _all_reduce(calls: list[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        total = reduce_tensors(calls[0].reduce_op, [call.inputs[index].detach() for call in calls])
        for call in calls:
            _write(call.outputs[index], total)


def _reduce(calls: list[Call]) -> None:
    total = reduce_tensors(calls[0].reduce_op, [call.inputs[0].detach() for call in calls])
    _write(calls[_root(calls)].outputs[0], total)


def _broadcast(calls: list[Call]) -> None:
    root = _root(calls)
    for index, value in enumerate(calls[root].inputs):
        for call in calls:
            if call is not calls[root]:
                _write(call.outputs[index], value.detach())


def _all_gather(calls: list[Call]) -> None:
    """``outputs`` holds, for each input in turn, one tensor for each rank."""
    size = len(calls)
    for index in range(len(calls[0].inputs)):
        values = [call.inputs[index].detach().clone() for call in calls]
        for call in calls:
            for source, value in enumerate(values):
                _write(call.outputs[index * size + source], value)


def _all_gather_single(calls: list[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        whole = torch.cat([_flat(call.inputs[index]).to(calls[0].inputs[index].device) for call in calls])
        for call in calls:
            _write(call.outputs[index], whole)


def _reduce_scatter(calls: list[Call]) -> None:
    totals = [
        reduce_tensors(calls[0].reduce_op, [call.inputs[target].detach() for call in calls])
        for target in range(len(calls))
    ]
    for call, total in zip(calls, totals, strict=True):
        _write(call.outputs[0], total)


def _reduce_scatter_single(calls: list[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        total = reduce_tensors(calls[0].reduce_op, [_flat(call.inputs[index]) for call in calls])
        for call, part in zip(calls, total.view(len(calls), -1), strict=True):
            _write(call.outputs[index], part)


def _all_to_all(calls: list[Call]) -> None:
    values = [[tensor.detach().clone() for tensor in call.inputs] for call in calls]
    for target, call in enumerate(calls):
        for source in range(len(calls)):
            _write(call.outputs[source], values[source][target])


def _all_to_all_single(calls: list[Call]) -> None:
    parts = [torch.split(call.inputs[0].detach().clone(), call.in_splits or []) for call in calls]
    for target, call in enumerate(calls):
        ends = list(accumulate(call.out_splits or []))
        for source, end in enumerate(ends):
            begin = end - (call.out_splits or [])[source]
            _write(call.outputs[0][begin:end], parts[source][target])


def _gather(calls: list[Call]) -> None:
    root = calls[_root(calls)]
    values = [call.inputs[0].detach().clone() for call in calls]
    for target, value in zip(root.outputs, values, strict=True):
        _write(target, value)


def _gather_single(calls: list[Call]) -> None:
    _write(calls[_root(calls)].outputs[0], torch.cat([_flat(call.inputs[0]) for call in calls]))


def _scatter(calls: list[Call]) -> None:
    values = [tensor.detach().clone() for tensor in calls[_root(calls)].inputs]
    for call, value in zip(calls, values, strict=True):
        _write(call.outputs[0], value)


def _barrier(calls: list[Call]) -> None:
    del calls


def _p2p(calls: list[Call]) -> None:
    send, recv = calls
    _write(recv.outputs[0], send.inputs[0].detach())


def _root(calls: list[Call]) -> int:
    root = calls[0].root
    if root is None:
        raise AssertionError(f"{calls[0].op} on rank {calls[0].rank} has no root")
    return root


MOVERS: dict[str, Callable[[list[Call]], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather,
    "all_gather_into_tensor": _all_gather_single,
    "all_gather_into_tensor_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "gather_into_tensor": _gather_single,
    "scatter": _scatter,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "send": _p2p,
}
