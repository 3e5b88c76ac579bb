"""The layer: route, place, send, compute, send back, weigh.

Legend: T tokens of this rank, D hidden size, E experts, L of them here, N expert-parallel ranks, R rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.comm import Communicator
from zoo.kernels.gating import permute, unpermute
from zoo.layout import declare_axis, declare_partial, declare_unit
from zoo.moe import exchange
from zoo.moe.experts.base import AXIS, Experts
from zoo.moe.gates.base import Gate
from zoo.moe.part import MoEPart
from zoo.moe.routing import Places, capacity, place
from zoo.moe.statistics import count
from zoo.moe.tensor_axis import gather_tokens, share_of, split_tokens
from zoo.parts import declare_part

Tensor = torch.Tensor

TENSOR_AXIS = "tensor"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many tokens an expert takes at most: see :func:`zoo.moe.routing.capacity`; the others are dropped.

    Args:
        factor: in training. eval_factor: in evaluation. minimum: at least so many.
    """

    factor: float = 1.0
    eval_factor: float = 1.0
    minimum: int = 4

    def __post_init__(self) -> None:
        if not (self.factor > 0 and self.eval_factor > 0 and self.minimum >= 0):
            raise ValueError(
                f"a capacity factor of {self.factor}, {self.eval_factor} in evaluation, and at least {self.minimum}; "
                "factors are positive, and the minimum is not negative."
            )


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """What a layer gives."""

    output: Tensor
    """As the input."""
    balance: Tensor
    """(): load balancing loss of the gate, of this rank's micro-batch."""
    z_loss: Tensor
    """()."""
    demand: Tensor
    """(E,) int64: tokens of each expert, before drops."""
    counts: Tensor
    """(E,) int64: after."""


