"""Rows go to the ranks of their experts, are computed there, come back and are weighed: what layers have in common.

Legend: T tokens of this rank, D hidden size, E experts, L of them here, N expert-parallel ranks, R rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from zoo.comm import Communicator
from zoo.kernels.gating import permute, unpermute
from zoo.layout import declare_partial, split_of
from zoo.moe import exchange
from zoo.moe.experts.base import AXIS
from zoo.moe.routing import Places
from zoo.moe.tensor_axis import gather_tokens, share_of, split_tokens

Tensor = torch.Tensor

TENSOR_AXIS = "tensor"


class Computes(Protocol):
    """This rank's experts, as :class:`zoo.moe.experts.base.Experts` are."""

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """Of rows that follow each other expert by expert."""

    def part(self, chunk: int, chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The same of one of ``chunks`` groups of consecutive experts."""


class Dispatcher:
    """From tokens and their places among rows sorted by expert to what the experts make of them.

    Args:
        num_experts: E. num_local: L. first: the number of the first expert of this rank.
        chunks: into how many groups a rank's experts are cut, of which one computes while the next one's tokens come.
        repeated: the tensor-parallel ranks have the same tokens, and whole experts: each of them dispatches its share.
    """

    def __init__(
        self, num_experts: int, num_local: int, first: int, *, chunks: int = 1, repeated: bool = True
    ) -> None:  # fmt: skip
        if chunks < 1 or num_local % chunks:
            raise ValueError(f"chunks={chunks} of {num_local} experts on a rank; it divides their number.")
        self.num_experts, self.num_local, self.first = num_experts, num_local, first
        self.chunks, self.repeated = chunks, repeated
        self.ep_size = num_experts // num_local
        self.comm: Communicator | None = None
        self._tensor: Communicator | None = None
        self._number = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """For a copied layer; it is among the same ranks."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: whoever loads it is among other ranks, and has to be told of a mesh."""
        return {**self.__dict__, "comm": None, "_tensor": None, "_number": 0}

    def enter_mesh(self, mesh: Any, parameters: Iterable[nn.Parameter]) -> None:
        """Find the ranks with the other experts, and those that have the same tokens. Collective over the mesh.

        Args:
            mesh: a DeviceMesh with names, among them "expert" if ``ep_size`` is more than 1.
            parameters: of this rank's experts.

        Raises:
            ValueError: it has no such axis, of another size, a rank has another place on it than its experts, or ranks
                with other tokens have parts of one expert.
        """
        names = tuple(mesh.mesh_dim_names or ())
        sizes = dict(zip(names, mesh.shape, strict=False))  # a mesh may have no names
        if self.ep_size > 1:
            if sizes.get(AXIS) != self.ep_size:
                raise ValueError(
                    f"a layer with ep_size={self.ep_size} on a mesh of the axes {sizes}; it needs the axis {AXIS!r} of "
                    f"that size: init_device_mesh(..., mesh_dim_names=('data', {AXIS!r}))."
                )
            self._check_place(mesh, mesh.get_local_rank(AXIS) * self.num_local)
            self.comm, self._number = exchange.along(mesh, [AXIS])
        if self.repeated and sizes.get(TENSOR_AXIS, 1) > 1:
            parameters = list(parameters)
            if any(TENSOR_AXIS in split_of(parameter).axes for parameter in parameters):
                raise ValueError(
                    "tensor-parallel ranks have parts of a layer's experts, and the layer gives each of these ranks "
                    "other tokens. Make it with enable_expert_tensor_parallelism=True (repeated=False of "
                    "MixtureOfExperts), or leave its experts out of the plan."
                )
            self._tensor, _ = exchange.along(mesh, [TENSOR_AXIS])
            for parameter in parameters:  # each of these ranks has the gradient of its share of tokens
                declare_partial(parameter, [TENSOR_AXIS])

    def _check_place(self, mesh: Any, place: int) -> None:
        """All ranks raise, or none: others would wait for it."""
        everyone, _ = exchange.along(mesh, mesh.mesh_dim_names)
        wrong = everyone.all_gather_object(place != self.first)
        if any(wrong):
            ranks = ", ".join(str(rank) for rank, other in zip(everyone.ranks, wrong, strict=True) if other)
            raise ValueError(
                f"the layer was made with other experts than those of its place on the mesh, on ranks {ranks}; here "
                f"with those from {self.first} on, and those from {place} on belong here. Make it with "
                f"ep_rank=mesh.get_local_rank({AXIS!r})."
            )

    def __call__(
        self, experts: Computes, x: Tensor, at: Places, beside: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the experts make of (T, D), weighed; and what ``beside`` returns, which runs while tokens travel."""
        if self._tensor is None:
            return self._through(experts, x, at, beside)
        begin, end = share_of(x.shape[0], self._tensor)
        mine = at.part(begin, end, split_tokens(at.weights, self._tensor))
        y, other = self._through(experts, split_tokens(x, self._tensor), mine, beside)
        return gather_tokens(y, x.shape[0], self._tensor), other

    def _through(
        self, experts: Computes, x: Tensor, at: Places, beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        x = _in_autocast(x)
        if self.ep_size == 1:
            rows = permute(x.contiguous(), at.rows, num_rows=at.num_rows)
            y = _as(rows, self._computed(experts, experts, rows, at.counts))
            other = None if beside is None else beside()
        elif self.comm is None:
            raise ValueError(
                f"a layer with ep_size={self.ep_size} that does not know the other ranks. Give mesh=DeviceMesh with an "
                f"axis {AXIS!r} to the ZeRO optimizer or to initialize, or call zoo.moe.use_mesh(model, mesh)."
            )
        else:
            if self.chunks > 1:
                at = at.reordered(self._order(x.device))
            rows = permute(x.contiguous(), at.rows, num_rows=at.num_rows)
            y, other = self._across(experts, rows, at.counts, beside)
        return unpermute(y, at.rows, at.weights.to(torch.promote_types(at.weights.dtype, torch.float32))), other

    def _across(
        self, experts: Computes, rows: Tensor, counts: Tensor, beside: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows go to the ranks of their experts and come back; the first chunk's way is hidden by what runs beside,
        the others' by the chunk before."""
        tickets: list[Tensor] = []
        if torch.compiler.is_compiling():
            return self._exchanged(experts, rows, counts, beside, tickets)
        try:
            return self._exchanged(experts, rows, counts, beside, tickets)
        except BaseException:
            exchange.drop(tickets)  # nobody will ask for them
            raise

    def _exchanged(
        self, experts: Computes, rows: Tensor, counts: Tensor, beside: Callable[[], Tensor] | None,
        tickets: list[Tensor],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The same; ``tickets`` gets those of all messages."""
        come, splits = exchange.exchange_counts(counts, self._number, self.chunks)
        parts = [rows] if self.chunks == 1 else _cut(rows, splits[:, 0].sum(1).tolist())
        whole = rows.shape[0] if self.chunks == 1 else -1
        tickets.append(exchange.start(parts[0], splits[0], comm=self._number))
        coming = [tickets[0]]
        other = None if beside is None else beside()
        returning: list[tuple[Tensor, Tensor]] = []
        for c, part in enumerate(parts):
            if c + 1 < self.chunks:
                tickets.append(exchange.start(parts[c + 1], splits[c + 1], comm=self._number))
                coming.append(tickets[-1])
            arrived = exchange.finish(coming[c], part, splits[c], comm=self._number)
            y = self._here(experts, arrived, come[c], c)
            tickets.append(exchange.start(y, splits[c], comm=self._number, back=True))
            returning.append((tickets[-1], y))
        back = [
            exchange.finish(ticket, y, splits[c], comm=self._number, back=True, num_rows=whole)
            for c, (ticket, y) in enumerate(returning)
        ]
        return back[0] if len(back) == 1 else torch.cat(back), other

    def _here(self, experts: Computes, x: Tensor, come: Tensor, chunk: int) -> Tensor:
        """Experts of a chunk on what has come, which lies sender by sender: sort by expert, and back."""
        run = experts if self.chunks == 1 else experts.part(chunk, self.chunks)
        if come.shape[1] == 1:
            y = _as(x, self._computed(experts, run, x, come.sum(0)))
        else:
            to = _by_expert(come, x.shape[0])
            sorted_rows = permute(x, to, num_rows=x.shape[0])
            y = unpermute(_as(x, self._computed(experts, run, sorted_rows, come.sum(0))), to)
        if torch.is_grad_enabled() and not y.requires_grad:
            # Only experts with parameters to train that got rows make a graph here, and a gradient comes back from all
            # ranks or from none.
            y = y.detach().requires_grad_()
        return y

    def _computed(self, experts: Computes, run: Callable[..., Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """``run`` of rows. Tensor-parallel ranks have other rows, and not as many: each draws for its own, and after
        that all draw alike again, as they do for the tokens that all of them have."""
        if self._tensor is None or not _draws(experts):
            return run(rows, counts)
        seed = int(torch.randint(2**62, ())) + self._tensor.rank
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed)
            return run(rows, counts)

    def _order(self, device: torch.device) -> Tensor:
        """(E,): the place of each expert where those of one chunk lie together, in it rank by rank."""
        e = torch.arange(self.num_experts, device=device)
        size = self.num_local // self.chunks
        rank, local = e // self.num_local, e % self.num_local
        return (local // size * self.ep_size + rank) * size + local % size


def _draws(experts: Any) -> bool:
    """Whether they drop something now."""
    return isinstance(experts, nn.Module) and any(
        isinstance(module, _DropoutNd) and module.training and module.p > 0 for module in experts.modules()
    )


def _as(x: Tensor, y: Tensor) -> Tensor:
    """``y``, what experts made of rows ``x``: of the same shape, in their dtype, as it is on ranks without rows."""
    if y.shape != x.shape:
        raise ValueError(
            f"experts made {tuple(y.shape)} of rows {tuple(x.shape)}; an expert gives as many rows, as wide, as it got."
        )
    return y.to(x.dtype)


def _cut(rows: Tensor, sizes: list[int]) -> list[Tensor]:
    """Parts of these sizes; what is after them nobody needs."""
    return list(torch.split(rows, [*sizes, rows.shape[0] - sum(sizes)]))[: len(sizes)]


def _by_expert(come: Tensor, num_rows: int) -> Tensor:
    """(R, 1): where each row goes if rows lie by expert and not by sender; ``come`` (N, L): rows of each."""
    at_sender = come.reshape(-1).cumsum(0) - come.reshape(-1)
    by_expert = come.t().reshape(-1)
    at_expert = (by_expert.cumsum(0) - by_expert).view(come.shape[1], -1).t().reshape(-1)
    moved = torch.repeat_interleave(at_expert - at_sender, come.reshape(-1), output_size=num_rows)
    return (moved + torch.arange(num_rows, device=come.device)).unsqueeze(1)


def _in_autocast(x: Tensor) -> Tensor:
    """What travels has the dtype in which it is used."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def place_of_rank(ep_size: int) -> int:
    """The expert-parallel rank of this process where consecutive ranks share the experts: rank mod ``ep_size``."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)
    return rank % ep_size
