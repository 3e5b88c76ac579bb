"""Weights with few bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.compression.config import WeightQuantizationGroup, WeightQuantizationSection
from zoo.compression.place import whole_shape
from zoo.compression.quantisers import (
    Lies,
    asymmetric,
    binary,
    check_finite,
    ends_of,
    fits,
    grouped,
    how_groups_lie,
    mixed,
    nearest,
    noise,
    straight_through,
    symmetric,
    ternary,
    within,
)
from zoo.compression.schedule import bits_at, share_at, steps_at_bits
from zoo.compression.technique import Order, Site, Technique, Transform, Where, parameter_of, weights_of

_log = logging.getLogger("zoo.compression")
OFF = 16
"""From so many bits on nothing is rounded."""


class WeightQuantizer(Transform):
    """w → r·Q_b(w) + (1 - r)·w, b and r of the step, with dL/dw = dL/dQ.

    Q_b is uniform (``quantisers/uniform.py``) for 3 to 15 bits and asymmetric 2, ternary for symmetric 2, binary for 1
    (``quantisers/extreme.py``), in fp32 over groups of consecutive elements, and returns the dtype of w.

    Of a weight that is split along mesh axes groups are those of the whole, bit for bit. Those that lie in a part are
    quantised there; of others ranks send the ends, (2, G) numbers, and, where they are cut unevenly or values are means
    (ternary, binary), the weight.

    Args:
        site: a weight.
        section: of the technique.
        group: of the site.
        num_groups: groups of elements, each with a scale.
        seed: of stochastic rounding.

    Attributes:
        bits, share: b and r now.
    """

    order: ClassVar[Order] = Order.QUANTISER

    def __init__(
        self, site: Site, section: WeightQuantizationSection, group: WeightQuantizationGroup, *, num_groups: int,
        seed: int,
    ) -> None:  # fmt: skip
        shared, params = section.shared_parameters, group.params
        self.num_groups, self.seed, self.step = num_groups, seed, 0
        self._asymmetric = shared.quantization_type == "asymmetric"
        self.keeps_zero = not self._asymmetric
        self._stochastic = shared.rounding == "stochastic"
        self._ratio = shared.fp16_mixed_quantize.quantize_change_ratio if shared.fp16_mixed_quantize.enabled else 1.0
        self._start, self.target_bits, self._period = params.start_bits, params.target_bits, params.quantization_period
        self._verbose = shared.quantize_verbose
        self.bits, self.share = self._start, 1.0
        self._lie: Lies | None = None
        super().__init__(site, offset=shared.schedule_offset)

    def set_step(self, step: int) -> None:
        """``step`` steps are over."""
        before, was_active, self.step = self.bits, self.active, step
        self.bits, since = self.bits_and_since(step)
        self.share = share_at(since, self._ratio)
        self.active = step >= self.offset and self.bits < OFF
        if self._verbose and self.active and (self.bits != before or not was_active):
            _log.info("step %d: %s has %d bits", step, self.site.name, self.bits)

    def bits_and_since(self, step: int) -> tuple[int, int]:
        """Bits in a step, and for how many steps they have been so."""
        offset, start, target, period = self.offset, self._start, self.target_bits, self._period
        bits = bits_at(step, offset=offset, start_bits=start, target_bits=target, period=period)
        return bits, steps_at_bits(step, offset=offset, start_bits=start, target_bits=target, period=period)

    def __call__(self, value: Tensor) -> Tensor:
        """T(w)."""
        return straight_through(value, mixed(value.detach(), self._quantised(value.detach(), self.bits), self.share))

    def fixed(self, value: Tensor) -> Tensor:
        """Q of the target bits, rounded to the nearest also where training rounds stochastically."""
        value = value.detach()
        return value if self.target_bits >= OFF else self._quantised(value, self.target_bits, final=True)

    def _quantised(self, value: Tensor, bits: int, *, final: bool = False) -> Tensor:
        stochastic, by_means = self._stochastic and not final, not self._asymmetric and bits <= 2
        if not self.place.along:
            return self._of_whole(value, bits, stochastic, self.num_groups)
        if self._lie is None:
            self._lie = how_groups_lie(self.place, self.num_groups)
        if self._lie == "odd" or by_means:
            # A mean depends on the order in which it is summed: that of the whole.
            return self.place.cut(self._of_whole(self.place.gather(value), bits, stochastic, self.num_groups))
        if self._lie == "inside":
            num_groups = value.numel() * self.num_groups // math.prod(self.place.shape or ())
            return self._of_whole(value, bits, stochastic, num_groups)
        rows = grouped(value, self.num_groups, self.site.name)
        lo, hi = ends_of(rows)
        minus, hi = self.place.largest(-lo, hi)
        check_finite(minus + hi, self.site.name)
        dice = self._dice(rows) if stochastic else None
        if self._asymmetric:
            found, _ = within(rows, -minus, hi, bits, dice)
        else:
            found, _ = symmetric(rows, bits, dice, span=torch.maximum(minus, hi))
        return found.reshape(value.shape).to(value.dtype)

    def _of_whole(self, value: Tensor, bits: int, stochastic: bool, num_groups: int) -> Tensor:
        """Of groups that lie whole in a value."""
        if not value.numel():
            return value
        if not stochastic and (self._asymmetric or bits > 2) and fits(value, num_groups, bits):
            found, span = nearest(value, num_groups, bits, asymmetric=self._asymmetric)
            check_finite(span, self.site.name)
            return found
        rows = grouped(value, num_groups, self.site.name)
        dice = self._dice(rows) if stochastic else None
        if self._asymmetric:
            found, span = asymmetric(rows, bits, dice)
        elif bits > 2:
            found, span = symmetric(rows, bits, dice)
        else:
            found, span = ternary(rows) if bits == 2 else binary(rows)
        check_finite(span, self.site.name)
        return found.reshape(value.shape).to(value.dtype)

    def _dice(self, rows: Tensor) -> Tensor:
        """What is drawn for these elements; of a part of a weight what is drawn for them in the whole."""
        shape = self.place.shape
        if shape is None or rows.numel() == math.prod(shape):  # all of it, here or gathered
            return noise(rows, seed=self.seed, step=self.step, name=self.site.name)
        like = rows.new_empty(()).expand(self.num_groups, math.prod(shape) // self.num_groups)
        whole = noise(like, seed=self.seed, step=self.step, name=self.site.name)
        return self.place.cut(whole.reshape(shape)).reshape(rows.shape)


class WeightQuantization(Technique[WeightQuantizationSection, WeightQuantizationGroup]):
    """The section ``weight_quantization``: for linear layers, convolutions, embeddings and attention."""

    name = "weight_quantization"

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """The module's weights."""
        return [("weight", name) for name in weights_of(module)]

    def transform(self, site: Site, group: WeightQuantizationGroup, module: nn.Module) -> Transform:
        """A quantiser; the weight of an embedding has a scale for each row, unless ``group_size`` is given."""
        weight = parameter_of(module, site.parameter)
        shape = whole_shape(weight) if weight is not None else ()
        by_row = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        numel, size = math.prod(shape), group.params.group_size
        if size is not None:
            said, num_groups, fits_in = f"params.group_size = {size}", numel // size, numel % size == 0
        else:
            num_groups = shape[0] if by_row else self.section.shared_parameters.quantize_groups
            said, fits_in = f"quantize_groups = {num_groups}", not num_groups or numel % num_groups == 0
        if not fits_in:
            raise ValueError(
                f"{site.group}: {said}, and {site.name} has {shape} = {numel} elements, which cannot be cut into such "
                "groups. Give a number that divides it, or let the patterns leave the module out."
            )
        return self.made(site, group, num_groups)

    def made(self, site: Site, group: WeightQuantizationGroup, num_groups: int) -> WeightQuantizer:
        """The quantiser of a site."""
        return WeightQuantizer(site, self.section, group, num_groups=num_groups, seed=self.seed)

    def adopt(self, transform: Transform, module: nn.Module, parameter: str) -> Transform:
        """The same here."""
        return transform
