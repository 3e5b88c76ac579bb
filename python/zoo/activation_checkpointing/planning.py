"""Which units to recompute under a budget: measured costs, a forecast, and the choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.activation_checkpointing.recomputing import ActivationCheckpointing

__all__ = ["Plan", "UnitCosts", "choose", "measure", "peak_bytes", "plan", "waiting_bytes"]

_MOST_STATES = 1024


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What one unit of a chain, y = unit(x), costs."""

    saved_bytes: int
    """That its graph keeps for backward, without parameters, x and y."""
    input_bytes: int
    """Of x, which a checkpoint keeps."""
    output_bytes: int = 0
    """Of y."""
    keeps_input: bool = True
    """Whether the graph keeps x."""
    keeps_output: bool = False
    """Whether the graph keeps y."""
    forward_s: float = 0.0
    """Of one forward: what a recomputation costs."""
    changes_input: bool = False
    """Whether it writes to x, as ``nn.ReLU(inplace=True)`` does: then it cannot be computed again."""

    @property
    def graph_bytes(self) -> int:
        """That the graph keeps beside x."""
        return self.saved_bytes + (self.output_bytes if self.keeps_output else 0)


@dataclass(frozen=True)
class Plan:
    """A choice of units.

    Attributes:
        recomputed: numbers of the units that are checkpointed.
        peak_bytes: forecast: the most that saved tensors occupy in forward and backward.
        recompute_s: seconds of a step that the recomputation takes.
        costs: of each unit.
    """

    recomputed: frozenset[int]
    peak_bytes: int
    recompute_s: float
    costs: tuple[UnitCosts, ...]

    def apply(
        self, units: Sequence[Callable[..., Any]], checkpointing: ActivationCheckpointing | None = None
    ) -> list[Callable[..., Any]]:
        """The units, those that are recomputed as functions that checkpoint them."""
        through = checkpointing or ActivationCheckpointing()
        return [
            _Checkpointed(through, unit) if number in self.recomputed else unit for number, unit in enumerate(units)
        ]

    def __str__(self) -> str:
        listed = ", ".join(map(str, sorted(self.recomputed))) or "none"
        return (
            f"recomputed: {listed} (of {len(self.costs)}); at most {self.peak_bytes} bytes of saved tensors; "
            f"{self.recompute_s * 1e3:.3f} ms of a step"
        )


class _Checkpointed:
    def __init__(self, checkpointing: ActivationCheckpointing, unit: Callable[..., Any]) -> None:
        self.checkpointing, self.unit = checkpointing, unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpointing.checkpoint(self.unit, *args, **kwargs)


def waiting_bytes(costs: Sequence[UnitCosts], recomputed: Iterable[int]) -> int:
    """Σ s_i + Σ x_i: what waits between forward and backward.

    s_i (``saved_bytes``) counts of units that are not recomputed. x_i counts if unit i is recomputed, or its graph
    keeps what it is given, or the unit before is not recomputed and its graph keeps what it returned. With the last
    unit's y, if its graph keeps it.
    """
    chosen = set(recomputed)
    total = sum(_boundary(costs, i, i in chosen, i - 1 in chosen) for i in range(len(costs)))
    total += sum(unit.saved_bytes for i, unit in enumerate(costs) if i not in chosen)
    last = len(costs) - 1
    return total + (costs[last].output_bytes if costs and costs[last].keeps_output and last not in chosen else 0)


def peak_bytes(costs: Sequence[UnitCosts], recomputed: Iterable[int]) -> int:
    """max over i of (what waits of units before i, x_i, and the whole graph of unit i): the most at any time.

    When the backward of unit i begins, what waited of later units is gone, and the graph of unit i is there: since its
    forward, or computed again. Gradients, and what kernels take for themselves, are not in it.
    """
    chosen, waiting, peak = set(recomputed), 0, 0
    for number, unit in enumerate(costs):
        waiting += _boundary(costs, number, number in chosen, number - 1 in chosen)
        peak = max(peak, waiting + unit.graph_bytes)
        waiting += 0 if number in chosen else unit.saved_bytes
    return peak


def _boundary(costs: Sequence[UnitCosts], number: int, again: bool, again_before: bool) -> int:
    unit = costs[number]
    kept_before = number > 0 and not again_before and costs[number - 1].keeps_output
    return unit.input_bytes if again or unit.keeps_input or kept_before else 0


_State = tuple[int, float, Any]
"""A choice for the units so far: bytes that wait, seconds of recomputation, (last unit chosen, those before)."""


