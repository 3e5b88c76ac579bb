"""Put fast layers into a model of transformers, and take them out again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.inject.decoder import STATE, Decoder, Head, Injected, Normed, PackedHead, State, become, leave
from zoo.inject.kinds import ATTENTIONS, Norm, Pieces, Unfit, norm_of, pieces_of
from zoo.inject.proof import Proof, prove
from zoo.nn import PackedLinear
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


def inject(model: nn.Module, *, invariant: bool = False) -> Injection:
    """Let decoder layers and the head of a model compute with few operations wherever no gradient is wanted.

    A layer is injected if it is of a kind that is described (:mod:`zoo.inject.kinds`), and if a copy of it with random
    weights, injected, is about as near to the copy in fp64 as the copy itself (:mod:`zoo.inject.proof`). All else stays
    as it is: parameters and their names, hooks, caches, ``generate``, training. Weights that change are seen at once.

    Args:
        model: of transformers, loaded, of one floating-point dtype a layer. Its layers are changed in place. If
            zoo.tensor has split it, all ranks of the axis call this, and inject the same layers.
        invariant: what a token gets depends, bit for bit, on the tokens that it sees and on their positions alone: not
            on the batch, on padding, on how much of the prompt came at once, nor on whether it is generated or scored.
            Prompts take longer: their products and their attention are those of single tokens. A layer that runs its
            own forward, as with hooks inside of it, has the bits of that.

    Returns:
        What is injected, and what is not and why, which is logged too.

    Raises:
        ValueError: it is no model, or injected, or nothing in it can be, or, invariant, not all: with the reasons.
            Nothing is changed then.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        raise ValueError(f"inject got a {type(given).__name__}; give it a model of transformers, loaded.")
    if any(STATE in module.__dict__ for module in model.modules()):
        raise ValueError("the model is injected; zoo.inject.detach(model) comes before another inject(model).")
    ranks = _ranks(model)
    layers, refused = dict(_decoder_layers(model)), {}
    allowed = ATTENTIONS[:1] if invariant else ATTENTIONS
    described: dict[str, Pieces] = {}
    how = getattr(getattr(model, "config", None), "_attn_implementation", None)
    for name, layer in layers.items():
        try:
            if how not in allowed:
                raise Unfit(f"attn_implementation is {how!r}; allowed: {', '.join(allowed)}")
            if invariant and ranks is not None:
                raise Unfit("zoo.tensor has split the model, whose products are torch's for many tokens")
            described[name] = pieces_of(layer)
            if invariant and any(getattr(one, "left", None) is not None for one in described[name].matrices):
                raise Unfit("codes with a low-rank part beside them are multiplied by torch")
        except Unfit as error:
            refused[name] = str(error)
    _agree(ranks, layers, refused)  # before a proof, in which ranks of a split layer wait for each other
    proofs: dict[str, Proof] = {}
    known: dict[Any, Proof | str] = {}
    for name, layer in layers.items():
        if name not in refused:
            try:
                proofs[name] = prove(layer, described[name], known, invariant=invariant)
            except Unfit as error:
                refused[name] = str(error)
    _agree(ranks, layers, refused)
    found = {name: layers[name] for name in layers if name not in refused}
    if not found or (invariant and refused):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:3])
        what = "not every layer" if found else "no layer"
        raise ValueError(
            f"{what} of {type(model).__name__} can be injected. {reasons or 'It has no decoder layers'}."
            f"{' invariant=True needs all of them.' if found else ''}"
        )
    others = _others(model, layers, [described[name] for name in found], invariant)
    for name, layer in found.items():
        described[name].join()
        become(layer, Decoder, State(described[name], proofs[name].dtype, invariant=invariant))
    for module, kind, norm in others.values():
        become(module, kind, State(None, None, invariant=invariant, norm=norm))
    errors = {type(layer).__name__: (proofs[name].injected, proofs[name].original) for name, layer in found.items()}
    done = Injection((*found, *others), refused, errors)
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
    """Elements of lists of layers, with an attention inside: what a model of transformers is a stack of. Each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            for index, layer in enumerate(module):
                if any("attn" in child or "attention" in child for child, _ in layer.named_children()):
                    found.setdefault(id(layer), (f"{name}.{index}", layer))
    return list(found.values())


def _others(
    model: nn.Module, layers: Iterable[str], described: Iterable[Pieces], invariant: bool
) -> dict[str, tuple[nn.Module, type[Injected], Norm | None]]:
    """The norm behind all layers, and the matrix of the words where that is a plain one; with their names."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if ask is not None else None
    kinds = {type(norm.module) for pieces in described for norm in pieces.norms}
    found: dict[str, tuple[nn.Module, type[Injected], Norm | None]] = {}
    for name, module in model.named_modules():
        if type(module) in kinds and not any(name.startswith(f"{layer}.") for layer in layers):
            found[name] = module, Normed, norm_of(module)
        elif module is head and type(module) is nn.Linear and torch.is_floating_point(module.weight):
            found[name] = module, Head, None
        elif invariant and module is head and type(module) is PackedLinear:
            found[name] = module, PackedHead, None
    return found
