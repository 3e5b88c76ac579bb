"""What the wrapped optimizer will keep of a segment, told before it has made a step: by a trial on a small tensor."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.shard.offload.tiers import Tier
from zoo.zero.update.segments import Segment
from zoo.zero.update.trial import stand_in, without_params

MASTER = "master"
"""The state that is the fp32 value of a 16-bit parameter."""


@dataclass(frozen=True)
class Keeps:
    """What an optimizer keeps of a tensor: states with one element for each of it, and bytes of all the others.

    ``numbers``: the names of those that are a single number; ``others``: the sizes of tensors of other shapes.
    """

    states: dict[str, torch.dtype]
    scalar_bytes: int
    numbers: frozenset[str] = frozenset()
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of all states beside a master, which is the parameter."""
        return (self.states.keys() | self.numbers | self.others.keys()) - {MASTER}

    @property
    def bytes_per_element(self) -> int:
        """Of the states."""
        return sum(dtype.itemsize for dtype in self.states.values())


def kept_of(tensor: torch.Tensor, entries: Mapping[str, Any]) -> Keeps:
    """What ``entries``, the states of ``tensor``, are."""
    kept = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    whole = {k: v.dtype for k, v in kept.items() if v.shape == tensor.shape}
    numbers = {k for k, v in entries.items() if isinstance(v, (int, float)) or (k in kept and v.numel() == 1)}
    others = {k: v.numel() for k, v in kept.items() if k not in whole and k not in numbers}
    return Keeps(whole, sum(v.nbytes for k, v in kept.items() if k not in whole), frozenset(numbers), others)


