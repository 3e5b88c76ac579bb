"""The methods by which something takes part in training. Each protocol is one of them; an object may have several.

All are called on every rank, in the same order, from the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zoo.parts.record import Clock, StepRecord


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What an engine tells of the job when it builds parts, sinks and a runner."""

    config: Any
    """The whole configuration."""
    rank: int
    """Of this process, in the job."""
    world_size: int
    """Processes of the job."""
    batch_rank: int
    """Which share of each batch this process gets."""
    batch_ranks: int
    """Into how many shares a batch is cut."""
    mesh: Any = None
    """A DeviceMesh with named axes; None where all ranks are data-parallel."""
    group: Any = None
    """Of the data-parallel ranks where there is no mesh; None for the default group."""


class Prepares(Protocol):
    """Changes the module before anything of it is sharded: compression, random-LTD, tensor parallelism."""

    def prepare(self, module: nn.Module, mesh: Any) -> nn.Module | None:
        """The module to train, None for this one. Called once, by ``initialize``, on the module as the user gave it."""


class OnBatch(Protocol):
    """Changes what goes into the model: curriculum learning, arguments that depend on progress."""

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward, training only; called before each, with what parts before this one
        returned."""


class CountsBatch(Protocol):
    """Gives a rank a micro-batch that stands for none, so that all ranks run the model as often."""

    def counts_batch(self, clock: Clock) -> bool:
        """Whether samples and tokens of the micro-batch that ``on_batch`` just had are counted."""


class OnLoss(Protocol):
    """Changes the loss of a micro-batch: distillation, penalties."""

    def on_loss(self, loss: Tensor, clock: Clock) -> Tensor:
        """The loss to go backward from; called by ``engine.backward`` before anything is scaled. ``loss.backward()``
        without the engine is refused where a part has this method."""


class ScalesLr(Protocol):
    """Multiplies the learning rate for one update: batches of another size."""

    def lr_factor(self, clock: Clock) -> float:
        """Called before each update; groups have their own rates again after it."""


class BeforeUpdate(Protocol):
    """Does something when the gradients of a step are there."""

    def before_update(self, clock: Clock) -> None:
        """Called before the optimizer's step."""


class AfterUpdate(Protocol):
    """Follows training."""

    def after_update(self, record: StepRecord) -> None:
        """Called with what the step came to, before the next update, save or load; before the next forward too, unless
        the engine has not waited for the step."""


class GivesMetrics(Protocol):
    """Has numbers for the record of a step."""

    def metrics(self) -> Mapping[str, float]:
        """Called after each update, for its record; names get the part's own before them, "<part>/<name>"."""


class HasState(Protocol):
    """Has state that is no function of the clock."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it: a tree of plain values and tensors (zoo.checkpointing says which)."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from there."""


class Closes(Protocol):
    """Holds files, threads or hooks."""

    def close(self) -> None:
        """Called once, by ``engine.destroy``."""


class MakesLoader(Protocol):
    """Decides which samples a micro-batch has: curriculum by a metric of samples, batches of variable size.

    One part of an engine may.
    """

    def make_loader(
        self, dataset: Any, *, micro_batch_size: int, rank: int, size: int, seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Any:  # fmt: skip
        """An iterable over one epoch's micro-batches of this rank, with ``state_dict`` and ``load_state_dict``."""


class Runner(Protocol):
    """How batches become gradients: forward and backward of one process, or of the stages of a pipeline.

    Built by ``registry.build("runner", name, engine=engine)``; the engine owns everything else.
    """

    def accumulate(self, batches: Iterator[Any], n: int, scale: float) -> Sequence[Any]:
        """Run n micro-batches forward and backward, and leave the sum of their gradients, each times ``scale``.

        Returns:
            The loss of each, detached, before the scale.
        """

    def evaluate(self, batch: Any) -> Any:
        """The module's output for a batch; the engine has set evaluation mode and switched gradients off."""


class Sink(Protocol):
    """Gets the record of each step, on a thread of its own, in order. What it raises switches it off.

    Built as ``sink(section, environment)`` by ``initialize``, on rank 0 only unless ``section.ranks`` is "all".
    """

    def write(self, record: StepRecord) -> None:
        """Take a record."""

    def close(self) -> None:
        """There will be no more: write what is held back."""
