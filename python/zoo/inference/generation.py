"""Generation of many prompts over few slots."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn
from transformers import PreTrainedModel

from zoo.inference.cache import Cache, check_numbers
from zoo.inference.sampling import Sampling, Words
from zoo.inference.sampling import numbers_of as whole_numbers
from zoo.inference.scoring import logprob
from zoo.inference.slots import Slots, Step
from zoo.inference.together import Together
from zoo.inference.tokens import check_model, check_positions, config_of, token_ids
from zoo.inject.prepared import prepared
from zoo.tensor.layers import part_of
from zoo.tensor.loss import head_in_parts, parts_kept

Tensor = torch.Tensor
GREEDY = Sampling(temperature=0)


class Generated(NamedTuple):
    """What :func:`generate` gives with ``logprobs=True``: for each prompt its tokens (n,) int64, and log softmax(z) of
    each (n,) fp32, before temperature, top_k and top_p."""

    tokens: list[Tensor]
    logprobs: list[Tensor]


@overload
def generate(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], *, max_new_tokens: int, sampling: Sampling = GREEDY,
    end: int | Iterable[int] | None = None, slots: int = 8, room: int | None = None,
    sequences: Sequence[int] | None = None, logprobs: Literal[False] = False,
) -> list[Tensor]: ...  # fmt: skip


@overload
def generate(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], *, max_new_tokens: int, sampling: Sampling = GREEDY,
    end: int | Iterable[int] | None = None, slots: int = 8, room: int | None = None,
    sequences: Sequence[int] | None = None, logprobs: Literal[True],
) -> Generated: ...  # fmt: skip


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], *, max_new_tokens: int, sampling: Sampling = GREEDY,
    end: int | Iterable[int] | None = None, slots: int = 8, room: int | None = None,
    sequences: Sequence[int] | None = None, logprobs: bool = False,
) -> list[Tensor] | Generated:  # fmt: skip
    """The tokens that follow each prompt.

    Up to ``slots`` prompts are generated at once; each is computed alone, then a token of all of them at a time. A row
    that ends is given to the next prompt. Prompts need no padding.

    Where ranks have parts of the parameters (ZeRO stage 3) all of them call this, each with prompts of its own, or
    none: those that are done first run the model until all are. What one of them refuses, or meets between two
    forwards, is told on all.

    Args:
        model: a causal model of transformers, in eval mode, of full or sliding attention; injected
            (:func:`zoo.inject.inject`) or not.
        prompts: token ids, whole numbers below the size of the vocabulary, 1-D.
        max_new_tokens: for each prompt.
        sampling: how tokens are drawn; :data:`GREEDY`: the most likely one.
        end: tokens that end a row; None: those of ``model.generation_config``.
        slots: rows of the cache. With 1 there are models that need it: those that are told no positions, that add
            ALiBi to scores, or that hide keys by masks of their own, which count from the longest row.
        room: tokens of a row of the cache, prompt included; None: what the longest prompt needs.
        sequences: the number of each prompt's sequence, for ``sampling``; None: 0, 1, ...
        logprobs: how likely each token was, too.

    Returns:
        For each prompt, in their order, (n,) int64, n <= max_new_tokens, with the token that ended it; or a
        :class:`Generated`.

    Raises:
        ValueError: the model trains, is of another kind, or needs ``slots=1``; a prompt is empty, has no room, takes
            more positions than the model has, or has other ids; before anything is computed. A model that keeps nothing
            in the cache, after its first prompt.
        zoo.comm.RankFailedError: another rank has raised; it names the rank.
    """
    together = Together(model, "zoo.inference.generate")
    with together.checking():
        ids, names, room, masked = _checked(model, prompts, max_new_tokens, sampling, slots, room, sequences)
        ends = _ends(model, end)
    if not ids:
        together.finish()
        return Generated([], []) if logprobs else []
    rows = min(slots, len(ids))
    run = _Run(
        model,
        Slots(config_of(model), rows, room),
        sampling,
        ends,
        max_new_tokens,
        masked=masked,
        scores=logprobs,
        together=together,
    )
    tokens = run.all(ids, names)
    return Generated(tokens, [torch.tensor(found) for found in run.logprobs]) if logprobs else tokens


def _checked(
    model: nn.Module, prompts: Sequence[Tensor | Sequence[int]], max_new_tokens: int, sampling: Sampling, slots: int,
    room: int | None, sequences: Sequence[int] | None,
) -> tuple[list[Tensor], list[int], int, bool]:  # fmt: skip
    """Prompts, the number of each one's sequence, room of a row, and whether rows of several lengths go together."""
    _check(model, max_new_tokens=max_new_tokens, slots=slots, room=1 if room is None else room)
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling={sampling!r}; it must be a zoo.inference.Sampling.")
    ids = token_ids(model, prompts)
    longest = max(range(len(ids)), key=lambda i: len(ids[i]), default=0)
    needed = (len(ids[longest]) if ids else 0) + max_new_tokens
    if ids:  # the last token is not computed with
        check_positions(model, needed - 1, f"prompt {longest} with max_new_tokens={max_new_tokens}")
    room = needed if room is None else room
    if ids and room < needed:
        raise ValueError(
            f"room={room}, and prompt {longest} has {len(ids[longest])} tokens and gets {max_new_tokens} more; "
            f"it must be at least {needed}."
        )
    names = numbers_of(sequences, len(ids))
    why = _one_at_a_time(model)
    if why and min(slots, len(ids)) > 1:
        raise ValueError(f"{why}, so that rows of several lengths cannot be computed together; give slots=1.")
    return ids, names, room, not why


