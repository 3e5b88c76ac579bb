"""What was measured, as values: a tree of modules, totals, and how much of a device's peak was used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from zoo.cost.operators import NOTHING, Work
from zoo.cost.writing import write_whole
from zoo.profiling.calls import CallNode, Calls, Pass
from zoo.profiling.parameters import Parameters, parameters_of

__all__ = ["ModuleProfile", "Operator", "Profile", "Utilisation", "gather"]


_NO_PARAMETERS = Parameters()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All calls of one operator, in all passes."""

    calls: int = 0
    work: Work = NOTHING


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Parts of a device's peak.

    Attributes:
        mfu: model FLOPs utilisation: forward and backward (Chowdhery et al. 2022, "PaLM", appendix B), attention as if
            nothing were masked. causal_mfu: without what a causal mask hides.
        hfu: hardware FLOPs utilisation: what is computed again too.
        estimated: backward was not measured; it was taken as twice the forward, and recomputation as
            ``recompute_fwd_factor`` forwards.
    """

    mfu: float
    causal_mfu: float
    hfu: float
    estimated: bool


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """A module, with all that ran in it and below it.

    Attributes:
        name: that it has in its parent; path: in the model; kind: its class.
        calls: of its forward. seconds: of these calls, all in all; None where nothing was computed (on meta).
        forward, backward, recomputation: what was done.
        parameters: its own and those below, each once.
    """

    name: str
    path: str
    kind: str
    extra: str = ""
    """What the module says of itself."""
    calls: int = 0
    seconds: float | None = None
    forward: Work = NOTHING
    backward: Work = NOTHING
    recomputation: Work = NOTHING
    parameters: Parameters = _NO_PARAMETERS
    children: tuple[ModuleProfile, ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ModuleProfile]]:
        """(depth, module) of this and of all below it."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; FLOPs beside the multiply-accumulates."""
        passes = {"forward": self.forward, "backward": self.backward, "recomputation": self.recomputation}
        return {
            "name": self.name, "path": self.path, "class": self.kind, "calls": self.calls, "seconds": self.seconds,
            "parameters": {
                "numel": self.parameters.numel, "kept": self.parameters.kept, "active": self.parameters.active,
            },
            **{name: _values(work) for name, work in passes.items()},
            "children": [child.to_dict() for child in self.children],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Of one model, from start to stop.

    Attributes:
        model: the tree.
        operators: by name. not_counted: calls of operators that have no formula.
        outside: what ran neither in the model's forward nor in backward, the update for example.
        backward_s: seconds of backward, recomputation included; None where there was none.
        folded: ways through modules → FLOPs of forward, backward and recomputation: a flame graph.
    """

    model: ModuleProfile
    operators: Mapping[str, Operator] = field(default_factory=dict)
    not_counted: Mapping[str, int] = field(default_factory=dict)
    outside: Work = NOTHING
    backward_s: float | None = None
    recompute_fwd_factor: float = 0.0
    folded: Mapping[tuple[str, ...], Work] = field(default_factory=dict)

    @property
    def model_flops(self) -> int:
        """Forward and backward; backward twice the forward where it was not measured."""
        forward, backward = self.model.forward.flops, self.model.backward.flops
        return forward + backward if self.has_backward else 3 * forward

    @property
    def causal_model_flops(self) -> int:
        """The same without what a causal mask hides."""
        forward, backward = self.model.forward.causal_flops, self.model.backward.causal_flops
        return forward + backward if self.has_backward else 3 * forward

    @property
    def hardware_flops(self) -> int:
        """With what was computed again."""
        if self.has_backward:
            return self.model_flops + self.model.recomputation.flops
        return self.model_flops + round(self.recompute_fwd_factor * self.model.forward.flops)

    @property
    def has_backward(self) -> bool:
        """Whether a backward was measured."""
        return self.backward_s is not None or self.model.backward != NOTHING

    @property
    def training_s(self) -> float | None:
        """Seconds of forward and backward; None where one of them was not measured."""
        forward = self.model.seconds
        return None if forward is None or self.backward_s is None else forward + self.backward_s

    def utilisation(self, peak_flops_per_s: float, seconds: float | None = None) -> Utilisation:
        """MFU and HFU.

        Args:
            peak_flops_per_s: of the device, of dense products in the dtype that is used.
            seconds: of a whole step; :attr:`training_s` if not given.

        Raises:
            ValueError: a peak or a time that is not positive, or no time at all.
        """
        seconds = self.training_s if seconds is None else seconds
        if seconds is None:
            raise ValueError(
                "utilisation() of a profile without a measured backward; give seconds=, those of a whole step."
            )
        if not (peak_flops_per_s > 0 and seconds > 0):
            raise ValueError(f"utilisation({peak_flops_per_s}, seconds={seconds}); both must be positive.")
        whole = peak_flops_per_s * seconds
        return Utilisation(
            mfu=self.model_flops / whole, causal_mfu=self.causal_model_flops / whole, hfu=self.hardware_flops / whole,
            estimated=not self.has_backward,
        )  # fmt: skip

    def module(self, path: str) -> ModuleProfile:
        """The module of that path; "" is the model.

        Raises:
            ValueError: there is none.
        """
        for _, found in self.model.walk():
            if found.path == path:
                return found
        raise ValueError(f"no module {path!r} in the profile of {self.model.kind}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model.to_dict(),
            "outside": _values(self.outside),
            "backward_s": self.backward_s,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "operators": {
                name: {"calls": one.calls, **_values(one.work)} for name, one in sorted(self.operators.items())
            },
            "not_counted": dict(sorted(self.not_counted.items())),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """:meth:`to_dict` as JSON; written to ``path`` too where one is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            written(path, text + "\n")
        return text


def written(path: str | Path, text: str) -> None:
    """Write a file, whole or not at all, and the folder that it is in."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, text)


def _values(work: Work) -> dict[str, int]:
    return {
        "flops": work.flops, "causal_flops": work.causal_flops, "macs": work.macs, "elementwise": work.elementwise,
        "read_bytes": work.read_bytes, "written_bytes": work.written_bytes,
    }  # fmt: skip


# -- from what was counted --------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Of one module, over all ways that lead to it."""

    calls: int = 0
    seconds: float = 0.0
    work: dict[Pass, Work] = field(default_factory=dict)


def gather(model: nn.Module, calls: Calls, *, timed: bool) -> tuple[ModuleProfile, dict[tuple[str, ...], Work]]:
    """The tree of modules, and the ways through it with what was done in each.

    Args:
        timed: values were computed, so that seconds mean something.
    """
    sums: dict[int, _Sums] = {}
    names = {id(module): path.rpartition(".")[2] or type(model).__name__ for path, module in model.named_modules()}
    folded: dict[tuple[str, ...], Work] = {}
    _collect(calls.root, set(), (), sums, names, folded)
    known = parameters_of(model)
    above = {one: calls.root.work(one) for one in _PASSES}  # loss and the like, of the backward and not of a module
    found = _tree("", type(model).__name__, model, sums, known, set(), timed, above)
    return found, folded


_PASSES = (Pass.FORWARD, Pass.BACKWARD, Pass.RECOMPUTATION)


def _collect(
    node: CallNode, above: set[int], way: tuple[str, ...], sums: dict[int, _Sums], names: Mapping[int, str],
    folded: dict[tuple[str, ...], Work],
) -> dict[Pass, Work]:  # fmt: skip
    """Of one node and all below it; a module that calls itself counts once."""
    number = id(node.module)
    if node.module is not None:
        way = (*way, names.get(number, type(node.module).__name__))
    whole = {one: node.work(one) for one in _PASSES}
    own = whole[Pass.FORWARD] + whole[Pass.BACKWARD] + whole[Pass.RECOMPUTATION]
    if node.module is not None and own != NOTHING:
        folded[way] = folded.get(way, NOTHING) + own
    for child in node.children.values():
        below = _collect(child, above | {number}, way, sums, names, folded)
        whole = {one: whole[one] + below[one] for one in _PASSES}
    if node.module is not None:
        kept = sums.setdefault(number, _Sums())
        kept.calls += node.calls
        if number not in above:
            kept.seconds += node.seconds
            kept.work = {one: kept.work.get(one, NOTHING) + whole[one] for one in _PASSES}
    return whole


def _tree(
    path: str, name: str, module: nn.Module, sums: Mapping[int, _Sums], known: Mapping[int, Parameters],
    seen: set[int], timed: bool, above: Mapping[Pass, Work],
) -> ModuleProfile:  # fmt: skip
    seen.add(id(module))
    children = tuple(
        _tree(f"{path}.{below}" if path else below, below, child, sums, known, seen, timed, {})
        for below, child in module.named_children()
        if id(child) not in seen
    )
    mine = sums.get(id(module))
    if mine is None:  # never called: a list of modules
        mine = _Sums(seconds=sum(child.seconds or 0.0 for child in children))
        for one, of in ((Pass.FORWARD, "forward"), (Pass.BACKWARD, "backward"), (Pass.RECOMPUTATION, "recomputation")):
            mine.work[one] = sum((getattr(child, of) for child in children), NOTHING)
    work = {one: mine.work.get(one, NOTHING) + above.get(one, NOTHING) for one in _PASSES}
    return ModuleProfile(
        name=name, path=path, kind=type(module).__name__, extra=module.extra_repr(), calls=mine.calls,
        seconds=mine.seconds if timed else None, forward=work[Pass.FORWARD], backward=work[Pass.BACKWARD],
        recomputation=work[Pass.RECOMPUTATION], parameters=known[id(module)], children=children,
    )  # fmt: skip
