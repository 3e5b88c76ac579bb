"""What row and channel pruning have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import nn

from zoo.compression.config import ROOT, ChannelPruningSection, RelatedPruningGroup, RowPruningSection
from zoo.compression.pruning.modules import BatchNorm, inputs_of, is_convolution, is_linear, out_dim_of, outputs_of
from zoo.compression.pruning.relations import Relation, described, modules_of, relations_of
from zoo.compression.pruning.removal import remove_units
from zoo.compression.pruning.units import FollowingMask, UnitMask
from zoo.compression.technique import Site, Technique, Transform, Where, parameter_of

UnitSectionT = TypeVar("UnitSectionT", RowPruningSection, ChannelPruningSection)


class UnitPruning(Technique[UnitSectionT, RelatedPruningGroup], Generic[UnitSectionT]):
    """Outputs of a layer that are zero, with their biases, and go away where related modules are given.

    A batch norm among the related modules is masked too: what it adds to a channel that is zero would come back through
    its bias, and could not be folded into a convolution that pads with zeros.
    """

    def prunes(self, module: nn.Module) -> bool:
        """Whether its outputs can be pruned."""
        raise NotImplementedError

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """Weight and bias."""
        if not self.prunes(module) or module._parameters.get("weight") is None:
            return []
        return [("weight", name) for name in ("weight", "bias") if module._parameters.get(name) is not None]

    def transform(self, site: Site, group: RelatedPruningGroup, module: nn.Module) -> Transform:
        """A mask of the outputs, and for the bias one that follows it."""
        masks: dict[str, UnitMask] = self.__dict__.setdefault("_masks", {})
        if site.parameter == "bias":
            if site.module not in masks:
                raise ValueError(
                    f"{site.group}.modules: the weight of {described(module, site.module)} is tied to one that is "
                    "pruned under another name, and its bias would not follow. Leave one of the two out."
                )
            return FollowingMask(site, masks[site.module])
        weight = parameter_of(module, site.parameter)
        if weight is None:
            raise TypeError(f"{site.name} is no weight.")
        if getattr(module, "groups", 1) != 1:
            raise ValueError(
                f"{site.group}.modules: {described(module, site.module)} has groups = {getattr(module, 'groups', 1)}, "
                "of which a mask would leave some with fewer outputs than others. Leave it out."
            )
        shared = self.section.shared_parameters
        masks[site.module] = UnitMask(
            site, weight, offset=shared.schedule_offset, ratio=group.params.dense_ratio, method=shared.method,
            dim=out_dim_of(module), num_units=outputs_of(module),
        )  # fmt: skip
        return masks[site.module]

    def relations(self, model: nn.Module) -> list[Relation]:
        """Of all groups."""
        from zoo.compression.planning import usable_by

        usable, found = usable_by(self, model), []
        for name, group in self.groups().items():
            where = f"{ROOT}.{self.name}.different_groups.{name}"
            found += relations_of(model, usable, group, where, _can_follow)
        return found

    def related(self, model: nn.Module, made: Sequence[Transform]) -> Sequence[tuple[nn.Module, Transform]]:
        """Masks of the batch norms between. Raises ValueError where a related module has another shape."""
        masks = {t.site.module: t for t in made if isinstance(t, UnitMask)}
        modules, found = modules_of(model), list[tuple[nn.Module, Transform]]()
        for relation in self.relations(model):
            pruned = modules[relation.name]
            for name in relation.related:
                _check_shape(relation, pruned, name, modules[name])
                if isinstance(modules[name], BatchNorm) and relation.name in masks:
                    for parameter in ("weight", "bias"):
                        if parameter_of(modules[name], parameter) is not None:
                            site = Site(
                                module=name, where="weight", parameter=parameter, technique=self.name,
                                group=relation.where,
                            )  # fmt: skip
                            found.append((modules[name], FollowingMask(site, masks[relation.name])))
        return found

    def shrink(self, model: nn.Module, transforms: Sequence[Transform]) -> None:
        """Take the rows and columns away."""
        for relation in self.relations(model):
            remove_units(model, relation)


def _can_follow(module: nn.Module) -> bool:
    has_weight = module._parameters.get("weight") is not None
    return isinstance(module, BatchNorm) or (has_weight and (is_linear(module) or is_convolution(module)))


def _check_shape(relation: Relation, pruned: nn.Module, name: str, module: nn.Module) -> None:
    """Raise ValueError unless a module can take, give or normalise the units of ``pruned``."""
    units = outputs_of(pruned)
    if isinstance(module, BatchNorm):
        there, fits = f"{module.num_features} features", module.num_features == units
    else:
        takes, gives = inputs_of(module), outputs_of(module)
        there = f"{takes} inputs and {gives} outputs"
        flat = is_convolution(pruned) and is_linear(module) and takes % units == 0
        fits = takes == units or flat or (gives == units and is_linear(module) == is_linear(pruned))
    if not fits:
        raise ValueError(
            f"{relation.where}.related_modules: {described(module, name)} has {there}, and "
            f"{described(pruned, relation.name)} {units} outputs; a related module takes them as inputs (of a "
            "convolution also flattened), normalises them, or gives as many by which they are multiplied. Correct the "
            "pattern."
        )
