"""What a model gives tokens that were generated: scoring, and how far it is from what generating said.

Trainers that learn from roll-outs weight a token by the ratio of two probabilities: of the policy that drew it and of
the one that is trained. Where the two programs add in another order, as with 16 bits and two libraries, the ratio is
not 1 before the first step. Here both run the kernels of one model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.inference.together import Together
from zoo.inference.tokens import check_model, check_positions, rows_of, token_ids

Tensor = torch.Tensor


@dataclass(frozen=True)
class Gap:
    """How far log-probabilities of the same tokens are from each other.

    Attributes:
        mean, most: of |a - b| over tokens, in nats. tokens: how many there are.
    """

    mean: float
    most: float
    tokens: int


def logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(z)[token], whatever was sampled with.

    Args:
        logits: z (B, V), of any floating dtype. tokens: (B,) int64.

    Returns:
        (B,) fp32. A row's depends on that row alone.
    """
    z = logits.float()
    picked = z.gather(1, tokens.to(z.device)[:, None])[:, 0]
    return picked - torch.stack([row.logsumexp(0) for row in z])


@torch.no_grad()
def score(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], answers: Sequence[Tensor | Sequence[int]]
) -> list[Tensor]:  # fmt: skip
    """The log-probabilities of the tokens of each answer behind its prompt, one forward a row, nothing padded.

    With ``inject(model, invariant=True)`` they are, bit for bit, those of
    :func:`~zoo.inference.generate` with ``logprobs=True``, of fp32 models. Where ranks have parts of the parameters
    (ZeRO stage 3) all of them call this, each with rows of its own, or none.

    Args:
        model: a causal model of transformers, in eval mode.
        prompts, answers: token ids, whole numbers below the size of the vocabulary, 1-D; as many of each.

    Returns:
        For each answer (n,) fp32.

    Raises:
        ValueError: the model trains, or is of another kind; other numbers of prompts and answers; a prompt without a
            token, other ids, or more positions than the model has; before anything is computed.
    """
    together = Together(model, "zoo.inference.score")
    with together.checking():
        check_model(model, "zoo.inference.score")
        prompts, answers = rows_of(prompts, "prompt"), rows_of(answers, "answer")
        if len(prompts) != len(answers):
            raise ValueError(f"there are {len(prompts)} prompts and {len(answers)} answers; give one for each.")
        pairs = [*zip(token_ids(model, prompts), token_ids(model, answers, "answer", least=0), strict=True)]
        for index, (prompt, answer) in enumerate(pairs):
            check_positions(model, len(prompt) + len(answer) - 1, f"prompt {index} with its answer")
    device = next(model.parameters()).device
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    found = []
    for prompt, answer in pairs:
        if not len(answer):
            found.append(torch.empty(0))
            continue
        together.goes_on(True)
        with together.turn():
            ids = torch.cat([prompt, answer])[:-1].to(device)
            options: Any = {"logits_to_keep": len(answer)} if keeps else {}
            logits = model(input_ids=ids[None], use_cache=False, **options).logits[0, -len(answer) :]
            together.ran()
            found.append(logprob(logits, answer).cpu())
    together.finish()
    return found


def gap(generated: Sequence[Tensor], scored: Sequence[Tensor]) -> Gap:
    """Of log-probabilities of the same tokens, as :func:`~zoo.inference.generate` and :func:`score` give them.

    Raises:
        ValueError: they are of other numbers of tokens.
    """
    if [one.shape for one in generated] != [one.shape for one in scored]:
        raise ValueError("the log-probabilities are not of the same tokens: rows have other lengths.")
    pairs = zip(generated, scored, strict=True)
    # Where both are -inf they are not apart.
    far = [torch.where(one == other, 0.0, (one.double() - other.double()).abs()).reshape(-1) for one, other in pairs]
    all_of = torch.cat(far) if far else torch.empty(0)
    return Gap(float(all_of.mean()), float(all_of.max()), len(all_of)) if len(all_of) else Gap(0.0, 0.0, 0)
