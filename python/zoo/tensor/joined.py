"""Files of tensor-parallel ranks that hold each rank's part, read as whole tensors.

Megatron-LM saves ``mp_rank_00``, ``mp_rank_01``, …: nothing in them says how parts fit together. A plan says it::

    parts = [open_foreign(f"iter_0000100/mp_rank_{rank:02d}/model_optim_rng.pt", key="model") for rank in range(4)]
    load(model, joined(parts, whole, plan))       # at any degree

Names in the files, and the order of rows within each rank's part, are those of a model split by that plan.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zoo.layout import Box, Laid, boxes_of, logical_name, split_of
from zoo.tensor.loading import Source
from zoo.tensor.plans import Plan
from zoo.tensor.splitting import split_alone
from zoo.tensor.summary import Rank


def joined(parts: Sequence[Source], model: nn.Module, plan: Plan, *, training: bool = True, grain: int = 1) -> Joined:
    """Whole tensors of the parts that ``parts``, one for each rank in order, have.

    Args:
        model: not split, with or without values; it stays as it is.
        plan: how the model was split when they were written. training, grain: as :func:`zoo.tensor.split` got them.

    Raises:
        ValueError: tensors that the model has not, or of other shapes than its parts; nothing is read.
    """
    degree = len(parts)
    if not parts:
        raise ValueError("joined got no parts; it takes one source for each rank that wrote its own.")
    laid: dict[str, list[tuple[Laid, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    roles: dict[str, Mapping[str, str]] = {}
    wrong: list[str] = []
    for rank, part in enumerate(parts):
        mine = copy.deepcopy(model)
        split_alone(mine, plan, Rank(degree, rank), training=training, grain=grain)
        known = {logical_name(mine, name): tensor for name, tensor in _tensors(mine)}
        wrong += [f"rank {rank} has {name!r}" for name in part.shapes if name not in known]
        for name, tensor in known.items():
            if name not in part.shapes:
                continue
            there, here = tuple(part.shapes[name]), tuple(tensor.shape)
            if there != here:
                wrong.append(f"rank {rank} has {name!r} of shape {there}, and the plan gives it {here}")
            said = split_of(tensor)
            shapes[name] = tuple(said.shape or tensor.shape)
            if set(roles.setdefault(name, part.roles[name])) != set(part.roles[name]):
                both = (", ".join(said) for said in (part.roles[name], roles[name]))
                wrong.append(f"rank {rank} has {name!r} as {', others as '.join(both)}")
            laid.setdefault(name, [()] * degree)[rank] = boxes_of(said.box or Box.whole(shapes[name]))
    for name, places in laid.items():
        if () in places:
            wrong.append(f"rank {places.index(())} does not have {name!r}, which others have")
    if wrong:
        raise ValueError(
            f"the parts of {degree} ranks are not those of {type(model).__name__} under plan {plan.name!r}: "
            f"{'; '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}."
        )
    return Joined(list(parts), shapes, roles, laid)


class Joined:
    """A source for :func:`zoo.tensor.load`. Made by :func:`joined`."""

    def __init__(
        self, parts: list[Source], shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, Mapping[str, str]],
        laid: Mapping[str, list[tuple[Laid, ...]]],
    ) -> None:  # fmt: skip
        self.shapes, self.roles = shapes, roles
        self._parts, self._laid = parts, laid

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        """A box of the whole tensor, each element from the first rank that has it."""
        found: torch.Tensor | None = None
        missing = [box]
        for part, places in zip(self._parts, self._laid[name], strict=True):
            for laid in places:
                for piece in [common for rest in missing if (common := rest.intersection(laid.box)) is not None]:
                    read = part.read_box(name, role, laid.here_of(piece))
                    found = read.new_empty(box.sizes) if found is None else found
                    found[_within(piece, box).ranges] = read
                    missing = [less for rest in missing for less in rest.minus(piece)]
            if not missing:
                break
        if found is None or missing:
            raise AssertionError(f"no rank has {missing} of {name}")
        return found


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept = set(model.state_dict(keep_vars=True))
    return [
        (name, tensor)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False),
        )
        if name in kept
    ]  # fmt: skip


def _within(piece: Box, box: Box) -> Box:
    return Box(tuple(x - offset for x, offset in zip(piece.offsets, box.offsets, strict=True)), piece.sizes)