def numbers_of(sequences: Sequence[int] | None, count: int) -> list[int]:
    """Of so many prompts' sequences; None: 0, 1, ...

    Raises:
        ValueError: they are another number, or one is no number of a sequence.
    """
    found = list(range(count)) if sequences is None else whole_numbers(sequences)
    if len(found) != count:
        raise ValueError(f"there are {count} prompts and {len(found)} sequences; give one for each, or none.")
    return found


class _Run:
    """One call of :func:`generate`. rows: of each slot in use, (prompt, its sequence). masked: a mask says what each
    row sees; else there is one row, which sees all. scores: log-probabilities are kept."""

    def __init__(
        self, model: nn.Module, slots: Slots, sampling: Sampling, ends: set[int], max_new_tokens: int, *, masked: bool,
        scores: bool, together: Together,
    ) -> None:  # fmt: skip
        self.model, self.slots, self.sampling, self.ends, self.most = model, slots, sampling, ends, max_new_tokens
        self.masked = masked or set(slots.windows) != {None}
        self.config = config_of(model)
        self.how = getattr(self.config, "_attn_implementation", "sdpa")
        self.last_only: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.last_only = {"logits_to_keep": 1}
        self.dtype = next(model.parameters()).dtype
        self.rows: list[tuple[int, int]] = []
        self.step: Step | None = None
        self.tokens: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.scores, self.together = scores, together
        self.head = head_in_parts(model) if sampling.is_of_all and not scores else None
        self.words: Words | None = None
        if self.head is not None and (part := part_of(self.head)) is not None:
            self.words = Words(part.cut.runs[0][0], part.region.comm)

    def all(self, ids: list[Tensor], names: list[int]) -> list[Tensor]:
        """The tokens of each prompt."""
        self.tokens, self.logprobs = [[] for _ in ids], [[] for _ in ids]
        waiting = list(reversed(range(len(ids))))
        device = next(self.model.parameters()).device
        with ExitStack() as stack:
            while self.together.goes_on(bool(waiting or self.rows)):
                with self.together.turn():
                    if waiting and len(self.rows) < self.slots.rows:
                        index = waiting.pop()
                        self._begin(ids[index].to(device), index, names[index])
                    elif self.rows:
                        if self.step is None and type(self.sampling) is Sampling:  # one of others may change anything
                            stack.enter_context(prepared(self.model))
                        self._step()
                    else:
                        self.together.idle()
        return [torch.tensor(found, dtype=torch.int64) for found in self.tokens]

    def _begin(self, prompt: Tensor, index: int, name: int) -> None:
        cache = Cache(self.config, len(prompt), keep_all=True)  # later a mask says what sliding layers see
        logits = self._forward(prompt[None], cache, position_ids=torch.arange(len(prompt), device=prompt.device)[None])
        layers: Any = cache.layers
        if any(layer.length != len(prompt) for layer in layers):
            raise ValueError(
                f"{type(self.model).__name__} keeps not every layer's tokens in the cache that it is given; let "
                "transformers generate with it."
            )
        if self._take(index, int(self._picked(logits, [(index, name)])[0])):
            return
        self.slots.admit(cache)
        self.rows.append((index, name))

    def _step(self) -> None:
        if self.step is None or self.step.rows != len(self.rows):
            self.step = Step(self.slots)
        step = self.step
        step.begin()
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
        with nullcontext() if self.head is None else parts_kept(self.head):
            found: Tensor = self.model(input_ids=ids, cache=cache, use_cache=True, **options, **self.last_only).logits
        self.together.ran()
        return found[:, -1]

    def _picked(self, logits: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        sequences = torch.tensor([name for _, name in rows])
        places = torch.tensor([len(self.tokens[index]) for index, _ in rows])
        picked = self.sampling.pick(logits, sequences, places, self.words)
        if self.scores:
            for (index, _), value in zip(rows, logprob(logits, picked).tolist(), strict=True):
                self.logprobs[index].append(value)
        return picked

    def _mask(self, step: Step) -> Any:
        if not self.masked:
            return None
        masks = step.masks(self.dtype, added=self.how == "eager")
        if len(masks) == 1:
            return masks[self.slots.windows[0]]
        return {kind: masks[window] for kind, window in zip(self.config.layer_types, self.slots.windows, strict=True)}

    def _take(self, index: int, token: int) -> bool:
        """Whether the row has ended with this token."""
        self.tokens[index].append(token)
        return token in self.ends or len(self.tokens[index]) == self.most


def _ends(model: nn.Module, end: int | Iterable[int] | None) -> set[int]:
    if end is None:
        end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if end is None:
        return set()
    try:
        several: Any = end.reshape(-1).tolist() if isinstance(end, Tensor) else end
        return {operator.index(token) for token in (several if isinstance(several, Iterable) else [several])}
    except TypeError as error:
        raise ValueError(f"end={end!r}; it must be a token id, or several.") from error


def _one_at_a_time(model: nn.Module) -> str:
    """Why rows of several lengths cannot be computed together; "": they can."""
    # Of a wrapper what is inside: it hands all arguments on.
    inner: nn.Module = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)
    known, name = inspect.signature(type(inner).forward).parameters, type(inner).__name__
    if "position_ids" not in known:
        return f"{name} cannot be told the positions of tokens"
    if getattr(config_of(model), "alibi", False):
        return f"{name} adds ALiBi to scores, and makes it of masks of another kind"
    for path, buffer in model.named_buffers():
        plain = buffer.dtype is torch.bool and buffer.dim() == 4 and buffer.shape[2] == buffer.shape[3]
        if plain and not bool(buffer[..., 0].all()):
            return f"{name} hides keys by a mask of its own ({path}), which counts from the longest row"
    return ""


def _check(model: nn.Module, **numbers: int) -> None:
    check_model(model, "zoo.inference.generate")
    check_numbers(**numbers)
    how = getattr(config_of(model), "_attn_implementation", "sdpa")
    if how not in ("sdpa", "eager"):
        raise ValueError(f"attn_implementation is {how!r}; zoo.inference.generate knows the masks of sdpa and eager.")
