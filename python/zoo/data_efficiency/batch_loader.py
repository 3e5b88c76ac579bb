"""Micro-batches of about the same number of tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from zoo.data_efficiency.ahead import Newest, loaded
from zoo.data_efficiency.config import DynamicBatchingConfig
from zoo.parts import mixed, shuffled

_log = logging.getLogger("zoo.data_efficiency")


def pack(lengths: Any, order: Any, *, max_tokens: int, smallest: int = 1, largest: int | None = None) -> Any:
    """Where micro-batches begin and end: edges e, micro-batch i holds ``order[e[i]:e[i + 1]]``.

    Samples are taken in order; a micro-batch is closed when the next sample would bring it over ``max_tokens`` or
    ``largest`` samples. Those of fewer than ``smallest`` samples are not closed before they have as many.

    Args:
        lengths: (N,) tokens of each sample.
        order: (N,) numbers of samples.

    Returns:
        (M + 1,) int64; the last micro-batch is dropped where it has fewer than ``smallest`` samples.

    Raises:
        ValueError: ``smallest`` samples in a row have more than ``max_tokens`` tokens, such as one that is too long.
    """
    taken = np.asarray(lengths)[order]
    total = np.concatenate([[0], np.cumsum(taken, dtype=np.int64)])
    edges = [0]
    while edges[-1] < len(taken):
        start = edges[-1]
        stop = int(np.searchsorted(total, total[start] + max_tokens, side="right")) - 1
        if stop - start < smallest:
            if start + smallest > len(taken):
                break
            raise ValueError(
                f"{smallest} sample{'s' if smallest > 1 else ''} from number {int(order[start])} on have "
                f"{int(total[start + smallest] - total[start])} tokens, more than max_tokens = {max_tokens}; raise "
                "max_tokens, shorten samples, or lower min_batch_size."
            )
        edges.append(min(stop, start + largest) if largest is not None else stop)
    if len(edges) > 1 and edges[-1] - edges[-2] < smallest:
        edges.pop()
    return np.array(edges, dtype=np.int64)


class PackedLoader(Newest):
    """Micro-batches of one rank, each of at most ``max_tokens`` tokens.

    An epoch's samples are packed into micro-batches, the same on all ranks and at any number of ranks. Position p of an
    epoch counts micro-batches of all ranks: rank r of N gets micro-batch p + r, and then p grows by N. So all ranks get
    equally many; what is left at the end and does not make one for each rank is dropped.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        section: ``data_efficiency.data_sampling.dynamic_batching``.
        lengths: (N,) tokens of each sample.
        rank, size, seed, collate_fn: as of ``make_loader`` of an engine part. Without a collate_fn, tensors of other
            lengths are padded at the end of their first dimension: see :func:`pad`.
        num_epochs: after which nothing comes any more.
        num_workers, pin_memory: see :func:`~zoo.data_efficiency.ahead.loaded`.

    Attributes:
        handed: samples in the latest micro-batches of all ranks together.
    """

    def __init__(
        self, dataset: Any, section: DynamicBatchingConfig, lengths: Any, *, rank: int, size: int, seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_epochs: int = 1000,
        num_workers: int = 0, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        if section.max_tokens is None:
            raise AssertionError("a loader of packed micro-batches without max_tokens")
        self.dataset, self.section, self.lengths = dataset, section, lengths
        self.rank, self.size, self.seed, self.num_epochs = rank, size, seed, num_epochs
        self.collate_fn: Callable[[list[Any]], Any] = collate_fn if collate_fn is not None else pad
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.epoch = self.position = self.handed = 0
        self._packed: tuple[int, Any, Any] | None = None
        if len(self) == 0:
            raise ValueError(
                f"the data set makes {len(self.edges()) - 1} micro-batches of at most {section.max_tokens} tokens, "
                f"fewer than one for each of {size} ranks; use more data, a lower max_tokens or fewer ranks."
            )

    def __len__(self) -> int:
        """Micro-batches of each rank in the epoch at hand."""
        return (len(self.edges()) - 1) // self.size

    def edges(self) -> Any:
        """See :func:`pack`; of the epoch at hand, in which micro-batches have their final order."""
        return self._of_epoch()[1]

    def _of_epoch(self) -> tuple[Any, Any]:
        if self._packed is None or self._packed[0] != self.epoch:
            self._packed = self.epoch, *self._pack()
            sizes = np.diff(self._packed[2])
            if self.section.verbose and self.rank == 0 and len(sizes):
                _log.info(
                    "epoch %d: %d micro-batches of %d to %d samples", self.epoch, len(sizes), sizes.min(), sizes.max()
                )
        return self._packed[1], self._packed[2]

    def _pack(self) -> tuple[Any, Any]:
        section, count = self.section, len(self.lengths)
        seed = mixed(self.epoch, self.seed)
        if section.sequence_picking_order == "seqlen":
            order = np.argsort(np.asarray(self.lengths), kind="stable")
        elif section.sequence_picking_order == "random":
            order = np.array([shuffled(i, count, seed) for i in range(count)], dtype=np.int64)
        else:
            order = np.arange(count)
        edges = pack(
            self.lengths, order, max_tokens=section.max_tokens or 0, smallest=section.min_batch_size,
            largest=section.max_batch_size,
        )  # fmt: skip
        if section.sequence_picking_order != "seqlen":
            return order, edges
        turns = [shuffled(i, len(edges) - 1, seed) for i in range(len(edges) - 1)]
        pieces = [order[edges[turn] : edges[turn + 1]] for turn in turns]
        return np.concatenate([order[:0], *pieces]), np.cumsum([0, *map(len, pieces)])

    def __iter__(self) -> Iterator[Any]:
        serial = self.begin()
        if self.epoch < self.num_epochs:
            found = loaded(
                self.dataset, self._chosen(self.position), self.collate_fn, num_workers=self.num_workers,
                pin_memory=self.pin_memory, seed=mixed(self.epoch, self.seed),
            )  # fmt: skip
            for batch, place in found:
                self.check_newest(serial)
                before = {"epoch": self.epoch, "micro_batch": self.position}
                self.position, self.handed = place
                self.hand(batch, before, self.handed)
                yield batch
                self.check_newest(serial)
        self.epoch += self.position > 0
        self.position = 0
        self.end()

    def _chosen(self, position: int) -> Iterator[tuple[list[int], tuple[int, int]]]:
        order, edges = self._of_epoch()
        while position + self.size <= len(edges) - 1:
            mine, first = position + self.rank, position
            position += self.size
            handed = int(edges[position] - edges[first])
            yield [int(number) for number in order[edges[mine] : edges[mine + 1]]], (position, handed)

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands; the same on all ranks."""
        oldest = None if self.unused is None else self.unused.oldest
        at = {"epoch": self.epoch, "micro_batch": self.position} if oldest is None else oldest.before
        return {**at, "num_samples": len(self.lengths), "seed": self.seed, "packing": self._packing()}

    def _packing(self) -> list[Any]:
        section = self.section
        return [section.max_tokens, section.min_batch_size, section.max_batch_size, section.sequence_picking_order]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, at any number of ranks.

        Raises:
            ValueError: see :meth:`check_state`.
        """
        self.check_state(state)
        self.move()
        self.epoch, self.position, self.seed = int(state["epoch"]), int(state["micro_batch"]), int(state["seed"])
        self._packed = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for the state of another data set, or of other micro-batches."""
        if state.get("num_samples") != len(self.lengths) or state.get("packing") != self._packing():
            raise ValueError(
                f"the loader's state is of {state.get('num_samples', 'no')} samples packed by {state.get('packing')}; "
                f"this loader has {len(self.lengths)} packed by {self._packing()} (max_tokens, min_batch_size, "
                "max_batch_size, sequence_picking_order). Continue with the data set and the options of the checkpoint."
            )


