"""Passes by name, what each promises, and the schedules that say which run when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from zoo.compile.passes.downcast import downcast
from zoo.compile.passes.keep import keep
from zoo.compile.passes.place import place
from zoo.compile.plan import GraphPlan

Pass = Callable[[fx.GraphModule, GraphPlan], fx.GraphModule]
Schedule = Sequence[tuple[int, Sequence["str | Pass"]]]

PROMISES = frozenset({"bits", "starts", "whole_bytes"})


@dataclass(frozen=True, kw_only=True)
class PassContract:
    """What a pass needs and promises.

    Attributes:
        requires: what passes before it have added. adds: what later ones may require.
        preserves: of "bits" (what the graph computes), "starts" (which communication begins, in which order) and
            "whole_bytes" (how much of the parameters is whole at once, at most what it was). A pass that preserves no
            starts has to run on all ranks.
        conflicts: names of passes that cannot be in the same list.
    """

    requires: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    preserves: frozenset[str] = PROMISES
    conflicts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
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
    """
    if not name.isidentifier():
        raise ValueError(f"the name of a pass is an identifier, not {name!r}.")
    if not callable(apply):
        raise TypeError(f"the pass {name!r} is a {type(apply).__name__}; give a function of a graph and a plan.")
    _PASSES[name] = Registered(name, apply, contract or PassContract())


def compile_pass(which: str | Pass) -> Registered:
    """The pass of a name, or that is this function.

    Raises:
        ValueError: there is none.
    """
    if isinstance(which, str) and which in _PASSES:
        return _PASSES[which]
    for known in _PASSES.values():
        if known.apply is which:
            return known
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
        ValueError: steps are not in order, or see :func:`ordered`.
    """
    checked: list[tuple[int, tuple[Registered, ...]]] = []
    for step, passes in schedule:
        if type(step) is not int or step < 0 or (checked and step <= checked[-1][0]):
            raise ValueError(f"a schedule of passes has steps 0 < … in order, and {step!r} is not in order.")
        checked.append((step, ordered(passes)))
    if not checked or checked[0][0] != 0:
        raise ValueError("a schedule of passes begins with step 0.")
    return tuple(checked)


DEFAULT = ("downcast", "keep", "place")
"""The passes that make a graph of a model that is split over ranks."""

register_compile_pass("downcast", downcast)
register_compile_pass("keep", keep, PassContract(adds=frozenset({"kept"})))
register_compile_pass("place", place, PassContract(requires=frozenset({"kept"}), adds=frozenset({"events"})))
