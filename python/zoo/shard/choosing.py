"""What becomes of each bucket of a model, decided on all ranks alike before anything of it is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import RankFailedError, raise_in_next
from zoo.comm.failures import sentence_of
from zoo.shard.agreement import CONSTRUCTION, agree, agree_on_kernels
from zoo.shard.buckets import bucket_of
from zoo.shard.collectives.choice import cannot_be_left, choose_routes
from zoo.shard.collectives.routes import Routes
from zoo.shard.config import ZeroConfig
from zoo.shard.offload.tiers import OffloadError
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.families import Ranks, make_families
from zoo.shard.placement.packing import BucketSpec
from zoo.shard.placement.placements import Placements, offload, place
from zoo.shard.placement.plan import described_parameters, plan_model
from zoo.shard.placement.precision import Precision, rounds
from zoo.shard.placement.units import UnitChoice, UnitSpec
from zoo.shard.quantised_parameters import meaning

if TYPE_CHECKING:
    from zoo.shard.collectives.routes import Switch


@dataclass(frozen=True)
class Chosen:
    """Units, buckets, and for each bucket where it lives and how it travels.

    Attributes:
        families: for each set of axes along which parameters are parts: which ranks split what.
        tied_anywhere: some parameters are those of several stages, on any of the ranks with other layers.
    """

    specs: Sequence[UnitSpec]
    plan: Sequence[BucketSpec]
    families: dict[tuple[str, ...], Axes]
    placements: Sequence[Placements]
    routes: Sequence[Routes]
    tied_anywhere: bool


def choose(
    module: nn.Module, ranks: Ranks, units: UnitChoice | None, cfg: ZeroConfig, precision: Precision,
    group_of: Callable[[nn.Parameter], int], *, sparse: bool, trains: bool, switch: Switch | None,
    arguments: Mapping[str, Any], on_any_layer: Callable[[bool, torch.device], bool],
    refuse_together: Callable[[Exception | None], None],
) -> Chosen:  # fmt: skip
    """Choose for ``module``. Collective over all ranks that have some of it; nothing of the module has changed after.

    Args:
        arguments: what all ranks have to give alike, by name. on_any_layer, refuse_together: of the model.
        ranks, units, cfg, precision, group_of, sparse, trains, switch: as the model's.

    Raises:
        ValueError, NotImplementedError: what cannot be, or differs between ranks.
    """
    with raise_in_next(lambda: ranks.data, CONSTRUCTION):
        specs, plan, layout = plan_model(
            module, units, cfg, precision=precision, group_of=group_of, sparse=sparse, mesh=ranks.mesh
        )
        codes = {name: p for b in plan if b.coded and not b.axes for name, p in zip(b.names, b.parameters, strict=True)}
        alike = {**arguments, "what the codes of frozen parameters stand for": meaning(codes)}
    device = plan[0].parameters[0].device
    agree(ranks.data, layout, alike, lambda: described_parameters(plan))
    agree_on_kernels(ranks.data, device)
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    if cfg.buffers != "own":
        named += module.named_buffers()
    families = make_families(ranks, named, cfg)
    tied_anywhere = on_any_layer(any(axes.spans_layers for axes in families.values()), device)
    if tied_anywhere and cfg.update_in_backward:
        raise NotImplementedError(
            "update_in_backward=True with parameters that several pipeline stages have (zoo.layout.declare_tied): "
            "their gradients are complete at the step. Leave one of the two out."
        )
    if device.type == "cpu":
        for family in sorted(families):
            families[family].share_memory()
    placements = place(plan, families, cfg)
    for spec, placed in zip(plan, placements, strict=True):
        # What is kept as int8 is rounded anyway, and what never changes back needs no memory.
        spec.keeps_originals = trains and rounds(spec.original, spec.dtype) and not placed.parameters.packed
    if switch is not None:
        refuse_together(cannot_be_left(plan, cfg))
    routes = choose_routes(plan, placements, families, cfg, precision, switch)
    placements = offload(plan, placements, [route.axes.shard.size for route in routes], cfg)
    return Chosen(specs, plan, families, placements, routes, tied_anywhere)


def told_of_parts(error: BaseException, module: nn.Module) -> BaseException:
    """The error of a construction, which says where of the module only parts are left."""
    lost = [name for name, p in module.named_parameters() if bucket_of(p) is not None]
    if not lost or not isinstance(error, Exception):
        return error
    text = (
        f"{sentence_of(error)} By then the model was split in part: of {len(lost)} parameter(s), such as "
        f"{lost[0]!r}, this rank has only a shard. It is of no use any more; build it anew."
    )
    if isinstance(error, RankFailedError):
        return RankFailedError(text, error.ranks)
    return OffloadError(text) if isinstance(error, OffloadError) else RuntimeError(text)