class ExpectedStates:
    """Of all segments of one optimizer.

    Args:
        make: makes the wrapped optimizer.
        groups: parameter groups of the user, whose options it gets.
        options: its arguments.
        unsplit: it gets parameters whole and in their shapes.
        objects: it treats some of them otherwise because of which they are.
    """

    def __init__(
        self, make: Any, groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, unsplit: bool,
        objects: bool,
    ) -> None:  # fmt: skip
        self._make, self._options, self._unsplit, self._objects = make, options, unsplit, objects
        self.inner: Any = None
        self.groups: list[dict[str, Any]] = []
        self.take(groups)

    def take(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The groups have these options from now on."""
        self.groups = [without_params(g) for g in groups]
        self._known: dict[tuple[Any, ...], Keeps] = {}
        self._first: dict[tuple[Any, ...], Keeps] = {}

    @property
    def known(self) -> bool:
        """Whether it can be told before the first step which states there will be of a parameter."""
        return not self._objects or bool(self.inner.state)

    def of(self, segment: Segment) -> Keeps:
        """What is kept of a segment, with the options of its group."""
        key = self.kind_of(segment)
        if key not in self._known:
            self._known[key] = self.with_options(segment, {})
        return self._known[key]

    def kind_of(self, segment: Segment) -> tuple[Any, ...]:
        """Of segments of one kind the same is kept."""
        if not self._unsplit:
            return segment.group, segment.tensor.dtype
        return segment.group, segment.tensor.dtype, segment  # by what else a parameter is too

    def made_later(self, segments: Iterable[Segment], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is kept of a segment, and a first step with the options of ``groups`` does not make: by name one of its
        values."""
        found: dict[str, Any] = {}
        on = [
            tuple((k, v != 0) for k, v in group.items() if k != "lr" and isinstance(v, (bool, int, float)))
            for group in groups
        ]
        for segment in segments if not self._objects else ():
            kept = {**segment.numbers(), **segment.states()}
            shape = tuple(segment.tensor.shape) if self._unsplit else ()
            kind = segment.group, segment.tensor.dtype, shape, on[segment.group]
            if kept and kind not in self._first:
                options = groups[segment.group]
                self._first[kind] = self.of_dtype(segment.group, segment.tensor.dtype, options, segment.tensor)
            found |= {name: segment.entries[name] for name in kept if name not in self._first[kind].names}
        return found

    def with_options(self, segment: Segment, options: Mapping[str, Any]) -> Keeps:
        """What would be kept of a segment if its parameter group had these options."""
        if self._unsplit and (entries := self.inner.state.get(segment.tensor)):
            return kept_of(segment.tensor, entries)
        return self.of_dtype(segment.group, segment.tensor.dtype, options, segment.tensor)

    def of_dtype(
        self, group: int, dtype: torch.dtype, options: Mapping[str, Any], like: torch.Tensor | None = None
    ) -> Keeps:  # fmt: skip
        """What would be kept of a tensor of ``dtype`` in parameter group ``group`` if that had these options.

        Args:
            like: the parameter, for an optimizer that gets it whole.
        """
        plain = {**self.groups[group], **without_params(options)}

        def kept(tensor: torch.Tensor) -> Keeps:
            optimizer = self._build([plain], [tensor])
            tensor.grad = torch.ones_like(tensor)
            optimizer.step()
            return kept_of(tensor, optimizer.state[tensor])

        if not self._unsplit or like is None:
            return kept(torch.ones(2, 3, dtype=dtype).requires_grad_())
        try:  # there it takes no memory
            return kept(stand_in(like, dtype, "meta"))
        except Exception:
            return kept(stand_in(like, dtype, "cpu"))

    def _build(self, groups: Sequence[Mapping[str, Any]], tensors: Sequence[torch.Tensor]) -> Any:
        """One for a trial, with a tensor in each group."""
        made = [{**group, "params": [tensor]} for group, tensor in zip(groups, tensors, strict=True)]
        return self._make(made, **self._options)

    def counts_calls(self) -> bool:
        """Whether a step changes numbers that the optimizer has as attributes: its update cannot be cut into
        several."""
        tensor = torch.ones(2).requires_grad_()
        optimizer = self._build(self.groups[:1], [tensor])
        tensor.grad = torch.ones_like(tensor)
        before = _numbers_of(optimizer)
        optimizer.step()
        return _numbers_of(optimizer) != before

    def takes_found_inf(self) -> bool:
        """Whether a step with the attribute ``found_inf`` at 1 changes nothing, and at 0 what a step without it does.

        That is how torch.amp.GradScaler tells optimizers that say ``_step_supports_amp_scaling`` (torch's with
        fused=True, whose kernels look at it on the device). It is tried all the same: a class that is derived from one
        of them may do more in its step.
        """
        found = []
        for flags in ((None, None), (None, 0.0), (None, 0.0, 1.0)):
            tensors = [torch.linspace(1, 2, 3).requires_grad_() for _ in self.groups]
            optimizer = self._build(self.groups, tensors)
            old = "grad_scaler" in inspect.signature(optimizer.step).parameters  # an earlier way to tell them
            if old or not getattr(optimizer, "_step_supports_amp_scaling", False):
                return False
            for number, flag in enumerate(flags):
                for tensor in tensors:
                    tensor.grad = torch.linspace(-1, 3, 3) * (number + 1)
                if flag is not None:
                    optimizer.found_inf = torch.tensor(flag)
                try:
                    optimizer.step()
                except Exception:  # whatever it says: it does not take it
                    return False
                if flag is not None:
                    del optimizer.found_inf
            found.append(_all_of(optimizer, tensors))
        return found[0] == found[1] == found[2]

    def check_places(self, segments: Iterable[Segment], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if with the options of ``groups`` other states than now are kept of some of ``segments``,
        which have places for them on NVMe."""
        for segment in {(s.group, s.tensor.dtype): s for s in segments}.values():
            kept = self.with_options(segment, groups[segment.group]).states
            if kept.keys() != self.of(segment).states.keys():
                raise ValueError(
                    f"with the options of the state {type(self.inner).__name__} keeps "
                    f"{', '.join(map(repr, kept)) or 'nothing'}; its files on NVMe were made for others. "
                    "Nothing was loaded. Construct the ZeRO optimizer with the options that the state was saved with."
                )

    def dtypes(self, segment: Segment) -> dict[str, torch.dtype]:
        """Of the states of a segment by name, "" for a master that the optimizer got as its parameter."""
        given = {} if segment.target is None else {"": segment.tensor.dtype}
        return {**given, **self.of(segment).states}

    def num_bytes(self, segments: Iterable[Segment]) -> dict[Tier, int]:
        """What masters and states take after the first step, by tier."""
        found = dict.fromkeys(Tier, 0)
        for segment in segments:
            keeps, n = self.of(segment), segment.tensor.numel()
            given = segment.tensor.itemsize if segment.target is not None else 0
            tier = segment.bucket.placements.states.tier
            found[tier] += n * (keeps.bytes_per_element + given)
            found[Tier.HOST if tier is Tier.NVME else tier] += keeps.scalar_bytes
        return found


def _all_of(optimizer: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Everything that a step may change, to be compared."""
    entries = [sorted(optimizer.state.get(t, {}).items()) for t in tensors]
    states = [[(k, v.tolist() if isinstance(v, torch.Tensor) else repr(v)) for k, v in found] for found in entries]
    options = [sorted((k, repr(v)) for k, v in g.items() if k != "params") for g in optimizer.param_groups]
    return [[t.tolist() for t in tensors], states, options, _numbers_of(optimizer)]


def _numbers_of(optimizer: Any) -> dict[str, float]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}
