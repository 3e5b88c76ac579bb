"""What layers cost, before anything has run: from the shapes of their parameters and the tokens of a micro-batch.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zoo.pipe.schedules.table import ScheduleError
from zoo.pipe.simulate import Costs

__all__ = ["LayerCosts", "LayerSize", "costs_of_stages", "layer_costs"]


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Of one layer, as ``zoo.pipe.sizes`` finds it.

    Multiplications and kept bytes of a token; bytes of a token that come in, where that is known.
    """

    multiplied: int
    kept_bytes: int
    entering_bytes: int


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
) -> Callable[[int], Costs]:  # fmt: skip
    """Costs for any number of stages, as ``zoo.pipe.choose`` takes them.

    Args:
        bounds_of: number of stages → bounds; a ValueError says that the layers cannot be cut so.
        checkpoint_interval: layers of a run whose activations are computed again: of a run only what comes in is kept,
            and its backward has a forward more; one in two parts has it in both. (What one run keeps while it runs
            again is left out.) checkpointed: whether a run of layers is one of these.
        activation_bytes, latency_s, bytes_per_s: of messages, see :class:`~zoo.pipe.simulate.Costs`.
    """

    def of(num_stages: int) -> Costs:
        try:
            bounds = list(bounds_of(num_stages))
        except ValueError as error:
            raise ScheduleError(str(error)) from error
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
        return Costs(
            forward_s=forward, input_s=input_, weight_s=weight, backward_s=backward, kept_bytes=kept,
            activation_bytes=activation_bytes, latency_s=latency_s, bytes_per_s=bytes_per_s,
        )  # fmt: skip

    return of


def _runs(start: int, end: int, interval: int) -> list[range]:
    every = interval or end - start
    return [range(first, min(first + every, end)) for first in range(start, end, every)]
