"""Put fast layers into a model of transformers, and take them out again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.inject.decoder import ATTENTIONS, STATE, Decoder, Head, State, become, leave
from zoo.inject.kinds import Pieces, Unfit, pieces_of
from zoo.inject.proof import Proof, prove
from zoo.tensor.layers import part_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Injection:
    """What :func:`inject` did.

    Attributes:
        layers: names of modules that are injected now. refused: of others that look like decoder layers, the reason.
        errors: by class of layer, (the error of the injected one, that of the original), against fp64.
    """

    layers: tuple[str, ...]
    refused: dict[str, str] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} modules are injected"]
        for kind, (mine, original) in self.errors.items():
            lines.append(f"  {kind}: error {mine:.2g}, that of the original {original:.2g}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            lines.append(f"  not {', '.join(names[:3])}{' …' if len(names) > 3 else ''}: {reason}")
        return "\n".join(lines)


def inject(model: nn.Module) -> Injection:
    """Let decoder layers and the head of a model compute with few operations wherever no gradient is wanted.

    A layer is injected if it is of a kind that is described (:mod:`zoo.inject.kinds`), and if a copy of it with random
    weights, injected, is about as near to the copy in fp64 as the copy itself (:mod:`zoo.inject.proof`). All else stays
    as it is: parameters and their names, hooks, caches, ``generate``, training. Weights that change are seen at once.

    Args:
        model: of transformers, loaded, of one floating-point dtype a layer. Its layers are changed in place. If
            zoo.tensor has split it, all ranks of the axis call this, and inject the same layers.

    Returns:
        What is injected, and what is not and why, which is logged too.

    Raises:
        ValueError: the model is injected, or nothing in it can be: with the reasons. Nothing is changed then.
    """
    if any(STATE in module.__dict__ for module in model.modules()):
        raise ValueError("the model is injected; zoo.inject.detach(model) comes before another inject(model).")
    layers, refused = dict(_decoder_layers(model)), {}
    described: dict[str, Pieces] = {}
    how = getattr(getattr(model, "config", None), "_attn_implementation", None)
    for name, layer in layers.items():
        try:
            if how not in ATTENTIONS:
                raise Unfit(f"attn_implementation is {how!r}; allowed are {', '.join(ATTENTIONS)}")
            described[name] = pieces_of(layer)
        except Unfit as error:
            refused[name] = str(error)
    ranks = _ranks(model)
    _agree(ranks, layers, refused)  # before a proof, in which ranks of a split layer wait for each other
    proofs: dict[str, Proof] = {}
    for name, layer in layers.items():
        if name not in refused:
            try:
                proofs[name] = prove(layer, described[name])
            except Unfit as error:
                refused[name] = str(error)
    _agree(ranks, layers, refused)
    found = {
        name: (layer, State(described[name], proofs[name].dtype))
        for name, layer in layers.items()
        if name not in refused
    }
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:3])
        raise ValueError(
            f"no layer of {type(model).__name__} can be injected. {reasons or 'It has no decoder layers'}."
        )
    errors = {type(layers[name]).__name__: (proofs[name].injected, proofs[name].original) for name in found}
    head = _head(model)
    for layer, state in found.values():
        become(layer, Decoder, state)
    if head is not None:
        become(head[1], Head, State(None, None))
    done = Injection((*found, *([head[0]] if head else [])), refused, errors)
    logger.info("%s: %s", type(model).__name__, done)
    return done


def detach(model: nn.Module) -> None:
    """Give the model back as it was before :func:`inject`; one that is not injected stays as it is."""
    for module in model.modules():
        if STATE in module.__dict__:
            leave(module)


def _ranks(model: nn.Module) -> Communicator | None:
    """Those that have the other parts of a model that zoo.tensor has split."""
    parts = (part_of(module) for module in model.modules())
    return next((part.region.comm for part in parts if part is not None), None)


def _agree(ranks: Communicator | None, layers: Iterable[str], refused: dict[str, str]) -> None:
    """What one rank refuses all of them do."""
    names = list(layers)
    if ranks is None or not names:
        return
    votes = torch.tensor([int(name in refused) for name in names], device=ranks.device)
    ranks.all_reduce(votes).wait()
    for name, vote in zip(names, votes.tolist(), strict=True):
        if vote:
            refused.setdefault(name, "another rank of its axis refuses it, and says why")


def _decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Elements of lists of layers, with an attention inside: what a model of transformers is a stack of."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            for index, layer in enumerate(module):
                if any("attn" in child or "attention" in child for child, _ in layer.named_children()):
                    found.append((f"{name}.{index}", layer))
    return found


def _head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Its name and the matrix of the words, where that is a plain one."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if ask is not None else None
    if type(head) is not nn.Linear or not torch.is_floating_point(head.weight):
        return None
    return next(((name, module) for name, module in model.named_modules() if module is head), None)
