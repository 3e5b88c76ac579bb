"""Random layerwise token dropping: which tokens a block sees.

Shape suffixes: B samples, T tokens, K kept ones, C width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.data_efficiency.config import RandomLtdConfig
from zoo.data_efficiency.schedules import FixedLinear
from zoo.data_efficiency.scope import Scope, hidden_of, join_output, split_output
from zoo.nn.blocks import Blocks, find_blocks
from zoo.parts import Clock, Environment, drawn

_WHO = "random_ltd"


class RandomLTD:
    """Middle blocks see a random part of the tokens in training; the others pass around them unchanged.

    With x_BTC the input of block F and S a random subset of K positions in order, drawn for each block and sample:
    y[S] = F(x[S]), y elsewhere = x. K grows linearly with steps, K(t) = m + t/T (M - m) rounded down to a multiple of
    ``seq_per_step``; t is the number of steps that are over. The first and the last block see all tokens. Attention
    inside of F is between kept tokens; masks and positions among F's arguments are cut to them (:func:`gathered`).

    Yao et al. 2022, "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
    Transformers", sections 3.1 to 3.3.

    S is drawn from seed, step, micro-batch, block and the share of the batch that this rank has: data-parallel ranks
    drop other tokens, ranks along other axes the same; checkpoints hold nothing of it, and activation checkpointing
    recomputes with the same tokens. With K >= T a block is called as it is.

    Args:
        section: ``data_efficiency.data_routing.random_ltd``.
        environment: of the engine.
        seed: of the draws.
    """

    def __init__(self, section: RandomLtdConfig, environment: Environment, *, seed: int) -> None:
        self.section, self.seed, self.batch_rank = section, seed, environment.batch_rank
        schedule = section.random_ltd_schedule
        self._schedule = FixedLinear(
            min_difficulty=schedule.min_value, max_difficulty=schedule.max_value,
            total_curriculum_step=int(schedule.schedule_config["require_steps"]),
            difficulty_step=int(schedule.schedule_config["seq_per_step"]),
        )  # fmt: skip
        self.layers: tuple[int, ...] = ()
        """Numbers of the blocks that drop tokens."""
        self.blocks: dict[str, nn.Module] = {}
        """These blocks by their paths."""
        self._kept = schedule.max_value
        self._blocks: Blocks | None = None
        self._scope: Scope | None = None
        self._forwards = self._calls = 0
        self._dim = 1 if section.hidden_state_order == "batch_seq_dim" else 0
        self._indices: dict[int, tuple[Any, torch.Tensor]] = {}  # block → what they are of, and positions

    def kept(self, clock: Clock) -> int:
        """K at a clock, where sequences are longer."""
        return self._schedule(clock.step)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Find the blocks and stand before those that drop tokens."""
        section = self.section
        blocks = find_blocks(module, section.blocks, _WHO)
        if section.total_layer_num not in (None, len(blocks)):
            raise ValueError(
                f"random_ltd.total_layer_num = {section.total_layer_num}, and the model has {len(blocks)} blocks "
                f"({next(iter(blocks))}, ...); set it to that, or name the blocks: random_ltd.blocks."
            )
        ids = section.random_ltd_layer_id
        self.layers = tuple(ids) if ids is not None else tuple(range(1, len(blocks) - 1))
        if section.random_ltd_layer_num not in (None, len(self.layers)):
            raise ValueError(
                f"random_ltd.random_ltd_layer_num = {section.random_ltd_layer_num}, and {len(self.layers)} blocks drop "
                f"tokens, {list(self.layers)}: by default all but the first and the last; give random_ltd_layer_id."
            )
        if not self.layers or self.layers[-1] >= len(blocks):
            raise ValueError(
                f"random_ltd.random_ltd_layer_id = {list(self.layers)} of {len(blocks)} blocks; give numbers from 0 to "
                f"{len(blocks) - 1}, at least one. By default all but the first and the last drop tokens."
            )
        paths = list(blocks)
        self.blocks = chosen = {paths[i]: blocks[paths[i]] for i in self.layers}
        self._names = {number: _parameters(block) for number, block in enumerate(chosen.values())}
        self._blocks, self._scope = Blocks(chosen, self._route, _WHO), Scope(module)

    def on_batch(self, clock: Clock) -> None:
        """A forward of training begins."""
        if clock.micro_batch == 0:
            self._forwards = self._calls = 0
        self._forwards += 1
        self._kept = self.kept(clock)
        self._indices.clear()
        if self._scope is not None:
            self._scope.tell(clock)

    def positions(self, number: int, clock: Clock, samples: int, tokens: int, kept: int) -> torch.Tensor:
        """S: (B, K) int64 on the CPU, each row in ascending order and without repetition; every subset is as likely.

        ``number`` counts the blocks that drop tokens.
        """
        bits = drawn(self.seed, clock.step, clock.micro_batch, self.layers[number], self.batch_rank)
        dice = torch.Generator().manual_seed(bits >> 1)
        rows = samples if self.section.per_sample else 1
        chosen = torch.rand(rows, tokens, generator=dice, dtype=torch.float64).argsort(dim=1)[:, :kept]
        return chosen.sort(dim=1).values.expand(samples, kept)

    def _route(self, number: int, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        clock = self._scope.clock if self._scope is not None else None
        if clock is None:
            return block(*args, **kwargs)
        self._calls += 1
        x = hidden_of(args, kwargs, _WHO)
        if x.dim() < 3:
            raise ValueError(
                f"{_WHO}: a block was called with hidden states {tuple(x.shape)}; they are (B, T, C), or (T, B, C) "
                "with hidden_state_order seq_batch_dim."
            )
        tokens, samples = x.shape[self._dim], x.shape[1 - self._dim]
        kept = min(self.kept(clock), tokens)
        self._kept = kept
        if kept == tokens:
            return block(*args, **kwargs)
        where = self._where(number, clock, samples, tokens, kept, x.device)
        index = _over(where if self._dim == 1 else where.t(), x)
        inner = torch.gather(x, self._dim, index)
        changed_args, changed_kwargs = self._arguments(number, args, kwargs, x, inner, where, tokens)
        y, form = split_output(block(*changed_args, **changed_kwargs), _WHO, inner.shape)
        dtype = torch.promote_types(x.dtype, y.dtype)  # under autocast they may differ
        return join_output(x.to(dtype).scatter(self._dim, index, y.to(dtype)), form)

    def _where(
        self, number: int, clock: Clock, samples: int, tokens: int, kept: int, device: torch.device
    ) -> torch.Tensor:  # fmt: skip
        key = (clock, samples, tokens, kept)
        found = self._indices.get(number)
        if found is None or found[0] != key:
            found = key, self.positions(number, clock, samples, tokens, kept).to(device, non_blocking=True)
            self._indices[number] = found
        return found[1]

    def _arguments(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor, inner: torch.Tensor,
        where: torch.Tensor, tokens: int,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        names = self._names[number]
        shared = not self.section.per_sample

        def change(value: torch.Tensor, name: str | None) -> torch.Tensor:
            if value is x:
                return inner
            is_mask = name is not None and name == self.section.model_mask_name
            return gathered(value, where, tokens, shared=shared, is_mask=is_mask, batch_first=self._dim == 1)

        found = tuple(_changed(v, names[i] if i < len(names) else None, change) for i, v in enumerate(args))
        return found, {key: _changed(value, key, change) for key, value in kwargs.items()}

    def before_update(self) -> None:
        """Tell the user of blocks that are not there where they were found."""
        if self._forwards and not self._calls:
            raise ValueError(
                f"{_WHO}: none of the blocks {list(self.layers)} was called in the step; name those that are: "
                "random_ltd.blocks."
            )

    def metrics(self) -> dict[str, float]:
        """The number of tokens of a sample that a block which drops tokens has seen."""
        return {"random_ltd_tokens": float(self._kept)}

    def close(self) -> None:
        """Blocks are called as before."""
        for item in (self._blocks, self._scope):
            if item is not None:
                item.close()
        self._blocks = self._scope = None


def gathered(
    tensor: torch.Tensor, where: torch.Tensor, tokens: int, *, shared: bool, is_mask: bool = False,
    batch_first: bool = True,
) -> torch.Tensor:  # fmt: skip
    """An argument of a block beside its hidden states, for the kept tokens only, by its shape.

    b is B or 1 below, ``…`` any sizes; the first line that fits counts:

    =====================================  =============================================================================
    (T, b, …) with ``batch_first=False``   along T: positions
    (b, …, T, T), (B h, T, T)              rows and columns: attention masks, biases
    (b, …, 1, T), (b, T)                   columns: key padding masks, positions; (T, T) too where it is named as mask
    (b, T, …)                              along T: rotary tables
    (b, h, T, d)                           along T: rotary tables of heads
    (T, T), (h, T, T)                      rows and columns; needs ``shared``
    (T,), (T, d)                           along T; needs ``shared``
    =====================================  =============================================================================

    Anything else stays as it is.

    Args:
        where: (B, K) kept positions, in order.
        tokens: T.
        shared: all samples keep the same positions.
        is_mask: the user has named it as the attention mask.

    Raises:
        ValueError: it has no dimension for samples, and samples keep different positions.
    """
    samples, shape, dims = where.shape[0], tensor.shape, tensor.dim()
    if tokens not in shape:
        return tensor
    square = dims >= 2 and shape[-1] == shape[-2] == tokens
    if not batch_first and dims >= 2 and not square and shape[0] == tokens and shape[1] in (samples, 1):
        return _along(tensor.transpose(0, 1), where, 1).transpose(0, 1)
    if dims >= 3 and square and (shape[0] == 1 or shape[0] % samples == 0):
        rows = where.repeat_interleave(max(1, shape[0] // samples), dim=0)
        return _along(_along(tensor, rows, dims - 2), rows, dims - 1)
    if dims >= 2 and shape[0] in (samples, 1) and (dims > 2 or is_mask or not square):
        if shape[-1] == tokens and (dims == 2 or shape[-2] == 1):
            return _along(tensor, where, dims - 1)
        if shape[1] == tokens:
            return _along(tensor, where, 1)
        if dims == 4 and shape[2] == tokens:
            return _along(tensor, where, 2)
    if not square and (dims > 2 or shape[0] != tokens):
        return tensor
    if not shared:
        raise ValueError(
            f"{_WHO}: a block has an argument {tuple(shape)} along {tokens} tokens without a dimension for samples, "
            "and each sample keeps tokens of its own; set data_routing.random_ltd.per_sample to false."
        )
    row = where[0]
    return tensor.index_select(-2, row).index_select(-1, row) if square else tensor.index_select(0, row)


def _along(tensor: torch.Tensor, where: torch.Tensor, dim: int) -> torch.Tensor:
    """(b, …) → (B, …) with ``tensor[i, …, where[i], …]`` along ``dim``."""
    samples, kept = where.shape
    tensor = tensor.expand(samples, *tensor.shape[1:])
    index = where.view(samples, *([1] * (dim - 1)), kept, *([1] * (tensor.dim() - dim - 1)))
    shape = list(tensor.shape)
    shape[dim] = kept
    return torch.gather(tensor, dim, index.expand(shape))


def _over(where: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The two dimensions of ``where``, repeated over the others of ``x``."""
    return where.reshape(*where.shape, *([1] * (x.dim() - 2))).expand(*where.shape, *x.shape[2:])


def _parameters(block: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(block.forward).parameters)
    except (TypeError, ValueError):
        return []


def _changed(value: Any, name: str | None, change: Callable[[torch.Tensor, str | None], torch.Tensor]) -> Any:
    """``value`` with its tensors changed. A function of its own: one that calls itself from within another keeps what
    it has seen until Python looks for circles."""
    if isinstance(value, torch.Tensor):
        return change(value, name)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_changed(item, name, change) for item in value)
    if isinstance(value, dict):
        return {key: _changed(item, key, change) for key, item in value.items()}
    return [_changed(item, name, change) for item in value] if isinstance(value, list) else value
