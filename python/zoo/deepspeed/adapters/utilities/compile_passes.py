"""``deepspeed.compile.passes``: what passes need and give, schedules of them, and which of zoo's stand for DeepSpeed's.

A schedule is a list of (update, passes). From that update on the graph is made anew by these passes, in this order, so
what a pass requires has to be provided by one before it in the same list.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.deepspeed.surface.constants import CONSTANTS

if TYPE_CHECKING:
    from zoo.engine import Engine

__all__ = [
    "PassContract", "PassContractError", "arguments", "get_pass_contract", "register_compile_pass",
    "register_pass_contract", "schedule_of", "translated", "validate_schedule",
]  # fmt: skip

_log = logging.getLogger("zoo.deepspeed")

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

    def __post_init__(self) -> None:
        for name in ("provides", "requires", "conflicts_with"):
            if isinstance(given := getattr(self, name), str):
                raise TypeError(f"PassContract({name}={given!r}): give a set of names, such as {{{given!r}}}.")


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

_pass_contracts: dict[str, PassContract] = {
    ZERO1: CONTRACT_Z1, ZERO2: CONTRACT_Z2, ZERO3: CONTRACT_Z3, PREFETCH: CONTRACT_PREFETCH,
    SELECTIVE_GATHER: CONTRACT_SELECTIVE_GATHER, OFFLOAD_PARAMETERS: CONTRACT_OFFLOAD_PARAMETERS,
    OFFLOAD: CONTRACT_OFFLOAD, OFFLOAD_SYNC: CONTRACT_OFFLOAD_SYNC, OFFLOAD_FOR_INIT: CONTRACT_OFFLOAD_FOR_INIT,
}  # fmt: skip


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
            function with several names. ValueError: it is no schedule.
    """
    from zoo.compile.contract import entries

    for step, passes in entries(schedule):
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
        contract: of DeepSpeed (:func:`get_pass_contract` gives it back), of zoo, or None.

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
    theirs = contract if isinstance(contract, PassContract) else None
    if theirs is not None:
        contract = passes.PassContract(
            requires=_in_zoo(theirs.requires), adds=_in_zoo(theirs.provides), conflicts=theirs.conflicts_with
        )
    passes.register_compile_pass(name, apply, contract)
    register_pass_contract(name, theirs)


def _in_zoo(capabilities: frozenset[str]) -> frozenset[str]:
    """What zoo's passes call these."""
    from zoo.compile.contract import EVENTS_ADDED

    return frozenset(EVENTS_ADDED if name in _GATHERS else name for name in capabilities)


_OF_STAGE = {1: ZERO1, 2: ZERO2, 3: ZERO3}
"""DeepSpeed's pass of a stage, for which zoo's own stand: they gather, keep what the budget allows and gather ahead at
once, so that nothing is left for :data:`_DONE`."""
_DONE = (PREFETCH, SELECTIVE_GATHER)


def translated(schedule: Any, stage: int) -> list[tuple[int, list[str]]]:
    """A schedule of DeepSpeed's passes, or of zoo's, as one of zoo's. Contracts hold in it under DeepSpeed's names:
    zoo's ``place`` is the pass of the stage.

    Raises:
        NotImplementedError: passes that move parameters or states to the host while a graph runs.
        PassContractError: see :func:`validate_schedule`; a pass comes twice. ValueError: it is no schedule.
    """
    from zoo.compile.contract import compile_pass, entries

    named = [
        (step, [one if isinstance(one, str) else compile_pass(one).name for one in passes])
        for step, passes in entries(schedule)
    ]
    in_zoo = {name: _in_zoo_are(name) for _, names in named for name in names}
    validate_schedule([(s, [_OF_STAGE.get(stage, n) if n == "place" else n for n in names]) for s, names in named])
    return [(step, _expanded(step, names, in_zoo)) for step, names in named]


def _expanded(step: int, names: Sequence[str], in_zoo: Mapping[str, Sequence[str]]) -> list[str]:
    """The passes of zoo that these are, each once."""
    found: dict[str, str] = {}  # and those of DeepSpeed, each with the one that was given
    made: list[str] = []
    for name in names:
        for one in dict.fromkeys((name, *in_zoo[name])):
            if one in found:
                by = name if found[one] == one else found[one]
                why = f": {by!r} stands for {', '.join(in_zoo[by])}" if by != one else ""
                raise PassContractError(f"the pass {one!r} of update {step} comes twice{why}; leave one out.")
            found[one] = name
        made += in_zoo[name]
    return made


def _in_zoo_are(name: str) -> tuple[str, ...]:
    from zoo.compile.contract import DEFAULT, compile_pass

    try:
        return (compile_pass(name).name,)
    except ValueError:  # it is not registered
        if name.startswith("offload_"):
            raise NotImplementedError(
                f"the compiler pass {name!r} is not in zoo: offload_optimizer and offload_param of the "
                "configuration move states and parameters, compiled or not."
            ) from None
    return DEFAULT if name in _OF_STAGE.values() else () if name in _DONE else (name,)


def schedule_of(engine: Engine, given: Any = None) -> list[tuple[int, list[str]]]:
    """The schedule that was given, or else that of the configuration, in zoo's words: see :func:`translated`."""
    from zoo.compile.contract import DEFAULT

    section = engine.config.compile
    if given is None:
        given = section.schedule
    if given is None:
        given = [(0, [*DEFAULT, *(section.passes or ())])]
    return translated(given, engine.config.zero_optimization.stage)


def arguments(
    engine: Engine, backend: Any, compile_kwargs: Any, schedule: Any, *, autograd: bool
) -> dict[str, Any]:  # fmt: skip
    """What :meth:`zoo.engine.Engine.compile` takes, of what ``engine.compile`` was given. Without a backend it is that
    of the configuration, or else the accelerator's.

    Raises:
        NotImplementedError: with ``autograd``. ValueError: ``compile_kwargs`` is no dict of arguments of
            ``torch.compile``; see :func:`translated`.
    """
    from zoo.compile.config import wrong_arguments
    from zoo.deepspeed.adapters.accelerator.real_accelerator import get_accelerator

    if autograd:
        raise NotImplementedError(
            "engine.compile(compiled_autograd_enabled=True): the backward of a graph is compiled with it, and "
            "between graphs hooks of the runtime run. Leave it out."
        )
    if compile_kwargs is not None and not isinstance(compile_kwargs, Mapping):
        raise ValueError(f"compile_kwargs={compile_kwargs!r}, a {type(compile_kwargs).__name__}; give a dict.")
    section, options = engine.config.compile, dict(compile_kwargs or {})
    if "backend" in options:
        _log.warning(
            "engine.compile(): compile_kwargs has backend=%r, which is left out: backend= of engine.compile says it.",
            options.pop("backend"),
        )
    for wrong in wrong_arguments(options, "compile_kwargs"):
        raise ValueError(f"engine.compile(): {wrong}.")
    if backend is None and "backend" not in section.model_fields_set:
        backend = get_accelerator().get_compile_backend()
    if section.deepcompile:
        schedule = schedule_of(engine, schedule)
    return {"backend": backend, "schedule": schedule, **options}
