"""What the wrapped optimizer will keep of a segment, told before it has made a step: by a trial on a small tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zoo.shard.offload.tiers import Tier
from zoo.zero.update.probe import Keeps, counts_calls, kept_of, takes_found_inf, what_it_keeps
from zoo.zero.update.segments import Segment


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
        self.groups = without_params(groups)
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
        plain = without_params(groups)
        on = [
            tuple((k, v != 0) for k, v in group.items() if k != "lr" and isinstance(v, (bool, int, float)))
            for group in plain
        ]
        for segment in segments if not self._objects else ():
            kept = {**segment.numbers(), **segment.states()}
            shape = tuple(segment.tensor.shape) if self._unsplit else ()
            kind = segment.group, segment.tensor.dtype, shape, on[segment.group]
            if kept and kind not in self._first:
                options = plain[segment.group]
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
        plain = {**self.groups[group], **options}

        def build(tensors: list[torch.Tensor]) -> Any:
            return self._make([{**plain, "params": tensors}], **self._options)

        if not self._unsplit or like is None:
            return what_it_keeps(build, dtype)
        from zoo.zero.update.trial import stand_in

        try:  # there it takes no memory
            return what_it_keeps(build, dtype, stand_in(like, dtype, "meta"))
        except Exception:
            return what_it_keeps(build, dtype, stand_in(like, dtype, "cpu"))

    def counts_calls(self) -> bool:
        """See :func:`~zoo.zero.update.probe.counts_calls`."""
        return counts_calls(lambda tensors: self._make([{**self.groups[0], "params": tensors}], **self._options))

    def takes_found_inf(self) -> bool:
        """See :func:`~zoo.zero.update.probe.takes_found_inf`."""

        def build(tensors: list[torch.Tensor]) -> Any:
            groups = [{**group, "params": [t]} for group, t in zip(self.groups, tensors, strict=True)]
            return self._make(groups, **self._options)

        return takes_found_inf(build, len(self.groups))

    def check_places(self, segments: Iterable[Segment], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if with the options of ``groups`` other states than now are kept of some of ``segments``,
        which have places for them on NVMe."""
        plain = without_params(groups)
        for segment in {(s.group, s.tensor.dtype): s for s in segments}.values():
            kept = self.with_options(segment, plain[segment.group]).states
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


def without_params(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of parameter groups."""
    return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
