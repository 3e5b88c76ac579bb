"""One batch through the stages of this rank: computations in the order of the table, messages between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zoo.pipe.runtime.channels import Channels, Meta, Name
from zoo.pipe.runtime.losses import Attached, attaching
from zoo.pipe.runtime.splitting import Split, split_backward
from zoo.pipe.schedules.table import Computation, Kind
from zoo.pipe.tracing.segments import loss_of
from zoo.pipe.trees import flatten, outline_text, unflatten

if TYPE_CHECKING:
    from zoo.pipe.lowering import Step
    from zoo.pipe.module import PipelineModule

__all__ = ["Batch", "Hooks"]

Key = tuple[int, int]
"""(stage, micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a batch asks of whoever owns the model.

    Attributes:
        window: with verbs forward, backward, backward_inputs, backward_weights, end (``zoo.zero``); None in evaluation.
        accumulate: takes the gradient of one parameter. computing: a context for "forward" and "backward".
        final_loss: (loss, micro-batch) → the loss of a micro-batch. scale: of losses, in backward.
        reduce: (computation) → whether its backward reduces. timed: is told of each computation before and after it.
    """

    window: Any
    accumulate: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    computing: Callable[[str], Any]
    final_loss: Callable[[torch.Tensor, int], torch.Tensor]
    scale: float = 1.0
    reduce: Callable[[Computation], bool]
    timed: Callable[[Computation], Any] | None = None


@dataclass
class _Passed:
    """What a forward leaves for its backward."""

    inputs: list[torch.Tensor]
    """Leaves that get gradients, in the order of the message that they came with."""
    outputs: list[torch.Tensor]
    """Tensors that have gradients, in the order of the message that they went with."""
    split: Split | None = None
    attached: Attached = field(default_factory=Attached)


class Batch:
    """One batch on one rank.

    Args:
        module, channels: this rank's; channels are None in a pipeline of one rank.
        micro_batches: (inputs, labels) of each on the first and last stage; None elsewhere.
        metas: how messages look, by name; this adds to it.
        offset: number of the first forward, for seeds. stride: from one micro-batch to the next.
        keeps: outputs of the last stage, too. computes_loss: losses.
    """

    def __init__(
        self, module: PipelineModule, channels: Channels | None, hooks: Hooks, *,
        micro_batches: Sequence[tuple[Any, Any]] | None, metas: dict[Name, Meta], device: torch.device,
        offset: int = 0, stride: int = 1, keeps: bool = False, computes_loss: bool = True,
    ) -> None:  # fmt: skip
        self._module, self._channels, self._hooks = module, channels, hooks
        self._micro_batches, self._metas, self._device = micro_batches, metas, device
        self._offset, self._stride, self._keeps, self._computes_loss = offset, stride, keeps, computes_loss
        self._rank_of, self._me = module.rank_of, module.stage_id
        self._last = len(module.rank_of) - 1
        self._passed: dict[Key, _Passed] = {}
        self._given: dict[Key, tuple[Any, list[torch.Tensor]]] = {}  # inputs from a stage of this rank
        self._shared: dict[Key, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # with outputs whose memory they have
        self._gradients: dict[Key, list[torch.Tensor]] = {}  # of the outputs, from a stage of this rank
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.attached: list[Attached] = []
        self._out: dict[Name, tuple[Meta, list[torch.Tensor]]] = {}

    def run(self, steps: Sequence[Step]) -> None:
        """Compute and send, in the order of the steps; all sends are over when it returns."""
        verbs = {
            Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward_inputs, Kind.WEIGHT: self._backward_weights,
        }  # fmt: skip
        timed = self._hooks.timed
        for step in steps:
            computation = step.computation
            if computation is not None:
                if timed is None:
                    verbs[computation.kind](computation)
                else:
                    self._await(computation)
                    with timed(computation):
                        verbs[computation.kind](computation)
            for transfer in step.transfers:
                if transfer.sends:
                    name = (transfer.what, transfer.stage, transfer.micro_batch)
                    self._send(transfer.peer, name)
        if self._channels is not None:
            self._channels.finish()

    def _await(self, c: Computation) -> None:
        """Have the message that a computation needs, so that its time is not a time of waiting."""
        channels, key = self._channels, (c.stage, c.micro_batch)
        if channels is None or c.kind is Kind.WEIGHT:
            return
        if c.kind is Kind.FORWARD:
            if c.stage and key not in self._given:
                channels.arrive(self._rank_of[c.stage - 1], ("activation", c.stage - 1, c.micro_batch))
        elif c.stage != self._last and key not in self._gradients and self._passed[key].outputs:
            channels.arrive(self._rank_of[c.stage + 1], ("gradient", c.stage + 1, c.micro_batch))

    def meta_of(self, name: Name) -> Meta | None:
        """How a message looks; None as long as that is not known. A gradient looks like the activation it is of."""
        what, stage, micro_batch = name
        return self._metas.get(name if what == "activation" else ("activation", stage - 1, micro_batch))

    def _send(self, peer: int, name: Name) -> None:
        meta, tensors = self._out.pop(name)
        if self._channels is None:
            raise AssertionError(f"message {name} for another rank in a pipeline of one rank.")
        if tensors or name[0] == "activation":
            self._channels.send(peer, name, meta, tensors)

    # Forward ---------------------------------------------------------------------------------------------------------

    def _forward(self, c: Computation) -> None:
        key = c.stage, c.micro_batch
        x, leaves = self._input_of(c)
        passed = _Passed(leaves, [])
        window = self._hooks.window
        module = self._module
        module.micro_offset = self._offset + self._stride * c.micro_batch
        trains = window is not None
        with (
            window.forward(key) if trains else contextlib.nullcontext(),
            self._hooks.computing("forward"),
            attaching(passed.attached),
            _versions(self._shared.pop(key, ())),
        ):
            out = module(x, stage=c.stage)
            if c.stage == self._last:
                out = self._end(c.micro_batch, out, trains)
        if passed.attached.values:
            self.attached.append(passed.attached)
        if c.stage == self._last:
            passed.outputs = [out] if trains else []
        else:
            passed.outputs = self._hand_on(c, out, trains)
        if trains:
            self._passed[key] = passed

    def _input_of(self, c: Computation) -> tuple[Any, list[torch.Tensor]]:
        if c.stage == 0:
            if self._micro_batches is None:
                raise AssertionError("the first stage has no micro-batches.")
            return self._micro_batches[c.micro_batch][0], []
        key = c.stage, c.micro_batch
        if key in self._given:
            return self._given.pop(key)
        name = ("activation", c.stage - 1, c.micro_batch)
        if self._channels is None:
            raise AssertionError(f"message {name} from another rank in a pipeline of one rank.")
        meta, tensors = self._channels.receive(self._rank_of[c.stage - 1], name)
        self._metas[name] = meta
        return self._as_inputs(meta, tensors)

    def _as_inputs(self, meta: Meta, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        leaves = []
        if self._hooks.window is not None:
            leaves = [tensors[i].requires_grad_() for i in meta.differentiable]
        # A layer may change its input in place, which a leaf does not allow.
        handed = [_Own.apply(t) if t.requires_grad else t for t in tensors]
        return unflatten(handed, meta.outline), leaves

    def _end(self, micro_batch: int, out: Any, trains: bool) -> Any:
        """What the last stage makes of its outputs: the loss, and in evaluation what is asked for."""
        module = self._module
        if self._keeps:
            self.outputs[micro_batch] = out
        if not self._computes_loss:
            return out
        loss = loss_of(out)
        if module.loss_fn is not None:
            if self._micro_batches is None:
                raise AssertionError("the last stage has no micro-batches.")
            loss = module.loss_fn(out, self._micro_batches[micro_batch][1])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            if not trains:
                return out
            name = "loss_fn" if module.loss_fn is not None else "the last layer, as there is no loss_fn,"
            raise ValueError(f"{name} returned {outline_text(loss)}; it must return the mean loss, of one element.")
        if trains:
            loss = self._hooks.final_loss(loss, micro_batch)
        self.losses[micro_batch] = loss.detach()
        return loss

    def _hand_on(self, c: Computation, out: Any, trains: bool) -> list[torch.Tensor]:
        """To the next stage, on this rank or as a message; returns the outputs that get gradients."""
        tensors, outline = flatten(out, f"the output of layer {self._module.bounds[c.stage + 1] - 1}")
        name = ("activation", c.stage, c.micro_batch)
        wanted = [trains and t.requires_grad and (t.is_floating_point() or t.is_complex()) for t in tensors]
        meta = Meta(outline, tuple((tuple(t.shape), t.dtype, w) for t, w in zip(tensors, wanted, strict=True)))
        meta = self._metas[name] = self._as_before(meta, self._metas.get(name), c.stage)
        if self._rank_of[c.stage + 1] == self._me:
            x, leaves = self._given[c.stage + 1, c.micro_batch] = self._as_inputs(meta, [t.detach() for t in tensors])
            self._shared[c.stage + 1, c.micro_batch] = list(zip(flatten(x)[0], tensors, strict=True)) if leaves else []
        else:
            self._out[name] = meta, tensors
        return [tensors[i] for i in meta.differentiable]

    def _as_before(self, meta: Meta, known: Meta | None, stage: int) -> Meta:
        """How a message looks for its receiver, who takes it to look as in an earlier batch: a gradient that comes back
        is not needed where a layer was frozen or left out."""
        if known is None or known == meta:
            return meta
        wanted = [before[2] or now[2] for before, now in zip(known.tensors, meta.tensors, strict=False)]
        wider = Meta(meta.outline, tuple((*now[:2], w) for now, w in zip(meta.tensors, wanted, strict=False)))
        if wider.encode() == known.encode() and len(known.tensors) == len(meta.tensors):
            return known
        raise ValueError(
            f"the output of layer {self._module.bounds[stage + 1] - 1} looks otherwise than that of the same "
            f"micro-batch in an earlier batch whose inputs had the same shapes: {meta.text()}, and {known.text()} "
            'before. Say {"pipeline": {"dynamic_shapes": true}}, or engine.reset_activation_shape() on all ranks '
            "before it."
        )

    # Backward --------------------------------------------------------------------------------------------------------

    def _gradients_of(self, c: Computation, passed: _Passed) -> list[torch.Tensor] | None:
        """Of the outputs; None for a loss."""
        if c.stage == self._last:
            return None
        key = c.stage, c.micro_batch
        if key in self._gradients:
            return self._gradients.pop(key)
        if not passed.outputs or self._channels is None:
            return []
        _, tensors = self._channels.receive(self._rank_of[c.stage + 1], ("gradient", c.stage + 1, c.micro_batch))
        return tensors

    def _started(self, c: Computation, passed: _Passed) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Where a backward begins: tensors, and their gradients."""
        gradients = self._gradients_of(c, passed)
        passed.attached.factor = self._hooks.scale
        if gradients is not None:
            pairs = [(o, g) for o, g in zip(passed.outputs, gradients, strict=True) if o.requires_grad]
            return [o for o, _ in pairs], [g for _, g in pairs]
        loss = passed.outputs[0]
        if not loss.requires_grad:
            return [], []
        return [loss], [torch.full_like(loss, self._hooks.scale)]

    def _backward(self, c: Computation) -> None:
        passed = self._passed.pop((c.stage, c.micro_batch))
        outputs, gradients = self._started(c, passed)
        with (
            self._hooks.window.backward((c.stage, c.micro_batch), reduce=self._hooks.reduce(c)),
            self._hooks.computing("backward"),
            attaching(passed.attached.repeated()),
        ):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        self._hand_back(c, passed, [leaf.grad for leaf in passed.inputs])

    def _backward_inputs(self, c: Computation) -> None:
        passed = self._passed[c.stage, c.micro_batch]
        outputs, gradients = self._started(c, passed)
        with (
            self._hooks.window.backward_inputs((c.stage, c.micro_batch)),
            self._hooks.computing("backward"),
            attaching(passed.attached.repeated()),
        ):
            found, passed.split = split_backward(outputs, gradients, passed.inputs)
        passed.outputs = []
        self._hand_back(c, passed, found)

    def _backward_weights(self, c: Computation) -> None:
        passed = self._passed.pop((c.stage, c.micro_batch))
        accumulate = self._hooks.accumulate
        if passed.split is None or accumulate is None:
            raise AssertionError(f"{c} before the gradients of the inputs.")
        window = self._hooks.window
        with (
            window.backward_weights((c.stage, c.micro_batch), reduce=self._hooks.reduce(c)),
            self._hooks.computing("backward"),
            attaching(passed.attached.repeated()),
        ):
            for parameter, gradient in passed.split.weights():
                accumulate(parameter, gradient)

    def _hand_back(self, c: Computation, passed: _Passed, found: Sequence[torch.Tensor | None]) -> None:
        """The gradients of the inputs, to the stage before."""
        if c.stage == 0:
            return
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(passed.inputs, found, strict=True)]
        for leaf in passed.inputs:
            leaf.grad = None
        if self._rank_of[c.stage - 1] == self._me:
            self._gradients[c.stage - 1, c.micro_batch] = grads
        else:
            self._out["gradient", c.stage, c.micro_batch] = self._metas["activation", c.stage - 1, c.micro_batch], grads


@contextlib.contextmanager
def _versions(shared: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Where inputs are changed in place that have the memory of outputs of the stage before, autograd is told, which
    then refuses a backward that needs what was there."""
    before = [given._version for given, _ in shared]
    yield
    for (given, output), version in zip(shared, before, strict=True):
        if given._version != version:
            torch.autograd.graph.increment_version(output)


class _Own(torch.autograd.Function):
    """x as a tensor of its own that may be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def expected_from(steps: Sequence[Step]) -> Mapping[int, list[Name]]:
    """What comes from each rank, in order."""
    found: dict[int, list[Name]] = {}
    for step in steps:
        for transfer in step.transfers:
            if not transfer.sends:
                found.setdefault(transfer.peer, []).append((transfer.what, transfer.stage, transfer.micro_batch))
    return found