def choose(costs: Sequence[UnitCosts], budget_bytes: int) -> Plan:
    """The units R to recompute: minimise Σ_{i in R} forward_s subject to peak_bytes(R) ≤ budget_bytes.

    A knapsack, solved from the first unit to the last: of all choices so far that end in the same way, those remain
    that no other one beats in waiting bytes and in seconds, which is exact. Where more than 1,024 remain, some of them
    go: then the plan fits the budget but may not be the fastest. Chen et al. 2016 and Jain et al. 2020, "Checkmate",
    pose the general problem; here units are a chain, and each is recomputed at most once, one that changes its input
    never.

    Raises:
        ValueError: no choice fits; the message says what the least is.
    """
    states: dict[bool, list[_State]] = {False: [(0, 0.0, None)], True: []}
    for number, unit in enumerate(costs):
        further: dict[bool, list[_State]] = {False: [], True: []}
        for before, those in states.items():
            for again in (False,) if unit.changes_input else (False, True):
                boundary = _boundary(costs, number, again, before)
                waits = boundary + (0 if again else unit.saved_bytes)
                room = budget_bytes - boundary - unit.graph_bytes
                seconds = unit.forward_s if again else 0.0
                further[again] += [
                    (waiting + waits, so_far + seconds, (number, chosen) if again else chosen)
                    for waiting, so_far, chosen in those
                    if waiting <= room
                ]
        states = {again: _unbeaten(those) for again, those in further.items()}
    left = [*states[False], *states[True]]
    if not left:
        able = [number for number, unit in enumerate(costs) if not unit.changes_input]
        every = "every unit" if len(able) == len(costs) else f"each of the {len(able)} units that keep their input"
        raise ValueError(
            f"budget_bytes={budget_bytes} is less than any choice needs; with {every} recomputed "
            f"{peak_bytes(costs, able)} bytes of saved tensors are there at once: give that much, or cut the model "
            "into smaller units."
        )
    _, seconds, link = min(left, key=_cheap)
    chosen = set()
    while link is not None:
        number, link = link
        chosen.add(number)
    return Plan(frozenset(chosen), peak_bytes(costs, chosen), seconds, tuple(costs))


def _cheap(state: _State) -> tuple[float, int]:
    return state[1], state[0]


def _small(state: _State) -> tuple[int, float]:
    return state[0], state[1]


def _unbeaten(states: list[_State]) -> list[_State]:
    found: list[_State] = []
    for one in sorted(states, key=_small):
        if not found or one[1] < found[-1][1]:
            found.append(one)
    stride = -(-len(found) // _MOST_STATES)
    return found if stride <= 1 else found[::stride]


def plan(units: nn.Module | Sequence[Callable[..., Any]], budget_bytes: int, example: Any, *, repeats: int = 3) -> Plan:
    """Measure the units of a chain and choose which of them to recompute; see :func:`choose` for the objective.

    ``plan(blocks, budget, x).apply(blocks)`` are the blocks to call. Measured seconds differ between ranks: in a job of
    several, one rank plans for all, because with ZeRO stage 3 the order of gathers follows from the choice.

    Args:
        units: each is called with what the one before it returned (a tuple: as arguments); the children of a module.
        budget_bytes: for saved tensors: device memory less parameters, gradients and optimizer states.
        example: what the first one is given.
        repeats: forwards that are timed; the fastest counts.
    """
    return choose(measure(units, example, repeats=repeats), budget_bytes)


def measure(
    units: nn.Module | Sequence[Callable[..., Any]], example: Any, *, repeats: int = 3
) -> tuple[UnitCosts, ...]:
    """What each unit keeps for backward and how long its forward takes: it is run on the example, with gradients.

    Random states, and gradients of parameters, are as before afterwards; buffers that a unit changes are changed.
    """
    chain: list[Callable[..., Any]] = list(units.children()) if isinstance(units, nn.Module) else list(units)
    found, values = [], example if isinstance(example, tuple) else (example,)
    devices = {x.device.index for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        for unit in chain:
            costs, output = _measure_one(unit, values, repeats)
            found.append(costs)
            values = output if isinstance(output, tuple) else (output,)
    return tuple(found)


def _measure_one(unit: Callable[..., Any], values: tuple[Any, ...], repeats: int) -> tuple[UnitCosts, Any]:
    given = pytree.tree_map_only(torch.Tensor, _as_input, values)
    saved: list[torch.Tensor] = []
    versions = _versions(given)
    with torch.autograd.graph.saved_tensors_hooks(_noting(saved), lambda x: x):
        output = unit(*given)
    changes = _versions(given) != versions
    kept = _storages([x for x in saved if not isinstance(x, nn.Parameter)])
    coming, going = _storages(given), _storages(output)
    parameters = _storages(list(unit.parameters())) if isinstance(unit, nn.Module) else {}
    best = float("inf")
    for _ in range(max(1, repeats)):
        start = _now(given)
        unit(*given)
        best = min(best, _now(given) - start)
    costs = UnitCosts(
        saved_bytes=sum(size for key, size in kept.items() if key not in coming | going | parameters),
        input_bytes=sum(coming.values()), output_bytes=sum(going.values()), forward_s=best,
        keeps_input=bool(kept.keys() & coming.keys()), keeps_output=bool(kept.keys() & (going.keys() - coming.keys())),
        changes_input=changes,
    )  # fmt: skip
    return costs, output


def _noting(into: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        into.append(tensor.detach() if not isinstance(tensor, nn.Parameter) else tensor)
        return tensor.detach()

    return note


def _as_input(tensor: torch.Tensor) -> torch.Tensor:
    """As it comes from the unit before: part of a graph that ends here, and no leaf, to which a unit cannot write."""
    found = tensor.detach()
    return found.requires_grad_().clone() if found.is_floating_point() or found.is_complex() else found.clone()


def _versions(values: Any) -> list[int]:
    return [x._version for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and not x.is_inference()]


def _storages(values: Any) -> dict[int, int]:
    """Address → bytes of all memory that tensors lie in: what is saved by two operations counts once."""
    found = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            found[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return found


def _now(values: Any) -> float:
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in pytree.tree_leaves(values)):
        torch.cuda.synchronize()
    return time.perf_counter()
