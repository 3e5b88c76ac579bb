"""Inputs of layers that are already trained, token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from zoo.compression.attach import attach, detach
from zoo.compression.post_training.grids import Grid, Uniform
from zoo.compression.quantisers import grouped, straight_through
from zoo.compression.technique import POST_TRAINING, Order, Site, Transform, inner_weights
from zoo.compression.techniques.activation_quantization import InputQuantizer


def quantise_inputs(model: nn.Module, layers: Iterable[str], grid: Grid) -> list[Transform]:
    """Let layers round what they are called with: x → the nearest values of a grid, each token (the last dimension)
    with numbers of its own, found anew in each forward. Gradients go straight through.

    The rounding is a part of the model from now on: copies and pickles have it, ``pack_model`` keeps it, files do not
    (``load_packed``: call this again). ``zoo.compression.detach`` takes it off.

    Args:
        layers: names of linear layers.
        grid: equal steps, as :class:`~zoo.compression.techniques.activation_quantization.InputQuantizer` has them, or
            any other.

    Returns:
        One transform for each layer.

    Raises:
        ValueError: a layer that quantises its input already, or that is never called; nothing is attached then.
    """
    made: list[Transform] = []
    never = inner_weights(model)
    try:
        for name in layers:
            if id(model.get_submodule(name)) in never:
                raise ValueError(
                    f"{name} is never called: nn.MultiheadAttention computes with its weight, and its input cannot be "
                    "rounded. Leave it out (leave_out=), or round weights alone (inputs=None)."
                )
            site = Site(module=name, where="input", technique=POST_TRAINING, group=POST_TRAINING)
            transform = _transform(site, grid)
            attach(model.get_submodule(name), "input", "", transform)
            made.append(transform)
    except BaseException:
        detach(model, made)
        raise
    return made


def _transform(site: Site, grid: Grid) -> Transform:
    if isinstance(grid, Uniform):
        return InputQuantizer(site, offset=0, bits=grid.bits, asymmetric=not grid.symmetric)
    return GridInput(site, grid)


class GridInput(Transform):
    """x → the nearest value of a grid, token by token, in fp32. What is infinite or NaN makes its token so.

    Args:
        site: an input.
        grid: of the values.
    """

    order: ClassVar[Order] = Order.QUANTISER

    def __init__(self, site: Site, grid: Grid) -> None:
        self.grid = grid
        super().__init__(site)

    def __call__(self, value: Tensor) -> Tensor:
        """T(x)."""
        if not value.numel():
            return value
        x = value.detach()
        rows = grouped(x, x.numel() // x.shape[-1], self.site.name)
        params = self.grid.fit(rows.float())
        found = self.grid.decode(self.grid.encode(rows.float(), params), params)
        return straight_through(value, found.reshape(x.shape).to(x.dtype))
