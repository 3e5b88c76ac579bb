"""``deepspeed.runtime.utils``: memory, norms, partitions."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zoo.deepspeed.adapters.accelerator.cpu import host_memory
from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator
from zoo.deepspeed.adapters.communication import comm as dist
from zoo.deepspeed.adapters.communication import groups
from zoo.deepspeed.adapters.utilities.helpers import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_rank

PIPE_REPLICATED = "ds_pipe_replicated"
_GIB = 1024.0**3
Tensors = torch.Tensor | Iterable[torch.Tensor]


def noop_decorator(func: Any) -> Any:
    """``func``."""
    return func


class noop_context:
    """A context that changes nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        pass


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """``call_to_str("f", 1, x=2)`` → ``"f(1, x=2)"``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """What all of them are.

    Raises:
        RuntimeError: they differ, or there are none.
    """
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected one value, all the same; got {sorted(map(repr, found))}.")
    return found.pop()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


# -- tensors in containers --------------------------------------------------------------------------------------------


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Lists, tuples and dicts again, with those members on the device that ``criterion_func`` is true of."""
    return tree_map(lambda leaf: leaf.to(device) if criterion_func(leaf) else leaf, item)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """:func:`copy_to_device` of the very tensors; those that ``criterion_func`` is true of, or all."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and (criterion_func is None or criterion_func(leaf)):
            leaf.data = leaf.data.to(device)
        return leaf

    return tree_map(move, item)


def get_tensor_bytes(item: Any) -> int:
    """Of all tensors in lists, tuples and dicts."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(item) if isinstance(x, torch.Tensor))


def align_dense_tensors(tensor_list: list[torch.Tensor], alignment: int) -> list[torch.Tensor]:
    """The list, with a tensor of zeros after it where the number of all elements is no multiple of ``alignment``."""
    rest = -sum(t.numel() for t in tensor_list) % alignment
    return [*tensor_list, tensor_list[0].new_zeros(rest)] if rest else tensor_list


# -- parameters -------------------------------------------------------------------------------------------------------


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether tensor-parallel ranks have other parts of it: ``model_parallel`` or ``tensor_model_parallel`` is true."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def is_optimized_parameter(param: Any) -> bool:
    """Whether it has elements and takes a gradient."""
    return bool(param.requires_grad and getattr(param, "ds_numel", param.numel()) > 0)


def filter_empty_parameters(params: Iterable[Any]) -> list[Any]:
    """Those with elements; groups keep those of theirs."""

    def kept(item: Any) -> Any:
        if isinstance(item, dict):
            return {**item, "params": [p for p in item["params"] if p.numel()]}
        return item

    return [kept(item) for item in params if isinstance(item, dict) or item.numel()]


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Those of ZeRO stage 3 that are not whole on this rank now."""
    from zoo.deepspeed.adapters.zero.parameters import ZeroParamStatus

    return [p for p in param_list if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


# -- memory -----------------------------------------------------------------------------------------------------------


def get_ma_status() -> int:
    """Bytes of the accelerator that are used; 0 on all ranks but the first."""
    return 0 if dist.is_initialized() and dist.get_rank() else int(_here().memory_allocated())


def empty_cache() -> None:
    """Give back what is free, and measure the peak from now on."""
    _here().empty_cache()
    _here().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force`` print, on rank 0, the memory of the accelerator and of the host; peaks count from there on."""
    if not force or (dist.is_initialized() and dist.get_rank()):
        return
    gc.collect()
    here = _here()
    total, available = host_memory()
    used = total - available
    print(  # noqa: T201
        f"{message}\nMA {here.memory_allocated() / _GIB:.2f} GB  Max_MA {here.max_memory_allocated() / _GIB:.2f} GB  "
        f"CA {here.memory_reserved() / _GIB:.2f} GB  Max_CA {here.max_memory_reserved() / _GIB:.2f} GB\n"
        f"CPU Virtual Memory:  used = {used / _GIB:.2f} GB, percent = {100 * used / total:.1f}%",
        flush=True,
    )
    here.reset_peak_memory_stats()


def _here() -> Any:
    return get_accelerator()


# -- norms ------------------------------------------------------------------------------------------------------------


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _counted(tensors: Iterable[Any], mpu: Any) -> list[Any]:
    """Each parameter of the model on one rank: replicas of a pipeline and of tensor parallelism once."""
    first = bwc_tensor_model_parallel_rank(mpu) == 0
    return [t for t in tensors if not getattr(t, PIPE_REPLICATED, False) and (first or is_model_parallel_parameter(t))]


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, mpu: Any) -> float:
    """Over the ranks that share the model; inf and NaN as they come."""
    p = float(norm_type)
    parts = [t.detach().float().norm(p).double() for t in tensors]
    largest = p == math.inf
    device = parts[0].device if parts else get_accelerator().current_device_name()
    total = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        stacked = torch.stack([part.to(device) for part in parts])
        total = stacked.max() if largest else stacked.pow(p).sum()
    group = bwc_tensor_model_parallel_group(mpu)
    if mpu is not None and group is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
    return float(total if largest else total.pow(1 / p))


