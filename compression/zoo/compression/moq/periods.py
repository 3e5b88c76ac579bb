"""When bits of a layer fall: periods by curvature, as a state of the layer's quantisers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zoo.compression.config import WeightQuantizationGroup
from zoo.compression.moq.sections import MOQ, CurvatureSection, EigenvalueSection, QuantizeTrainingSection
from zoo.compression.patterns import nearest_names
from zoo.compression.technique import Site, Transform
from zoo.compression.techniques.weight_quantization import WeightQuantization, WeightQuantizer
from zoo.layout import logical_name

MOST = 4
"""What the largest curvature adds to a factor of 1."""


def factors_of(eigenvalues: Mapping[str, float]) -> dict[str, int]:
    """f = 1 + ⌊4·λ/λ_max⌋, 1 to 5, by block; DeepSpeed's MoQ documents the factor 5 for the most sensitive layer.

    NaN and infinity count as the largest of the others, as documented there, and where there is no other each is 1. A
    loss that is flat everywhere gives 1.
    """
    known = [value for value in eigenvalues.values() if math.isfinite(value)]
    largest = max(known) if known else 1.0
    whole = {name: value if math.isfinite(value) else largest for name, value in eigenvalues.items()}
    if not largest:
        return dict.fromkeys(whole, 1)
    return {name: 1 + math.floor(MOST * value / largest) for name, value in whole.items()}


class GuidedQuantizer(WeightQuantizer):
    """A quantiser whose periods are stretched by factors: a fall of bits is decided when the one before it is over.

    At the begin, and after each fall, in the next step in which curvature is looked at, s: the next fall is in step
    s + f·g_i, g_0 = g_1 = T, g_2 = 2T, g_3 = 4T, ... (i falls before). With one f all the time bits fall after f·T,
    f·2T, f·4T, ... steps, as with the period f·T (:func:`zoo.compression.schedule.bits_at`).

    Attributes:
        falls: steps in which bits fall, the next one too. It is all that does not follow from the step, and is saved.
    """

    remembers = True

    def __init__(self, site: Site, *args: Any, block: str, **more: Any) -> None:
        self.block = block
        self.falls: list[int] = []
        super().__init__(site, *args, **more)

    def waits(self, step: int) -> bool:
        """Whether its next fall is to be decided."""
        before = self.falls[-1] if self.falls else self.offset
        return before <= step and self._start - len(self.falls) > self.target_bits

    def decide(self, step: int, factor: int) -> None:
        """The next fall."""
        gap = self._period << max(0, len(self.falls) - 1)
        self.falls.append(step + gap * factor)
        self.set_step(step)

    def bits_and_since(self, step: int) -> tuple[int, int]:
        """Bits in a step, and for how many steps they have been so."""
        over = [fall for fall in self.falls if fall <= step]
        return self._start - len(over), max(0, step - (over[-1] if over else self.offset))

    def state_dict(self) -> dict[str, Any]:
        """``falls``."""
        return {"falls": list(self.falls)} if self.falls else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.falls = [int(step) for step in state.get("falls", ())]


class Moq(WeightQuantization):
    """The section ``quantize_training``: the technique ``weight_quantization`` on all weights, with the periods of
    blocks by curvature where that is asked for.

    Args:
        section: ``quantize_training``.
        curvature: ``eigenvalue``.
        seed: of stochastic rounding.
    """

    name = MOQ

    def __init__(self, section: QuantizeTrainingSection, curvature: CurvatureSection, *, seed: int = 0) -> None:
        super().__init__(section.as_weight_quantization(), seed=seed)
        self.curvature = curvature

    def place(self, group: str) -> str:
        """Of its groups in a configuration: the section itself."""
        return MOQ

    def made(self, site: Site, group: WeightQuantizationGroup, num_groups: int) -> WeightQuantizer:
        """A quantiser; one that is guided in a block."""
        block = _block_of(site.module, self.curvature)
        if not self.curvature.enabled or not block:
            return super().made(site, group, num_groups)
        return GuidedQuantizer(site, self.section, group, num_groups=num_groups, seed=self.seed, block=block)

    def related(self, model: nn.Module, made: Sequence[Transform]) -> Sequence[tuple[nn.Module, Transform]]:
        """None; layers that are not there are refused."""
        if self.curvature.enabled:
            _check_layers(model, self.curvature, made)
        return ()


def moq_of(
    section: QuantizeTrainingSection, root: EigenvalueSection, *, seed: int = 0
) -> dict[str, Moq]:  # fmt: skip
    """The technique that the sections ask for, by name; none, if they do not."""
    if not section.enabled:
        return {}
    return {MOQ: Moq(section, root if root.enabled else section.eigenvalue, seed=seed)}


def _block_of(path: str, curvature: CurvatureSection) -> str:
    """The name of the layer that a module is in; "" for none."""
    prefix = f"{curvature.layer_name}." if curvature.layer_name else ""
    number = path.removeprefix(prefix).partition(".")[0] if path.startswith(prefix) else ""
    if not number.isdigit() or (curvature.layer_num and int(number) >= curvature.layer_num):
        return ""
    return prefix + number


def _check_layers(model: nn.Module, curvature: CurvatureSection, made: Sequence[Transform]) -> None:
    where, name = f"{MOQ}.eigenvalue", curvature.layer_name
    there = {logical_name(model, path) if path else "": module for path, module in model.named_modules()}
    if name not in there:
        near = ", ".join(map(repr, nearest_names(name, [path for path in there if path])))
        raise ValueError(f"{where}.layer_name: the model has no module {name!r}; the nearest names are {near}.")
    layers = [child for child, _ in there[name].named_children() if child.isdigit()]
    if not layers:
        raise ValueError(
            f"{where}.layer_name = {name!r} is a {type(there[name]).__name__}, and no list of layers. Give the name of "
            "the list: 'bert.encoder.layer'."
        )
    if curvature.layer_num > len(layers):
        raise ValueError(
            f"{where}.layer_num = {curvature.layer_num}, and {name!r} has {len(layers)} layers; give at most as many, "
            "or 0 for all."
        )
    if not any(isinstance(transform, GuidedQuantizer) for transform in made):
        raise ValueError(f"{where}.layer_name: the layers of {name!r} have no weights that are quantised.")
