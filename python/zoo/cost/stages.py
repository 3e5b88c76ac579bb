"""What layers and stages of a pipeline cost: from the shapes of parameters alone, or as it was measured.

For a layer with weight matrices of a rows and b columns, T tokens in a micro-batch, and numbers of ``itemsize`` bytes::

    seconds of F, of I, and of W  = 2 T Σ a b / flops_per_s
    bytes that F keeps            = T Σ (a + b) itemsize

A product needs its input again, and what comes after it its output. An embedding multiplies nothing and keeps what it
returns; a module with vectors only (a norm) keeps what it was given. With GPT's blocks of width D that is 16 T D
numbers; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, count 17 T D beside the scores of attention, which
no parameter tells of and which are left out here, as is all that has no parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsFloat

__all__ = ["ComputationKind", "LayerCosts", "LayerSize", "StageCosts", "costs_of_stages", "evenly", "layer_costs"]

ComputationKind = Literal["F", "B", "I", "W"]
"""What is computed of a stage: a forward; a backward, which is I (of the stage's input) and W (of its weights)."""

PerStage = float | Sequence[float]
_BY_STAGE = ("forward_s", "input_s", "weight_s", "backward_s", "activation_bytes", "kept_bytes")


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What a micro-batch costs in each stage: one number for all stages, or one for each.

    Attributes:
        forward_s: F.
        input_s: I.
        weight_s: W.
        backward_s: B; None: I + W.
        activation_bytes: of the message from a stage to the next one, and of the gradient that comes back for it.
        latency_s: of every message.
        bytes_per_s: of a channel (from one rank to another); messages of a channel go one after the other.
        overlapped: whether ranks compute while messages are under way. If not, a rank stays at the boundary of a slot
            until all of its transfers there are through.
        receives_ahead: whether receives are posted before the messages come (a ring of buffers, a transport that keeps
            what comes), so that a message goes when its sender has come to it. If not, or without ``overlapped``, it
            goes when both sides have come to the boundary after its slot.
        kept_bytes: what F keeps for the backward of a stage.
        freed_by_input: the part of it that I frees; W frees the rest, B all of it.
    """

    forward_s: PerStage = 1.0
    input_s: PerStage = 1.0
    weight_s: PerStage = 1.0
    backward_s: PerStage | None = None
    activation_bytes: PerStage = 0.0
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    overlapped: bool = True
    receives_ahead: bool = True
    kept_bytes: PerStage = 1.0
    freed_by_input: float = 0.0

    def __post_init__(self) -> None:
        for name in (*_BY_STAGE, "latency_s"):
            given = getattr(self, name)
            numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
            if given is None and name == "backward_s":
                continue
            if not all(isinstance(n, SupportsFloat) and 0 <= float(n) < math.inf for n in numbers):
                raise ValueError(f"costs got {name}={given}; a cost is a finite number of 0 or more.")
        if not 0 <= self.freed_by_input <= 1 or not self.bytes_per_s > 0:
            raise ValueError(
                f"costs got freed_by_input={self.freed_by_input} and bytes_per_s={self.bytes_per_s}; the first is a "
                "part, at most 1, and the second is more than 0."
            )

    def seconds(self, kind: ComputationKind, stage: int) -> float:
        """Of a computation."""
        if kind == "F":
            return _of(self.forward_s, stage)
        if kind == "B":
            whole = self.backward_s
            return _of(self.input_s, stage) + _of(self.weight_s, stage) if whole is None else _of(whole, stage)
        return _of(self.input_s if kind == "I" else self.weight_s, stage)

    def kept(self, stage: int) -> float:
        """Bytes that F keeps."""
        return _of(self.kept_bytes, stage)

    def message_bytes(self, what: Literal["activation", "gradient"], stage: int) -> float:
        """Of a message. The gradient for stage s is as large as what stage s sent."""
        return _of(self.activation_bytes, stage if what == "activation" else stage - 1)

    def message_s(self, num_bytes: float) -> float:
        """Of a message: latency + bytes / bandwidth."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def check(self, num_stages: int) -> None:
        """Raise ValueError where there are numbers for another number of stages."""
        for name in _BY_STAGE:
            given = getattr(self, name)
            if isinstance(given, Sequence) and len(given) != num_stages:
                raise ValueError(f"costs have {len(given)} numbers for {name}; the schedule has {num_stages} stages.")


def _of(value: PerStage, stage: int) -> float:
    return value if type(value) is float else float(value[stage] if isinstance(value, Sequence) else value)


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Of one layer, as ``zoo.pipe`` finds it.

    Multiplications and kept bytes of a token; bytes of a token that come in, where that is known.
    """

    multiplied: int
    kept_bytes: int
    entering_bytes: int

    @classmethod
    def of_shapes(cls, parts: Iterable[tuple[Sequence[Sequence[int]], int, bool]]) -> LayerSize:
        """From parameters: Σ a b, Σ (a + b) itemsize, and b itemsize of the first matrix.

        Args:
            parts: of each part of the layer (shapes of its own parameters, bytes of a number, whether it embeds). A
                shape of more than two dims is a matrix of its first one by all others.
        """
        multiplied = kept = entering = 0
        for shapes, itemsize, embeds in parts:
            matrices = [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1]
            if embeds:
                kept += sum(columns for _, columns in matrices) * itemsize
                continue
            multiplied += sum(rows * columns for rows, columns in matrices)
            width = sum(rows + columns for rows, columns in matrices) or max((math.prod(s) for s in shapes), default=0)
            kept += width * itemsize
            first = matrices[0][1] if matrices else width
            entering = entering or first * itemsize
        return cls(multiplied=multiplied, kept_bytes=kept, entering_bytes=entering)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Of one layer and one micro-batch."""

    forward_s: float
    input_s: float
    weight_s: float
    kept_bytes: float
    entering_bytes: float


def layer_costs(sizes: Sequence[LayerSize], *, tokens: int, flops_per_s: float) -> list[LayerCosts]:
    """The formula above, for each layer."""
    return [
        LayerCosts(
            forward_s=2 * tokens * size.multiplied / flops_per_s, input_s=2 * tokens * size.multiplied / flops_per_s,
            weight_s=2 * tokens * size.multiplied / flops_per_s, kept_bytes=float(tokens * size.kept_bytes),
            entering_bytes=float(tokens * size.entering_bytes),
        )
        for size in sizes
    ]  # fmt: skip


def costs_of_stages(
    layers: Sequence[LayerCosts], bounds_of: Callable[[int], Sequence[int]], *, checkpoint_interval: int = 0,
    checkpointed: Callable[[range], bool] = lambda numbers: True, activation_bytes: float = 0.0,
    latency_s: float = 0.0, bytes_per_s: float = math.inf,
) -> Callable[[int], StageCosts]:  # fmt: skip
    """Costs for any number of stages, as ``zoo.pipe.choose`` takes them.

    Args:
        bounds_of: number of stages → bounds; a ValueError says that the layers cannot be cut so.
        checkpoint_interval: layers of a run whose activations are computed again: of a run only what comes in is kept,
            and its backward has a forward more; one in two parts has it in both. (What one run keeps while it runs
            again is left out.) checkpointed: whether a run of layers is one of these.
        activation_bytes, latency_s, bytes_per_s: of messages, see :class:`StageCosts`.
    """

    def of(num_stages: int) -> StageCosts:
        bounds = list(bounds_of(num_stages))
        forward, input_, weight, backward, kept = [], [], [], [], []
        for start, end in itertools.pairwise(bounds):
            own, again, keeps = layers[start:end], 0.0, 0.0
            for numbers in _runs(start, end, checkpoint_interval):
                run = layers[numbers.start : numbers.stop]
                if checkpoint_interval and checkpointed(numbers):
                    again += sum(layer.forward_s for layer in run)
                    # What functions are given is what the first layer of which it is known is given.
                    keeps += next((layer.entering_bytes for layer in run if layer.entering_bytes), 0.0)
                else:
                    keeps += sum(layer.kept_bytes for layer in run)
            parts = sum(layer.input_s for layer in own), sum(layer.weight_s for layer in own)
            forward.append(sum(layer.forward_s for layer in own))
            input_.append(parts[0] + again)
            weight.append(parts[1] + again)
            backward.append(sum(parts) + again)
            kept.append(keeps)
        # Nothing leads to an input of the first stage, and the runtime has all gradients of its weights at once.
        input_[0], weight[0] = backward[0], 0.0
        return StageCosts(
            forward_s=forward, input_s=input_, weight_s=weight, backward_s=backward, kept_bytes=kept,
            activation_bytes=activation_bytes, latency_s=latency_s, bytes_per_s=bytes_per_s,
        )  # fmt: skip

    return of


def evenly(costs: StageCosts) -> Callable[[int], StageCosts]:
    """Costs of a stage for any number of stages, from those of the whole model: stages of equal work and memory.

    ``forward_s``, ``input_s``, ``weight_s``, ``backward_s`` and ``kept_bytes`` are the whole model's, one number
    each, for a micro-batch; messages are as large wherever the model is cut.
    """
    whole = (costs.forward_s, costs.input_s, costs.weight_s, costs.backward_s, costs.kept_bytes, costs.activation_bytes)
    forward, input_, weight, backward, kept, message = (None if n is None else _number(n) for n in whole)

    def of(num_stages: int) -> StageCosts:
        def part(number: float | None) -> float:
            return (number or 0.0) / num_stages

        return StageCosts(
            forward_s=part(forward),
            input_s=part(input_),
            weight_s=part(weight),
            backward_s=None if backward is None else part(backward),
            kept_bytes=part(kept),
            activation_bytes=message or 0.0,
            latency_s=costs.latency_s,
            bytes_per_s=costs.bytes_per_s,
            overlapped=costs.overlapped,
            receives_ahead=costs.receives_ahead,
            freed_by_input=costs.freed_by_input,
        )

    return of


def _number(value: float | Sequence[float]) -> float:
    if isinstance(value, Sequence):
        raise ValueError(f"evenly got {list(value)}, numbers of stages; it takes one number, of the whole model.")
    return float(value)


def _runs(start: int, end: int, interval: int) -> list[range]:
    every = interval or end - start
    return [range(first, min(first + every, end)) for first in range(start, end, every)]
