"""What an engine does for a model that is compressed: the part "compression_training"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from zoo.comm import Communicator, together
from zoo.compression.attach import transforms_of
from zoo.compression.compressing import check_same
from zoo.compression.config import ROOT, CompressionConfig
from zoo.compression.layer_reduction import has_begun
from zoo.compression.moq.periods import moq_of
from zoo.compression.moq.sections import MOQ
from zoo.compression.planning import AnyTechnique, Made, attach_all, compress, made_by, named_for, techniques_of
from zoo.compression.ranks import Ranks
from zoo.compression.scheduler import CompressionScheduler
from zoo.compression.ties import Ties, ties_of, with_ties
from zoo.parts import Clock, Environment, StepRecord

T = TypeVar("T")


class CompressionPart:
    """Compresses the model before it is sharded, unless ``init_compression`` has, and tells its transforms the step.

    The record has ``bits/<technique>.<group>``, the mean over the group's tensors, for transforms that have bits.

    Args:
        section: ``compression_training``.
        environment: of the engine.
    """

    before = ("data_efficiency", "progressive_layer_drop", "moe")
    """Parts that give modules another forward."""

    def __init__(self, section: CompressionConfig, environment: Environment) -> None:
        self.section, self._environment = section, environment
        self.scheduler: CompressionScheduler | None = None

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Attach what the section asks for."""
        if self.section.layer_reduction.enabled and not has_begun(module):
            raise ValueError(
                f"{ROOT}.layer_reduction: enabled, and an engine has no teacher; call init_compression(model, config, "
                "teacher_model=...) before initialize."
            )
        ranks, techniques = self._ranks(), self._techniques()
        if ranks is None:
            _take_over_or_compress(module, techniques)
        elif mesh is None:
            _on_all(ranks.everyone, lambda: _take_over_or_compress(module, techniques))
        else:
            self._prepare_parts(module, ranks, techniques)
        shared = [one for technique in techniques.values() for one in technique.shared()]
        self.scheduler = CompressionScheduler(module, ranks, shared)

    def _prepare_parts(self, module: nn.Module, ranks: Ranks, techniques: dict[str, AnyTechnique]) -> None:
        """Where ranks have other layers or experts a pattern may mean those of others; what is wrong on one rank is
        raised on all."""
        everyone = ranks.everyone
        begun = everyone.all_gather_object(bool(transforms_of(module)))
        if not ranks.layer_axes and any(begun):
            _on_all(everyone, lambda: check_same(module, techniques))
            return
        names = _on_all(everyone, lambda: {name: list(named_for(t, module)) for name, t in techniques.items()})
        elsewhere = {name: {other for there in names for other in there[name]} for name in techniques}
        made: Made = []

        def make() -> Ties:
            if transforms_of(module):
                raise ValueError("a pipeline is compressed by its engine; leave init_compression out.")
            made.extend(made_by(module, techniques, elsewhere))
            return ties_of(module, made)

        candidates = _on_all(everyone, make)
        _on_all(everyone, lambda: len(attach_all(module, with_ties(module, made, candidates, techniques))))

    def _techniques(self) -> dict[str, AnyTechnique]:
        config = self._environment.config
        moq = moq_of(getattr(config, MOQ), config.eigenvalue, seed=int(config.seed))
        return {**techniques_of(self.section, seed=int(config.seed)), **moq}

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins."""
        if self.scheduler is not None and self.scheduler.steps != clock.step:
            self.scheduler.set_step(clock.step)
        return args, kwargs

    def after_update(self, record: StepRecord) -> None:
        """A step is over."""
        if self.scheduler is not None:
            self.scheduler.set_step(record.step - 1)
            self.scheduler.step(skipped=record.skipped)

    def metrics(self) -> Mapping[str, float]:
        """Bits of each group in the step that is over."""
        found: dict[str, list[float]] = {}
        for transform in self.scheduler.transforms if self.scheduler is not None else ():
            bits = getattr(transform, "bits", None)
            if bits is not None:
                group = transform.site.group.rpartition(".different_groups.")[2]
                name = ".".join(dict.fromkeys((transform.site.technique, group)))
                found.setdefault(f"bits/{name}", []).append(float(bits))
        return {name: sum(values) / len(values) for name, values in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """What does not follow from the step."""
        return self.scheduler.state_dict() if self.scheduler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)

    def data_ranks(self) -> Communicator | None:
        """Those whose losses are averaged; None: this one alone."""
        there = self._environment
        if there.world_size == 1:
            return None
        if there.mesh is None:
            return Communicator(there.group)
        return Communicator.of_axes(there.mesh, there.config.mesh.data_axes)

    def _ranks(self) -> Ranks | None:
        """Of the job; None where there is one."""
        there = self._environment
        if there.world_size == 1:
            return None
        if there.mesh is None:
            return Ranks(Communicator(there.group))
        return Ranks.of_mesh(there.mesh, there.config.mesh.data_axes, there.config.mesh.layer_axes)


def _take_over_or_compress(module: nn.Module, techniques: dict[str, AnyTechnique]) -> None:
    """What ``init_compression`` has attached, or else what techniques make."""
    if transforms_of(module):
        check_same(module, techniques)
    else:
        compress(module, techniques)


def _on_all(comm: Communicator, work: Callable[[], T]) -> list[T]:
    """What each rank's work gives; what one of them raises all raise."""
    return together(
        comm, f"compressing the model ({ROOT})", work, error=lambda text, _: ValueError(text), plain=ValueError
    )
