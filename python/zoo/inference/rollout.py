"""Tokens between steps of training, from the weights that are trained, in one of two placements.

*in place*: the model that is trained generates. At ZeRO 0 to 2 nothing moves; at stage 3 each token gathers each layer.
*tensor*: the ranks share the model by heads and features. Once for each call the shards become parts, which sends less
than one gather of the model, and each token sends two sums a layer instead of its weights (Sheng et al. 2024,
"HybridFlow", section 5, and Yao et al. 2023, "DeepSpeed-Chat", section 4).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from zoo.comm import Communicator, raise_together, together
from zoo.inference.generation import Generated, generate, numbers_of
from zoo.inference.scoring import score
from zoo.inference.tokens import token_ids
from zoo.inference.weights import Resharded
from zoo.layout import split_of
from zoo.tensor import Plan, parameters_on_meta, plan_of, split

__all__ = ["Placement", "Rollout"]

Tensor = torch.Tensor
Placement = Literal["auto", "in_place", "tensor"]
_PLACEMENTS = ("auto", "in_place", "tensor")
_log = logging.getLogger("zoo.inference")


class Rollout:
    """Generates for a model that is trained by ``zoo.zero``. Every method is a collective over its data ranks, each of
    which gives prompts of its own, or none, and gets the answers to them.

    The tokens are the same in both placements, of the same degree of rounding: sampling is a function of place, and
    prompts that are given no ``sequences`` are numbered over all ranks. What one rank refuses all of them do.

    Args:
        trained: an engine, an optimizer of ``zoo.zero``, or the sharded model.
        placement: "auto": "tensor" where parameters are split over ranks (ZeRO stage 3), the model has a plan and its
            parts are at most ``budget_bytes``; else "in_place". Why not "tensor" is logged.
        degree: ranks that share a model in the placement "tensor"; None: all of them.
        plan: how it is cut; None: that of its family (:func:`zoo.tensor.plan_of`).
        make: makes a model like the one that is trained; None: ``type(model)(model.config)``. Its parameters take no
            memory until they are parts.
        budget_bytes: for the parts of a rank; None: as many as they are.
        injects: the parts get the fast layers of :func:`zoo.inject.inject` where these are proved.

    Attributes:
        model: what generates. placement: "in_place" or "tensor". comm: all ranks. group: those that share a model; None
            in place.
        num_bytes: of this rank's parts, 0 in place. sent_bytes: that this rank sends at each call before it generates.

    Raises:
        ValueError: another placement; a degree that does not divide the ranks; a model that cannot be made anew, is
            split itself, or has no plan; on all ranks.
    """

    def __init__(
        self, trained: Any, *, placement: Placement = "auto", degree: int | None = None, plan: Plan | None = None,
        make: Callable[[], nn.Module] | None = None, budget_bytes: int | None = None, injects: bool = True,
    ) -> None:  # fmt: skip
        sharded = getattr(trained, "sharded", trained)
        if not hasattr(sharded, "buckets"):
            raise ValueError(
                f"Rollout got a {type(trained).__name__}; it takes an engine, an optimizer of zoo.zero, or a "
                "ShardedModel."
            )
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement={placement!r}; allowed are {', '.join(map(repr, _PLACEMENTS))}.")
        self._sharded, self.comm = sharded, sharded.comm
        size = self.comm.size
        self.degree = size if degree is None else degree
        if type(self.degree) is not int or self.degree < 1 or size % self.degree:
            raise ValueError(f"degree={degree!r} does not divide the {size} ranks of the model.")
        self.model: nn.Module = sharded.module
        self.placement: Literal["in_place", "tensor"] = "in_place"
        self.num_bytes = self.sent_bytes = 0
        self.group: Communicator | None = None
        self._weights: Resharded | None = None
        if placement == "auto":
            why = self._why_in_place(plan, budget_bytes)
            if why:
                _log.info("tokens are generated in place: %s", why)
                return
        if placement != "in_place":
            self._share(plan, make, injects=injects)

    def _why_in_place(self, plan: Plan | None, budget_bytes: int | None) -> str:
        """Why not "tensor"; the same on every rank."""
        buckets = self._sharded.buckets
        if not any(bucket.partitioned for bucket in buckets):
            return "every rank has all parameters"
        if self.degree == 1:
            return "one rank would have the whole model"
        if any(split_of(p).box is not None for bucket in buckets for p in bucket.spec.parameters):
            return "the model is split along other axes"
        if plan is None:
            try:
                plan_of(self.model)
            except (ValueError, AttributeError) as error:
                return f"there is no plan to cut it: {error}"
        parts = sum(bucket.num_bytes for bucket in buckets) // self.degree
        if budget_bytes is not None and parts > budget_bytes:
            return f"its parts take {parts} bytes a rank, and budget_bytes is {budget_bytes}"
        return ""

    def _share(self, plan: Plan | None, make: Callable[[], nn.Module] | None, *, injects: bool) -> None:
        size = self.comm.size
        with raise_together(self.comm, "making the model that generates"):
            model = self._made(make)
            cut = plan_of(model) if plan is None else plan
        groups = [list(range(first, first + self.degree)) for first in range(0, size, self.degree)]
        self.group = self.comm.partition(groups, name="rollout")
        split(model, cut, self.group, training=False)
        self._weights = Resharded(self._sharded, model, self.comm)
        self.model, self.placement = model, "tensor"
        self.num_bytes, self.sent_bytes = self._weights.num_bytes, self._weights.sent_bytes
        if injects:
            self._weights.refresh()  # what is proved looks at values
            self._inject(model)

    def _made(self, make: Callable[[], nn.Module] | None) -> nn.Module:
        module = self._sharded.module
        if make is None and not hasattr(module, "config"):
            raise ValueError(
                f"{type(module).__name__} has no config to make another one of; give make=, which makes a model like "
                "it, with the same names."
            )
        with parameters_on_meta():
            model: nn.Module = type(module)(copy.deepcopy(module.config)) if make is None else make()
        if hasattr(module, "generation_config"):
            model.generation_config = copy.deepcopy(module.generation_config)
        return model.eval()

    @staticmethod
    def _inject(model: nn.Module) -> None:
        from zoo.inject import inject

        try:
            _log.info("the model that generates: %s", inject(model))
        except ValueError as error:
            _log.info("the model that generates has no fast layers: %s", error)

    def refresh(self) -> None:
        """The parts become the weights of now; nothing in place. :meth:`generate` and :meth:`score` do it."""
        if self._sharded is None:
            raise ValueError("this Rollout was closed.")
        if self._weights is not None:
            self._weights.refresh()

    def generate(
        self, prompts: Sequence[Tensor | Sequence[int]], *, sequences: Sequence[int] | None = None, **options: Any
    ) -> list[Tensor] | Generated:  # fmt: skip
        """See :func:`zoo.inference.generate`, whose options these are, alike on all ranks."""

        own: list[Tensor] = []

        def checked() -> tuple[list[Any], list[int] | None]:
            own.extend(token_ids(self.model, prompts))
            rows = [one.tolist() for one in own]
            return rows, None if sequences is None else numbers_of(sequences, len(rows))

        everyone = self._gathered("generate", checked, options)
        self.refresh()
        in_place, mine = self.placement == "in_place", slice(*everyone.own)
        rows, numbers = (own, everyone.numbers[mine]) if in_place else (everyone.rows, everyone.numbers)
        with _generating(self.model):
            found: Any = generate(self.model, rows, sequences=numbers, **options)
        mine = slice(None) if in_place else mine
        if isinstance(found, Generated):
            return Generated(found.tokens[mine], found.logprobs[mine])
        answers: list[Tensor] = found[mine]
        return answers

    def score(
        self, prompts: Sequence[Tensor | Sequence[int]], answers: Sequence[Tensor | Sequence[int]]
    ) -> list[Tensor]:  # fmt: skip
        """See :func:`zoo.inference.score`."""
        texts: list[Tensor] = []
        others: list[Tensor] = []

        def checked() -> tuple[list[Any], None]:
            texts.extend(token_ids(self.model, prompts))
            others.extend(token_ids(self.model, answers, "answer", least=0))
            if len(texts) != len(others):
                raise ValueError(f"there are {len(texts)} prompts and {len(others)} answers; give one for each.")
            return [[one.tolist(), other.tolist()] for one, other in zip(texts, others, strict=True)], None

        everyone = self._gathered("score", checked, {})
        self.refresh()
        with _generating(self.model):
            if self.placement == "in_place":
                return score(self.model, texts, others)
            found = score(self.model, [one for one, _ in everyone.rows], [other for _, other in everyone.rows])
        return found[slice(*everyone.own)]

    def _gathered(
        self, what: str, checked: Callable[[], tuple[list[Any], list[int] | None]], options: dict[str, Any]
    ) -> _Everyone:
        """Of all ranks of this one's group, what ``checked`` gives: rows, and their sequences. In place no rank needs
        another one's rows, and gets none.

        Raises:
            ValueError: on all ranks, where it raised on some, or their options differ.
        """
        if self._sharded is None:
            raise ValueError("this Rollout was closed.")

        def mine() -> tuple[int, list[Any], list[int] | None, str]:
            rows, sequences = checked()
            return len(rows), rows if self.placement == "tensor" else [], sequences, repr(options)

        told = together(
            self.comm, f"Rollout.{what}", mine, error=lambda told, ranks: ValueError(told), plain=ValueError
        )
        if len({one[3] for one in told}) > 1:
            other = next(rank for rank, one in enumerate(told) if one[3] != told[0][3])
            raise ValueError(f"ranks give other options: rank 0 {told[0][3]}, rank {other} {told[other][3]}.")
        numbers = _numbers(told)
        first = self.comm.rank // self.degree * self.degree if self.placement == "tensor" else self.comm.rank
        ranks = range(first, first + (self.degree if self.placement == "tensor" else 1))
        before, count = sum(told[rank][0] for rank in ranks if rank < self.comm.rank), told[self.comm.rank][0]
        return _Everyone(
            [row for rank in ranks for row in told[rank][1]], [n for rank in ranks for n in numbers[rank]],
            (before, before + count),
        )  # fmt: skip

    def close(self) -> None:
        """Give the parts back. The model that is trained is as it was."""
        self._weights, self.model, self._sharded = None, nn.Module(), None
        self.num_bytes = self.sent_bytes = 0


class _Everyone:
    """Rows of a group, the number of each sequence, and which rows are this rank's."""

    def __init__(self, rows: list[Any], numbers: list[int], own: tuple[int, int]) -> None:
        self.rows, self.numbers, self.own = rows, numbers, own


def _numbers(told: Sequence[Any]) -> list[list[int]]:
    """Of each rank's sequences: as given, or over all ranks."""
    found, at = [], 0
    for count, _, sequences, _ in told:
        found.append(list(range(at, at + count)) if sequences is None else sequences)
        at += count
    return found


@contextmanager
def _generating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