class MixtureOfExperts(nn.Module):
    """y_t = Σ_j w_tj f_{e_tj}(x_t) + s(x_t): experts e_tj and weights w_tj of a gate, and what every token gets.

    Without a capacity nothing is dropped (Gale et al. 2023, "MegaBlocks", section 3): tokens are sorted by expert, and
    experts work on segments, so that memory is O(T·k) whatever the routing.

    With expert parallelism the layer is made alike on all ranks, each with its own experts, and is told of the mesh by
    :meth:`enter_mesh`, which ZeRO optimizers with ``mesh=`` and ``zoo.engine`` call, or by :func:`zoo.moe.use_mesh`.

    Args:
        gate: of the layer's experts.
        experts: those that this rank has.
        capacity: None: dropless.
        shared: s, of every token, added to the output: "shared experts" (Dai et al. 2024, "DeepSeekMoE", section 3.2).
            It runs while tokens travel.
        residual: the output is c_0 times that of the experts plus c_1 s(x), c = softmax(x W + b) of two numbers
            (Rajbhandari et al. 2022, "DeepSpeed-MoE", section 4.1.1, as PR-MoE has it in code; the paper adds the two).
        chunks: into how many groups a rank's experts are cut, of which one computes while the next one's tokens come.
        repeated: the tensor-parallel ranks have the same tokens, and whole experts: each of them dispatches its share.

    Attributes:
        tally: (2, E) int64: sums of ``demand`` and ``counts`` of training forwards since somebody has set it to 0;
            recomputation does not count.

    Raises:
        ValueError: gate and experts do not fit.
    """

    def __init__(
        self, gate: Gate, experts: Experts, *, capacity: Capacity | None = None, shared: nn.Module | None = None,
        residual: bool = False, chunks: int = 1, repeated: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if gate.num_experts != experts.num_experts:
            raise ValueError(f"a gate for {gate.num_experts} experts and {experts.num_experts} experts.")
        if chunks < 1 or experts.num_local % chunks:
            raise ValueError(f"chunks={chunks} of {experts.num_local} experts on a rank; it divides their number.")
        if residual and shared is None:
            raise ValueError("residual=True without shared=, which it weighs.")
        self.gate, self.experts, self.shared, self.capacity = gate, experts, shared, capacity
        self.coefficient = nn.Linear(gate.hidden_size, 2) if residual else None
        self.chunks, self.repeated = chunks, repeated
        self.ep_size = experts.num_experts // experts.num_local
        self._comm: Communicator | None = None
        self._tensor: Communicator | None = None
        self._number = 0
        self.tally: Tensor | None = None
        declare_unit(experts)
        declare_part(self, "moe", MoEPart)
        if self.ep_size > 1:
            declare_axis(self, AXIS, self.ep_size)

    def enter_mesh(self, mesh: Any) -> None:
        """Find the ranks with the other experts, and those that have the same tokens. Collective over the mesh.

        Args:
            mesh: a DeviceMesh with names, among them "expert" if ``ep_size`` is more than 1.

        Raises:
            ValueError: it has no such axis, of another size, or this rank has another place on it than its experts.
        """
        names = tuple(mesh.mesh_dim_names or ())
        sizes = dict(zip(names, mesh.shape, strict=True))
        if self.ep_size > 1:
            if sizes.get(AXIS) != self.ep_size:
                raise ValueError(
                    f"a layer with ep_size={self.ep_size} on a mesh of the axes {sizes}; it needs the axis {AXIS!r} of "
                    f"that size: init_device_mesh(..., mesh_dim_names=('data', {AXIS!r}))."
                )
            place = mesh.get_local_rank(AXIS) * self.experts.num_local
            if place != self.experts.first:
                raise ValueError(
                    f"the layer was made with the experts from {self.experts.first} on, and the mesh has this rank "
                    f"where those from {place} on belong. Make it with ep_rank=mesh.get_local_rank({AXIS!r})."
                )
            self._comm = Communicator.of_axes(mesh, [AXIS])
            self._number = exchange.known_as(self._comm)
        if self.repeated and sizes.get(TENSOR_AXIS, 1) > 1:
            self._tensor = Communicator.of_axes(mesh, [TENSOR_AXIS])
            for parameter in self.experts.parameters():  # each of these ranks has the gradient of its share of tokens
                declare_partial(parameter, [TENSOR_AXIS])

    def forward(self, x: Tensor, used: Tensor | None = None) -> Mixed:
        """Mix (…, D).

        Args:
            used: (…) bool, or numbers of which 0 means no: tokens that count; others get 0 from the experts.
        """
        given = x.reshape(-1, x.shape[-1])
        routing = self.gate(given, None if used is None else used.reshape(-1) != 0)
        at = place(routing, self._limit(given.shape[0]))
        if self._tensor is None:
            y, shared = self._through(given, at, x)
        else:
            begin, end = share_of(given.shape[0], self._tensor)
            mine = split_tokens(given, self._tensor)
            y, shared = self._through(mine, at.part(begin, end, split_tokens(at.weights, self._tensor)), x)
            y = gather_tokens(y, given.shape[0], self._tensor)
        if self.training:
            count(self._tally(x.device), routing.demand, at.counts)
        return Mixed(
            output=self._joined(y.view(x.shape), shared, x), balance=routing.balance, z_loss=routing.z_loss,
            demand=routing.demand, counts=at.counts,
        )  # fmt: skip

    def _joined(self, y: Tensor, shared: Tensor | None, x: Tensor) -> Tensor:
        if shared is None:
            return y
        if self.coefficient is None:
            return y + shared
        c = torch.softmax(self.coefficient(x), -1)
        return y * c[..., :1] + shared * c[..., 1:]

    def _tally(self, device: torch.device) -> Tensor:
        if self.tally is None or self.tally.device != device:
            self.tally = torch.zeros(2, self.gate.num_experts, dtype=torch.int64, device=device)
        return self.tally

    def _limit(self, num_tokens: int) -> int | None:
        if self.capacity is None:
            return None
        factor = self.capacity.factor if self.training else self.capacity.eval_factor
        return capacity(num_tokens, self.gate.num_experts, factor * self.gate.capacity_choices(), self.capacity.minimum)

    def _through(self, x: Tensor, at: Places, all_x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the experts make of (T, D), and what the shared one makes of all tokens, if there is one."""
        x = _in_autocast(x)
        if self.ep_size == 1:
            y = self.experts(permute(x.contiguous(), at.rows, num_rows=at.num_rows), at.counts)
            shared = None if self.shared is None else self.shared(all_x)
        elif self._comm is None:
            raise ValueError(
                f"a layer with ep_size={self.ep_size} that does not know the other ranks. Give mesh=DeviceMesh with an "
                f"axis {AXIS!r} to the ZeRO optimizer or to initialize, or call zoo.moe.use_mesh(model, mesh)."
            )
        else:
            if self.chunks > 1:
                at = at.reordered(self._order(x.device))
            y, shared = self._across(permute(x.contiguous(), at.rows, num_rows=at.num_rows), at.counts, all_x)
        return unpermute(y, at.rows, at.weights.to(torch.promote_types(at.weights.dtype, torch.float32))), shared

    def _across(self, rows: Tensor, counts: Tensor, all_x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows go to the ranks of their experts and come back; the first chunk's way is hidden by the shared expert,
        the others' by the chunk before."""
        come, splits = exchange.exchange_counts(counts, self._number, self.chunks)
        parts = [rows] if self.chunks == 1 else _cut(rows, splits[:, 0].sum(1).tolist())
        whole = rows.shape[0] if self.chunks == 1 else -1
        tickets = [exchange.start(parts[0], splits[0], comm=self._number)]
        shared = None if self.shared is None else self.shared(all_x)
        returning: list[tuple[Tensor, Tensor]] = []
        for c, part in enumerate(parts):
            if c + 1 < self.chunks:
                tickets.append(exchange.start(parts[c + 1], splits[c + 1], comm=self._number))
            arrived = exchange.finish(tickets[c], part, splits[c], comm=self._number)
            y = self._here(arrived, come[c], c)
            returning.append((exchange.start(y, splits[c], comm=self._number, back=True), y))
        back = [
            exchange.finish(ticket, y, splits[c], comm=self._number, back=True, num_rows=whole)
            for c, (ticket, y) in enumerate(returning)
        ]
        return back[0] if len(back) == 1 else torch.cat(back), shared

    def _here(self, x: Tensor, come: Tensor, chunk: int) -> Tensor:
        """Experts of a chunk on what has come, which lies sender by sender: sort by expert, and back."""
        experts = self.experts if self.chunks == 1 else self.experts.part(chunk, self.chunks)
        if come.shape[1] == 1:
            return experts(x, come.sum(0))
        to = _by_expert(come, x.shape[0])
        y = experts(permute(x, to, num_rows=x.shape[0]), come.sum(0))
        return unpermute(y, to)

    def _order(self, device: torch.device) -> Tensor:
        """(E,): the place of each expert where those of one chunk lie together, in it rank by rank."""
        e = torch.arange(self.gate.num_experts, device=device)
        size = self.experts.num_local // self.chunks
        rank, local = e // self.experts.num_local, e % self.experts.num_local
        return (local // size * self.ep_size + rank) * size + local % size


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
