"""Single weights, or small blocks of them, that are zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zoo.compression.config import ROOT, PruningGroup, PruningParams, SparsePruningSection
from zoo.compression.place import whole_shape
from zoo.compression.pruning.elements import ElementMask, LearnedElementMask
from zoo.compression.pruning.masks import Pattern, as_matrix
from zoo.compression.pruning.modules import out_dim_of
from zoo.compression.pruning.snip import SnipMask, Together
from zoo.compression.technique import Shared, Site, Technique, Transform, Where, parameter_of, weights_of


class SparsePruning(Technique[SparsePruningSection, PruningGroup]):
    """The section ``sparse_pruning``: for linear layers, convolutions and attention.

    * l1: of each weight the ``dense_ratio`` of largest magnitude stays, from the offset on (``pruning/elements.py``);
    * topk: scores are learned, movement pruning (the same file);
    * snip_momentum: by the momentum of |w·dL/dw|, over all weights together, in strides (``pruning/snip.py``).

    ``block_pattern`` is for all three; l1 and topk go by single weights where it is not given. N:M says the share
    itself. A weight's rows are outputs and its columns inputs, of a convolution with its channels as neighbours.
    """

    name = "sparse_pruning"
    _together: Together | None = None

    @property
    def excluded(self) -> Sequence[str]:
        """``excluded_modules``."""
        return self.section.shared_parameters.excluded_modules

    def groups(self) -> Mapping[str, PruningGroup]:
        """Those given; snip_momentum without any has one for the whole model."""
        groups = self.section.different_groups
        if groups or self.section.shared_parameters.method != "snip_momentum":
            return groups
        return {"all": PruningGroup()}

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """The module's weights; embeddings have none, because their rows are looked up and not multiplied."""
        return [] if isinstance(module, nn.Embedding) else [("weight", name) for name in weights_of(module)]

    def transform(self, site: Site, group: PruningGroup, module: nn.Module) -> Transform:
        """A mask."""
        shared = self.section.shared_parameters
        weight, out_dim = parameter_of(module, site.parameter), out_dim_of(module)
        if weight is None:
            raise TypeError(f"{site.name} is no weight.")
        snip = shared.method == "snip_momentum"
        given = snip or "block_pattern" in shared.model_fields_set
        pattern = Pattern.parse(shared.block_pattern) if given else Pattern()
        _check_ratio(pattern, site.group, group.params)
        _check_ratio(pattern, f"{ROOT}.{self.name}.shared_parameters", shared)
        rows, columns = as_matrix(torch.empty(whole_shape(weight), device="meta"), out_dim).shape
        pattern.check((rows, columns), site.name, f"{ROOT}.{self.name}.shared_parameters")
        if snip:
            if "dense_ratio" in group.params.model_fields_set:
                raise ValueError(
                    f"{site.group}.params.dense_ratio = {group.params.dense_ratio}: snip_momentum ranks all weights "
                    f"together, by {ROOT}.{self.name}.shared_parameters.dense_ratio. Give that one alone."
                )
            return SnipMask(site, weight, self._ranking, out_dim=out_dim)
        kind = LearnedElementMask if shared.method == "topk" else ElementMask
        ratio = group.params.dense_ratio
        return kind(site, weight, offset=shared.schedule_offset, ratio=ratio, pattern=pattern, out_dim=out_dim)

    @property
    def _ranking(self) -> Together:
        """Of snip_momentum."""
        shared = self.section.shared_parameters
        if self._together is None:
            self._together = Together(
                offset=shared.schedule_offset, end=shared.schedule_offset_end, stride=shared.schedule_offset_stride,
                ratio=shared.dense_ratio, pattern=Pattern.parse(shared.block_pattern),
            )  # fmt: skip
        return self._together

    def shared(self) -> Sequence[Shared]:
        """The ranking of snip_momentum."""
        return [self._ranking] if self.section.shared_parameters.method == "snip_momentum" else []

    def adopt(self, transform: Transform, module: nn.Module, parameter: str) -> Transform:
        """The same mask here; that of snip_momentum is ranked with others of this stage."""
        weight = parameter_of(module, parameter)
        if isinstance(transform, SnipMask) and weight is not None:
            return SnipMask(transform.site, weight, self._ranking, out_dim=transform.out_dim)
        if transform.learned:
            return super().adopt(transform, module, parameter)
        return transform


def _check_ratio(pattern: Pattern, where: str, given: PruningParams | object) -> None:
    ratio = getattr(given, "dense_ratio", None)
    said = "dense_ratio" in getattr(given, "model_fields_set", ())
    if pattern.dense_ratio is not None and said and ratio != pattern.dense_ratio:
        raise ValueError(
            f"{where}: dense_ratio = {ratio}, and the block_pattern {str(pattern)!r} leaves {pattern.dense_ratio:g}. "
            "Leave one of them out."
        )
