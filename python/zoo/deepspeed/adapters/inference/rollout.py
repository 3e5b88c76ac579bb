"""Answers during training: ``HybridEngineRollout`` and ``build_rollout``, over ``zoo.inference.generate``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.data_classes import (
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)  # fmt: skip
from zoo.deepspeed.adapters.utilities.logs import warning_once

if TYPE_CHECKING:
    from zoo.inference import Sampling

Tensor = torch.Tensor
UNNECESSARY = ("use_shared_prefill", "align_decode_fronts", "enable_cache_trimming", "continuous_cache_capacity")
"""How rows share a cache of one length; here a row has a length of its own."""
SLOTS = 16


class HybridEngineRollout(RolloutEngine):
    """The module that an engine trains draws answers, from its parameters as they are: nothing is copied.

    Rows end on their own, and the next prompt takes their place. Answers are drawn by place
    (``zoo.inference.Sampling``) with a seed from torch's generator at each call: ``torch.manual_seed`` repeats them,
    whatever the batch. Decoder layers are injected where that is proved (``zoo.inject``); at stage 3 each step gathers
    each layer, and ranks that are done first go on until all are.

    The first answer of each call is scored as a trainer would. How far its log-probabilities are from those of
    generating is "rollout/logprob_gap" (mean) and "rollout/logprob_gap_most" of the next step's record, in nats;
    ``measures_gap = False`` leaves it out.

    Args:
        engine: of ``deepspeed.initialize``, or anything with ``module``, a causal model of transformers.
        tokenizer: with ``eos_token_id`` and ``pad_token_id``.
        cfg: ``use_graph_capture`` says nothing on a CPU; what is about caches of one length says nothing at all.
    """

    name = "hybrid_engine"
    measures_gap = True

    def __init__(self, engine: Any, tokenizer: Any, cfg: HybridEngineRolloutConfig | Any = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.cfg = HybridEngineRolloutConfig() if cfg is None else cfg
        self.use_graph_capture = bool(getattr(self.cfg, "use_graph_capture", False))
        for name in UNNECESSARY:
            if getattr(self.cfg, name, None):
                warning_once(f"{name} is unnecessary: rows of the cache have lengths of their own.")
        self._injected: bool | None = None

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """``n_samples_per_prompt`` answers to each prompt, one prompt's behind each other.

        Returns:
            Prompts as they were given, then answers, padded on the right to the longest; which tokens are real, the one
            that ends an answer with them; and the column where answers begin.

        Raises:
            ValueError: numbers of ``sampling`` that cannot be, a prompt without a token, or another model.
        """
        from zoo.inference import gap, generate, score  # with zoo-kernels

        drawn, times = _sampling(sampling), sampling.n_samples_per_prompt
        if type(times) is not int or times < 1:
            raise ConfigError(f"n_samples_per_prompt={times!r}; it must be a whole number, at least 1.")
        module: nn.Module = self.engine.module
        real = request.prompt_attention_mask.bool()
        prompts = [ids[seen].cpu() for ids, seen in zip(request.prompt_ids, real, strict=True) for _ in range(times)]
        training = [one for one in module.modules() if one.training]
        module.eval()
        shared, slots = getattr(self.engine, "rollout", None), sampling.continuous_batch_size
        how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "end": self._ends(), "logprobs": True}
        try:
            if shared is None:
                self._inject(module)
                slots = slots or min(SLOTS, max(len(prompts), 1))
                answers, said = generate(module, prompts, sampling=drawn, slots=slots, **how)
            else:  # the ranks that share a model draw by one seed
                drawn = replace(drawn, seed=shared.group.broadcast_object(drawn.seed))
                answers, said = shared.generate(prompts, sampling=drawn, slots=slots or SLOTS, **how)
            report = getattr(getattr(self.engine, "engine", None), "report", None)
            if report is not None and self.measures_gap:  # where ranks have parts of the parameters, on all of them
                scores = score(module, prompts[:1], answers[:1]) if shared is None else shared.score(
                    prompts[:1], answers[:1]
                )  # fmt: skip
                found = gap(said[:1], scores)
                if answers:
                    report("rollout/logprob_gap", found.mean)
                    report("rollout/logprob_gap_most", found.most)
        finally:
            for one in training:
                one.training = True
        return self._batch(request, answers, times)

    def _inject(self, module: nn.Module) -> None:
        if self._injected is None and getattr(self.engine, "injection", None) is not None:
            self._injected = False  # a DeepSpeedHybridEngine has done it
        if self._injected is None:
            from zoo.inject import inject

            try:
                inject(module)
                self._injected = True
            except ValueError as error:
                warning_once(f"the model generates as it is: {error}")
                self._injected = False

    def _ends(self) -> list[int]:
        found = getattr(self.tokenizer, "eos_token_id", None)
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    def _batch(self, request: RolloutRequest, answers: list[Tensor], times: int) -> RolloutBatch:
        prompts = request.prompt_ids.repeat_interleave(times, 0)
        mask = request.prompt_attention_mask.repeat_interleave(times, 0)
        rows, width = prompts.shape
        longest = max((len(one) for one in answers), default=0)
        pad = getattr(self.tokenizer, "pad_token_id", None)
        ends = self._ends()
        made = prompts.new_full((rows, longest), pad if isinstance(pad, int) else ends[0] if ends else 0)
        real = mask.new_zeros((rows, longest))
        for row, one in enumerate(answers):
            made[row, : len(one)], real[row, : len(one)] = one.to(made), 1
        starts = torch.full((rows,), width, dtype=torch.long, device=prompts.device)
        return RolloutBatch(torch.cat([prompts, made], 1), torch.cat([mask, real], 1), starts)

    def sync_weights(self, step: int) -> None:
        """Nothing: the parameters that are trained are those that generate."""

    def shutdown(self) -> None:
        """Take the fast layers out again."""
        if self._injected:
            from zoo.inject import detach

            detach(self.engine.module)
        self._injected = None


def _sampling(given: SamplingConfig) -> Sampling:
    from zoo.inference import Sampling

    seed = int(torch.randint(2**62, ()))
    top_k = given.top_k
    if top_k is None or (type(top_k) is int and top_k < 0):
        top_k = 0
    top_p = 1.0 if given.top_p is None else _number("top_p", given.top_p)
    return Sampling(temperature=_number("temperature", given.temperature), top_k=top_k, top_p=top_p, seed=seed)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r}; it must be a number.") from error


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any) -> RolloutEngine:
    """The engine that ``rollout_cfg.engine`` names: "hybrid_engine".

    Raises:
        ValueError: another name; no engine, or no tokenizer.
    """
    if kwargs:
        raise ConfigError(f"build_rollout got {', '.join(kwargs)}; it takes rollout_cfg, student_engine and tokenizer.")
    if rollout_cfg.engine != HybridEngineRollout.name:
        raise ConfigError(f"Unknown rollout engine {rollout_cfg.engine!r}; allowed: {HybridEngineRollout.name!r}.")
    if student_engine is None or tokenizer is None:
        raise ConfigError("the rollout engine 'hybrid_engine' needs both student_engine and tokenizer.")
    return HybridEngineRollout(
        student_engine, tokenizer, HybridEngineRolloutConfig(use_graph_capture=bool(rollout_cfg.use_graph_capture))
    )
