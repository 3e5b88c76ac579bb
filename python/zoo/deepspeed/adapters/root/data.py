"""The data loader that ``deepspeed.initialize(training_data=...)`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler


class DeepSpeedDataLoader:
    """This rank's micro-batches of a data set, in the order that programs of DeepSpeed know: that of torch's
    ``DistributedSampler``, the same in every epoch unless a program calls ``data_sampler.set_epoch``. Where training
    stands in it is the program's to keep.

    Args:
        dataset: with ``__len__`` and ``__getitem__``; or an ``IterableDataset``, whose samples are this rank's.
        batch_size: samples of a micro-batch.
        local_rank: below 0: samples are drawn at random, the same data set on all ranks.
        tput_timer: not used.
        collate_fn: list of samples → batch.
        num_local_io_workers: processes that load; by default this one does.
        data_sampler: indices of this rank's samples.
        data_parallel_world_size, data_parallel_rank: how many data-parallel ranks there are, and this one's number; by
            default those of the job.
        dataloader_drop_last: a last batch that is not full is left out.
        deepspeed_dataloader_config: refused where it chooses samples; the configuration's section ``data_efficiency``
            does that.

    Raises:
        ValueError: a batch size that is no whole number above 0; a collate_fn that cannot be called.
    """

    def __init__(
        self, dataset: Any, batch_size: int, pin_memory: bool, local_rank: int, tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None, num_local_io_workers: int | None = None,
        data_sampler: Any = None, data_parallel_world_size: int | None = None, data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False, deepspeed_dataloader_config: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        if deepspeed_dataloader_config.get("curriculum_learning"):
            raise ValueError(
                "DeepSpeedDataLoader with a curriculum: give the configuration the section data_efficiency, and "
                "initialize the data set."
            )
        batch_size = _checked("DeepSpeedDataLoader", batch_size, collate_fn)
        streams = isinstance(dataset, IterableDataset)
        if data_sampler is None and not streams:
            data_sampler = (
                RandomSampler(dataset)
                if local_rank < 0
                else DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
            )
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        self.collate_fn, self.pin_memory, self.dataloader_drop_last = collate_fn, pin_memory, dataloader_drop_last
        from zoo.engine.numbers import whole

        self.num_local_io_workers = whole("num_local_io_workers", num_local_io_workers or 0, least=0)
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=data_sampler, collate_fn=collate_fn, num_workers=self.num_local_io_workers,
            pin_memory=pin_memory, drop_last=dataloader_drop_last,
        )  # fmt: skip
        self.data: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.data = iter(self.dataloader)
        return self.data

    def __next__(self) -> Any:
        if self.data is None:
            self.data = iter(self.dataloader)
        return next(self.data)

    def __len__(self) -> int:
        return len(self.dataloader)


def is_data_set(data: Any) -> bool:
    """Whether it holds samples, and not batches as a loader does."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def loader_of(
    engine: Any, dataset: Any, batch_size: int | None, route: str, pin_memory: bool, data_sampler: Any,
    collate_fn: Callable[[list[Any]], Any] | None, num_local_io_workers: int | None, *, shuffle: bool = True,
) -> Any:  # fmt: skip
    """See :meth:`~zoo.deepspeed.adapters.root.engine.DeepSpeedEngine.deepspeed_io`."""
    if not is_data_set(dataset):
        raise ValueError(
            f"the data are a {type(dataset).__name__}; a data set has __len__ and __getitem__, or is an "
            "IterableDataset."
        )
    rank, size = engine.engine.batch_rank, engine.engine.batch_ranks
    if route not in ("train", "eval", "predict"):
        raise ValueError(f"route={route!r}; allowed are 'train', 'eval' and 'predict'.")
    collate_fn = engine.collate_fn if collate_fn is None else collate_fn
    batch_size = engine.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
    batch_size = _checked("deepspeed_io", batch_size, collate_fn)
    if route == "train" and data_sampler is None and shuffle:
        chosen = _chosen(engine.engine, dataset, batch_size, collate_fn)
        if chosen is not None:
            return chosen
    if data_sampler is None and not isinstance(dataset, IterableDataset) and (route != "train" or not shuffle):
        data_sampler = DistributedSampler(dataset, size, rank, shuffle=False)
    return DeepSpeedDataLoader(
        dataset, batch_size, pin_memory, 0, None, collate_fn, num_local_io_workers, data_sampler, size, rank,
        engine.dataloader_drop_last(),
    )  # fmt: skip


def _checked(what: str, batch_size: Any, collate_fn: Any) -> int:
    """The batch size; raises ValueError for one that is none, and for what makes no batches."""
    from zoo.engine.numbers import shown, whole

    if collate_fn is not None and not callable(collate_fn):
        raise ValueError(
            f"{what} got collate_fn={shown(collate_fn)}; it takes a callable that makes a batch of a list of samples."
        )
    return whole(f"the batch_size of {what}", batch_size)


def _chosen(engine: Any, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
    """The loader of the configuration's section ``data_efficiency``, where it chooses samples; None: it does not."""
    part = engine.parts.get("data_efficiency")
    if part is None:
        return None
    before = part.loader
    made = part.make_loader(
        dataset, micro_batch_size=batch_size, rank=engine.batch_rank, size=engine.batch_ranks, seed=engine.config.seed,
        collate_fn=collate_fn,
    )  # fmt: skip
    if before is not None:
        part.loader = before  # the record tells of the loader that trains
    return made
