"""The wrapped optimizer on this rank's segments."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zoo.cost.collectives import Hop
from zoo.shard.buckets import Bucket
from zoo.shard.offload.tiers import OffloadError
from zoo.zero.update.clipping import Factors, SkipsOnDevice
from zoo.zero.update.expected import MASTER, ExpectedStates, Keeps
from zoo.zero.update.segments import Segment, cut_segments, in_pieces, updated_dtype
from zoo.zero.update.tensor_collectives import BucketParts

if TYPE_CHECKING:
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.instances import Follows
    from zoo.zero.update.probe import Tried, Wrapped
    from zoo.zero.update.stream import StateStream
    from zoo.zero.update.synced import Meetings

DEPTH_IN_BACKWARD = 3
"""Pieces that are read ahead, and written behind, in backward: so much has the device to do between two units."""


class Updater:
    """Builds the wrapped optimizer on the segments of the buckets and runs its steps, piece by piece.

    What it can do is read off its class. ``needs_whole_tensors``: it gets parts of single tensors, and ``parts=`` to
    bring them together (:class:`~zoo.zero.update.tensor_collectives.BucketParts`). ``keeps_masters``: it takes 16-bit
    parameters and gradients as they are, keeps fp32 masters among its states and has ``step(grad_scale=)``, a number or
    with ``capturable`` a tensor, so that scaling, update and rounding are one pass. Any other gets fp32 masters as
    parameters, and gradients converted piece by piece.

    Args:
        sharded: the model, whose buckets that have gradients are updated.
        wrapped: the optimizer, with its arguments and the parameter groups of the user, whose options it is given.
        tried: what came out of trying it.
        unsplit: it gets parameters whole and in their shapes; an instance is used where it can get the very parameters
            of the model.
        multiplies: gradients have a loss scale; without it they take memory of their size once more.
    """

    def __init__(
        self, sharded: ShardedModel, wrapped: Wrapped, tried: Tried, *, unsplit: bool, multiplies: bool
    ) -> None:  # fmt: skip
        buckets = self.buckets = sharded.trainable
        optimizer, groups, options = wrapped.make, wrapped.groups, wrapped.options
        config, scratch, switch, everyone = sharded.config, sharded.scratch, sharded.switch, sharded.everyone
        in_backward, offload = config.update_in_backward, config.offload_optimizer
        self.broken: str | None = None
        self._outer: Sequence[dict[str, Any]] = ()
        whole = bool(getattr(optimizer, "needs_whole_tensors", False))
        self._scales = bool(getattr(optimizer, "keeps_masters", False))
        self.skips_on_device = SkipsOnDevice(self._takes_found_inf, "capturable" if self._scales else "fused")
        name = getattr(optimizer, "__name__", str(optimizer))
        self.expected = ExpectedStates(optimizer, groups, options, unsplit=unsplit, objects=tried.objects)
        what = "whole tensors" if whole else "the other ranks" if switch is not None else ""
        if what and in_backward:
            raise ValueError(
                f"update_in_backward=True with {name}, which needs {what}: ranks would meet in the middle of "
                "backward. Use an elementwise optimizer, or leave update_in_backward out."
            )
        self.follows: Follows | None = None
        self._optimizer, self._unsplit, self._asked = optimizer, unsplit, tried.asked
        fused = bool(options.get("fused") or any(group.get("fused") for group in groups))
        self.segments: list[Segment] = []
        if unsplit:
            from zoo.zero.update.unsplit import whole_segments

            self.segments += whole_segments(buckets, groups, masters=not self._scales)
        for bucket in buckets if not unsplit else ():
            self.segments += cut_segments(
                bucket, masters=not self._scales, by_tensor=whole or tried.quantises, in_one_pass=self._scales or fused
            )
        for segment in self.segments:
            if self._gradient_dtype(segment) is not segment.tensor.dtype:
                segment.tensor.grad_dtype = None  # whatever it is given
        self._parts: BucketParts | None = BucketParts() if whole else None
        if switch is not None:
            from zoo.zero.update.synced import peers_for

            self._parts, options = peers_for(everyone, options, whole=whole)
        if self._parts is not None:
            self._parts.adopt(self.segments, buckets)
            options = {**options, "parts": self._parts} if whole else options
        self.inner = self.expected.inner = self._build(groups, options, wrapped.instance)
        if self._scales:
            self.inner.takes_writes = False  # a write goes to masters too
        for segment in self.segments:
            segment.inner = self.inner
        self.meetings: Meetings | None = None
        if switch is not None:
            from zoo.zero.update.synced import Meetings

            self.meetings = Meetings(self.inner, switch, buckets, self.segments, everyone)
            self.decide([dict(group) for group in groups])
        streams = False
        if scratch is not None:
            from zoo.zero.update.stream import StateStream, needs_stream

            streams = needs_stream(buckets)
        size, copies = config.sub_group_size, multiplies and not self._scales
        if not (whole or unsplit) and switch is None and self.expected.counts_calls():
            size = self._in_one_piece(name, streams=streams, in_backward=in_backward)
        self._pieces = self._cut(size, small=streams or copies, in_backward=in_backward)
        self._stream: StateStream | None = None
        depth = DEPTH_IN_BACKWARD if in_backward else 1
        if scratch is not None and streams:
            self._stream = StateStream(
                scratch, offload.nvme_path, self.pieces(), self.expected.dtypes,
                ahead=depth * offload.pipeline_read, behind=depth * offload.pipeline_write,
            )  # fmt: skip
            scratch.check_room(self.buffer_bytes())

    def _build(
        self, groups: Sequence[Mapping[str, Any]], options: dict[str, Any], instance: torch.optim.Optimizer | None
    ) -> Any:  # fmt: skip
        """The wrapped optimizer on the segments."""
        if self._unsplit and instance is not None:
            from zoo.zero.update.instances import double_of
            from zoo.zero.update.unsplit import are_parameters

            if are_parameters(self.buckets, masters=not self._scales):
                return double_of(instance)
        inner: list[dict[str, Any]] = [{**g, "params": []} for g in self.expected.groups]
        for segment in self.segments:
            inner[segment.group]["params"].append(segment.tensor)
        trained = {id(p) for bucket in self.buckets for p in bucket.spec.parameters}
        for made, group in zip(inner, groups, strict=True):
            if self._unsplit and "param_names" in group:
                named = zip(group["param_names"], group["params"], strict=True)
                made["param_names"] = [name for name, parameter in named if id(parameter) in trained]
        with self._as_they_are(self.segments if self._unsplit else ()):
            return self._optimizer(inner, **options)

    def _in_one_piece(self, name: str, *, streams: bool, in_backward: bool) -> int:
        """What ``sub_group_size`` is for an optimizer that counts its steps in itself.

        Raises:
            NotImplementedError: there must be several pieces.
        """
        if streams or in_backward:
            how = "update_in_backward=True" if in_backward else "states on NVMe"
            raise NotImplementedError(
                f"{how} with {name}, which counts the calls of step() in itself: it would be called for every piece of "
                "an update. Let it count in its states or parameter groups, or leave that option out."
            )
        return sum(s.tensor.numel() for s in self.segments)

    def _cut(self, limit: int, *, small: bool, in_backward: bool) -> list[tuple[Sequence[Bucket], list[Segment]]]:
        if self._parts is not None:  # pieces of whole buckets, the same on every rank
            together = [b for b in self.buckets if self._parts.is_cut(b)]
            of_pieces: list[list[Bucket]] = []
            size = 0
            for bucket in (b for b in self.buckets if b not in together):
                if not of_pieces or size + bucket.layout.size > limit:
                    of_pieces.append([])
                    size = 0
                size += bucket.layout.size
                of_pieces[-1].append(bucket)
            of_pieces += [together] if together else []
            return [(each, [s for b in each for s in self.segments if s.bucket is b]) for each in of_pieces]
        if self._unsplit:
            return [((), self.segments)]
        if in_backward:
            backwards = [s for b in reversed(self.buckets) for s in self.segments if s.bucket is b]
            return [((), piece) for piece in in_pieces(backwards, limit)]
        # Gradients that are converted, or multiplied by a factor, are so piece by piece.
        if small or any(s.target is not None for s in self.segments):
            return [((), piece) for piece in in_pieces(self.segments, limit)]
        return [((), self.segments)]

    def keeps_of(self, bucket: Bucket, slot: int, options: Mapping[str, Any]) -> Keeps:
        """What is kept of a parameter with the options of its group; a master, of a 16-bit one, is among the states."""
        dtype = updated_dtype(bucket, masters=not self._scales)
        found = self.expected.of_dtype(bucket.spec.groups[slot], dtype, options, bucket.spec.parameters[slot])
        given = dtype is not bucket.spec.dtype and MASTER not in found.states
        return replace(found, states={**found.states, MASTER: dtype}) if given else found

    def check_places(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if other states than at construction are kept with the options of ``groups``, on NVMe."""
        self.expected.check_places(self.segments if self._stream is not None else (), groups)

    def buffer_bytes(self) -> int:
        """The most host memory that offloading to NVMe takes at one time, beside what stays in memory."""
        if self._stream is None:
            return 0
        from zoo.shard.offload.scratch import WriteBehind

        shards = [b.num_gradient_bytes // b.num_chunks for b in self.buckets]
        return max(self._stream.buffer_bytes(), WriteBehind.buffer_bytes(max(shards, default=0)))

    def hops(self) -> list[Hop]:
        """What the next step sends inside of its update."""
        if self._parts is None:
            return []
        sums, found = int(getattr(self.inner, "num_sums", 0)), list[Hop]()
        for buckets, _ in self._pieces:
            found += self._parts.hops(buckets, sums)
        return found + (self.meetings.hops() if self.meetings is not None else [])

    @property
    def apart(self) -> bool:
        """Ranks that repeat a state have different ones after the steps so far."""
        return self.meetings is not None and self.meetings.apart

    def nvme_traffic(self) -> tuple[int, int]:
        """Bytes that an update reads from and writes to NVMe, once states exist."""
        return self._stream.traffic() if self._stream is not None else (0, 0)

    # Steps -----------------------------------------------------------------------------------------------------------

    def update(self, factors: Factors) -> None:
        """One step with the reduced gradients, multiplied by ``factors``, after :meth:`begin`. Collective with parts.

        Raises:
            OffloadError: a device failed; this and every later step, until a state is loaded.
            Exception: whatever the optimizer raises; what it has changed by then is changed.
        """
        for index in range(len(self._pieces)):
            self.run(index, factors)
        if self.meetings is not None:
            self.inner.finish_step()
            self._give_options()
            self.decide(self._outer)
        self.skips_on_device.updated()

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """A step begins, with the options of ``groups``: what the first pieces need is on its way after this."""
        self.check_whole()
        self._check_asked()
        if self.follows is not None:
            self.follows.take()
        self._finish_writes()
        self._take_options(groups)
        if self.meetings is not None:
            self.meetings.begin()
        self.read_ahead()

    def _check_asked(self) -> None:
        """Raise ValueError if a parameter has an attribute by now that the optimizer looks for."""
        for bucket in self.buckets if self._asked else ():
            for name, parameter in zip(bucket.spec.names, bucket.spec.parameters, strict=True):
                for attribute in vars(parameter).keys() & self._asked:
                    raise ValueError(
                        f"{name!r} has the attribute {attribute!r} since the ZeRO optimizer was constructed; "
                        f"{type(self.inner).__name__} looks for it, and would not find it on its flat segments of "
                        "parameters. Set it before the ZeRO optimizer is constructed."
                    )

    def _take_options(self, groups: Sequence[dict[str, Any]]) -> None:
        for outer, group in zip(groups, self.inner.param_groups, strict=True):
            group.update({k: v for k, v in outer.items() if k != "params"})
        self._outer = groups

    def run(self, index: int, factors: Factors) -> None:
        """Update piece ``index`` of the step; the pieces come in order."""
        buckets, piece = self._pieces[index]
        if self._parts is not None:
            self._parts.about(buckets)
        with self._restoring_groups(options=index < len(self._pieces) - 1), self._loaded(index):
            if len(self._pieces) > 1:
                self._restrict(piece)
            self._update_piece(piece, factors)
        if index == len(self._pieces) - 1:
            self._give_options()

    def _give_options(self) -> None:
        """What ``step`` wrote into its groups is in the user's too, where the next step takes options from."""
        for outer, group in zip(self._outer, self.inner.param_groups, strict=True):
            for key, value in group.items():
                if key != "params" and value is not outer.get(key):
                    outer[key] = value

    def arrived(self, index: int) -> bool:
        """Whether :meth:`run` would not wait for a device."""
        return self._stream is None or self._stream.arrived(index)

    def pieces(self) -> list[list[Segment]]:
        """What is updated together, in the order of the update."""
        return [piece for _, piece in self._pieces]

    def drop_read(self) -> None:
        """What was read ahead may be stale, or the step that it was for does not go on."""
        if self._stream is not None:
            self._stream.drop_read()

    def give_up(self, why: str) -> None:
        """A step that has begun will not end: refuse everything until a state is loaded."""
        self.broken = why
        if self._stream is not None:
            self._stream.give_up()

    def settle(self) -> None:
        """Wait until what the latest step updated is where it belongs.

        Raises:
            OffloadError: it is not, or a step did not end.
        """
        self.check_whole()
        self._finish_writes()
        self.drop_read()

    def expect(self, optimizer: weakref.ref[torch.optim.Optimizer]) -> None:
        """A backward that reduces starts: what the latest update wrote is on its device now.

        A model keeps this, and must not keep its ``optimizer`` by it.
        """
        self.settle()
        owner = optimizer()
        if owner is not None:
            with contextlib.suppress(ValueError):  # which the step will say
                self.decide(owner.param_groups)

    def read_ahead(self) -> None:
        """What the first pieces of the next step need may come in by now."""
        if self._stream is not None and self._pieces:
            with self.failing():
                self._stream.begin(0)

    def _finish_writes(self) -> None:
        if self._stream is not None:
            with self.failing():
                self._stream.finish()

    def check_whole(self) -> None:
        """Raise OffloadError if a failure left states of two different steps behind."""
        if self.broken is not None:
            raise OffloadError(f"the training state is incomplete since a step failed ({self.broken}).")

    @contextlib.contextmanager
    def _restoring_groups(self, *, options: bool = False) -> Iterator[None]:
        """Groups have all their members again afterwards; with ``options`` also their options.

        What ``step`` writes there, a counter for example, counts once for an update: that of the last piece.
        """
        groups = self.inner.param_groups
        before = [dict(group) if options else {"params": group["params"]} for group in groups]
        try:
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)

    @contextlib.contextmanager
    def _loaded(self, index: int) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with self.failing():
            self._stream.load(index)
            yield
            self._stream.store(index)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What is left with an exception leaves a mixture of states behind: see :meth:`give_up`."""
        try:
            yield
        except BaseException as error:
            self.give_up(str(error) or type(error).__name__)
            raise

    def _restrict(self, piece: Sequence[Segment]) -> None:
        for group in self.inner.param_groups:
            group["params"] = []
        for segment in piece:
            self.inner.param_groups[segment.group]["params"].append(segment.tensor)

    def _gradient_dtype(self, segment: Segment) -> torch.dtype:
        """In which the optimizer gets the gradient of ``segment``: what it need not round is not rounded here."""
        own = segment.tensor.dtype
        if not self._scales or own.itemsize > 2:
            return own
        kept = segment.bucket.spec.gradient_dtype
        return kept if kept.itemsize <= 4 else torch.float32

    def _update_piece(self, piece: Sequence[Segment], factors: Factors) -> None:
        with self._as_they_are(piece):
            self._step_piece(piece, factors)
        for segment in piece:
            if segment.target is not None:
                segment.target.copy_(segment.tensor)

    @contextlib.contextmanager
    def _as_they_are(self, piece: Sequence[Segment]) -> Iterator[None]:
        """What the optimizer gets are tensors as any other, and what it puts into other memory is brought back."""
        if self._unsplit:
            from zoo.zero.update.unsplit import ordinary_parameters

            with ordinary_parameters(piece):
                yield
            return
        places = [(s.tensor, s.tensor.detach()) for s in piece if s.target is None]
        yield
        for tensor, place in places:
            if tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor.detach())
                tensor.data = place

    def _step_piece(self, piece: Sequence[Segment], factors: Factors) -> None:
        for segment in piece:
            kept = segment.gradient()
            gradient = kept.to(segment.tensor.device, self._gradient_dtype(segment))
            if not (self._scales or factors.neutral):
                shared = gradient.data_ptr() == kept.data_ptr() and segment.loaded_gradient is None
                gradient = factors.apply(gradient, segment.gradients if shared else None)
            segment.tensor.grad = gradient
        options = {"grad_scale": factors.product()} if self._scales else {}
        if factors.found_inf is not None:  # a step that changes nothing where the device finds 1 there
            self.inner.found_inf = factors.found_inf
        try:
            self.inner.step(**options)
        finally:
            if factors.found_inf is not None:
                del self.inner.found_inf
            for segment in piece:
                segment.tensor.grad = None

    def _takes_found_inf(self) -> bool:
        """Nothing of an update needs the norm on the host: it is all on the device, and can be told there to skip."""
        off = any(s.tensor.device != s.bucket.device for s in self.segments)
        if self._parts is not None or self._stream is not None or off or self._unsplit:
            return False
        return self.expected.takes_found_inf()

    # State -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_memory(self, index: int, *, write: bool) -> Iterator[Sequence[Segment]]:
        """The segments of piece ``index``, with their values and states in memory; ``write``: they change."""
        with self._stream.in_memory(index, write=write) if self._stream is not None else contextlib.nullcontext():
            yield self._pieces[index][1]

    def load(
        self, fill: Callable[[Segment], bool], groups: Sequence[dict[str, Any]], *, anew: bool = False
    ) -> None:  # fmt: skip
        """Fill every segment and its states by ``fill``, which says whether there was an optimizer state for it.

        The states are those that the optimizer keeps with the options of ``groups``. A failure leaves a mixture of two
        states behind, and everything is refused until a state is loaded. With ``anew`` the parameters are others than
        those that the states came with: what ranks have moved by themselves is forgotten.
        """
        self.check_places(groups)
        with contextlib.suppress(OffloadError):
            self.settle()  # whatever was wrong, what comes now is whole
        self.broken = None
        self.skips_on_device.loaded()
        if self._stream is not None:
            self._stream.forget()
        self._take_options(groups)
        self.expected.take(groups)
        with self.failing(), self._restoring_groups():
            for index, (buckets, piece) in enumerate(self._pieces):
                self._restrict(piece)
                if self._parts is not None:
                    self._parts.about(buckets)
                with self.in_memory(index, write=True):
                    self._make_states(piece)
                    for segment in piece:
                        if not fill(segment):  # nothing but parameters yet; a master is one
                            kept = {k: v for k, v in segment.entries.items() if k == "master"}
                            self.inner.state[segment.tensor] = kept
                        segment.round_parameters()
                    if anew and self.meetings is not None:
                        self.inner.forget_moved()
        if self.meetings is not None:
            self.meetings.resume(anew=anew)
            self._give_options()
            self.decide(self._outer)

    def decide(self, groups: Sequence[dict[str, Any]]) -> None:
        """Gradients may be reduced for the next step, with the options of ``groups``: whether to means."""
        if self.meetings is not None:
            self._take_options(groups)
            self.meetings.decide()

    def _make_states(self, piece: Sequence[Segment]) -> None:
        # A step on zero gradients makes the entries that the optimizer keeps; what is loaded overwrites all their
        # values, and the parameters. So the gradients can share their memory.
        zeros: dict[Any, torch.Tensor] = {}
        with self._as_they_are(piece):
            for segment in sorted(piece, key=lambda segment: -segment.tensor.numel()):
                tensor = segment.tensor
                self.inner.state.pop(tensor, None)
                if (tensor.dtype, tensor.device) not in zeros:  # the largest of its kind
                    zeros[tensor.dtype, tensor.device] = tensor.new_zeros(tensor.numel())
                tensor.grad = zeros[tensor.dtype, tensor.device][: tensor.numel()].view(tensor.shape)
            with self.meetings.forming() if self.meetings is not None else contextlib.nullcontext():
                self.inner.step()
            for segment in piece:
                segment.tensor.grad = None
                segment.lay_flat()
