"""Slots: rows of a cache with lengths of their own. A row that has ended is given to the next prompt.

Rows that are in use are the first ones, so that a step computes those and no others. Memory is not paged: a slot has
room for the longest sequence. Servers that page are vLLM and its like (Kwon et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from zoo.inference.cache import Cache, windows_of

Tensor = torch.Tensor


class Slots:
    """Memory of ``rows`` sequences of up to ``room`` tokens for the layers of a model.

    Attributes:
        lengths: of each row in use, how many tokens are in it.
    """

    def __init__(self, config: Any, rows: int, room: int) -> None:
        self.windows = windows_of(config)
        self.rows, self.room, self.lengths = rows, room, list[int]()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def admit(self, prompt: Cache) -> None:
        """One row more, with what a cache of one row has: a prompt that was computed alone."""
        layers: Any = prompt.layers
        row, length = len(self.lengths), prompt.get_seq_length()
        if not self.keys:  # zeros: what a mask hides is multiplied by 0, and must be a number
            for layer in layers:
                for where, one in ((self.keys, layer.keys), (self.values, layer.values)):
                    where.append(one.new_zeros(self.rows, one.shape[1], self.room, one.shape[3]))
        for i, layer in enumerate(layers):
            self.keys[i][row, :, :length] = layer.keys[0, :, :length]
            self.values[i][row, :, :length] = layer.values[0, :, :length]
        self.lengths.append(length)

    def release(self, row: int) -> None:
        """A row has ended: the last one moves to its place."""
        last = len(self.lengths) - 1
        length = self.lengths.pop()
        if row == last:
            return
        for tensors in (self.keys, self.values):
            for one in tensors:
                one[row, :, :length] = one[last, :, :length]
        self.lengths[row] = length


class Step(cache_utils.Cache):
    """The cache of a step: a token for each row in use, which is written to the end of that row. It serves one step
    after the other, each after :meth:`begin`, as long as so many rows are in use."""

    positions: Tensor
    longest: int

    def __init__(self, slots: Slots) -> None:
        self.slots, self.rows = slots, len(slots.lengths)
        super().__init__(layers=[_Row(self, index) for index in range(len(slots.keys))])

    def begin(self) -> None:
        """The next tokens come behind those that are there."""
        lengths = self.slots.lengths
        self.positions = torch.tensor(lengths, dtype=torch.int64, device=self.slots.keys[0].device)[:, None]
        self.longest = max(lengths) + 1

    def masks(self, dtype: torch.dtype, added: bool) -> dict[int | None, Tensor]:
        """(rows, 1, 1, keys) for each window that layers have: which keys a row sees; ``added``: 0, or least."""
        keys = torch.arange(self.longest, device=self.positions.device)
        found: dict[int | None, Tensor] = {}
        for window in set(self.slots.windows):
            seen = keys <= self.positions
            if window is not None:
                seen &= keys > self.positions - window
            mask = seen[:, None, None]
            found[window] = (
                torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
                if added
                else mask
            )
        return found

    def done(self) -> None:
        """The tokens are in."""
        self.slots.lengths = [length + 1 for length in self.slots.lengths]


class _Row(cache_utils.CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Of one layer, all rows in use."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, step: Step, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.is_initialized = step, True
        rows = step.rows
        self.keys, self.values = step.slots.keys[index][:rows], step.slots.values[index][:rows]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write one token of each row; all that is there, of every row as much as of the longest."""
        rows = torch.arange(len(self.keys), device=self.keys.device)
        places = self.step.positions[:, 0]
        self.keys[rows, :, places], self.values[rows, :, places] = key_states[:, :, 0], value_states[:, :, 0]
        return self.seen()

    def place(self, rows: int, tokens: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the next tokens go: keys, values, places."""
        if tokens != 1 or self.keys.shape[1:4:2] != (heads, dim) or self.values.shape != self.keys.shape:
            return None
        return (self.keys, self.values, self.step.positions) if self.keys.dtype is like.dtype else None

    def placed(self, tokens: int) -> int:
        """They are there; how many there are of the longest row."""
        return self.step.longest

    def seen(self) -> tuple[Tensor, Tensor]:
        """Keys and values, of every row as many as of the longest."""
        return self.keys[:, :, : self.step.longest], self.values[:, :, : self.step.longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, the place of the first of them)."""
        return self.step.longest, 0

    def get_seq_length(self) -> int:
        """Of the longest row."""
        return self.step.longest - 1

    def get_max_length(self) -> int:
        """The room."""
        return self.step.slots.room
