"""Memory-centric tiling: a linear layer as a grid of smaller ones that are gathered one at a time.

Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zoo.nn.sharded import whole
from zoo.nn.unit_list import UnitList


class TiledLinear(nn.Module):
    """y = x Wᵀ + b with W cut into ``out_splits`` × ``in_splits`` tiles: y_i = Σ_j x_j W_ijᵀ + b_i.

    Shapes: x (*, in_features), y (*, out_features), W_ij (out_i, in_j). Pieces are as even as possible; the first ones
    take the remainder. Each tile is a module and, under the ZeRO optimizers, a unit of its own wherever the layer
    stands: at stage 3 one tile is gathered at a time, so the memory of gathered parameters falls from that of W to
    that of a tile. Tiles that together fit ``reduce_bucket_size`` share a bucket and are gathered together; what is
    prefetched (``prefetch_bucket_size``) and kept for backward (``max_live_parameters``) comes on top.

    Args:
        in_features, out_features, bias: as of ``torch.nn.Linear``.
        in_splits, out_splits: columns and rows of the grid.
        input_is_already_split: forward takes a sequence of ``in_splits`` tensors (*, in_j), not one tensor.
        combine_out_splits: forward returns one tensor; otherwise the list of ``out_splits`` tensors (*, out_i).
        linear_cls: makes a tile: ``linear_cls(in_j, out_i, bias=..., **kwargs)`` with ``weight`` (out_i, in_j) and
            ``bias``. Tiles of the first column have the bias.
        init_linear: a layer to copy the values from, see :meth:`copy_params_from`.
        kwargs: passed to ``linear_cls``, such as ``device`` and ``dtype``.

    Values are initialised with the distribution of the whole layer: U(-k, k), k = in_features^-1/2, where
    ``nn.Linear`` would give a tile in_j^-1/2. A ``linear_cls`` with a ``reset_parameters`` of its own keeps that.

    Raises:
        ValueError: splits below 1 or above the number of features; an input whose size does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes = _pieces("in", in_features, in_splits)
        self.out_sizes = _pieces("out", out_features, out_splits)
        self.has_bias = bias
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.tiles = UnitList(
            linear_cls(columns, rows, bias=bias and j == 0, **kwargs)
            for rows in self.out_sizes
            for j, columns in enumerate(self.in_sizes)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)
        else:
            self._rescale()

    @torch.no_grad()
    def _rescale(self) -> None:
        for tile in self.tiles:
            if getattr(type(tile), "reset_parameters", None) is nn.Linear.reset_parameters:
                layer: Any = tile
                for parameter in layer.parameters():
                    parameter.mul_((layer.in_features / self.in_features) ** 0.5)

    def tile(self, row: int, column: int) -> nn.Module:
        """The module that holds W_ij, i = ``row``, j = ``column``."""
        return self.tiles[row * len(self.in_sizes) + column]

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Apply the layer, tile after tile: (*, in_features) → (*, out_features), or their pieces."""
        pieces = self._split(x)
        outputs = []
        for row in range(len(self.out_sizes)):
            total = self.tile(row, 0)(pieces[0])
            for column in range(1, len(pieces)):
                # Out of place: a tile's output is autograd's to keep.
                total = total + self.tile(row, column)(pieces[column])
            outputs.append(total)
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _split(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.input_is_already_split:
            if isinstance(x, torch.Tensor):
                raise ValueError(
                    f"TiledLinear got one tensor; with input_is_already_split it takes {len(self.in_sizes)} of last "
                    f"sizes {self.in_sizes}."
                )
            given = [piece.shape[-1] for piece in x]
            if given != self.in_sizes:
                raise ValueError(f"TiledLinear got pieces of last sizes {given}; it takes {self.in_sizes}.")
            return x
        if not isinstance(x, torch.Tensor):
            raise ValueError(
                f"TiledLinear got a {type(x).__name__}; it takes one tensor (*, {self.in_features}), and pieces only "
                "with input_is_already_split=True."
            )
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"TiledLinear got an input of shape {tuple(x.shape)}; it takes (*, {self.in_features}).")
        return torch.split(x, self.in_sizes, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """W, b := those of ``other``, which has a ``weight`` (out_features, in_features) and ``bias`` as this layer.

        Either layer may be ordinary, partitioned by ``zoo.zero.Init``, or under a ZeRO optimizer at any stage. Where
        this one is not ordinary it is collective: the values that ``other`` has on rank 0 count on all ranks, and reach
        shards, whole copies and fp32 values alike. Where ``other`` is partitioned, it is gathered for the time of the
        copy, and of this layer one tile at a time.

        Raises:
            ValueError: other shapes, or a bias on one side only; nothing is copied then.
        """
        weight, bias = other.weight, other.bias
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"copy_params_from got a weight of shape {tuple(getattr(weight, 'shape', ()))}; this layer's is "
                f"{(self.out_features, self.in_features)}."
            )
        if (bias is not None) != self.has_bias:
            has = "with" if self.has_bias else "without"
            raise ValueError(f"copy_params_from got a layer with bias={bias is not None}; this one is {has} bias.")
        first_rows = [0, *accumulate(self.out_sizes)]
        first_columns = [0, *accumulate(self.in_sizes)]
        with whole([p for p in (weight, bias) if isinstance(p, nn.Parameter)]):
            for i, (rows, top) in enumerate(zip(self.out_sizes, first_rows, strict=False)):
                for j, (columns, left) in enumerate(zip(self.in_sizes, first_columns, strict=False)):
                    tile: Any = self.tile(i, j)
                    with whole(tile.parameters(), modifier_rank=0):
                        tile.weight.copy_(weight[top : top + rows, left : left + columns])
                        if j == 0 and isinstance(bias, torch.Tensor):
                            tile.bias.copy_(bias[top : top + rows])

    def extra_repr(self) -> str:
        """Sizes of the layer and of its grid."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, "
            f"in_splits={len(self.in_sizes)}, out_splits={len(self.out_sizes)}"
        )


def _pieces(side: str, features: int, splits: int) -> list[int]:
    if type(features) is not int or type(splits) is not int or features < 1 or not 1 <= splits <= features:
        raise ValueError(
            f"TiledLinear got {side}_features={features!r} and {side}_splits={splits!r}; it takes at least one feature "
            f"and between 1 and {side}_features splits."
        )
    even, remainder = divmod(features, splits)
    return [even + (piece < remainder) for piece in range(splits)]
