"""Answers during training: of the newest weights, at every stage, as programs of DeepSpeed ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.deepspeed.test_init_inference import TRAINING
from tests.inject.models import model_of

pytest.importorskip("transformers")

from zoo.deepspeed.runtime.rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)  # fmt: skip

import zoo.deepspeed as deepspeed
from zoo import sim

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=2)
PROMPTS = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 11, 12, 13]])
REQUEST = RolloutRequest(PROMPTS, (PROMPTS > 0).long())
GREEDY = SamplingConfig(max_new_tokens=6, temperature=0)


def right_answers(model: Any, tokens: int = 6) -> torch.Tensor:
    found: torch.Tensor = model.eval().generate(
        PROMPTS, attention_mask=REQUEST.prompt_attention_mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        eos_token_id=2,
    )  # fmt: skip
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_answers_are_of_the_newest_weights(stage: int) -> None:
    def fn(rank: int) -> list[torch.Tensor]:
        model = model_of("Llama").train()
        rule = {"type": "SGD", "params": {"lr": 3.0}}
        document = {**TRAINING, "optimizer": rule, "zero_optimization": {"stage": stage}}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]
        rollout = build_rollout(RolloutConfig(), engine, TOKENIZER)
        found = []
        for step in range(2):
            ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            found.append(rollout.generate(REQUEST, GREEDY).input_ids)
            assert engine.module.training
            assert rollout.sync_weights(step) is None
            if step == 1:
                told = engine.engine.record.metrics  # of what was drawn after the step before
                assert 0 <= told["rollout/logprob_gap"] <= told["rollout/logprob_gap_most"] < 1e-4
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            state = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        rollout.shutdown()
        whole = model_of("Llama")
        whole.load_state_dict(state, strict=False)
        return [*found, right_answers(whole)]

    for first, last, right in sim.run(2, fn):
        assert not torch.equal(first, last)
        assert torch.equal(last, right[:, : last.shape[1]])
        assert bool((right[:, last.shape[1] :] == 0).all())


def test_ranks_that_share_parameters_roll_out_prompts_of_their_own() -> None:
    """At stage 3 every forward gathers from all ranks; their answers end at different tokens, and one has no prompt."""

    def fn(rank: int) -> tuple[list[int], bool, bool]:
        model = model_of("Llama").train()
        model.lm_head.eval()
        document = {**TRAINING, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]
        rollout = build_rollout(RolloutConfig(), engine, TOKENIZER)
        request = RolloutRequest(PROMPTS[2 * rank :], (PROMPTS[2 * rank :] > 0).long())
        found = rollout.generate(request, SamplingConfig(max_new_tokens=3 + rank, temperature=0))
        assert (rank < 2) == (found.input_ids.shape[0] > 0)
        return [*found.attention_mask.sum(1).tolist()], model.training, model.lm_head.training

    lengths, training, head = zip(*sim.run(3, fn), strict=True)
    assert [len(one) for one in lengths] == [3, 1, 0]
    assert (set(training), set(head)) == ({True}, {False})


@pytest.mark.dear
def test_ranks_that_share_a_model_draw_by_one_seed() -> None:
    """``inference_tp_size``: prompts of each rank, answered by both together; greedy ones are those of one rank."""

    def fn(rank: int, degree: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = model_of("Llama", torch.float64).train()
        document = {
            **TRAINING, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "hybrid_engine": {"enabled": True, "inference_tp_size": degree},
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]
        rollout = build_rollout(RolloutConfig(), engine, TOKENIZER)
        request = RolloutRequest(PROMPTS[rank:], (PROMPTS[rank:] > 0).long())
        torch.manual_seed(rank)
        greedy = rollout.generate(request, GREEDY).input_ids
        drawn = rollout.generate(request, SamplingConfig(max_new_tokens=6, temperature=1.0)).input_ids
        return greedy, drawn, 0 if engine.rollout is None else engine.rollout.degree

    alone, shared = ([*sim.run(2, lambda rank, n=n: fn(rank, n))] for n in (1, 2))
    for (greedy, drawn, degree), (right, _, none) in zip(shared, alone, strict=True):
        assert torch.equal(greedy, right)
        assert drawn.shape[0] == greedy.shape[0]
        assert (degree, none) == (2, 0)
    again = [*sim.run(2, lambda rank: fn(rank, 2))]
    assert all(torch.equal(one[1], other[1]) for one, other in zip(shared, again, strict=True))


def test_several_answers_to_each_prompt() -> None:
    engine = SimpleNamespace(module=model_of("Llama").train())
    rollout = HybridEngineRollout(engine, TOKENIZER)
    sampling = SamplingConfig(max_new_tokens=5, temperature=2.0, n_samples_per_prompt=3, continuous_batch_size=2)
    torch.manual_seed(0)
    found = rollout.generate(REQUEST, sampling)
    assert found.input_ids.shape[0] == found.batch_size == 9
    assert torch.equal(found.input_ids[:, :4], PROMPTS.repeat_interleave(3, 0))
    assert found.response_start_idx.tolist() == [4] * 9
    assert len({tuple(row.tolist()) for row in found.input_ids[:3]}) > 1
    for row, mask in zip(found.input_ids[:, 4:], found.attention_mask[:, 4:], strict=True):
        count = int(mask.sum())
        assert torch.equal(mask, (torch.arange(len(mask)) < count).long())
        assert bool((row[count:] == 0).all())
        assert (2 in row[:count].tolist()[:-1]) is False
        assert count == 5 or row[count - 1] == 2
    assert torch.equal(found.attention_mask[:, :4], REQUEST.prompt_attention_mask.repeat_interleave(3, 0))
    torch.manual_seed(0)
    sampling.continuous_batch_size = 7
    assert torch.equal(rollout.generate(REQUEST, sampling).input_ids, found.input_ids)
    assert not torch.equal(rollout.generate(REQUEST, sampling).input_ids, found.input_ids)


def test_layers_are_injected_and_given_back() -> None:
    from zoo.inject.decoder import STATE

    module = model_of("Llama").train()
    rollout = HybridEngineRollout(SimpleNamespace(module=module), TOKENIZER, HybridEngineRolloutConfig())
    right = right_answers(module)
    module.train()
    found = rollout.generate(REQUEST, GREEDY).input_ids
    assert torch.equal(found, right[:, : found.shape[1]])
    assert any(STATE in m.__dict__ for m in module.modules())
    rollout.shutdown()
    assert not any(STATE in m.__dict__ for m in module.modules())
    other = model_of("GPTNeoX").train()
    right = right_answers(other)
    other.train()
    found = HybridEngineRollout(SimpleNamespace(module=other), TOKENIZER).generate(REQUEST, GREEDY).input_ids
    assert torch.equal(found, right[:, : found.shape[1]])


def test_what_is_wrong_is_told() -> None:
    rollout = HybridEngineRollout(SimpleNamespace(module=model_of("Llama").train()), TOKENIZER)
    with pytest.raises(ValueError, match="n_samples_per_prompt=0"):
        rollout.generate(REQUEST, SamplingConfig(max_new_tokens=2, n_samples_per_prompt=0))
    with pytest.raises(ValueError, match=r"temperature=-1\.0"):
        rollout.generate(REQUEST, SamplingConfig(max_new_tokens=2, temperature=-1))
    with pytest.raises(ValueError, match=r"temperature=None; it must be a number"):
        rollout.generate(REQUEST, SamplingConfig(max_new_tokens=2, temperature=None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"top_k='5'; it must be a whole number"):
        rollout.generate(REQUEST, SamplingConfig(max_new_tokens=2, top_k="5"))  # type: ignore[arg-type]
    off = SamplingConfig(max_new_tokens=2, temperature=0, top_k=None, top_p=None)
    assert rollout.generate(REQUEST, off).input_ids.shape == (3, 6)
    with pytest.raises(ValueError, match="prompt 1 has shape"):
        rollout.generate(
            RolloutRequest(PROMPTS[:2], torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])), SamplingConfig(max_new_tokens=2)
        )
    assert rollout.engine.module.training
    with pytest.raises(ValueError, match="Unknown rollout engine 'mine'"):
        build_rollout(RolloutConfig(engine="mine"))
    with pytest.raises(ValueError, match="needs both student_engine and tokenizer"):
        build_rollout(RolloutConfig(), student_engine=object())
    with pytest.raises(ValueError, match="build_rollout got other; it takes"):
        build_rollout(RolloutConfig(), other=1)
