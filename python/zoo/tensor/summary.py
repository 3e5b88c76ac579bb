"""What a plan comes to before there are any ranks: bytes of each, and what they send. Of a model on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.layout import split_of
from zoo.tensor.adapters import home
from zoo.tensor.layers import Column, Inside, Row, Vocabulary, part_of
from zoo.tensor.plans import Plan
from zoo.tensor.splitting import split_alone


@dataclass(frozen=True)
class Summary:
    """Of one model at one degree.

    Attributes:
        whole_bytes: parameters of the model that is not split. rank_bytes: of each rank.
        sums_forward: sums over ranks of (B, T, C) in a forward, for C of every size: C → how many.
        sums_backward: of gradients of that shape in a backward.
        checked: features of embeddings whose sums have a row more, which says that ranks have the same ids.
        gathered: features of outputs that are gathered in a forward, for each token.
        partial_bytes: parameters that are whole on every rank, and whose gradients are summed in a step.
    """

    whole_bytes: int
    rank_bytes: tuple[int, ...]
    sums_forward: dict[int, int]
    sums_backward: dict[int, int]
    gathered: int
    partial_bytes: int
    checked: int = 0

    def sent_bytes(self, num_tokens: int, itemsize: int = 4) -> tuple[int, int]:
        """The messages of a forward and of a backward of B·T tokens, as whole buffers (an all-reduce sends about twice
        its buffer)."""
        each = num_tokens * itemsize
        forward = sum(features * number for features, number in self.sums_forward.items()) + self.gathered
        backward = sum(features * number for features, number in self.sums_backward.items())
        return forward * each + self.checked * itemsize, backward * each


class Rank:
    """In the place of a communicator, for splitting alone: nothing is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


def summary(model: nn.Module, plan: Plan, degree: int, *, training: bool = True, grain: int = 1) -> Summary:
    """Of ``model``, which stays as it is; one without values costs nothing.

    Raises:
        ValueError: as :func:`zoo.tensor.split`.
    """
    ranks = []
    for rank in range(degree):
        mine, comm = copy.deepcopy(model), Rank(degree, rank)
        split_alone(mine, plan, comm, training=training, grain=grain)
        ranks.append(mine)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    blocks: dict[str, int] = {}
    gathered = checked = 0
    for path, module in ranks[0].named_modules():
        part = part_of(module)
        if part is None:
            continue
        if isinstance(module, Row | Vocabulary):
            features = _features(module, 1 if part.turned or isinstance(module, Vocabulary) else 0)
            forward[features] = forward.get(features, 0) + 1
            checked += features if isinstance(module, Vocabulary) and features >= degree else 0
        elif isinstance(module, Column):
            block = home(ranks[0], path)
            # What adapters have in between comes in by itself.
            blocks[path if ".lora_B." in path else block or path] = _features(module, 0 if part.turned else 1)
            gathered += sum(part.sizes or ())
        elif isinstance(module, Inside):
            forward[part.features] = forward.get(part.features, 0) + 1
            blocks[path] = part.features
    for features in blocks.values():
        backward[features] = backward.get(features, 0) + 1
    partial = sum(_bytes(p) for p in ranks[0].parameters() if split_of(p).partial)
    return Summary(
        sum(map(_bytes, model.parameters())), tuple(sum(map(_bytes, rank.parameters())) for rank in ranks), forward,
        backward if training else {}, gathered, partial if training else 0, checked,
    )  # fmt: skip


def _features(module: Any, dim: int) -> int:
    return int(module.weight.shape[dim])


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.itemsize
