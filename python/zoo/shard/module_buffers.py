"""The buffers of a model (running statistics, counters) over the data-parallel ranks.

Legend: N ranks; b_r the value that rank r's forwards have left in a buffer.

=============  ========================================================================================
``buffers=``   after ``step()``
=============  ========================================================================================
"own"          b_r: each rank's own, what plain torch would do; nothing is sent
"broadcast"    b_0 on all ranks, as with ``broadcast_buffers`` of DistributedDataParallel
"average"      1/N Σ_r b_r, of floating point ones; others stay each rank's own
=============  ========================================================================================

With the last two all ranks begin with those of rank 0 at construction, as they do with its parameters. Between two
steps each rank's forwards change its own.

DDP broadcasts at the start of the forward that follows a synchronised one. Here it is at the end of a step, and the
next forward sees the same: with one forward a step every value that is computed is the same. Several forwards a step
each see what this rank's one before left, as in DDP under ``no_sync()``; nothing is overwritten under a forward that
still has its backward to come; and evaluation after a step has what rank 0 has, on any ranks that run it.

An average of running variances is the mean variance within the ranks' batches; what the means of ranks differ by is
not in it. (``nn.SyncBatchNorm`` is what computes the statistics of all ranks' tokens together.)

A buffer that is a part along mesh axes (an expert's) goes between the ranks that have the same part. It is one if
``declare_split`` said so, or else if the parameters of the very module that holds it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from zoo.comm import Handle
from zoo.cost.collectives import Hop
from zoo.layout import split_of
from zoo.shard.agreement import short_digest
from zoo.shard.dtensors import is_dtensor
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.families import Family, family_of

Together = tuple[Family, torch.dtype, torch.device]
"""What goes in one message."""


def repeats(buffer: torch.Tensor) -> bool:
    """Whether elements may share memory, as ``expand`` makes them: nothing can be written there in place."""
    reach = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@torch.no_grad()
def write_buffer(module: nn.Module, buffer: torch.Tensor, value: torch.Tensor) -> None:
    """``value``, of the same shape, becomes that of a buffer of ``module``. In the place of one that :func:`repeats`
    and has another value comes one with memory for each element."""
    if not repeats(buffer):
        buffer.copy_(value)
    elif not torch.equal(buffer, value.to(buffer)):
        own = torch.empty_like(buffer, memory_format=torch.contiguous_format).copy_(value)
        for child in module.modules():
            child._buffers.update({name: own for name, held in child._buffers.items() if held is buffer})


class ModuleBuffers:
    """Keeps the buffers of ``module`` alike on the ranks of each family. Collective, as is :meth:`sync`.

    Raises:
        ValueError: ranks have different buffers, or nobody can say along which axes one is a part.
        NotImplementedError: one is a DTensor.
    """

    def __init__(
        self, module: nn.Module, mode: Literal["broadcast", "average"], families: Mapping[Family, Axes]
    ) -> None:
        self._module, self._mode, self._families = module, mode, families
        found = self._found()
        described = [(str(key[1]), [tuple(b.shape) for b in buffers]) for key, buffers in found.items()]
        digest = short_digest(described)
        if found:
            device = next(iter(found))[2]
            families[()].world.agree("buffers of the model", digest, device)
        self._move("broadcast")

    def sync(self) -> None:
        """Bring them to what the mode says."""
        self._move(self._mode)

    def hops(self) -> list[Hop]:
        """The collectives of :meth:`sync`."""
        op = "broadcast" if self._mode == "broadcast" else "all_reduce"
        return [
            Hop(op, self._families[key[0]].world, sum(b.numel() for b in buffers) * _sent(key[1], self._mode).itemsize)
            for key, buffers in self._messages(self._mode)
        ]

    @torch.no_grad()
    def _move(self, mode: str) -> None:
        under_way: list[tuple[Handle, torch.Tensor, list[torch.Tensor], int]] = []
        for (family, dtype, _), buffers in self._messages(mode):
            world = self._families[family].world
            flat = torch.cat([b.reshape(-1) for b in buffers]).to(_sent(dtype, mode))
            handle = world.broadcast(flat.view(torch.uint8)) if mode == "broadcast" else world.all_reduce(flat)
            under_way.append((handle, flat, buffers, 1 if mode == "broadcast" else world.size))
        for handle, arrived, buffers, divisor in under_way:
            handle.wait()
            if divisor > 1:
                arrived.div_(divisor)
            for buffer, part in zip(buffers, torch.split(arrived, [b.numel() for b in buffers]), strict=True):
                write_buffer(self._module, buffer, part.view(buffer.shape))

    def _messages(self, mode: str) -> Iterator[tuple[Together, list[torch.Tensor]]]:
        for key, buffers in self._found().items():
            if self._families[key[0]].world.size > 1 and (mode == "broadcast" or key[1].is_floating_point):
                yield key, buffers

    def _found(self) -> dict[Together, list[torch.Tensor]]:
        """All of them as they are now (a module may have put another tensor in the place of one), in one order."""
        found: dict[Together, list[torch.Tensor]] = {}
        seen: set[int] = set()
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen or buffer.numel() == 0:
                    continue
                seen.add(id(buffer))
                full = f"{path}.{name}" if path else name
                if is_dtensor(buffer):
                    raise NotImplementedError(
                        f"buffers={self._mode!r} with the buffer {full!r}, a DTensor, whose parts DTensor itself keeps "
                        "alike. Use buffers='own'."
                    )
                key = (self._family(full, module, buffer), buffer.dtype, buffer.device)
                found.setdefault(key, []).append(buffer)
        return found

    @staticmethod
    def _family(name: str, module: nn.Module, buffer: torch.Tensor) -> Family:
        if split_of(buffer).axes:
            return family_of(buffer)
        families = {family_of(p) for p in module._parameters.values() if p is not None} - {()}
        if len(families) > 1:
            raise ValueError(
                f"buffer {name!r} is held by a module with parameters along the axes {sorted(families)}. Say along "
                "which ones it is a part itself: zoo.layout.declare_split(buffer, axes)."
            )
        return families.pop() if families else ()


def _sent(dtype: torch.dtype, mode: str) -> torch.dtype:
    """16-bit values are added in fp32."""
    return torch.promote_types(dtype, torch.float32) if mode == "average" else dtype
