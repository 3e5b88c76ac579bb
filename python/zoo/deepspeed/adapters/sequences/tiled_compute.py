"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: a function of long sequences, computed tile by tile.

Each tile is an activation checkpoint: of a tile only its inputs are kept, and backward computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_SEQUENCE = 1
_REDUCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "mean": torch.mean,
    "sum": torch.sum,
}


def _check(who: str, shards: int, output_reduction: str | None, allowed: Sequence[str | None]) -> None:
    if output_reduction not in allowed:
        raise ValueError(f"{who}: output_reduction={output_reduction!r}; allowed are {', '.join(map(repr, allowed))}.")
    if shards < 1:
        raise ValueError(f"{who}: shards={shards}; needed is 1 or more.")


def _tile(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor], seqlen: int, shards: int, kwargs_to_shard: Mapping[str, torch.Tensor | None],
    kwargs_to_pass: Mapping[str, Any], grad_requiring_tensor_key: str, compute_params: Any = None,
    output_unshard_dimension: int = _SEQUENCE, output_reduction: str | None = "mean",
) -> torch.Tensor:  # fmt: skip
    """``fn`` of each tile, put together along a dimension and reduced.

    Args:
        seqlen: length of dimension 1 of all tensors that are cut.
        shards: into so many tiles, as ``torch.chunk`` does.
        kwargs_to_shard: what is cut; None stays None. kwargs_to_pass: what every tile gets whole.
        grad_requiring_tensor_key: one of ``kwargs_to_shard``. Others get gradients too where they need them.
        compute_params: makes no difference; whatever ``fn`` uses gets its gradient.
        output_reduction: "mean" or "sum" of all values; None.

    Raises:
        ValueError: an unknown reduction or key, no tiles, a tensor of another length.
    """
    _check("sequence_tiled_compute", shards, output_reduction, tuple(_REDUCTIONS))
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ValueError(
            f"grad_requiring_tensor_key={grad_requiring_tensor_key!r} is not in kwargs_to_shard, which has "
            f"{', '.join(kwargs_to_shard) or 'nothing'}."
        )
    for name, value in kwargs_to_shard.items():
        if value is not None and (value.ndim <= _SEQUENCE or value.shape[_SEQUENCE] != seqlen):
            raise ValueError(
                f"kwargs_to_shard[{name!r}] has shape {tuple(value.shape)}; dimension {_SEQUENCE} must be "
                f"seqlen={seqlen} long."
            )
    cut = {k: v.chunk(shards, dim=_SEQUENCE) for k, v in kwargs_to_shard.items() if v is not None}
    whole = {**kwargs_to_pass, **{k: None for k, v in kwargs_to_shard.items() if v is None}}
    count = len(cut[grad_requiring_tensor_key])
    tiles = [_tile(fn, **{k: pieces[i] for k, pieces in cut.items()}, **whole) for i in range(count)]
    return _REDUCTIONS[output_reduction](torch.cat(tiles, dim=output_unshard_dimension))


class SequenceTiledCompute:
    """``.apply`` of tensors by name; see :func:`sequence_tiled_compute`."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], seqlen: int, shards: int, keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str], grad_requiring_tensor_key: str, compute_params: Any,
        output_unshard_dimension: int, output_reduction: str | None, *args: Any,
    ) -> torch.Tensor:  # fmt: skip
        """``args``: the values of ``keys_to_shard``, then those of ``keys_to_pass``."""
        if len(args) != len(keys_to_shard) + len(keys_to_pass):
            raise ValueError(
                f"SequenceTiledCompute.apply got {len(args)} values for {len(keys_to_shard)} keys to shard and "
                f"{len(keys_to_pass)} to pass; give one for each."
            )
        return sequence_tiled_compute(
            fn, seqlen, shards, dict(zip(keys_to_shard, args, strict=False)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True)), grad_requiring_tensor_key,
            compute_params, output_unshard_dimension, output_reduction,
        )  # fmt: skip


class TiledMLP:
    """``.apply``: a function of each token, such as the MLP of a transformer."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor], self: Any, x: torch.Tensor, shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """``fn(self, x)``, computed for so many tiles of tokens; ``x`` (..., tokens, features)."""
        _check("TiledMLP", shards, None, (None,))
        return torch.cat([_tile(fn, self, piece) for piece in x.chunk(shards, dim=-2)], dim=-2)


class TiledFusedLogitsLoss:
    """``.apply``: a loss whose logits are never all there."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None,
        shards: int, compute_params: Any, output_reduction: str,
    ) -> torch.Tensor:  # fmt: skip
        """The mean, or the sum, of ``fn(self, x, y)`` (``fn(self, x, y, mask)``) of tiles of tokens.

        ``fn`` gets tokens of all sequences in a row, ``x`` (tokens, features), ``y`` and ``mask`` (tokens,). Where
        tiles have different numbers of tokens that count, let ``fn`` add up and take "sum".
        """
        _check("TiledFusedLogitsLoss", shards, output_reduction, ("mean", "sum"))
        tokens = x.shape[:-1]
        for name, value in (("y", y), ("mask", mask)):
            if value is not None and value.shape[: len(tokens)] != tokens:
                raise ValueError(
                    f"TiledFusedLogitsLoss: {name} has shape {tuple(value.shape)}, and the tokens of x {tuple(tokens)}."
                )
        cut = [x.flatten(0, -2), y.flatten()] + ([] if mask is None else [mask.flatten()])
        tiles = [_tile(fn, self, *pieces) for pieces in zip(*(one.chunk(shards) for one in cut), strict=True)]
        return _REDUCTIONS[output_reduction](torch.stack(tiles))


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """(S, ..., D) with its first R features turned, where the angles' cosines and sines are (S, ..., R): feature i with
    feature i + R/2. Su et al. 2021, "RoFormer", section 3.4.2, in the order of GPT-NeoX.
    """
    turning, rest = t[..., : freqs_cos.shape[-1]], t[..., freqs_cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return torch.cat((turned, rest), dim=-1)
