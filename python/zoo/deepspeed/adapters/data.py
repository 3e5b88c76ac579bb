"""The data loader that ``deepspeed.initialize(training_data=...)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler


class DeepSpeedDataLoader:
    """This rank's micro-batches of a data set, in the order that programs of DeepSpeed know: that of torch's
    ``DistributedSampler``, the same in every epoch. Where training stands in it is the program's to keep.

    Args:
        rank, size: this one's number among the data-parallel ranks, and how many there are.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int, size: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        sampler: Any = None
        if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=size, rank=rank)
        self.dataset, self.batch_size = dataset, batch_size
        self.dataloader: DataLoader[Any] = DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate_fn)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def __len__(self) -> int:
        return len(self.dataloader)


def loader_for(data: Any, batch_size: int, group: Any, collate_fn: Any) -> Any:
    """A loader over a data set; what is a loader, or nothing, as it is."""
    if not isinstance(data, Dataset):
        return data
    here = dist.is_initialized()
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if here else (0, 1)
    return DeepSpeedDataLoader(data, batch_size, rank=rank, size=size, collate_fn=collate_fn)