def length_of_sample(sample: Any) -> int:
    """Tokens of a sample: the length of the first tensor, array or sequence of numbers in it; of a mapping,
    ``input_ids`` before the others. Text and single numbers are none.

    Raises:
        ValueError: it has none.
    """
    found = _first_sequence(sample)
    if found is None:
        raise ValueError(
            f"dynamic batching cannot tell how many tokens a sample has, a {type(sample).__name__}; analyse the data "
            'set with a metric "seqlen" and give its directory as metrics_path.'
        )
    return len(found)


def _first_sequence(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value if value.ndim else None
    if isinstance(value, Mapping):
        inside = sorted(value, key=lambda key: key != "input_ids")  # stable: the others in their order
        return next((found for key in inside if (found := _first_sequence(value[key])) is not None), None)
    if isinstance(value, (tuple, list)):
        if not value or isinstance(value[0], Number):
            return value
        return next((found for item in value if (found := _first_sequence(item)) is not None), None)
    return value if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else None


def pad(samples: Sequence[Any]) -> Any:
    """A batch of samples whose sequences may have different lengths: shorter ones are continued with zeros along their
    first dimension; integers under the name ``labels`` with -100, which losses of torch leave out.

    Sequences are tensors, arrays, and lists of numbers, which become tensors; a tuple is parts of a sample, as many in
    each. Of sequences of several dtypes the batch has the one that holds them all. Where padding must not count as
    labels in tuples, give ``collate_fn``.

    Raises:
        ValueError: samples have other keys than others, tuples or lists of different lengths that are no sequences, or
            tensors that differ in more than their length.
    """

    def joined(values: list[Any], is_label: bool) -> Any:
        first = values[0]
        if isinstance(first, Mapping):
            _check_keys(values)
            return {key: joined([v[key] for v in values], key == "labels") for key in first}
        if isinstance(first, np.ndarray) or any(isinstance(v, list) and v and isinstance(v[0], Number) for v in values):
            values = [torch.as_tensor(v) for v in values]
            first = values[0]
        if isinstance(first, (tuple, list)):
            if len({len(v) for v in values}) > 1:
                raise ValueError(
                    f"samples of one micro-batch have a {type(first).__name__} of {len(first)} parts and one of "
                    f"{next(len(v) for v in values if len(v) != len(first))}; give sequences as lists of numbers or "
                    "tensors, or a collate_fn."
                )
            return [joined([v[i] for v in values], is_label) for i in range(len(first))]
        if isinstance(first, torch.Tensor) and first.dim() and len({len(v) for v in values}) > 1:
            return _continued(values, is_label)
        return default_collate(values)

    return joined(list(samples), False)


def _check_keys(samples: list[Any]) -> None:
    """Raise ValueError unless all have the same keys: what some lack would be an error, or be left out unseen."""
    other = next((sample for sample in samples if set(sample) != set(samples[0])), None)
    if other is not None:
        raise ValueError(
            f"samples of one micro-batch have different keys, {', '.join(map(str, samples[0]))} and "
            f"{', '.join(map(str, other))}; give each sample the same keys, or a collate_fn."
        )


def _continued(values: list[torch.Tensor], is_label: bool) -> torch.Tensor:
    """Sequences of different lengths as one tensor, in a dtype that holds all of them."""
    if len({v.shape[1:] for v in values}) > 1:
        raise ValueError(
            f"samples of one micro-batch have tensors of the shapes {', '.join(str(tuple(v.shape)) for v in values)}; "
            "only the first dimension may differ. Give them one shape beside it, or a collate_fn."
        )
    # Of an empty list torch makes floats; it says nothing of the others.
    dtypes = [v.dtype for v in values if v.numel()] or [values[0].dtype]
    dtype = functools.reduce(torch.promote_types, dtypes)
    fill = -100 if is_label and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool) else 0
    if fill and torch.iinfo(dtype).min == 0:
        raise ValueError(f"labels are {dtype}, which cannot hold {fill} for padding; give them as int64.")
    return torch.nn.utils.rnn.pad_sequence([v.to(dtype) for v in values], batch_first=True, padding_value=float(fill))
