"""Heads of attention that go away."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from zoo.compression.config import ROOT, HeadPruningSection, RelatedPruningGroup
from zoo.compression.place import whole_shape
from zoo.compression.pruning.attention import check_projection, remove_heads, remove_own_heads, zero_heads
from zoo.compression.pruning.flow import Unknown
from zoo.compression.pruning.modules import inputs_of, is_linear, out_dim_of
from zoo.compression.pruning.relations import Relation, described, modules_of, relations_of
from zoo.compression.pruning.removal import check_whole
from zoo.compression.pruning.units import UnitMask
from zoo.compression.technique import Site, Technique, Transform, Where, parameter_of

_log = logging.getLogger("zoo.compression")


class HeadPruning(Technique[HeadPruningSection, RelatedPruningGroup]):
    """The section ``head_pruning``: the columns of one head in the projection of an attention's output.

    ``modules`` are these projections, ``related_modules`` those of queries, keys and values, or the one that gives all
    three; ``nn.MultiheadAttention`` has all of them inside, and its list of related modules may be empty. Where
    ``related_modules`` is null, heads are zero and stay.
    """

    name = "head_pruning"

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """The weight of the projection."""
        if isinstance(module, nn.MultiheadAttention):
            return [("weight", "out_proj.weight")]
        return [("weight", "weight")] if is_linear(module) and module._parameters.get("weight") is not None else []

    def transform(self, site: Site, group: RelatedPruningGroup, module: nn.Module) -> Transform:
        """A mask of heads."""
        shared, weight = self.section.shared_parameters, parameter_of(module, site.parameter)
        if weight is None:
            raise TypeError(f"{site.name} is no weight.")
        num, where = shared.num_heads or 0, f"{ROOT}.{self.name}.shared_parameters.num_heads"
        own = isinstance(module, nn.MultiheadAttention)
        dim = 1 if own else 1 - out_dim_of(module)
        width = whole_shape(weight)[dim]
        if width % num:
            raise ValueError(
                f"{where} = {num} does not divide the {width} inputs of {described(module, site.module)}, "
                f"which {site.group} means. Give the number of its heads, or let the patterns leave it out."
            )
        if isinstance(module, nn.MultiheadAttention) and module.num_heads != num:
            raise ValueError(
                f"{where} = {num}, and {described(module, site.module)} has {module.num_heads} heads. Give that number."
            )
        return UnitMask(
            site, weight, offset=shared.schedule_offset, ratio=group.params.dense_ratio, method=shared.method, dim=dim,
            num_units=num,
        )  # fmt: skip

    def relations(self, model: nn.Module) -> list[Relation]:
        """Of all groups that have related modules."""
        from zoo.compression.planning import usable_by

        usable, found = usable_by(self, model), []
        for name, group in self.groups().items():
            where = f"{ROOT}.{self.name}.different_groups.{name}"
            if group.related_modules is not None:
                found += relations_of(model, usable, group, where, is_linear)
        return found

    def related(self, model: nn.Module, made: Sequence[Transform]) -> Sequence[tuple[nn.Module, Transform]]:
        """None. Raises ValueError where a related module has another shape."""
        modules, num = modules_of(model), self.section.shared_parameters.num_heads or 1
        for relation in self.relations(model):
            output = modules[relation.name]
            if isinstance(output, nn.MultiheadAttention) and relation.related:
                raise ValueError(
                    f"{relation.where}.related_modules: {described(output, relation.name)} has its queries, keys and "
                    f"values inside, and {relation.related[0]!r} is not among them. Give an empty list."
                )
            for name in relation.related:
                check_projection(
                    relation.where, name, modules[name], num=num, width=inputs_of(output),
                    packed=len(relation.related) == 1,
                )  # fmt: skip
        return ()

    def shrink(self, model: nn.Module, transforms: Sequence[Transform]) -> None:
        """Take the heads away."""
        modules, num = modules_of(model), self.section.shared_parameters.num_heads or 1
        for relation in self.relations(model):
            output = modules[relation.name]
            try:
                check_whole([output, *(modules[name] for name in relation.related)])
                if isinstance(output, nn.MultiheadAttention):
                    goes = zero_heads(output.out_proj.weight, 1, num)
                    gone = remove_own_heads(model, output, goes)
                elif relation.related:
                    weight = parameter_of(output, "weight")
                    if weight is None:
                        raise Unknown("the projection has no weight of its own")
                    goes = zero_heads(weight, 1 - out_dim_of(output), num)
                    gone = remove_heads(model, modules, relation.name, relation.related, goes)
                else:
                    continue
            except Unknown as why:
                _log.warning("%s: the heads of %r stay, as zeros: %s", relation.where, relation.name, why)
                continue
            if gone < int(goes.sum()):
                _log.warning(
                    "%s: %d of the %d heads of %r that are zero stay: they share keys and values with others, or are "
                    "the last", relation.where, int(goes.sum()) - gone, int(goes.sum()), relation.name,
                )  # fmt: skip
