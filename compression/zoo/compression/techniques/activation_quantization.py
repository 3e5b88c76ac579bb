"""Inputs of modules with few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from zoo.compression.config import ActivationQuantizationGroup, ActivationQuantizationSection
from zoo.compression.quantisers import asymmetric, ends_of, fits, grouped, nearest, straight_through, symmetric, within
from zoo.compression.technique import Order, Site, Technique, Transform, Where, weights_of

OFF = 16
MOMENTUM = 0.95


class InputQuantizer(Transform):
    """x → Q_b(x), with dL/dx = dL/dQ: each token (the last dimension), or each image of a convolution, has the range of
    its own elements. Infinite elements and NaN make NaN of what shares a range with them. Where ranks have other inputs
    of a layer, whose weight is split along mesh axes, a range is that of all of them: two numbers a token are sent.

    Args:
        site: an input.
        offset: steps that are over before it begins.
        bits: b.
        asymmetric: from the minimum to the maximum, else around zero.
        sample_dims: ranges are those of samples of so many dimensions, not of tokens; None: of tokens.
    """

    order: ClassVar[Order] = Order.QUANTISER

    def __init__(
        self, site: Site, *, offset: int, bits: int, asymmetric: bool, sample_dims: int | None = None
    ) -> None:  # fmt: skip
        self.bits, self._asymmetric, self._sample_dims = bits, asymmetric, sample_dims
        self.keeps_zero = not asymmetric
        self._begun = False
        super().__init__(site, offset=offset)

    def set_step(self, step: int) -> None:
        """``step`` steps are over."""
        self.active = self._begun = step >= self.offset and self.bits < OFF

    def __call__(self, value: Tensor) -> Tensor:
        """T(x)."""
        if not self._begun or not (value.numel() or self.place.along):
            return value
        return straight_through(value, self._quantised(value.detach()))

    def _quantised(self, x: Tensor) -> Tensor:
        if self._sample_dims is None:
            num_groups = math.prod(x.shape[:-1])
        else:
            num_groups = x.shape[0] if x.dim() > self._sample_dims else 1  # one sample without a batch around it
        if self.place.along:
            return self._of_part(grouped(x, num_groups, self.site.name)).reshape(x.shape).to(x.dtype)
        if fits(x, num_groups, self.bits):
            return nearest(x, num_groups, self.bits, asymmetric=self._asymmetric)[0]
        rows = grouped(x, num_groups, self.site.name)
        found = (asymmetric if self._asymmetric else symmetric)(rows, self.bits)[0]
        return found.reshape(x.shape).to(x.dtype)

    def _of_part(self, rows: Tensor) -> Tensor:
        """Of inputs of which each rank has some features, with the range of all of them."""
        lo, hi = ends_of(rows)
        minus, hi = self.place.largest(-lo, hi)
        # What is infinite anywhere makes NaN of its range on all ranks, as it does where one rank has all.
        minus, hi = (end.masked_fill(end.isinf(), torch.nan) for end in (minus, hi))
        if self._asymmetric:
            return within(rows, -minus, hi, self.bits)[0]
        return symmetric(rows, self.bits, span=torch.maximum(minus, hi))[0]


class StaticInputQuantizer(InputQuantizer):
    """x → Q_b(x) with one range for all inputs, fixed for inference; what lies outside becomes the nearer end.

    After each step of training it becomes m·range + (1 - m)·(what all ranks have seen in the step), m = 0.95. The first
    is what was seen in the first step, in which nothing is rounded yet: ranges are looked for from the first step on,
    also before the technique begins. They do not move in evaluation, and do not follow what is infinite or NaN.

    Args:
        as of :class:`InputQuantizer`.

    Attributes:
        range: (2,) fp32, minimum and maximum; None before the first step.
    """

    remembers = True

    def __init__(self, site: Site, **options: Any) -> None:
        self.range: Tensor | None = None
        self._seen: Tensor | None = None
        super().__init__(site, **options)

    def set_step(self, step: int) -> None:
        """``step`` steps are over."""
        super().set_step(step)
        self.active = self.bits < OFF

    def __call__(self, value: Tensor) -> Tensor:
        """T(x)."""
        if self.training and value.numel():
            x = value.detach()
            now = torch.stack([-x.amin(), x.amax()]).float()
            self._seen = now if self._seen is None else torch.maximum(self._seen, now)
        return value if self.range is None else super().__call__(value)

    def _quantised(self, x: Tensor) -> Tensor:
        row = grouped(x, 1, self.site.name)
        ends = self.range.to(row) if self.range is not None else row.new_zeros(2)
        if self._asymmetric:
            found = within(row, ends[0], ends[1], self.bits)[0]
        else:
            found = symmetric(row, self.bits, span=ends.abs().amax().reshape(1, 1))[0]
        return found.reshape(x.shape).to(x.dtype)

    def seen(self) -> Tensor:
        """(-minimum, maximum) of this rank's inputs in the step."""
        return torch.full((2,), -torch.inf) if self._seen is None else self._seen

    def commit(self, seen: Tensor) -> None:
        """The range moves towards what all ranks have seen."""
        self._seen = None
        new = torch.stack([-seen[0], seen[1]])
        if bool(torch.isfinite(new).all()):
            self.range = new if self.range is None else self.range.to(new) * MOMENTUM + new * (1 - MOMENTUM)

    def forget(self) -> None:
        """The step is skipped."""
        self._seen = None

    def state_dict(self) -> dict[str, Any]:
        """The range."""
        return {} if self.range is None else {"range": self.range}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that range."""
        self._seen, found = None, state.get("range")
        self.range = None if found is None else torch.as_tensor(found, dtype=torch.float32)


class ActivationQuantization(Technique[ActivationQuantizationSection, ActivationQuantizationGroup]):
    """The section ``activation_quantization``: inputs of linear layers, convolutions and attention."""

    name = "activation_quantization"

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """The module's input, if it has weights; those of embeddings are integers."""
        return [("input", "")] if weights_of(module) and not isinstance(module, nn.Embedding | nn.EmbeddingBag) else []

    def transform(self, site: Site, group: ActivationQuantizationGroup, module: nn.Module) -> Transform:
        """A quantiser."""
        shared = self.section.shared_parameters
        made = StaticInputQuantizer if shared.range_calibration == "static" else InputQuantizer
        return made(
            site, offset=shared.schedule_offset, bits=group.params.bits,
            asymmetric=shared.quantization_type == "asymmetric",
            sample_dims=module.weight.dim() - 1 if isinstance(module, _ConvNd) else None,
        )  # fmt: skip
