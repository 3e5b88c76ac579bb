"""Generation of many prompts over few slots."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zoo.inference.cache import Cache
from zoo.inference.sampling import Sampling
from zoo.inference.slots import Slots, Step

Tensor = torch.Tensor
GREEDY = Sampling(temperature=0)


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], *, max_new_tokens: int, sampling: Sampling = GREEDY,
    end: int | Iterable[int] | None = None, slots: int = 8, room: int | None = None,
    sequences: Sequence[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The tokens that follow each prompt.

    Up to ``slots`` prompts are generated at once; each is computed alone, then a token of all of them at a time. A row
    that ends is given to the next prompt. Prompts need no padding.

    Args:
        model: a causal model of transformers, in eval mode, of full or sliding attention; injected
            (:func:`zoo.inject.inject`) or not.
        prompts: token ids, 1-D.
        max_new_tokens: for each prompt.
        sampling: how tokens are drawn; :data:`GREEDY`: the most likely one.
        end: tokens that end a row; None: those of ``model.generation_config``.
        slots: rows of the cache.
        room: tokens of a row of the cache, prompt included; None: what the longest prompt needs.
        sequences: the number of each prompt's sequence, for ``sampling``; None: 0, 1, ...

    Returns:
        For each prompt, in their order, (n,) int64, n <= max_new_tokens, with the token that ended it.

    Raises:
        ValueError: the model trains, is of another kind, or a prompt is empty or has no room; before anything is
            computed.
    """
    ids = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
    _check(model, ids, max_new_tokens, slots)
    if not ids:
        return []
    needed = max(len(one) for one in ids) + max_new_tokens
    room = needed if room is None else room
    if room < needed:
        longest = max(range(len(ids)), key=lambda i: len(ids[i]))
        raise ValueError(
            f"room={room}, and prompt {longest} has {len(ids[longest])} tokens and gets {max_new_tokens} more; "
            f"it must be at least {needed}."
        )
    names = list(range(len(ids))) if sequences is None else list(sequences)
    if len(names) != len(ids):
        raise ValueError(f"there are {len(ids)} prompts and {len(names)} sequences; give one for each, or none.")
    run = _Run(model, Slots(_config(model), min(slots, len(ids)), room), sampling, _ends(model, end), max_new_tokens)
    return run.all(ids, names)


class _Run:
    """One call of :func:`generate`. rows: of each slot in use, (prompt, its sequence)."""

    def __init__(
        self, model: nn.Module, slots: Slots, sampling: Sampling, ends: set[int], max_new_tokens: int
    ) -> None:  # fmt: skip
        self.model, self.slots, self.sampling, self.ends, self.most = model, slots, sampling, ends, max_new_tokens
        self.config = _config(model)
        self.how = getattr(self.config, "_attn_implementation", "sdpa")
        self.last_only: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.last_only = {"logits_to_keep": 1}
        self.dtype = next(model.parameters()).dtype
        self.rows: list[tuple[int, int]] = []
        self.tokens: list[list[int]] = []

    def all(self, ids: list[Tensor], names: list[int]) -> list[Tensor]:
        """The tokens of each prompt."""
        self.tokens = [[] for _ in ids]
        waiting = list(reversed(range(len(ids))))
        device = next(self.model.parameters()).device
        while waiting or self.rows:
            while waiting and len(self.rows) < self.slots.rows:
                index = waiting.pop()
                self._begin(ids[index].to(device), index, names[index])
            if self.rows:
                self._step()
        return [torch.tensor(found, dtype=torch.int64) for found in self.tokens]

    def _begin(self, prompt: Tensor, index: int, name: int) -> None:
        cache = Cache(self.config, len(prompt), keep_all=True)  # later a mask says what sliding layers see
        logits = self._forward(prompt[None], cache, position_ids=torch.arange(len(prompt), device=prompt.device)[None])
        if self._take(index, int(self._picked(logits, [(index, name)])[0])):
            return
        self.slots.admit(cache)
        self.rows.append((index, name))

    def _step(self) -> None:
        step = Step(self.slots)
        logits = self._forward(
            torch.tensor([[self.tokens[index][-1]] for index, _ in self.rows], device=step.positions.device), step,
            position_ids=step.positions, attention_mask=self._mask(step),
        )  # fmt: skip
        step.done()
        picked = self._picked(logits, self.rows).tolist()
        for row in reversed(range(len(self.rows))):
            if self._take(self.rows[row][0], picked[row]):
                self.slots.release(row)
                self.rows[row] = self.rows[-1]
                self.rows.pop()

    def _forward(self, ids: Tensor, cache: Any, **options: Any) -> Tensor:
        found: Tensor = self.model(input_ids=ids, cache=cache, use_cache=True, **options, **self.last_only).logits
        return found[:, -1]

    def _picked(self, logits: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        sequences = torch.tensor([name for _, name in rows])
        return self.sampling.pick(logits, sequences, torch.tensor([len(self.tokens[index]) for index, _ in rows]))

    def _mask(self, step: Step) -> Any:
        masks = step.masks(self.dtype, added=self.how == "eager")
        kinds = dict(zip(getattr(self.config, "layer_types", None) or [], self.slots.windows, strict=False))
        if len(set(self.slots.windows)) == 1:
            return masks[self.slots.windows[0]]
        return {kind: masks[window] for kind, window in kinds.items()}

    def _take(self, index: int, token: int) -> bool:
        """Whether the row has ended with this token."""
        self.tokens[index].append(token)
        return token in self.ends or len(self.tokens[index]) == self.most


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _ends(model: nn.Module, end: int | Iterable[int] | None) -> set[int]:
    if end is None:
        end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return set() if end is None else {end} if isinstance(end, int) else {int(token) for token in end}


def _check(model: nn.Module, ids: list[Tensor], max_new_tokens: int, slots: int) -> None:
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__name__} is no causal model of transformers, which has a config and generates."
        )
    if model.training:
        raise ValueError("the model is in training mode, with dropout; call model.eval() first.")
    for name, value in (("max_new_tokens", max_new_tokens), ("slots", slots)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r}; it must be a whole number, at least 1.")
    how = getattr(_config(model), "_attn_implementation", "sdpa")
    if how not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation is {how!r}; zoo.inference.generate knows the masks of sdpa and eager.")
    for index, one in enumerate(ids):
        if one.dim() != 1 or len(one) == 0:
            raise ValueError(f"prompt {index} has shape {tuple(one.shape)}; it must be 1-D, with at least one token.")