def clip_grad_norm_(parameters: Tensors, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; gives the norm before. Collective in a job.

    The norm is the mean of those of the data-parallel ranks, which differ where ranks have different experts or
    gradients that were not reduced: as in DeepSpeed all ranks scale by one factor. With an mpu each is over the
    tensor-parallel ranks, each of the model's parameters once. Not for parameters of a ZeRO optimizer, which clips.
    """
    chosen = [p for p in _listed(parameters) if p.grad is not None]
    counted = [p.grad for p in _counted(chosen, mpu) if p.grad is not None]
    total = _mean_of_ranks(_norm(counted, norm_type, mpu), chosen)
    factor = max_norm / (total + 1e-6)
    if not factor >= 1:  # NaN too, which makes all elements NaN: whoever looks at one of them sees it
        for p in chosen:
            if p.grad is not None:
                p.grad.detach().mul_(factor)
    return torch.tensor(total, dtype=torch.float32)


def _mean_of_ranks(norm: float, like: Sequence[torch.Tensor]) -> float:
    if not dist.is_initialized():
        return norm
    group = groups._get_data_parallel_group()
    mean = torch.tensor([norm], dtype=torch.float64, device=like[0].device if like else _here().current_device_name())
    dist.all_reduce(mean, dist.ReduceOp.SUM, group)
    return float(mean) / dist.get_world_size(group)


def get_weight_norm(parameters: Tensors, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of parameters; -1 where it is not finite."""
    found = _norm([p.data for p in _counted(_listed(parameters), mpu)], norm_type, mpu)
    return found if math.isfinite(found) else -1.0


def get_global_norm(norm_list: Iterable[float]) -> float:
    """√Σ n², inf where one is negative or not finite."""
    numbers = [float(n) for n in norm_list]
    bad = any(n < 0 or not math.isfinite(n) for n in numbers)
    return math.inf if bad else math.sqrt(sum(n * n for n in numbers))


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> torch.Tensor:
    """The norm of all elements, (), fp32; -1 where it is not finite. With an mpu over its ranks.

    Raises:
        AssertionError: there is something else than tensors in it. ValueError: ``moe_ep_group``, which is not taken.
    """
    given: Any = input_tensors
    if not isinstance(given, Iterable) or not all(isinstance(t, torch.Tensor) for t in given):
        raise AssertionError("get_global_norm_of_tensors() takes a list of tensors.")
    if moe_ep_group is not None:
        raise ValueError(
            "get_global_norm_of_tensors(moe_ep_group=...): the engine's get_global_grad_norm() counts experts."
        )
    found = _norm(list(input_tensors), norm_type, mpu)
    return torch.tensor(found if math.isfinite(found) else -1.0, dtype=torch.float32)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor], max_norm: float = 1.0, global_norm: Any = None, mpu: Any = None,
    eps: float = 1e-6,
) -> Any:  # fmt: skip
    """Scale tensors so that their norm is at most ``max_norm``; gives the norm before."""
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(input_tensors, mpu=mpu)
    factor = float(max_norm / (global_norm + eps))
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return global_norm


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Whether an element is not finite, as a number in fp32."""
    return (~x.detach().isfinite()).any().float()


class CheckOverflow:
    """Whether a gradient is not finite on any rank.

    Args:
        param_groups: lists of parameters; or none, and :meth:`check` is given them.
        mpu, zero_reduce_scatter, deepspeed: as DeepSpeed's; all ranks are asked in any case.
    """

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed
        self.params = [p for group in param_groups for p in group] if param_groups else None

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """By norms, of which -1 is one that was not finite: inf and NaN are too.

        Args:
            reduce_overflow: ask all ranks. False: the ranks that share experts, where there are parameters of experts,
                and those of the mpu's model-parallel group, where there is an mpu; they have other parameters.
        """
        here = any(
            not math.isfinite(n) or n < 0 for norm in norm_group for n in torch.as_tensor(norm).view(-1).tolist()
        )
        if reduce_overflow:
            return self._anywhere(here)
        if any(map(_is_of_experts, self.params or ())):
            shared = groups._get_expert_parallel_group_dict() if dist.is_initialized() else {}
            here = self._anywhere(here, groups._get_max_expert_parallel_group() if shared else None)
        group = bwc_tensor_model_parallel_group(self.mpu)
        return here if self.mpu is None or group is None else self._anywhere(here, group)

    def check(self, param_groups: Any = None) -> bool:
        """By the gradients of these parameters, or of those of the constructor. A collective.

        Raises:
            AssertionError: there are none.
        """
        params = self.params if param_groups is None else [p for group in param_groups for p in group]
        if params is None:
            raise AssertionError("CheckOverflow was made without param_groups; give them to check().")
        return self.has_overflow(params)

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """On this rank."""
        return any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in params)

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        """On any rank. A collective."""
        return self._anywhere(self.has_overflow_serial(params))

    @staticmethod
    def _anywhere(here: bool, group: Any = None) -> bool:
        if not dist.is_initialized():
            return here
        flag = torch.tensor([float(here)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        return bool(flag.item())


def _is_of_experts(parameter: Any) -> bool:
    if getattr(parameter, "allreduce", True) is False:
        return True
    if "zoo.moe" not in sys.modules:  # a plug-in, which may not be there
        return False
    from zoo.deepspeed.adapters.moe.experts import is_moe_param

    return is_moe_param(parameter)


# -- partitions -------------------------------------------------------------------------------------------------------


def prefix_sum_inc(weights: Iterable[float]) -> list[Any]:
    """``[3, 4, 5]`` → ``[3, 7, 12]``."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of parts in their order, ``num_parts + 1`` numbers; the first parts have the items that are over."""
    each, over = divmod(num_items, num_parts)
    return [part * each + min(part, over) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of consecutive parts whose heaviest less whose lightest is small: for each number of first items and of
    parts the least that the choice for one part less allows, and of equals the one with the latest last cut.
    O(parts · items²).

    DeepSpeed's choice, which programs have in their checkpoints; the heaviest part can be heavier than it has to be.
    """
    n, sums = len(weights), [0.0, *accumulate(map(float, weights))]
    if n <= num_parts:
        return partition_uniform(n, num_parts)
    # best[i]: (heaviest, lightest, bounds) of the first i items in as many parts as rounds.
    best: list[Any] = [(sums[i], sums[i], [0, i]) for i in range(n + 1)]
    for parts in range(2, num_parts + 1):
        found: list[Any] = [None] * (n + 1)
        for i in range(parts, n + 1):
            for k in range(parts - 1, i):
                most, least, bounds = best[k]
                high, low = max(most, sums[i] - sums[k]), min(least, sums[i] - sums[k])
                if found[i] is None or high - low <= found[i][0] - found[i][1]:
                    found[i] = (high, low, [*bounds, i])
        best = found
    return list(best[n][2])


class PartitionedTensor:
    """A tensor of which each rank of a group keeps a part of the elements, in their order.

    Args:
        tensor: whole, the same on all ranks. group: the ranks.

    Attributes:
        local_data: (n,) this rank's elements. partition: bounds of the parts. orig_size: the tensor's shape.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group, self.num_parts, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        low, high = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[low:high].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """From :meth:`to_meta` and :meth:`data` of the same rank.

        Raises:
            AssertionError: ``meta`` is no int64, or of another group or rank.
        """
        if meta.dtype != torch.long:
            raise AssertionError(f"meta is {meta.dtype}; it is the int64 tensor that to_meta() gives.")
        dims, *numbers = meta.tolist()
        shape, (parts, rank, *partition) = numbers[:dims], numbers[dims:]
        made = cls.__new__(cls)
        made.group, made.num_parts, made.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise AssertionError(
                f"meta is of rank {rank} of {parts}; this is rank {made.rank} of {made.num_parts} of the group."
            )
        made.orig_size, made.partition, made.local_data = shape, partition, local_part.detach()
        made.orig_device = torch.device(get_accelerator().current_device_name() if device is None else device)
        return made

    def full(self, device: Any = None) -> torch.Tensor:
        """The whole tensor. A collective."""
        device = self.orig_device if device is None else device
        sizes = [high - low for low, high in zip(self.partition, self.partition[1:], strict=False)]
        longest = max(sizes)
        mine = self.local_data.new_zeros(longest, device=device)
        mine[: self.local_data.numel()] = self.local_data.to(device)
        gathered = mine.new_empty(longest * self.num_parts)
        dist.all_gather_into_tensor(gathered, mine, self.group)
        pieces = [part[:size] for part, size in zip(gathered.split(longest), sizes, strict=True)] if longest else []  # type: ignore[no-untyped-call]
        return torch.cat(pieces).view(self.full_size()) if pieces else mine.view(self.full_size())

    def to_meta(self) -> torch.Tensor:
        """int64: number of dims, shape, number of parts, rank, bounds."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """This rank's elements."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Of this rank's elements."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Of the tensor."""
        return self.orig_size
