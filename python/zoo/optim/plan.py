"""What makes a step cost little for many small tensors.

A *plan* is everything about a list of parameters that stays the same from step to step: which have gradients, their
states, grouped into *batches* that one kernel call can take (one dtype, one device, one number of steps taken). A step
checks that parameters and states are still those, and hands a batch over without touching its tensors from Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zoo.kernels import loading
from zoo.kernels.update import UpdatePlan, update_plan

Tensor = torch.Tensor


class Watch:
    """How often anybody but the optimizer set an entry of its states, or a whole state, or took one away."""

    changes = 0


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def changed(self: State | States, *args: Any, **more: Any) -> Any:
        self.watch.changes += 1
        return method(self, *args, **more)

    return changed


class State(dict[str, Any]):
    """The state of one parameter: a dictionary that tells its optimizer's :class:`Watch` of changes.

    The alternative, comparing every entry by identity in every step, touches as much memory as updating the tensors of
    a small layer. Copied or pickled it is a plain dictionary.
    """

    __slots__ = ("batch", "watch")

    def __init__(self, watch: Watch, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.watch = watch
        self.batch: Batch | None = None

    def put(self, name: str, value: Any) -> None:
        """Set an entry without telling: for the optimizer itself."""
        super().__setitem__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    __setitem__ = _noting("__setitem__")
    __delitem__ = _noting("__delitem__")
    __ior__ = _noting("__ior__")
    clear = _noting("clear")
    pop = _noting("pop")
    popitem = _noting("popitem")
    setdefault = _noting("setdefault")
    update = _noting("update")


class States(defaultdict[Tensor, Any]):
    """The states of all parameters: ``optimizer.state``, which tells of changes as each :class:`State` does.

    Copied or pickled it is what torch makes.
    """

    __slots__ = ("watch",)

    def __init__(self, watch: Watch, values: Mapping[Tensor, Any]) -> None:
        self.watch = watch
        super().__init__(dict, values)

    @staticmethod
    def put(states: dict[Tensor, Any], param: Tensor, value: Any) -> None:
        """Set the state of a parameter without telling: for the optimizer itself."""
        dict.__setitem__(states, param, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def copy(self) -> Any:
        """A dictionary that tells nobody."""
        return defaultdict(dict, self)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    __copy__ = copy
    __setitem__ = _noting("__setitem__")
    __delitem__ = _noting("__delitem__")
    __ior__ = _noting("__ior__")
    clear = _noting("clear")
    pop = _noting("pop")
    popitem = _noting("popitem")
    setdefault = _noting("setdefault")
    update = _noting("update")


class _DifferentError(Exception):
    """Two tensors would have been compared by their values."""


class _ByIdentity(TorchFunctionMode):
    def __torch_function__(self, *_: Any) -> Any:
        raise _DifferentError


def same_tensors(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether the lists have the very same tensors at the same places.

    Python compares the items of lists by address first. So this touches none, where ``is`` in a loop touches each,
    which the update of the step before has driven out of the caches.
    """
    classes = loading.loaded_classes()
    if classes is not None:
        return bool(classes.same_objects(a, b))
    try:
        with _ByIdentity():
            return a == b
    except _DifferentError:
        return False


def _places(params: Sequence[Tensor]) -> tuple[list[int], list[int]] | None:
    """What changes where a parameter is written to, and where it is given other memory; None where nobody counts."""
    try:
        return [p._version for p in params], [p.data_ptr() for p in params]
    except RuntimeError:  # made under inference_mode
        return None


