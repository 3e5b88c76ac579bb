"""What may be chosen: the candidates, each one a set of values for keys of one configuration."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.registry import nearest

__all__ = ["AXES", "DIMENSIONS", "Candidate", "Job", "SpaceError", "candidates", "divisors", "meshes"]

AXES = ("pipe", "data", "tensor")
"""Axes of a mesh, outermost first."""
DIMENSIONS = ("stage", "micro", "mesh", "schedule", "bucket", "offload", "checkpointing")
"""What is searched, and what the keys of ``autotuning.space`` are, beside paths of the configuration."""
OFFLOADS = ("none", "cpu", "nvme")
PATHS = {
    "train_micro_batch_size_per_gpu": "micro", "gradient_accumulation_steps": "micro",
    "zero_optimization.stage": "stage", "mesh.axes": "mesh", "tensor_parallel.autotp_size": "mesh",
    "tensor_parallel.tp.tp_size": "mesh", "pipeline.schedule.type": "schedule",
    "zero_optimization.reduce_bucket_size": "bucket", "zero_optimization.allgather_bucket_size": "bucket",
    "zero_optimization.offload_optimizer.device": "offload", "zero_optimization.offload_param.device": "offload",
    "activation_checkpointing.blocks": "checkpointing", "pipeline.activation_checkpoint_interval": "checkpointing",
}  # fmt: skip
"""What a dimension sets. As paths of the space they would undo it: a candidate would not be what its label says."""


class SpaceError(ValueError):
    """A value that cannot be searched."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the job.

    Attributes:
        micro: samples of a rank in a pass. accumulation: passes in a step; the global batch is what it was.
        mesh: ranks of the axes "pipe", "data" and "tensor".
        schedule: of the pipeline; "" without stages.
        bucket: elements of a bucket; 0 for what the configuration says.
        offload: where optimizer states wait, and at stage 3 parameters.
        extra: further keys of the configuration, path → JSON.
    """

    stage: int
    micro: int
    accumulation: int
    mesh: tuple[int, int, int] = (1, 1, 1)
    schedule: str = ""
    bucket: int = 0
    offload: str = "none"
    checkpointing: bool = False
    extra: tuple[tuple[str, str], ...] = ()

    @property
    def pipe(self) -> int:
        """Stages of the pipeline."""
        return self.mesh[0]

    @property
    def data(self) -> int:
        """Ranks that see other samples."""
        return self.mesh[1]

    @property
    def tensor(self) -> int:
        """Ranks that have parts of the same matrices."""
        return self.mesh[2]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "stage": self.stage, "micro": self.micro, "accumulation": self.accumulation, "mesh": list(self.mesh),
            "schedule": self.schedule, "bucket": self.bucket, "offload": self.offload,
            "checkpointing": self.checkpointing, "extra": dict(self.extra),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """What :meth:`to_dict` gave."""
        pipe, data, tensor = values["mesh"]
        return cls(**{**values, "mesh": (pipe, data, tensor), "extra": tuple(values["extra"].items())})

    def label(self) -> str:
        """In a table: what differs from the plainest way."""
        words = [f"stage {self.stage}", f"{self.accumulation} x {self.micro}"]
        words += [f"{axis} {size}" for axis, size in zip(AXES, self.mesh, strict=True) if size > 1]
        words += [self.schedule] if self.schedule else []
        words += [f"bucket {self.bucket:,}"] if self.bucket else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"{path}={value}" for path, value in self.extra]
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is known of a job when its candidates are made.

    Attributes:
        batch: samples of a step, over all ranks.
        axes: those that the configuration names; what is not in AXES (experts, sequences) fixes the mesh.
        base: what the configuration itself asks for.
        tensor: the model has a plan for tensor parallelism. blocks: it has a list of blocks to checkpoint.
        device: "cpu" has one memory for device and host. nvme: a folder for offloading, "" for none.
        num_parameters: of the model.
        least_micro, most_micro: bounds of a micro-batch, where ``space`` does not name them; None for none.
        num_micro: in the fast form so many micro-batches of each mesh, the largest ones.
    """

    ranks: int
    batch: int
    base: Candidate
    num_parameters: int
    fixed_mesh: bool = False
    tensor: bool = False
    pipe: bool = False
    blocks: bool = False
    device: str = "cpu"
    nvme: str = ""
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "zb_h1")
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fast: bool = False
    num_micro: int = 3
    least_micro: int = 1
    most_micro: int | None = None

    def lists(self) -> dict[str, list[Any]]:
        """The values of each dimension that does not depend on another one.

        Raises:
            SpaceError: ``space`` has a value that is none.
        """
        base = self.base
        buckets = sorted({base.bucket, *(max(1, self.num_parameters // n) for n in (4, 16))})
        offloads = ["none", *(["cpu"] if self.device != "cpu" else []), *(["nvme"] if self.nvme else [])]
        found: dict[str, list[Any]] = {
            "stage": [0, 1, 2, 3],
            "micro": [n for n in divisors(self.batch) if self.least_micro <= n <= (self.most_micro or n)],
            "mesh": [base.mesh] if self.fast or self.fixed_mesh else self._meshes(),
            "schedule": [base.schedule] if self.fast else list(self.schedules),
            "bucket": [base.bucket] if self.fast else buckets,
            "offload": [base.offload] if self.fast else sorted({base.offload, *offloads}, key=OFFLOADS.index),
            "checkpointing": [base.checkpointing] if self.fast else [False, True] if self.blocks else [False],
        }
        for key, values in self.space.items():
            _check_key(key)
            if not values:
                raise SpaceError(f"autotuning.space.{key} has no values; name at least one, or leave it out.")
            found[key] = [_checked(key, value, self) for value in values]
        return found

    def _meshes(self) -> list[tuple[int, int, int]]:
        return [m for m in meshes(self.ranks) if (self.tensor or m[2] == 1) and (self.pipe or m[0] == 1)]


def _check_key(key: str) -> None:
    """Whether a key of ``autotuning.space`` is a dimension, or a path of the configuration that no dimension sets.

    Raises:
        SpaceError: it is neither.
    """
    if key in DIMENSIONS:
        return
    for path, dimension in PATHS.items():
        if f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}."):
            raise SpaceError(
                f'autotuning.space has "{key}", which sets {path}; the space has the name {dimension} for it: give '
                f"values of {dimension} instead."
            )
    if key.split(".")[0] == "autotuning":
        raise SpaceError(f'autotuning.space has "{key}"; a trial does not read the section autotuning.')
    if "." not in key:
        close = nearest(key, DIMENSIONS)
        raise SpaceError(
            f"autotuning.space.{key}: no such dimension; there are {', '.join(DIMENSIONS)}, and paths of the "
            f'configuration such as "optimizer.params.fused"' + (f". Did you mean {close}?" if close else "")
        )


def _checked_mesh(value: Any, ranks: int) -> tuple[int, int, int]:
    sizes = value if isinstance(value, Mapping) else {}
    pipe, data, tensor = (sizes.get(axis, 1) for axis in AXES)
    if (
        not isinstance(value, Mapping)
        or set(sizes) - set(AXES)
        or not all(type(size) is int and size >= 1 for size in (pipe, data, tensor))
        or pipe * data * tensor != ranks
    ):
        raise SpaceError(
            f"autotuning.space.mesh has {json.dumps(value, default=str)}; each is sizes of axes, such as "
            f'{{"data": {ranks}}}, of {", ".join(AXES)}: whole numbers, at least 1, whose product is the number of '
            f"ranks, {ranks}."
        )
    return pipe, data, tensor


def _checked(key: str, value: Any, job: Job) -> Any:
    """A value of ``autotuning.space`` as candidates have it."""
    if key == "mesh":
        return _checked_mesh(value, job.ranks)
    whole = type(value) is int
    allowed = {
        "stage": (whole and 0 <= value <= 3, "0, 1, 2 or 3"),
        "micro": (whole and value >= 1, "a number of samples, at least 1"),
        "bucket": (whole and value >= 0, "a number of elements, 0 for the configuration's"),
        "offload": (value in OFFLOADS and (value != "nvme" or bool(job.nvme)),
                    "none, cpu or nvme (with zero_optimization.offload_optimizer.nvme_path)"),
        "checkpointing": (type(value) is bool, "true or false"),
        "schedule": (isinstance(value, str), "the name of a schedule"),
    }  # fmt: skip
    good, what = allowed.get(key, (True, ""))
    if not good:
        raise SpaceError(f"autotuning.space.{key} has {json.dumps(value, default=str)}; it is {what}.")
    return value


def divisors(number: int) -> list[int]:
    """In order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def meshes(ranks: int) -> list[tuple[int, int, int]]:
    """All (pipe, data, tensor) whose product is ``ranks``; those with more data ranks first."""
    found = [(p, ranks // p // t, t) for p in divisors(ranks) for t in divisors(ranks // p)]
    return sorted(found, key=lambda mesh: (-mesh[1], mesh))


def candidates(job: Job) -> list[Candidate]:
    """Every candidate, in the order of the dimensions, none twice; that of the configuration itself is the first.

    What makes no difference is not varied: buckets without data ranks, schedules of one micro-batch, states that are
    offloaded where none are split. The global batch is kept: accumulation = batch / (micro · data ranks).

    Raises:
        SpaceError: there is none, or ``autotuning.space`` has what cannot be.
    """
    lists = job.lists()
    extras = [key for key in lists if "." in key]
    found: dict[Candidate, None] = {}
    if _within(job.base, lists):
        found[job.base] = None
    for mesh, stage, checkpointing in itertools.product(lists["mesh"], lists["stage"], lists["checkpointing"]):
        for micro, accumulation in _micros(job, lists["micro"], mesh[1]):
            for schedule, bucket, offload in itertools.product(
                _schedules(mesh, accumulation, lists["schedule"]),
                lists["bucket"] if mesh[1] > 1 else lists["bucket"][:1],
                lists["offload"] if stage else ["none"],
            ):
                for values in itertools.product(*(lists[key] for key in extras)):
                    extra = tuple((key, json.dumps(value)) for key, value in zip(extras, values, strict=True))
                    found[Candidate(
                        stage=stage, micro=micro, accumulation=accumulation, mesh=mesh, schedule=schedule,
                        bucket=bucket, offload=offload, checkpointing=checkpointing, extra=extra,
                    )] = None  # fmt: skip
    if not found:
        raise SpaceError(
            f"there is no candidate: no micro-batch of autotuning.space or between the bounds of the section divides a "
            f"batch of {job.batch} over the data ranks of {job.ranks}."
        )
    return list(found)


def _within(base: Candidate, lists: Mapping[str, Iterable[Any]]) -> bool:
    """Whether what the configuration asks for is in the space: so is what is not searched, but not extras."""
    kept = {"schedule": {"", *lists["schedule"]}, "bucket": {0, *lists["bucket"]}}
    return not any("." in key for key in lists) and all(
        getattr(base, name) in kept.get(name, set(lists[name])) for name in DIMENSIONS
    )


def _micros(job: Job, allowed: Sequence[int], data: int) -> Iterator[tuple[int, int]]:
    """(micro, accumulation) that keep the batch; in the fast form the largest few."""
    share, rest = divmod(job.batch, data)
    sizes = [micro for micro in sorted(set(allowed)) if not rest and share % micro == 0]
    if job.fast and "micro" not in job.space:
        sizes = sizes[-job.num_micro :]
    for micro in sizes:
        yield micro, share // micro


def _schedules(mesh: tuple[int, int, int], accumulation: int, schedules: Sequence[str]) -> Sequence[str]:
    if mesh[0] == 1:
        return [""]
    return schedules if accumulation > 1 else schedules[:1]
