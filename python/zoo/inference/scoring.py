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
    :func:`~zoo.inference.generate` with ``logprobs=True``, of fp32 models.

    Args:
        model: a causal model of transformers, in eval mode.
        prompts, answers: token ids, 1-D; as many of each.

    Returns:
        For each answer (n,) fp32.

    Raises:
        ValueError: the model trains; other numbers of prompts and answers; a prompt without a token.
    """
    if model.training:
        raise ValueError("the model is in training mode, with dropout; call model.eval() first.")
    if len(prompts) != len(answers):
        raise ValueError(f"there are {len(prompts)} prompts and {len(answers)} answers; give one for each.")
    device = next(model.parameters()).device
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    found = []
    for index, pair in enumerate(zip(prompts, answers, strict=True)):
        prompt, answer = (torch.as_tensor(one).to(torch.int64) for one in pair)
        if prompt.dim() != 1 or answer.dim() != 1 or not len(prompt):
            raise ValueError(
                f"prompt {index} has shape {tuple(prompt.shape)} and its answer {tuple(answer.shape)}; both must be "
                "1-D, and a prompt has at least one token."
            )
        if not len(answer):
            found.append(torch.empty(0))
            continue
        ids = torch.cat([prompt, answer])[:-1].to(device)
        options: Any = {"logits_to_keep": len(answer)} if keeps else {}
        logits = model(input_ids=ids[None], use_cache=False, **options).logits[0, -len(answer) :]
        found.append(logprob(logits, answer).cpu())
    return found


def gap(generated: Sequence[Tensor], scored: Sequence[Tensor]) -> Gap:
    """Of log-probabilities of the same tokens, as :func:`~zoo.inference.generate` and :func:`score` give them.

    Raises:
        ValueError: they are of other numbers of tokens.
    """
    if [len(one) for one in generated] != [len(one) for one in scored]:
        raise ValueError("the log-probabilities are not of the same tokens: rows have other lengths.")
    far = torch.cat([(one.double() - other.double()).abs() for one, other in zip(generated, scored, strict=True)])
    return Gap(float(far.mean()), float(far.max()), len(far)) if len(far) else Gap(0.0, 0.0, 0)
