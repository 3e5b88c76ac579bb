"""ZeroQuant: weights and inputs of a trained model with few bits, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from zoo.compression.post_training.chain import Run, call
from zoo.compression.post_training.grids import Grid, Uniform
from zoo.compression.post_training.recipe import Layer, Recipe, quantise

EIGHT_BITS = Uniform(bits=8)


def zeroquant(
    model: nn.Module, *, weights: Grid = EIGHT_BITS, inputs: Grid | None = EIGHT_BITS, group_size: int = 64,
    blocks: Sequence[nn.Module] | None = None, batches: Sequence[Any] | None = None, run: Run = call,
    distil_steps: int = 100, distil_lr: float = 1e-4, low_rank: int = 0,
    method: Literal["nearest", "gptq"] = "nearest", leave_out: Sequence[str] = (),
) -> dict[str, Layer]:  # fmt: skip
    """Weights in groups, inputs token by token, and each block distilled with both (Yao et al. 2022, "ZeroQuant:
    Efficient and Affordable Post-Training Quantization for Large-Scale Transformers", sections 4.1 and 4.2).

    Block after block: what it gives with its exact weights and inputs is what its weights are trained for, rounded
    straight through and on rounded inputs, each block on what rounded blocks before it give. Then they are rounded.
    ZeroQuant-V2 (Yao et al. 2023) adds ``low_rank``; ZeroQuant-FP (Wu et al. 2023) has ``weights=Floating(format=
    "fp4_e2m1", power_of_two=True), inputs=Floating(format="fp8_e4m3")``.

    Args:
        model: a whole one, on this rank; itself changed.
        weights: grid of weights.
        inputs: grid of the inputs of the same layers, found anew for each token; None: inputs stay.
        group_size: consecutive elements of a row that share a scale; 0 for whole rows.
        blocks: that its forward calls one after the other, such as the layers of a decoder.
        batches: what blocks are distilled on. Without them nothing is: all linear layers of the model are rounded.
        run: (model, batch).
        distil_steps, distil_lr: of each block, with batches; 0 for none.
        low_rank, method, leave_out: of :class:`~zoo.compression.post_training.Recipe`.

    Returns:
        The layers by name, as :func:`~zoo.compression.post_training.quantise` does. The model computes with them, and
        rounds inputs (:func:`~zoo.compression.post_training.quantise_inputs`).

    Raises:
        ValueError: as of ``quantise``, or a layer whose input is quantised already; the model is as it was in the
            latter case.
    """
    recipe = Recipe(
        grid=weights, inputs=inputs, group_size=group_size, method=method, low_rank=low_rank,
        distil_steps=distil_steps if batches else 0, distil_lr=distil_lr, leave_out=leave_out,
    )  # fmt: skip
    return quantise(model, recipe, blocks=blocks, batches=batches, run=run)
