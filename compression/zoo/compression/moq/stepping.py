"""What an engine does for ``quantize_training``: the part of that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zoo.compression.config import ROOT, CompressionConfig
from zoo.compression.moq.guide import Guide, loss_in
from zoo.compression.moq.sections import MOQ, CurvatureSection, QuantizeTrainingSection
from zoo.compression.part import CompressionPart
from zoo.parts import Clock, Environment, StepRecord, own_hook
from zoo.parts.hooks import BoundHook


class MoqPart:
    """Quantises weights as the section says, and measures curvature before the first forward of a step in which bits of
    some layer wait for it, on that micro-batch.

    The rest is the work of a :class:`~zoo.compression.part.CompressionPart`: that of ``compression_training``, where
    there is one, else one of its own. With curvature the record has ``bits/<layer>``.

    Args:
        section: ``quantize_training``.
        environment: of the engine.
    """

    before = ("data_efficiency", "progressive_layer_drop", "moe")
    after = (ROOT,)

    def __init__(self, section: QuantizeTrainingSection, environment: Environment) -> None:
        config = environment.config
        self._environment = environment
        self.curvature: CurvatureSection = config.eigenvalue if config.eigenvalue.enabled else section.eigenvalue
        self._shared = bool(getattr(config, ROOT).enabled)
        self._inner = CompressionPart(CompressionConfig(), environment)
        self._module: nn.Module | None = None
        self.guide: Guide | None = None
        self._hook: Any = None

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Attach quantisers."""
        if self.curvature.enabled and getattr(module, "engine_runner", "plain") != "plain":
            raise NotImplementedError(
                f"{MOQ}.eigenvalue: on a pipeline no rank has the whole loss of a layer's weights to differentiate. "
                "Leave eigenvalue out, so that all layers have one period, or train without the pipeline."
            )
        if not self._shared:
            self._inner.prepare(module, mesh)
        self._module = module
        if self.curvature.enabled:
            seed = int(self._environment.config.seed)
            self.guide = Guide(module, self.curvature, seed=seed, comm=self._inner.data_ranks())

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward of training begins."""
        if not self._shared:
            self._inner.on_batch(args, kwargs, clock)
        if self.guide is not None and self._module is not None and self.guide.due(clock.step):
            self._drop_hook()
            step, guide = clock.step, self.guide

            def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                # Arguments are as the model gets them: other parts may change them after this one.
                self._drop_hook()
                guide.look(step, lambda: loss_in(module(*args, **kwargs)))

            self._hook = self._module.register_forward_pre_hook(
                own_hook(BoundHook(first)), prepend=True, with_kwargs=True
            )
        return args, kwargs

    def after_update(self, record: StepRecord) -> None:
        """A step is over."""
        if not self._shared:
            self._inner.after_update(record)

    def metrics(self) -> Mapping[str, float]:
        """Bits, of each layer where curvature guides them."""
        own = {} if self._shared else dict(self._inner.metrics())
        layers = self.guide.bits() if self.guide is not None else {}
        return {**own, **{f"bits/{block}": bits for block, bits in layers.items()}}

    def state_dict(self) -> dict[str, Any]:
        """When bits have fallen and fall next; where ``compression_training`` is, its part has it."""
        return {} if self._shared else self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if not self._shared:
            self._inner.load_state_dict(state)

    def close(self) -> None:
        """No hook stays."""
        self._drop_hook()

    def _drop_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
