"""Fixed-length windows over ranges of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i is ``(x, y)``: ``context`` bytes and the bytes that follow each of them, both (context,) int64.

    Windows start every ``context`` bytes inside each range, so that every byte is predicted at most once in an epoch,
    and no window leaves its range.

    Raises:
        ValueError: no range is as long as one window and the byte after it.
    """

    def __init__(self, data: torch.Tensor, ranges: Sequence[tuple[int, int]], context: int) -> None:
        self.data, self.context = data, context
        starts = [torch.arange(a, b - context, context) for a, b in ranges if b - a > context]
        self.starts = torch.cat(starts) if starts else torch.empty(0, dtype=torch.int64)
        if not len(self.starts):
            raise ValueError(
                f"none of the {len(ranges)} ranges of text holds a window of {context} bytes and the byte after it; "
                f"use a "
                "longer text, fewer segments or a shorter context."
            )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[index])
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]
