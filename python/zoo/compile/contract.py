"""Passes by name, what each promises, and the schedules that say which run when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zoo.compile.passes.downcast import downcast
from zoo.compile.passes.keep import keep
from zoo.compile.passes.place import place
from zoo.compile.plan import GraphPlan

Pass = Callable[[fx.GraphModule, GraphPlan], fx.GraphModule]
Schedule = Sequence[tuple[int, Sequence["str | Pass"]]]

PROMISES = frozenset({"bits", "starts", "whole_bytes"})
EVENTS_ADDED = "events"
"""What the pass "place" adds, without which nothing is gathered and no gradient is taken."""


@dataclass(frozen=True, kw_only=True)
class PassContract:
    """What a pass needs and promises.

    Attributes:
        requires: what passes before it have added. adds: what later ones may require.
        preserves: of "bits" (what the graph computes), "starts" (which communication begins, in which order) and
            "whole_bytes" (how much of the parameters is whole at once, at most what it was). Ranks rely on the last
            two: a graph that has not these is not used, whatever the contract of its pass is
            (:func:`~zoo.compile.check`). Bits are its author's word; reports say where it is not given.
        conflicts: names of passes that cannot be in the same list.

    Raises:
        ValueError: there is nothing of that name to preserve. TypeError: one of these is no set of names.
    """

    requires: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    preserves: frozenset[str] = PROMISES
    conflicts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("requires", "adds", "preserves", "conflicts"):
            given = getattr(self, name)
            names = None if isinstance(given, str) or not isinstance(given, Iterable) else frozenset(given)
            if names is None or not all(isinstance(one, str) for one in names):
                raise TypeError(f"PassContract({name}={given!r}): give a set of names, such as {{'events'}}.")
            object.__setattr__(self, name, names)
        unknown = self.preserves - PROMISES
        if unknown:
            raise ValueError(
                f"a pass cannot preserve {', '.join(sorted(unknown))}; it is some of {', '.join(sorted(PROMISES))}."
            )


@dataclass(frozen=True)
class Registered:
    """A pass with its name and contract."""

    name: str
    apply: Pass
    contract: PassContract


_PASSES: dict[str, Registered] = {}


def register_compile_pass(name: str, apply: Pass, contract: PassContract | None = None) -> None:
    """Make a pass known by name; an earlier one of that name is replaced.

    Args:
        apply: ``(graph, plan) → graph``, over the forward graph and then over that of backward
            (``plan.backward``); it may change the one that it is given.
        contract: what it needs and promises; None: everything is preserved, nothing is needed.

    Raises:
        ValueError: the name is none. TypeError: it is no function, or the contract is none.
    """
    if not str(name).isidentifier():
        raise ValueError(f"the name of a pass is an identifier, not {name!r}.")
    if not callable(apply):
        raise TypeError(f"the pass {name!r} is a {type(apply).__name__}; give a function of a graph and a plan.")
    if contract is not None and not isinstance(contract, PassContract):
        raise TypeError(
            f"the contract of the pass {name!r} is a {type(contract).__name__}; give a PassContract or None."
        )
    _PASSES[name] = Registered(name, apply, contract or PassContract())


def compile_pass(which: str | Pass) -> Registered:
    """The pass of a name, or that is this function.

    Raises:
        ValueError: there is none, or the function has several names.
    """
    if isinstance(which, str) and which in _PASSES:
        return _PASSES[which]
    known = [one for one in _PASSES.values() if one.apply is which]
    if len(known) > 1:
        raise ValueError(f"a pass has the names {', '.join(one.name for one in known)}: give the one that is meant.")
    if known:
        return known[0]
    shown = repr(which) if isinstance(which, str) else getattr(which, "__name__", repr(which))
    raise ValueError(
        f"there is no pass {shown}: known are {', '.join(sorted(_PASSES))}. Make others known by "
        "zoo.compile.register_compile_pass(name, pass, contract)."
    )


def ordered(passes: Iterable[str | Pass]) -> tuple[Registered, ...]:
    """Passes that can run one after the other.

    Raises:
        ValueError: one is unknown, comes twice, needs what none before it adds, or conflicts with another one.
    """
    found: list[Registered] = []
    added: set[str] = set()
    for which in passes:
        known = compile_pass(which)
        missing = sorted(known.contract.requires - added)
        if missing:
            raise ValueError(
                f"the pass {known.name!r} needs {', '.join(missing)}, which no pass before it adds: "
                f"{', '.join(p.name for p in found) or 'there is none'}."
            )
        for other in found:
            if other.name == known.name:
                raise ValueError(f"the pass {known.name!r} comes twice.")
            if known.name in other.contract.conflicts or other.name in known.contract.conflicts:
                raise ValueError(f"the passes {other.name!r} and {known.name!r} cannot be in one list.")
        added |= known.contract.adds
        found.append(known)
    return tuple(found)


def validate_schedule(schedule: Schedule) -> tuple[tuple[int, tuple[Registered, ...]], ...]:
    """Which passes run from which step on.

    Args:
        schedule: (step, passes), the first of step 0, in order.

    Raises:
        ValueError: it is no list of these; steps are not in order; a list adds no events; or see :func:`ordered`.
    """
    checked: list[tuple[int, tuple[Registered, ...]]] = []
    for step, passes in entries(schedule):
        if type(step) is not int or step < 0 or (checked and step <= checked[-1][0]):
            raise ValueError(
                f"the steps of a schedule of passes are whole numbers that rise from 0, and {step!r} is not in order."
            )
        checked.append((step, ordered(passes)))
    if not checked or checked[0][0] != 0:
        raise ValueError("a schedule of passes begins with step 0.")
    for step, found in checked:
        if not any(EVENTS_ADDED in known.contract.adds for known in found):
            raise ValueError(
                f"the passes of step {step} are {', '.join(known.name for known in found) or 'none'}, and none of "
                f"them adds {EVENTS_ADDED}: nothing would be gathered. Zoo's own are {', '.join(DEFAULT)}."
            )
    return tuple(checked)


def entries(schedule: object) -> list[tuple[Any, list[Any]]]:
    """The steps of a schedule with their passes, in its order.

    Raises:
        ValueError: it is something else.
    """
    shape = "a schedule of passes is a list such as [(0, ['keep', 'place'])], of steps with lists of passes"
    if not isinstance(schedule, Sequence) or isinstance(schedule, str):
        raise ValueError(f"{shape}, and no {type(schedule).__name__}.")
    for entry in schedule:
        fits = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
        if not fits or isinstance(entry[1], (str, Mapping)) or not isinstance(entry[1], Iterable):
            raise ValueError(f"{shape}, and {entry!r} is no such pair.")
    return [(step, list(passes)) for step, passes in schedule]


DEFAULT = ("downcast", "keep", "place")
"""The passes that make a graph of a model that is split over ranks."""

register_compile_pass("downcast", downcast)
register_compile_pass("keep", keep, PassContract(adds=frozenset({"kept"})))
register_compile_pass("place", place, PassContract(requires=frozenset({"kept"}), adds=frozenset({"events"})))
