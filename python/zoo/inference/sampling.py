"""Sampling as a function of place: who asks for the same token again gets it, in whatever batch, slot or order.

The noise of a token is a function of (seed, sequence, position, token), a word w of Philox4x32-10 (Salmon et al. 2011),
u = (w + 1/2)/2^32 and g = -log(-log u), standard Gumbel. argmax(z + g) over tokens is a draw from softmax(z) (Gumbel
1954; Maddison et al. 2014, section 2): no generator has a state that rows would share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zoo.kernels.philox import blocks
from zoo.kernels.uniform import uniform

if TYPE_CHECKING:
    from zoo.comm import Communicator

Tensor = torch.Tensor
_LEAST = 1e-200
"""Of temperatures by which any logit may be divided."""


@dataclass(frozen=True)
class Words:
    """The part of the vocabulary that this rank of a split model has: words from ``start`` on; of all ranks of ``comm``
    together the parts are the vocabulary."""

    start: int
    comm: Communicator

    def best(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Of each row the token with the highest score of any rank, the first one of equal scores.

        Raises:
            ValueError: a highest score is no finite number.
        """
        mine = torch.stack([scores, tokens.double()], 1).contiguous()  # exact: tokens are below 2^53
        everyone = mine.new_empty(self.comm.size, *mine.shape)
        self.comm.all_gather(everyone.view(-1), mine.view(-1), label="best words").wait()
        highest, rank = everyone[..., 0].max(0)
        for row, score in enumerate(highest.tolist()):
            if not math.isfinite(score):
                raise ValueError(
                    f"the greatest logit of row {row} is {score}: there are no probabilities to draw from."
                )
        return everyone[..., 1].gather(0, rank[None])[0].long()


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 is the most likely token.
        top_k: only the k most likely tokens; 0: all. Tokens as likely as the k-th are kept.
        top_p: only the fewest most likely tokens whose probabilities, after temperature and top_k, sum to at least
            this; 1: all.
        seed: of the noise, below 2^63.

    Raises:
        ValueError: a number that cannot be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.temperature) not in (int, float) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r}; it must be a number, 0 or more.")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k={self.top_k!r}; it must be a whole number, 0 or more.")
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}; it must be above 0 and at most 1.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r}; it must be a whole number from 0 to 2^63 - 1.")

    @property
    def is_of_all(self) -> bool:
        """Each token has its chance by itself: the best of the best of parts of the vocabulary is the best."""
        return self.temperature == 0 or (self.top_k == 0 and self.top_p == 1 and self.temperature > _LEAST)

    @torch.no_grad()
    def pick(
        self, logits: Tensor, sequences: Tensor, positions: Tensor, words: Words | None = None
    ) -> Tensor:  # fmt: skip
        """The next token of each row.

        Args:
            logits: (B, V), of any floating dtype.
            sequences: (B,) int64, which sequence a row is: below 2^31.
            positions: (B,) int64, how many tokens were drawn for it before: below 2^31.
            words: where logits are (B, V_r), of this rank's part of the vocabulary, which: ranks tell each other 16
                bytes a row. Collective; where :attr:`is_of_all`.

        Returns:
            (B,) int64. What a row gets depends on its logits, its sequence and its position alone.

        Raises:
            ValueError: shapes or places that cannot be; the greatest logit of a row is no number, and it is not the
                most likely token that is asked for.
        """
        if logits.dim() != 2 or not (len(logits) == len(sequences) == len(positions)):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}, with {len(sequences)} sequences and {len(positions)} "
                "positions; it must be (B, V), and B of each."
            )
        if words is not None:
            return words.best(*self._best_of_part(logits, sequences.tolist(), positions.tolist(), words.start))
        if self.temperature == 0:
            return logits.argmax(-1)
        names, drawn = sequences.tolist(), positions.tolist()
        check_places("sequences", names)
        check_places("positions", drawn)
        for row, greatest in enumerate(logits.amax(-1).tolist()):
            if not math.isfinite(greatest):
                raise ValueError(
                    f"the greatest logit of row {row} is {greatest}: there are no probabilities to draw from."
                )
        if self.top_p == 1 and (self.top_k == 0 or self.top_k >= logits.shape[1]):
            rows = zip(logits, names, drawn, strict=True)
            return torch.stack([(self._scaled(z) + self._noise_from(0, name, i, z)).argmax() for z, name, i in rows])
        rows = zip(logits, names, drawn, strict=True)
        return torch.stack([self._pick(row, sequence, position) for row, sequence, position in rows])

    def _best_of_part(
        self, logits: Tensor, names: Sequence[int], drawn: Sequence[int], start: int
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(B,) fp64 scores and (B,) tokens of the best ones from ``start`` on; NaN where a logit is none."""
        if not self.is_of_all:
            raise ValueError("top_k, top_p and temperatures next to 0 look at all of the vocabulary.")
        if self.temperature == 0:
            scores = logits.double()
        else:
            check_places("sequences", names)
            check_places("positions", drawn)
            scores = torch.stack([
                row.double() / self.temperature + self._noise_from(start, name, place, row)
                for row, name, place in zip(logits, names, drawn, strict=True)
            ])  # fmt: skip
        best = scores.argmax(-1)
        return scores.gather(1, best[:, None])[:, 0], best + start

    def _scaled(self, logits: Tensor) -> Tensor:
        z = logits.double() / self.temperature
        if not math.isfinite(z.max()):  # the temperature is that low
            z = (logits.double() - logits.max()) / self.temperature
        return z

    def _pick(self, logits: Tensor, sequence: int, position: int) -> Tensor:
        z = self._scaled(logits)
        tokens: Tensor | None = None
        if 0 < self.top_k < len(z):
            least = z.topk(self.top_k).values[-1]
            tokens = (z >= least).nonzero()[:, 0]
            z = z[tokens]
        if self.top_p < 1:
            kept = _nucleus(z, self.top_p)
            z, tokens = z[kept], kept if tokens is None else tokens[kept]
        if tokens is None:
            raise AssertionError("neither top_k nor top_p.")
        return tokens[(z + self.noise(sequence, position, tokens)).argmax()]

    def processor(self, sequences: Sequence[int] | None = None) -> Processor:
        """For ``logits_processor=[...]`` of transformers' ``generate``, of one call: all but the drawn token get -inf.

        Args:
            sequences: the number of each row's sequence; None: 0, 1, ...
        """
        return Processor(self, None if sequences is None else numbers_of(sequences))

    def noise(self, sequence: int, position: int, tokens: Tensor) -> Tensor:
        """g of these tokens (int64), fp64."""
        words = blocks(self.seed, sequence << 32 | position, tokens >> 2)
        word = words.gather(1, (tokens & 3)[:, None])[:, 0]
        return _gumbel((word.double() + 0.5) / 2**32)

    def _noise_from(self, start: int, sequence: int, position: int, like: Tensor) -> Tensor:
        """g of the tokens from ``start`` on, as many as ``like`` has."""
        place = torch.tensor([sequence << 32 | position], device=like.device)
        return _gumbel(uniform(place, self.seed, start + len(like))[0, start:])


def _gumbel(u: Tensor) -> Tensor:
    return -torch.log(-torch.log(u))


def numbers_of(sequences: Sequence[int]) -> list[int]:
    """As whole numbers.

    Raises:
        ValueError: one is none, or is no number of a sequence.
    """
    try:
        found = [operator.index(one) for one in sequences]
    except TypeError as error:
        raise ValueError(f"sequences={sequences!r}; they must be whole numbers, one for each prompt.") from error
    check_places("sequences", found)
    return found


def check_places(name: str, places: Sequence[int]) -> None:
    """Noise is a function of 31 bits of them.

    Raises:
        ValueError: one is not from 0 to 2^31 - 1.
    """
    for place in places:
        if type(place) is not int or not 0 <= place < 2**31:
            raise ValueError(f"{name} has {place!r}; it must be a whole number from 0 to 2^31 - 1.")


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """Places of the fewest most likely numbers whose probabilities sum to at least top_p, in their order."""
    ordered, places = torch.sort(z, descending=True, stable=True)
    before = torch.softmax(ordered, 0).cumsum(0).roll(1)
    before[0] = 0.0
    return places[before < top_p].sort().values


class Processor:
    """See :meth:`Sampling.processor`. Positions are counted from the first call on."""

    def __init__(self, sampling: Sampling, sequences: Sequence[int] | None) -> None:
        self.sampling, self.sequences = sampling, sequences
        self.begin = self.next = -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (B, V) for input_ids (B, T)."""
        rows, length = input_ids.shape
        if self.begin < 0:
            self.begin = self.next = length
        if length != self.next or (self.sequences is not None and len(self.sequences) != rows):
            given = "" if self.sequences is None else f" for {len(self.sequences)} sequences"
            raise ValueError(
                f"a processor{given} that expects {self.next} tokens gets {rows} rows of {length}: it is for one call "
                "of generate, without beams; make another one."
            )
        self.next += 1
        names = torch.arange(rows) if self.sequences is None else torch.tensor(list(self.sequences))
        picked = self.sampling.pick(scores, names, torch.full((rows,), length - self.begin))
        return torch.full_like(scores, -math.inf).scatter_(1, picked[:, None], 0.0)
