"""Looks at curvature when bits of some layer are to fall, and tells its quantisers how long to wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from zoo.comm import Communicator
from zoo.compression.attach import attached_to, transforms_of
from zoo.compression.moq.curvature import eigenvalues
from zoo.compression.moq.periods import GuidedQuantizer, factors_of
from zoo.compression.moq.sections import MOQ, CurvatureSection
from zoo.compression.place import is_alone
from zoo.compression.planning import holders_of

_log = logging.getLogger("zoo.compression")


class Guide:
    """Measures the curvature of blocks for the quantisers of a model that ``quantize_training.eigenvalue`` made.

    An engine has one by itself. In a loop of one's own::

        model = init_compression(model, config)
        scheduler, guide = CompressionScheduler(model), Guide(model, config_of_eigenvalue)
        for x, y in batches:
            guide.look(scheduler.steps, lambda: loss(model(x), y))
            ...
            scheduler.step()

    Args:
        model: with transforms.
        section: ``eigenvalue``.
        seed: of the first vector of power iteration.
        comm: ranks whose losses are averaged; None: this one alone.

    Raises:
        NotImplementedError: a weight of a block is split along a mesh axis, is an expert of which other ranks have
            others, or each rank has a summand of its gradient.

    Attributes:
        eigenvalues: by block, of the latest measurement.
    """

    def __init__(
        self, model: nn.Module, section: CurvatureSection | None = None, *, seed: int = 0,
        comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        self._model, self._section, self._seed, self._comm = model, section or CurvatureSection(), seed, comm
        self._guided = [t for t in transforms_of(model) if isinstance(t, GuidedQuantizer)]
        for transform in self._guided:
            _check_whole(transform)
        self.eigenvalues: Mapping[str, float] = {}

    def due(self, step: int) -> bool:
        """Whether curvature is to be measured, ``step`` steps being over. The same on all ranks."""
        every = self._section.gas_boundary_resolution
        return any(t.waits(step) and (step - t.offset) % every == 0 for t in self._guided)

    def look(self, step: int, loss: Callable[[], Tensor]) -> bool:
        """Measure if it is due, and decide when bits fall next in the blocks that wait for it. Collective then.

        Args:
            step: steps that are over.
            loss: calls the model with this rank's batch, and returns its mean loss.

        Returns:
            Whether it was.
        """
        if not self.due(step):
            return False
        parameters = {id(p): p for p in self._model.parameters()}
        mine = {id(t): key for key, held in holders_of(self._model).items() for t in _on(held)}
        blocks: dict[str, list[nn.Parameter]] = {}
        for t in self._guided:
            blocks.setdefault(t.block, []).append(parameters[mine[id(t)]])
        options = self._section
        found = eigenvalues(
            self._model, loss, blocks, max_iter=options.max_iter, tol=options.tol, stability=options.stability,
            seed=self._seed, comm=self._comm,
        )  # fmt: skip
        factors = factors_of(found)
        for t in self._guided:
            if t.waits(step):
                t.decide(step, factors[t.block])
        self.eigenvalues = found
        if self._section.verbose:
            for block, value in found.items():
                _log.info("step %d: %s: eigenvalue %.4g, factor %d", step, block, value, factors[block])
        return True

    def bits(self) -> dict[str, float]:
        """Bits of each block now."""
        return {t.block: float(t.bits) for t in self._guided}


def _check_whole(transform: GuidedQuantizer) -> None:
    """Each rank iterates by itself, and with parts it would find another eigenvalue than others, or wait for them."""
    place = transform.place
    axes = [] if is_alone() or (place.box and place.box.sizes == place.shape) else [*place.apart, *place.partial]
    if axes:
        raise NotImplementedError(
            f"{MOQ}.eigenvalue: of {transform.site.name} and its gradient a rank has only a part, others are along the "
            f"mesh axis {', '.join(dict.fromkeys(axes))}, and curvature is measured for whole weights. Leave "
            "eigenvalue out, so that all layers have one period, or train without that axis."
        )


def _on(held: Iterable[tuple[nn.Module, str]]) -> list[GuidedQuantizer]:
    found = [t for module, path in held for t in attached_to(module).get(("weight", path), ())]
    return [t for t in found if isinstance(t, GuidedQuantizer)]


def loss_in(output: Any) -> Tensor:
    """The loss that a model returned: itself, ``output.loss``, ``output["loss"]``, or the first of several.

    Raises:
        ValueError: there is none.
    """
    found = output
    if isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    elif not isinstance(output, Tensor) and getattr(output, "loss", None) is not None:
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"{MOQ}.eigenvalue: the model returned a {type(found).__name__}{shape}, and curvature is that of a loss. "
            "Let its forward return the mean loss: alone, as .loss, or as the first of a tuple; or leave eigenvalue "
            "out."
        )
    return found
