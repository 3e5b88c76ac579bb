"""Keys and values of past tokens, in memory that is there from the start.

transformers' dynamic cache joins what it has and what comes, so that each token of each layer copies all tokens before
it. Here a token is written to its place: a layer's keys and values are two tensors (rows, heads, room, dim).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import cache_utils

Tensor = torch.Tensor
KEPT = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e5m2fnuz,
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(config: Any) -> list[int | None]:
    """How many tokens each layer of a model sees, the newest with them; None: all.

    Raises:
        ValueError: it is no configuration; a layer is neither of full nor of sliding attention.
    """
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    window = getattr(config, "sliding_window", None)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise ValueError(
            f"config is a {type(config).__name__}, which says no num_hidden_layers; give the configuration of a model "
            "of transformers, model.config."
        )
    kinds = getattr(config, "layer_types", None) or [SLIDING if window is not None else FULL] * count
    other = sorted(set(kinds) - {FULL, SLIDING})
    if other:
        raise ValueError(
            f"{type(config).__name__} has layers of {', '.join(other)}; zoo.inference knows {FULL} and {SLIDING}: let "
            "transformers make its own cache for this model."
        )
    return [window if kind == SLIDING else None for kind in kinds]


def check_numbers(**numbers: int) -> None:
    """Of things.

    Raises:
        ValueError: one is not a whole number, or below 1.
    """
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}; it must be a whole number, at least 1.")


@torch.no_grad()
def forecast(
    model: nn.Module, *, rows: int, room: int, dtype: torch.dtype | None = None, nvme: bool = False
) -> int:  # fmt: skip
    """Bytes in memory of a cache of this model before it is there, on this rank.

    Σ over layers of rows·heads·min(room, 2·window)·(dim of keys + dim of values) numbers; of those in files two. One
    token is computed, which shows heads, dims and dtype as they are, split over ranks or not.

    Args:
        model: of transformers.
        rows, room: of sequences; of tokens, prompt included.
        dtype: as of :class:`Cache`. nvme: layers of full attention are in files (``Cache(folder=...)``).

    Raises:
        ValueError: a number below 1; another dtype; layers that are neither of full nor of sliding attention.
    """
    check_numbers(rows=rows, room=room)
    config: Any = getattr(model, "config", None)
    probe = Cache(config, 1, keep_all=True, dtype=dtype)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), cache=probe, use_cache=True)
    layers: Any = probe.layers
    windows = windows_of(config)
    tokens = [room if window is None else min(room, 2 * window) for window in windows]
    sizes = [rows * n * sum(one.nbytes for one in layer.memory) for n, layer in zip(tokens, layers, strict=True)]
    if not nvme:
        return sum(sizes)
    full = [size for size, window in zip(sizes, windows, strict=True) if window is None]
    return sum(sizes) - sum(full) + 2 * max(full, default=0) if len(full) > 1 else sum(sizes)


class Cache(cache_utils.Cache):
    """A cache of transformers whose memory has room for ``room`` tokens a row; ``generate(..., cache=Cache(...))``.

    Sliding layers have memory for two windows: their newest tokens lie one behind the other, and move to its beginning
    once in a window. Memory is allocated when the first tokens come, with their heads, dtype and device.

    Args:
        config: ``model.config``.
        room: tokens of a row, prompt included. More are refused by ValueError, before anything is written.
        keep_all: sliding layers keep all tokens too.
        dtype: what keys and values are kept in, floating; None: as they come. Others are rounded when they come, and
            all that a layer sees is converted for each of its calls: half the memory for more time.
        device: where they are kept, such as the host ("cpu") of a model on a GPU; None: where they come. A layer's go
            to the model's device for each of its calls.
        folder: on NVMe: keys and values of layers of full attention are in files of a new folder within it, which goes
            with the cache. Memory has two layers' worth (:class:`~zoo.inference.cache_files.FileLayer`).

    Raises:
        ValueError: another room or dtype; a device and a folder. OSError: the folder is not there, or has no room.
    """

    def __init__(
        self, config: Any, room: int, *, keep_all: bool = False, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, folder: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        if type(room) is not int or room < 1:
            raise ValueError(f"room={room!r}; it must be a whole number of tokens, at least 1.")
        if dtype is not None and dtype not in KEPT:
            raise ValueError(
                f"dtype={dtype!r}; it must be a floating dtype that has signs, such as torch.bfloat16, or None."
            )
        windows = windows_of(config)
        if folder is not None and device is not None:
            raise ValueError(f"device={device!r} and a folder: keys and values are kept in one of them.")
        full: Callable[[int], Any] = _Full
        self._files = None
        if folder is not None:
            from zoo.inference.cache_files import CacheFiles, FileLayer

            files = self._files = CacheFiles(folder)
            full = lambda room: FileLayer(room, files)  # noqa: E731
        super().__init__(layers=[full(room) if keep_all or w is None else _Window(room, w) for w in windows])
        self.room = room
        layers: Any = self.layers
        for layer in layers:
            layer.kept_as = dtype, None if device is None else torch.device(device)

    @property
    def num_bytes(self) -> int:
        """That are allocated in memory."""
        layers: Any = self.layers
        inside = [layer for layer in layers if layer.is_initialized and not hasattr(layer, "file_bytes")]
        files = self._files.num_bytes if self._files else 0
        return files + int(sum(one.nbytes for layer in inside for one in layer.memory))

    @property
    def file_bytes(self) -> int:
        """That are taken on the disk."""
        return sum([layer.file_bytes for layer in self._files.layers]) if self._files else 0


class _Placed(cache_utils.CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What full and sliding layers have in common. length: tokens that came. memory: of keys and of values. kept_as:
    (dtype, device) of it; None: as they come."""

    is_compileable = False
    is_croppable = True
    memory: tuple[Tensor, Tensor]
    kept_as: tuple[torch.dtype | None, torch.device | None] = None, None

    def __init__(self, room: int, size: int) -> None:
        # Not that of the base, which sets keys and values.
        self.room, self.size, self.length, self.is_initialized = room, size, 0, False

    def kept(self) -> slice:
        """Where the tokens lie that a next one sees."""
        return slice(0, self.length)

    @property
    def keys(self) -> Any:  # type: ignore[override]
        """Those of the tokens that are kept, as a layer of transformers has them: models read them for
        cross-attention. None before any came."""
        return self._seen(self.memory[0][:, :, self.kept()]) if self.is_initialized else None

    @property
    def values(self) -> Any:  # type: ignore[override]
        """As :attr:`keys`."""
        return self._seen(self.memory[1][:, :, self.kept()]) if self.is_initialized else None

    def _seen(self, kept: Tensor) -> Tensor:
        """As the model takes them: where it is, in its dtype."""
        return kept.to(self.device, self.dtype)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate."""
        self.dtype, self.device = key_states.dtype, key_states.device
        dtype, device = self.kept_as
        keys, values = (
            one.new_empty((*one.shape[:2], self.size, one.shape[3]), dtype=dtype, device=device)
            for one in (key_states, value_states)
        )
        self.memory, self.is_initialized = (keys, values), True

    def _admit(self, key_states: Tensor, value_states: Tensor) -> int:
        """How many tokens there are with the new ones."""
        if key_states.requires_grad or value_states.requires_grad:
            raise ValueError(
                "keys or values that come into the cache want a gradient; memory that is written in place has none. "
                "Call the model under torch.no_grad(), or let transformers make its own cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._length_with(key_states.shape[0], key_states.shape[2])

    def _length_with(self, rows: int, tokens: int) -> int:
        length = self.length + tokens
        if length > self.room:
            raise ValueError(
                f"the cache has room for {self.room} tokens a row; {self.length} are in it and {tokens} come. Make it "
                "with more room, or generate fewer tokens."
            )
        if rows != self.rows:
            raise ValueError(f"the cache has {self.rows} rows and {rows} come, whatever is reset: make another cache.")
        return length

    @property
    def rows(self) -> int:
        """For which there is memory."""
        return len(self.memory[0])

    def get_seq_length(self) -> int:
        """Tokens that came."""
        return self.length

    def get_max_length(self) -> int:
        """The room."""
        return self.room

    def reset(self) -> None:
        """Nothing is in it; memory stays."""
        self.length = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        if self.is_initialized:
            keys, values = self.memory
            self.memory = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows."""
        if self.is_initialized:
            self.memory = self.memory[0][indices], self.memory[1][indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become these rows."""
        self.batch_select_indices(beam_idx)

    def _refuse_crop(self, why: str) -> NoReturn:
        raise ValueError(f"this cache cannot be cropped: {why}")


class _Full(_Placed):  # type: ignore[no-untyped-call]
    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__(room, room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write what comes; all that is there."""
        begin, length = self.length, self._admit(key_states, value_states)
        self.memory[0][:, :, begin:length], self.memory[1][:, :, begin:length] = key_states, value_states
        self.length = length
        return self.keys, self.values

    def place(self, rows: int, tokens: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the next tokens go: keys, values, places. Who writes them there calls :meth:`placed`. None: they have
        to come by :meth:`update`."""
        if not self.is_initialized:
            return None
        keys, values = self.memory
        if keys.shape[1:4:2] != (heads, dim) or (keys.dtype, keys.device) != (like.dtype, like.device):
            return None
        if not (keys.is_contiguous() and values.is_contiguous() and values.shape == keys.shape):
            return None
        length = self._length_with(rows, tokens)
        return keys, values, torch.arange(self.length, length, device=like.device)[None]

    def placed(self, tokens: int) -> int:
        """They are there; how many there are now."""
        self.length += tokens
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, the place of the first of them)."""
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """The last -tokens_to_remove tokens go."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            self._refuse_crop(f"{tokens_to_remove} is not between {-self.length} and 0.")
        self.length += tokens_to_remove


class _Window(_Placed):  # type: ignore[no-untyped-call]
    """Of the tokens that came the last window - 1 lie from ``begin`` on."""

    is_sliding = True

    def __init__(self, room: int, window: int) -> None:
        super().__init__(room, min(room, 2 * window))
        self.window, self.sliding_window, self.begin = window, window, 0

    def kept(self) -> slice:
        """See the base."""
        return slice(self.begin, self.begin + self._kept())

    def _kept(self) -> int:
        return min(self.length, self.window - 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write what comes; what was kept, and that."""
        length, kept, new = self._admit(key_states, value_states), self._kept(), key_states.shape[2]
        own, more = self.memory, (key_states, value_states)
        if kept + new > self.size:  # more than there is memory for, and more than is kept
            whole = [
                torch.cat([self._seen(one[:, :, self.begin : self.begin + kept]), two], 2)
                for one, two in zip(own, more, strict=True)
            ]
            self.begin, self.length = 0, length
            for one, two in zip(own, whole, strict=True):
                one[:, :, : self._kept()] = two[:, :, two.shape[2] - self._kept() :]
            return whole[0], whole[1]
        if self.begin + kept + new > self.size:
            for one in own:
                one[:, :, :kept] = one[:, :, self.begin : self.begin + kept].clone()
            self.begin = 0
        end = self.begin + kept + new
        for one, two in zip(own, more, strict=True):
            one[:, :, end - new : end] = two
        seen = slice(self.begin, end)
        self.length = length
        self.begin = end - self._kept()
        return self._seen(own[0][:, :, seen]), self._seen(own[1][:, :, seen])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, the place of the first of them)."""
        return self._kept() + query_length, self.length - self._kept()

    def reset(self) -> None:
        """Nothing is in it; memory stays."""
        self.length = self.begin = 0

    def crop(self, tokens_to_remove: int) -> None:
        """The last -tokens_to_remove tokens go, as long as none has left the window."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            self._refuse_crop(f"{tokens_to_remove} is not between {-self.length} and 0.")
        if tokens_to_remove and self.length >= self.window:
            self._refuse_crop(
                f"{self.length} tokens came, and a sliding layer keeps {self.window - 1}. With "
                "Cache(..., keep_all=True) it keeps all."
            )
        self.length += tokens_to_remove
