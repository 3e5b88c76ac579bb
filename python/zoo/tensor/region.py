"""What goes in and out of the region where ranks of the axis ``tensor`` have different heads and features.

Megatron-LM (Shoeybi et al. 2019, section 3) writes f for the way in, the identity whose gradient is a sum over ranks,
and g for the way out, a sum whose gradient is the identity. A block of attention has one of each, and so has a
perceptron: two sums of (B, T, C) a layer in forward, two in backward.

Queries, keys and values are projections of one input. Their ways in are one: its gradients are added here first, and
then over ranks once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zoo.comm import Communicator

PIECES = 2
"""Of outputs that are summed in pieces."""
F = TypeVar("F", bound=Callable[..., Any])


def eager(method: F) -> F:
    """A method that no compiler looks into: it sends, or changes what the region knows."""

    @functools.wraps(method)
    def called(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            from zoo.tensor.outside import call

            return call(method, *args)
        return method(*args)

    return called  # type: ignore[return-value]


class Region:
    """The ways in and out of one model on one rank.

    Args:
        comm: the ranks of the axis ``tensor``, each with the same tokens.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.draws = False
        """The model drops something in training."""
        self.drawing = False
        """A mask of a whole tensor is being drawn."""
        self.inside = False
        """Tensors are parts now: after a column-parallel layer and before a row-parallel one."""
        self.pieces = 1
        """In how many pieces outputs of row-parallel layers are made."""
        self._entered: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        """What came in, as which version, and what was made of it; emptied by the way out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        if id(self) not in memo:
            memo[id(self)] = found = type(self)(self.comm)
            found.pieces, found.draws = self.pieces, self.draws
        return memo[id(self)]  # type: ignore[no-any-return]

    @eager
    def go_in(self, x: torch.Tensor) -> torch.Tensor:
        """:meth:`enter`, into a column-parallel layer."""
        self.inside = True
        return self.enter(x)

    @eager
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x, whose gradient is the sum of all ranks'. Of the same x as before, with nothing left in between, it is the
        tensor of before."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        for before, version, found in self._entered:
            if before is x and version == x._version:
                return found
        entered: torch.Tensor = _Enter.apply(x, self.comm)
        self._entered.append((x, x._version, entered))
        return entered

    @eager
    def rest(self) -> None:
        """Outputs stay parts, and nothing follows that would sum or gather them: what came in is let go."""
        self._entered, self.inside = [], False

    @eager
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Σ over ranks of x, in the memory of ``x`` where that is contiguous; gradients pass as they are."""
        self.rest()
        if not has_values(x):
            return x
        x = x.contiguous()
        if not (torch.is_grad_enabled() and x.requires_grad):  # as for each token: a step of autograd costs more
            self.comm.all_reduce(x).wait()
            return x
        found: torch.Tensor = _Leave.apply(x, self.comm)
        return found

    @eager
    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Σ over ranks of x W^T, in ``pieces`` of its rows: each is summed while the next is computed.

        Args:
            x: (…, I). weight: (O, I).
        """
        self.rest()
        if not has_values(x):
            return x.new_empty(*x.shape[:-1], len(weight))
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        found: torch.Tensor = _Product.apply(x, weight, self.comm, self.pieces)
        return found

    @eager
    def gather(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """(…, Σ sizes): the last dims of all ranks, side by side; of the gradient each rank takes its own part.

        Whatever is computed from it, all ranks have to compute alike.

        Args:
            x: (…, sizes[rank]). sizes: of every rank.
        """
        self.rest()
        if not has_values(x):
            return x.new_empty(*x.shape[:-1], sum(sizes))
        found: torch.Tensor = _Gather.apply(x, self.comm, sizes)
        return found

    def scatter(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """x[…, start:stop] of a whole x that every rank has; ranks' gradients of it are added up."""
        return self.enter(x)[..., start:stop]


def has_values(x: torch.Tensor) -> bool:
    """Whether there is something to send: not in a model that is built on "meta", or run to see its shapes."""
    return not (x.is_meta or isinstance(x, FakeTensor))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.detach()  # no view: writing to x later says what it would without the way in

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Leave.apply(grad.clone(memory_format=torch.contiguous_format), ctx.comm), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        ctx.mark_dirty(x)
        comm.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # The identity; for a gradient of gradients, which are each rank's own, it is a way in.
        return (_Enter.apply(grad, ctx.comm) if torch.is_grad_enabled() else grad), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: Communicator, pieces: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        rows = x.reshape(-1, x.shape[-1])
        y = rows.new_empty(len(rows), len(weight))
        sums = []
        for piece, out in zip(rows.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            if len(out):
                torch.mm(piece, weight.t(), out=out)
                sums.append(comm.all_reduce(out))
        for each in sums:
            each.wait()
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = _Enter.apply(grad, ctx.comm) if torch.is_grad_enabled() else grad  # as of _Leave
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return grad @ weight if needs_x else None, of_weight, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, sizes: list[int]) -> torch.Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        rows, most = x.numel() // max(x.shape[-1], 1), max(sizes)
        mine = x.new_zeros(rows, most)
        mine[:, : x.shape[-1]] = x.reshape(rows, x.shape[-1])  # rows may be none
        everyone = x.new_empty(comm.size, rows, most)
        comm.all_gather(everyone.view(-1), mine.view(-1), label="outputs").wait()
        parts = [everyone[rank, :, :size] for rank, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1).view(*x.shape[:-1], sum(sizes))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Mine.apply(grad, ctx.comm, ctx.sizes), None, None


class _Mine(torch.autograd.Function):
    """This rank's columns of what all ranks have; the gradient of :class:`_Gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, sizes: list[int]) -> torch.Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return x.narrow(-1, sum(sizes[: comm.rank]), sizes[comm.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Gather.apply(grad, ctx.comm, ctx.sizes), None, None
