"""What an engine does for a model that is compressed: the part "compression_training"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zoo.comm import Communicator, together
from zoo.compression.attach import transforms_of
from zoo.compression.compressing import check_same
from zoo.compression.config import ROOT, CompressionConfig
from zoo.compression.layer_reduction import has_begun
from zoo.compression.moq.periods import moq_of
from zoo.compression.moq.sections import MOQ
from zoo.compression.planning import AnyTechnique, compress, techniques_of, usable_by
from zoo.compression.scheduler import CompressionScheduler
from zoo.parts import Clock, Environment, StepRecord


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
        axes = self._environment.config.mesh.layer_axes if mesh is not None else ()
        if axes:
            self._prepare_stages(module, Communicator.of_axes(mesh, axes))
        elif transforms_of(module):
            check_same(module, self._techniques())
        else:
            compress(module, self._techniques())
        self.scheduler = CompressionScheduler(module, self.ranks())

    def _prepare_stages(self, module: nn.Module, comm: Communicator) -> None:
        """Of a pipeline: a pattern may mean layers of other stages; what is wrong on one stage is raised on all."""
        techniques = self._techniques()
        who = f"compressing the stages of a pipeline ({ROOT})"
        names = together(comm, who, lambda: {name: list(usable_by(t, module)) for name, t in techniques.items()})
        elsewhere = {name: {other for stage in names for other in stage[name]} for name in techniques}

        def work() -> None:
            if transforms_of(module):
                raise ValueError("a pipeline is compressed by its engine; leave init_compression out.")
            compress(module, techniques, elsewhere)
            for transform in transforms_of(module):
                if transform.remembers:
                    raise NotImplementedError(
                        f"{transform.site.group}: {transform.site.name} has a state that does not follow from the "
                        "step, and a checkpoint of a pipeline has that of the first stage only. Use range_calibration "
                        "dynamic, and masks by the method topk."
                    )

        together(comm, who, work, error=lambda text, _: ValueError(text), plain=ValueError)

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

    def ranks(self) -> Communicator | None:
        """All that see different data."""
        there = self._environment
        if there.world_size == 1:
            return None
        if there.mesh is None:
            return Communicator(there.group)
        return Communicator.of_axes(there.mesh, there.config.mesh.data_axes)
