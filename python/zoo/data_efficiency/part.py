"""What the section ``data_efficiency`` asks for, as one engine part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.data_efficiency.batch_loader import PackedLoader, length_of_sample
from zoo.data_efficiency.config import DataEfficiencyConfig
from zoo.data_efficiency.curriculum import Growing
from zoo.data_efficiency.index import Index
from zoo.data_efficiency.metric_loader import CurriculumLoader, Place
from zoo.data_efficiency.random_ltd import RandomLTD
from zoo.data_efficiency.schedules import Schedule
from zoo.data_efficiency.sequence import Cutter
from zoo.parts import Clock, Environment, Handed, Unused
from zoo.shard.runtime.outputs import tensors_in

_METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
_BATCHING = "data_efficiency.data_sampling.dynamic_batching"
_CUTS = ("seqlen_truncate", "seqlen_reshape")


class DataEfficiency:
    """Curriculum by metrics of samples, micro-batches of variable size, and random-LTD, each where it is enabled.

    Args:
        section: ``data_efficiency``.
        environment: of the engine.

    Attributes:
        random_ltd: None where it is not enabled.
        loader: what :meth:`make_loader` has made, None where it makes none.
    """

    def __init__(self, section: DataEfficiencyConfig, environment: Environment) -> None:
        self.section, self.environment = section, environment
        routing, sampling = section.data_routing, section.data_sampling
        self.random_ltd: RandomLTD | None = None
        if routing.enabled and routing.random_ltd.enabled:
            self.random_ltd = RandomLTD(routing.random_ltd, environment, seed=section.seed)
        curriculum = sampling.curriculum_learning
        self._metrics = curriculum.curriculum_metrics if sampling.enabled and curriculum.enabled else {}
        self._growing = {name: Growing(metric, f"{_METRICS}.{name}") for name, metric in self._metrics.items()}
        self._packs = sampling.enabled and sampling.dynamic_batching.enabled
        self._picks = any(m.clustering_type == "schedule_based" for m in self._metrics.values())
        self._cutter = Cutter()
        self.loader: CurriculumLoader | PackedLoader | None = None
        self._unused = Unused(_BATCHING)
        self._sizes: dict[int, int] = {}  # micro-batch of the step at hand → samples of all ranks
        self._step = -1  # that they are of
        self._difficulties: dict[str, int] = {}
        self._batch_size = 0

    def set_schedule(self, name: str, schedule: Schedule) -> None:
        """The schedule of a curriculum metric whose schedule_type is "custom": a function step → difficulty."""
        if name not in self._growing:
            raise ValueError(f"there is no curriculum metric {name!r}; there are {', '.join(self._growing) or 'none'}.")
        self._growing[name].set_schedule(schedule)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Change the module before it is sharded."""
        if self.random_ltd is not None:
            self.random_ltd.prepare(module, mesh)

    def make_loader(
        self, dataset: Any, *, micro_batch_size: int, rank: int, size: int, seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Any:  # fmt: skip
        """The loader that the section asks for; None for the engine's own. Its shuffles are drawn from the engine's
        seed, as those of the engine's loader are."""
        sampling = self.section.data_sampling
        if (self._picks or self._packs) and not hasattr(dataset, "__len__"):
            raise ValueError(
                f"training_data is a {type(dataset).__name__} without __len__; data_efficiency.data_sampling picks "
                "samples by their numbers and needs to know how many there are. Give a data set with __len__."
            )
        more: dict[str, Any] = {
            "num_epochs": sampling.num_epochs, "num_workers": sampling.num_workers, "pin_memory": sampling.pin_memory,
        }  # fmt: skip
        if self._picks:
            self.loader = CurriculumLoader(
                dataset, self._metrics, self._growing, micro_batch_size=micro_batch_size, rank=rank, size=size,
                samples_a_step=int(self.environment.config.train_batch_size), seed=seed, collate_fn=collate_fn,
                **more,
            )  # fmt: skip
        elif self._packs:
            self.loader = PackedLoader(
                dataset, sampling.dynamic_batching, self._lengths(dataset), rank=rank, size=size, seed=seed,
                collate_fn=collate_fn, **more,
            )  # fmt: skip
        if self.loader is not None:
            self.loader.unused = self._unused
        return self.loader

    def _lengths(self, dataset: Any) -> Any:
        directory = self.section.data_sampling.dynamic_batching.metrics_path
        if directory is None:
            return np.array([length_of_sample(dataset[i]) for i in range(len(dataset))], dtype=np.int64)
        index = Index(Path(directory) / "seqlen" / "sample_to_metric.safetensors")
        if len(index) != len(dataset) or index.dtype is not torch.int64:
            raise ValueError(
                f"the index {str(index.path)!r} has {len(index)} numbers, {index.dtype}, and the data set "
                f"{len(dataset)} samples; analyse this data set with a metric of whole numbers."
            )
        return index.values

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins."""
        if (self._picks or self._packs) and self.loader is None:
            raise ValueError(
                "data_efficiency.data_sampling decides which samples a micro-batch has, and the engine has made no "
                "loader: give initialize a data set with __len__ and __getitem__ as training_data, or make the loader "
                "by engine.parts['data_efficiency'].make_loader(...)."
            )
        if self.loader is not None:
            self._use(args, kwargs, clock)
        self._difficulties = {name: growing.at(clock.step + 1) for name, growing in self._growing.items()}
        for name in _CUTS:
            if name in self._metrics and self._metrics[name].clustering_type == "single_cluster":
                cut = self._cutter.truncate if name == "seqlen_truncate" else self._cutter.reshape
                args, kwargs = cut(args, kwargs, self._difficulties[name])
        if self.random_ltd is not None:
            self.random_ltd.on_batch(clock)
        return args, kwargs

    @property
    def _scales(self) -> bool:
        return self._packs and self.section.data_sampling.dynamic_batching.lr_scaling_method != "none"

    def _use(self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock) -> None:
        # By number, so that a step that begins anew, or a forward that is repeated, counts once.
        if clock.step != self._step or (clock.micro_batch == 0 and len(self._sizes) > 1):
            self._sizes, self._step = {}, clock.step
        found: Handed | None = None
        given = list(tensors_in((args, kwargs)))
        try:
            found = self._unused.find(given)
        except ValueError:
            if self._scales:
                raise
        if found is None and self._scales:
            raise ValueError(
                f"{_BATCHING} scales learning rates by the batches of its own loader, and this batch is not of it, or "
                "was used before: use engine.dataloader, each batch once, in their order, or set lr_scaling_method to "
                "'none'."
            )
        if found is not None:
            self._unused.use(found, given)
        self._sizes[clock.micro_batch] = found.counts if found is not None and self._packs else 0

    def lr_factor(self, clock: Clock) -> float:
        """(samples of the step / train_batch_size), to the power that lr_scaling_method says: 1, 1/2 or 0.

        Raises:
            ValueError: no forward of the engine has had a batch of this step.
        """
        counted = self._sizes if clock.step == self._step else {}
        self._batch_size = sum(counted.values())
        if not self._scales:
            return 1.0
        if not counted or any(number not in counted for number in range(clock.micro_batch)):
            raise ValueError(
                f"{_BATCHING} scales learning rates by samples, and does not know the batches of this step: compute "
                "each loss by engine(batch), in training mode (engine.train()), or set lr_scaling_method to 'none'."
            )
        method = self.section.data_sampling.dynamic_batching.lr_scaling_method
        ratio = self._batch_size / int(self.environment.config.train_batch_size)
        return ratio if method == "linear" else math.sqrt(ratio)

    def before_update(self, clock: Clock) -> None:
        """The gradients of a step are there."""
        if self.random_ltd is not None:
            self.random_ltd.before_update()

    def metrics(self) -> dict[str, float]:
        """Difficulties (of metrics that pick samples: those that the latest were drawn at), samples that are allowed,
        samples of the step, tokens that layers keep."""
        found = {name: float(value) for name, value in self._difficulties.items()}
        if isinstance(self.loader, CurriculumLoader):
            used = self._unused.current
            place: Place = self.loader.place if used is None else used.counts
            found.update({name: float(value) for name, value in place.difficulties.items()})
            found["allowed_samples"] = float(place.allowed)
        if self._packs:
            found["batch_size"] = float(self._batch_size)
        if self.random_ltd is not None:
            found.update(self.random_ltd.metrics())
        return found

    def close(self) -> None:
        """Modules are called as before."""
        if self.random_ltd is not None:
            self.random_ltd.close()