class Batch:
    """Parameters that one kernel call updates.

    ``lists`` has one list of tensors for each state name (and "master"); ``packed`` holds the number of steps taken of
    each parameter, and the states' ``step`` are views of it, so that counting is one operation for all. It is on
    ``device``, where the kernels count; without one the host counts, in ``step`` too. ``may_prepare``: fp32, bf16 or
    fp16 on the CPU, contiguous, counted by the host, so that a plan of the kernels may hold the tensors.
    """

    def __init__(
        self, params: list[Tensor], dicts: list[State], names: Sequence[str], step: int,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.params, self.names, self.step = params, tuple(names), step
        self.on_device = device is not None
        self.retired: bool = False
        self.packed = torch.full((len(params),), float(step), device=device or "cpu")
        self.places: tuple[list[int], list[int]] | None = None  # of parameters with masters, after the latest step
        if "master" in self.names:
            self._take_places([state.batch for state in dicts])
        for state, view in zip(dicts, self.packed.unbind(), strict=True):
            state.put("step", view)
            if state.batch is not None:
                state.batch.retired = True  # it counts into another tensor
            state.batch = self
        self.lists = {name: [state[name] for state in dicts] for name in names}
        self.watch = dicts[0].watch
        self.seen = self.watch.changes
        self.may_prepare = False
        self.prepared: UpdatePlan | None = None

    def _take_places(self, before: Sequence[Batch | None]) -> None:
        """Those that the batches had seen of which the parameters were."""
        known: dict[int, tuple[int, int]] = {}
        for batch in {id(b): b for b in before if b is not None and b.places is not None}.values():
            rows = zip(batch.params, *(batch.places or ()), strict=True)
            known |= {id(p): (version, memory) for p, version, memory in rows}
        if all(id(p) in known for p in self.params):
            versions, memory = zip(*(known[id(p)] for p in self.params), strict=True)
            self.places = list(versions), list(memory)

    def note_writes(self) -> None:
        """The step has written to the parameters."""
        if "master" not in self.lists:
            return
        if self.prepared is not None and self.places is not None:  # to each of them once
            self.places = [version + 1 for version in self.places[0]], self.places[1]
        else:
            self.places = _places(self.params)

    def take_writes(self) -> None:
        """Masters of parameters that somebody else has written to since become what these are. Where a master rounds
        to its parameter it stays."""
        before, now = self.places, None
        if before is not None:
            self.places = now = _places(self.params)
        if before is None or now is None or now == before:
            return
        for p, master, *places in zip(self.params, self.masters(), *now, *before, strict=True):
            if places[:2] != places[2:]:
                value = p.detach()
                master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    def is_current(self) -> bool:
        """Whether the states are still the very tensors that were there when the batch was made."""
        return not self.retired and self.watch.changes == self.seen

    def states(self) -> list[list[Tensor]]:
        """The lists of the rule's states, in the order of its names."""
        return [self.lists[name] for name in self.names if name != "master"]

    def masters(self) -> list[Tensor]:
        """The fp32 masters; empty where the parameters are themselves what is updated."""
        return self.lists.get("master", [])

    def prepare(self) -> UpdatePlan | None:
        """The update, prepared natively when first asked for; None where operations do not run so, or not on these."""
        if not self.may_prepare or not loading.native():
            return None
        if self.prepared is None and loading.classes() is not None:
            self.prepared = update_plan(self.params, self.states(), self.masters(), self.packed)
        return self.prepared

    def count(self) -> None:
        """One more step was taken, if the device has not counted it."""
        if self.on_device:
            return
        self.step += 1
        if self.prepared is not None:
            self.prepared.count()
        else:
            self.packed += 1


class Idle(Batch):
    """One parameter that has no gradient now, and its states: read and written, neither planned nor counted.

    Its states must lie as the parameter does.
    """

    def __init__(self, param: Tensor, state: Mapping[str, Any], names: Sequence[str]) -> None:
        self.params, self.names, self.step = [param], tuple(names), int(state["step"])
        self.lists = {name: [state[name]] for name in self.names}
        self.places = None


class Plan:
    """A list of parameters as batches; ``absent`` are those that had no gradient when it was made.

    ``on_device``: whether the batches count their steps there.
    """

    def __init__(self, params: list[Tensor], absent: list[Tensor], batches: list[Batch], *, on_device: bool) -> None:
        self.params, self.absent, self.batches, self.on_device = params, absent, batches, on_device

    def fits(self, params: list[Tensor], *, on_device: bool) -> bool:
        """Whether it is of these parameters, states replaced by nobody, and no parameter got its first gradient."""
        return (
            len(params) == len(self.params)
            and on_device == self.on_device
            and same_tensors(params, self.params)
            and all(p.grad is None for p in self.absent)
            and all(batch.is_current() for batch in self.batches)
        )
