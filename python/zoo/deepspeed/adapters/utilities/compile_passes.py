"""``deepspeed.compile.passes``: what passes need and give, schedules of them, and which of zoo's stand for DeepSpeed's.

A schedule is a list of (update, passes). From that update on the graph is made anew by these passes, in this order, so
what a pass requires has to be provided by one before it in the same list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.deepspeed.surface.constants import CONSTANTS

__all__ = [
    "PassContract", "PassContractError", "arguments", "get_pass_contract", "register_compile_pass",
    "register_pass_contract", "translated", "validate_schedule",
]  # fmt: skip

_CAPS = CONSTANTS["compile.passes.contract"]
_GATHERS, _EVICTED = frozenset({_CAPS["CAP_Z3_GATHER_RELEASE"]}), frozenset({_CAPS["CAP_OPT_STATES_EVICTED"]})


class PassContractError(ValueError):
    """Passes that cannot run in this order, or not together."""


@dataclass(frozen=True)
class PassContract:
    """What a pass needs and gives.

    Attributes:
        provides, requires: names of capabilities. conflicts_with: names of passes that cannot be in the same list.
        phase: "fwd", "bwd" or "both": of which graph it is.
    """

    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    phase: str = "both"


ZERO1, ZERO2, ZERO3 = "zero1_compile", "zero2_compile", "zero3_compile"
PREFETCH, SELECTIVE_GATHER, OFFLOAD_PARAMETERS = "prefetch", "selective_gather", "offload_parameters"
OFFLOAD, OFFLOAD_SYNC, OFFLOAD_FOR_INIT = (f"offload_adam_states{end}" for end in ("", "_sync", "_for_init"))
_OF_STATES = frozenset({ZERO1, ZERO2, OFFLOAD_PARAMETERS})
CONTRACT_Z1 = PassContract(conflicts_with=frozenset({ZERO3}))
CONTRACT_Z2 = PassContract(conflicts_with=frozenset({ZERO3, ZERO1}))
CONTRACT_Z3 = PassContract(provides=_GATHERS)
CONTRACT_PREFETCH = CONTRACT_SELECTIVE_GATHER = CONTRACT_OFFLOAD_PARAMETERS = PassContract(requires=_GATHERS)
CONTRACT_OFFLOAD = PassContract(requires=_EVICTED, conflicts_with=_OF_STATES)
CONTRACT_OFFLOAD_SYNC = PassContract(conflicts_with=_OF_STATES | {OFFLOAD})
CONTRACT_OFFLOAD_FOR_INIT = PassContract(provides=_EVICTED, conflicts_with=_OF_STATES)

_pass_contracts: dict[str, PassContract] = {}


def register_pass_contract(name: str, contract: PassContract | None) -> None:
    """Of the pass of this name, from now on; None: it needs and gives nothing."""
    if contract is None:
        _pass_contracts.pop(name, None)
    else:
        _pass_contracts[name] = contract


def get_pass_contract(name: str) -> PassContract | None:
    """The one that was registered."""
    return _pass_contracts.get(name)


def validate_schedule(
    schedule: Sequence[tuple[int, Sequence[Any]]], name_registry: Mapping[str, Any] | None = None
) -> None:
    """Check each list of passes by itself.

    Args:
        schedule: (update, passes), by name or function.
        name_registry: name → function; one that is in it under no name has no contract.

    Raises:
        PassContractError: a pass requires what none before it provides, conflicts with one of the list, or is a
            function with several names.
    """
    for step, passes in schedule:
        provided: set[str] = set()
        before: list[tuple[str, PassContract]] = []
        for which in passes:
            name = _name_of(which, name_registry or {})
            contract = _pass_contracts.get(name, PassContract())
            missing = sorted(contract.requires - provided)
            if missing:
                raise PassContractError(
                    f"the pass {name!r} of update {step} requires {', '.join(missing)}, which no pass before it in the "
                    f"list provides; before it are {[one for one, _ in before] or 'none'}."
                )
            wrong = [one for one, its in before if one in contract.conflicts_with or name in its.conflicts_with]
            if wrong:
                raise PassContractError(
                    f"the pass {name!r} of update {step} conflicts with {', '.join(wrong)} in the same list; leave one "
                    "of them out."
                )
            provided |= contract.provides
            before.append((name, contract))


def _name_of(which: Any, registry: Mapping[str, Any]) -> str:
    if isinstance(which, str):
        return which
    names = sorted(name for name, function in registry.items() if function is which)
    if len(names) > 1:
        raise PassContractError(f"a pass is registered under multiple names, {', '.join(names)}; give the name.")
    return names[0] if names else getattr(which, "__name__", repr(which))


def register_compile_pass(name: str, apply: Callable[..., Any], contract: Any = None) -> None:
    """A pass of zoo, by name: ``(graph, plan) → graph`` (:func:`zoo.compile.register_compile_pass`).

    Args:
        contract: of zoo or of DeepSpeed.

    Raises:
        NotImplementedError: the function takes other arguments, as DeepSpeed's passes do: their graphs are others.
    """
    from zoo import compile as passes

    try:
        inspect.signature(apply).bind(None, None)
    except TypeError as error:
        raise NotImplementedError(
            f"register_compile_pass({name!r}): {error}. A pass of zoo is called with a graph and a plan "
            "(zoo.compile.GraphPlan), and gives the graph; those of DeepSpeed change graphs of its own operators."
        ) from None
    if isinstance(contract, PassContract):
        contract = passes.PassContract(
            requires=contract.requires, adds=contract.provides, conflicts=contract.conflicts_with
        )
    passes.register_compile_pass(name, apply, contract)


_STAGE = ("downcast", "keep", "place")
_STANDS_FOR = {ZERO1: _STAGE, ZERO2: _STAGE, ZERO3: _STAGE, PREFETCH: (), SELECTIVE_GATHER: ()}
"""DeepSpeed's pass → those of zoo: each stage's gather, keep what the budget allows and gather ahead at once."""


def translated(schedule: Any) -> Any:
    """A schedule of DeepSpeed's passes as one of zoo's; another one as it is.

    Raises:
        NotImplementedError: passes that move parameters or states to the host while a graph runs.
    """
    if schedule is None:
        return None
    made = []
    for step, passes in schedule:
        found: list[Any] = []
        for which in passes:
            if isinstance(which, str) and which.startswith("offload_"):
                raise NotImplementedError(
                    f"the compiler pass {which!r} is not in zoo: offload_optimizer and offload_param of the "
                    "configuration move states and parameters, compiled or not."
                )
            more = _STANDS_FOR.get(which, (which,)) if isinstance(which, str) else (which,)
            found += [one for one in more if one not in found]
        made.append((step, found))
    return made


def arguments(backend: Any, compile_kwargs: Any, schedule: Any, *, autograd: bool) -> dict[str, Any]:
    """What :meth:`zoo.engine.Engine.compile` takes, of what ``engine.compile`` was given.

    Raises:
        NotImplementedError: with ``autograd``. ValueError: ``compile_kwargs`` is no dict.
    """
    if autograd:
        raise NotImplementedError(
            "engine.compile(compiled_autograd_enabled=True): the backward of a graph is compiled with it, and "
            "between graphs hooks of the runtime run. Leave it out."
        )
    if compile_kwargs is not None and not isinstance(compile_kwargs, Mapping):
        raise ValueError(f"compile_kwargs={compile_kwargs!r}, a {type(compile_kwargs).__name__}; give a dict.")
    return {"backend": backend, "schedule": translated(schedule), **(compile_kwargs or {})}
