"""The layer: route, place, dispatch, join with what every token gets.

Legend: T tokens of this rank, D hidden size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zoo.comm import Communicator
from zoo.config.mesh import data_axes
from zoo.layout import declare_axis, declare_unit
from zoo.moe import exchange
from zoo.moe.counted import CountedLayer
from zoo.moe.dispatch import Dispatcher
from zoo.moe.experts.base import AXIS, Experts
from zoo.moe.gates.base import Gate
from zoo.moe.gates.loss_free import LossFreeGate
from zoo.moe.part import MoEPart
from zoo.moe.routing import Routing, capacity, place
from zoo.parts import declare_part

Tensor = torch.Tensor


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
        kinds: tuple[tuple[str, object, type], ...] = (
            ("factor", self.factor, Real), ("eval_factor", self.eval_factor, Real), ("minimum", self.minimum, Integral),
        )  # fmt: skip
        wrong = [f"{name}={value!r}" for name, value, kind in kinds if not isinstance(value, kind)]
        if wrong:
            raise ValueError(
                f"Capacity got {', '.join(wrong)}; factors are numbers, the minimum is a whole one. To drop nothing "
                "give no capacity (MoE: drop_tokens=False)."
            )
        if not (0 < self.factor < math.inf and 0 < self.eval_factor < math.inf and self.minimum >= 0):
            raise ValueError(
                f"a capacity factor of {self.factor}, {self.eval_factor} in evaluation, and at least {self.minimum}; "
                "factors are positive and finite, and the minimum is not negative. To drop nothing give no capacity."
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


class _Data:
    """The ranks that a balance loss is over: a copied layer is among the same ones, and a pickle has to be told."""

    def __init__(self, comm: Communicator | None = None, number: int = 0) -> None:
        self.comm, self.number = comm, number

    def __deepcopy__(self, memo: Any) -> _Data:
        return _Data(self.comm, self.number)

    def __reduce__(self) -> Any:
        return _Data, ()


class MixtureOfExperts(CountedLayer):
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
            A gate that draws has to draw the same on all of them: without an engine, seed torch alike there.
        balance_over: the micro-batch of which the balance loss is: each rank's own, or in training that of all data
            ranks together, which lets a rank's text be of one kind (one more small collective a forward).

    Attributes:
        tally: see :class:`~zoo.moe.counted.CountedLayer`.

    Raises:
        ValueError: gate and experts do not fit.
    """

    def __init__(
        self, gate: Gate, experts: Experts, *, capacity: Capacity | None = None, shared: nn.Module | None = None,
        residual: bool = False, chunks: int = 1, repeated: bool = True,
        balance_over: Literal["rank", "global"] = "rank",
    ) -> None:  # fmt: skip
        super().__init__()
        if gate.num_experts != experts.num_experts:
            raise ValueError(f"a gate for {gate.num_experts} experts and {experts.num_experts} experts.")
        width = getattr(experts, "hidden_size", gate.hidden_size)
        if width != gate.hidden_size:
            raise ValueError(
                f"a gate of hidden_size={gate.hidden_size} and experts of {width}; they see the same tokens."
            )
        if capacity is not None and not isinstance(capacity, Capacity):
            raise ValueError(f"capacity={capacity!r}; it is a Capacity(factor=...), or None, which drops nothing.")
        if residual and shared is None:
            raise ValueError("residual=True without shared=, which it weighs.")
        if balance_over not in ("rank", "global"):
            raise ValueError(f"balance_over={balance_over!r}; allowed are 'rank' and 'global'.")
        self.balance_over, self._data = balance_over, _Data()
        self.gate, self.experts, self.shared, self.capacity = gate, experts, shared, capacity
        self.coefficient = nn.Linear(gate.hidden_size, 2) if residual else None
        self.num_experts = gate.num_experts
        self._dispatch = Dispatcher(
            experts.num_experts, experts.num_local, experts.first, chunks=chunks, repeated=repeated
        )
        self.ep_size = self._dispatch.ep_size
        declare_unit(experts)
        declare_part(self, "moe", MoEPart)
        if self.ep_size > 1:
            declare_axis(self, AXIS, self.ep_size)

    def enter_mesh(self, mesh: Any) -> None:
        """Tell the layer of the mesh: see :meth:`zoo.moe.dispatch.Dispatcher.enter_mesh`. Collective over the mesh."""
        if self.experts.alike and self.expert_ranks is None and AXIS in (mesh.mesh_dim_names or ()):
            self.experts.move(mesh.get_local_rank(AXIS))  # consecutive ranks may be those of another axis
            self._dispatch.first = self.experts.first
        self.experts.declare()
        self._dispatch.enter_mesh(mesh, self.experts.parameters())
        if self.balance_over == "global":
            self._data = _Data(*exchange.along(mesh, data_axes(mesh.mesh_dim_names)))

    @property
    def expert_ranks(self) -> Communicator | None:
        """See :class:`CountedLayer`."""
        return self._dispatch.comm

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Of the experts that this rank has."""
        return self.experts.parameters()

    def draw_by(self, number: int) -> None:
        """See :class:`CountedLayer`."""
        if self.gate.draws:
            if self.gate.noise_key is None:
                self.gate.noise_key = torch.zeros((), dtype=torch.int64)
            self.gate.noise_key.fill_(number)

    @property
    def has_bias(self) -> bool:
        """See :class:`CountedLayer`."""
        return isinstance(self.gate, LossFreeGate)

    def commit(self, demand: Tensor) -> None:
        """See :class:`CountedLayer`."""
        if isinstance(self.gate, LossFreeGate):
            self.gate.commit(demand)

    def forward(self, x: Tensor, used: Tensor | None = None) -> Mixed:
        """Mix (…, D).

        Args:
            used: (…) or (T,) bool, or numbers of which 0 means no: tokens that count; others get 0 from the experts.

        Raises:
            ValueError: another width or another number of tokens.
        """
        if x.dim() == 0 or x.shape[-1] != self.gate.hidden_size or not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}; it takes numbers "
                f"(…, {self.gate.hidden_size})."
            )
        if used is not None and used.shape != x.shape[:-1] and used.shape != (x.shape[:-1].numel(),):
            raise ValueError(
                f"{type(self).__name__} got a mask of used tokens {tuple(used.shape)} for {tuple(x.shape)}; it has one "
                f"number for each token: {tuple(x.shape[:-1])}."
            )
        given = x.reshape(-1, x.shape[-1])
        routing = self.gate(given, None if used is None else used.reshape(-1) != 0)
        at = place(routing, self._limit(given.shape[0]))
        balance = self._balance_of(routing)
        y, shared = self._dispatch(self.experts, given, at, None if self.shared is None else lambda: self._shared(x))
        self.count(routing.demand, at.counts)
        return Mixed(
            output=self._joined(y.view(x.shape), shared, x), balance=balance, z_loss=routing.z_loss,
            demand=routing.demand, counts=at.counts,
        )  # fmt: skip

    def _balance_of(self, routing: Routing) -> Tensor:
        if self.balance_over == "rank" or routing.load is None or not (dist.is_initialized() and self.training):
            return routing.balance
        if self._data.comm is None:
            everyone = Communicator()
            self._data = _Data(everyone, exchange.known_as(everyone))
        size = exchange.ranks_of(self._data.number)
        return routing.load.over(self._data.number).loss() if size > 1 else routing.balance

    def _shared(self, x: Tensor) -> Tensor:
        found: Tensor = self.shared(x)  # type: ignore[misc]  # called only where there is one
        return found

    def _joined(self, y: Tensor, shared: Tensor | None, x: Tensor) -> Tensor:
        if shared is None:
            return y
        if self.coefficient is None:
            return y + shared
        c = torch.softmax(self.coefficient(x), -1)
        return y * c[..., :1] + shared * c[..., 1:]

    def _limit(self, num_tokens: int) -> int | None:
        if self.capacity is None:
            return None
        factor = self.capacity.factor if self.training else self.capacity.eval_factor
        return capacity(num_tokens, self.gate.num_experts, factor * self.gate.capacity_choices(), self.capacity.minimum)
