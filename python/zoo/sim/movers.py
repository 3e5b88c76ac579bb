"""What each collective computes. Every function gets the calls of one match in group-rank order, ``Absent`` ones for
members that do not run: they give, and get nothing.

All of them read everything before they write anything, so inputs and outputs may share memory. Reductions go through
``reduce_tensors`` alone, so that all forms of them agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from zoo.sim.calls import reduce_name
from zoo.sim.roles import counted

__all__ = ["MOVERS", "premul_factor", "reduce_tensors"]


def reduce_tensors(op: Any, tensors: list[torch.Tensor], counts: list[int] | None = None) -> torch.Tensor:
    """``((t0 + t1) + t2) + ...``: one operand after the other, in group-rank order, in the dtype of the operands.

    That holds for bf16 and fp16 as well: each partial sum is rounded to the dtype. AVG divides the sum by the number
    of ranks (integers: rounding towards zero); PREMUL_SUM multiplies each operand by its factor, then sums.

    Args:
        counts: how many ranks give each operand, where some stand in for others: sums take it so many times.
    """
    name = reduce_name(op).partition("(")[0]
    combine = _COMBINE.get(name)
    if combine is None:
        raise ValueError(f"reduce op {name} is not supported; allowed are {', '.join(sorted(_COMBINE))}")
    if name == "PREMUL_SUM":
        factor = premul_factor(op)
        tensors = [tensor * factor for tensor in tensors]
    num = len(tensors)
    if counts is not None and max(counts) > 1:
        num = sum(counts)
        tensors = [_times(name, tensor, count) for tensor, count in zip(tensors, counts, strict=True)]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor if tensor.device == total.device else tensor.to(total.device))
    if name == "AVG":
        whole = not (total.is_floating_point() or total.is_complex())
        total = total.div_(num, rounding_mode="trunc") if whole else total.div_(num)
    return total


def _times(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """What so many equal operands make of each other."""
    if name in ("SUM", "AVG", "PREMUL_SUM"):
        return tensor * count
    if name == "PRODUCT":
        return tensor**count
    return tensor * (count % 2) if name == "BXOR" else tensor


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


def _all_reduce(calls: list[Any]) -> None:
    for index in range(len(calls[0].inputs)):
        total = _reduced(calls, index)
        for call in _running(calls):
            _write(call.outputs[index], total)


def _reduce(calls: list[Any]) -> None:
    total = _reduced(calls, 0)
    for target in calls[_root(calls)].outputs[:1]:
        _write(target, total)


def _broadcast(calls: list[Any]) -> None:
    root = _root(calls)
    for index, value in enumerate(calls[root].inputs):
        for call in _running(calls):
            if call is not calls[root]:
                _write(call.outputs[index], value.detach())


def _all_gather(calls: list[Any]) -> None:
    """``outputs`` holds, for each input in turn, one tensor for each rank."""
    size = len(calls)
    for index in range(len(calls[0].inputs)):
        values = [call.inputs[index].detach().clone() for call in calls]
        for call in _running(calls):
            for source, value in enumerate(values):
                _write(call.outputs[index * size + source], value)


def _all_gather_single(calls: list[Any]) -> None:
    for index in range(len(calls[0].inputs)):
        whole = torch.cat([_flat(call.inputs[index]).to(calls[0].inputs[index].device) for call in calls])
        for call in _running(calls):
            _write(call.outputs[index], whole)


def _reduce_scatter(calls: list[Any]) -> None:
    totals = [(taker, _reduced(calls, taker.group_rank)) for taker in _running(calls)]
    for taker, total in totals:
        _write(taker.outputs[0], total)


def _reduce_scatter_single(calls: list[Any]) -> None:
    for index in range(len(calls[0].inputs)):
        total = _flat(_reduced(calls, index)).view(len(calls), -1)
        for call in _running(calls):
            _write(call.outputs[index], total[call.group_rank])


def _all_to_all(calls: list[Any]) -> None:
    takers = _running(calls)
    values = [[call.inputs[taker.group_rank].detach().clone() for call in calls] for taker in takers]
    for taker, given in zip(takers, values, strict=True):
        for source, value in enumerate(given):
            _write(taker.outputs[source], value)


def _all_to_all_single(calls: list[Any]) -> None:
    own = {
        id(call.inputs): torch.split(call.inputs[0].detach().clone(), call.in_splits or [])
        for call, _ in counted(calls)
    }  # fmt: skip
    parts = [own[id(call.inputs)] for call in calls]
    for call in _running(calls):
        ends = list(accumulate(call.out_splits or []))
        for source, end in enumerate(ends):
            begin = end - (call.out_splits or [])[source]
            _write(call.outputs[0][begin:end], parts[source][call.group_rank])


def _gather(calls: list[Any]) -> None:
    root = calls[_root(calls)]
    if root.absent:
        return
    values = [call.inputs[0].detach().clone() for call in calls]
    for target, value in zip(root.outputs, values, strict=True):
        _write(target, value)


def _gather_single(calls: list[Any]) -> None:
    for target in calls[_root(calls)].outputs[:1]:
        _write(target, torch.cat([_flat(call.inputs[0]) for call in calls]))


def _scatter(calls: list[Any]) -> None:
    values = [tensor.detach().clone() for tensor in calls[_root(calls)].inputs]
    for call, value in zip(calls, values, strict=True):
        if not call.absent:
            _write(call.outputs[0], value)


def _barrier(calls: list[Any]) -> None:
    del calls


def _p2p(calls: list[Any]) -> None:
    send, recv = calls
    _write(recv.outputs[0], send.inputs[0].detach())


def _running(calls: list[Any]) -> list[Any]:
    return [call for call in calls if not call.absent]


def _reduced(calls: list[Any], index: int) -> torch.Tensor:
    """Of the tensors of this number that each member gives."""
    own = counted(calls)
    tensors = [call.inputs[index].detach() for call, _ in own]
    return reduce_tensors(calls[0].reduce_op, tensors, [count for _, count in own])


def _root(calls: list[Any]) -> int:
    root: int | None = calls[0].root
    if root is None:
        raise AssertionError(f"{calls[0].op} on rank {calls[0].rank} has no root")
    return root


MOVERS: dict[str, Callable[[list[Any]], None]] = {
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
