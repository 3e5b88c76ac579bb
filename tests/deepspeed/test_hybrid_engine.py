"""``hybrid_engine``: the model that is trained generates, at every stage, and training keeps its bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.deepspeed.test_init_inference import TRAINING
from tests.inject.models import model_of

pytest.importorskip("transformers")

from zoo.deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.inject.decoder import Decoder
from zoo.kernels import loading

PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}


def made(stage: int, model: Any = None, **section: Any) -> Any:
    model = model_of("Llama").train() if model is None else model
    document = {
        **TRAINING, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True, **section},
    }  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]


def train(engine: Any, rank: int, step: int) -> None:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_generates_from_the_newest_weights_and_trains_on_with_the_same_bits(stage: int) -> None:
    def fn(rank: int, generates: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        engine = made(stage)
        assert isinstance(engine, DeepSpeedHybridEngine)
        assert engine.injection is not None or not loading.native()
        found = []
        for step in range(3):
            train(engine, rank, step)
            if generates:
                found.append(engine.generate(PROMPTS, **GREEDY))
                assert engine.module.training
                assert all(module.training for module in engine.module.modules())
        return found, engine.engine.optimizer.consolidated_parameters()

    with_it, without = ([*sim.run(2, lambda rank, on=on: fn(rank, on))] for on in (True, False))
    for (found, state), (_, other) in zip(with_it, without, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
        whole = model_of("Llama")
        whole.load_state_dict(state, strict=False)
        assert torch.equal(found[-1], whole.generate(PROMPTS, **GREEDY))
    assert all(map(torch.equal, with_it[0][0], with_it[1][0]))


def test_ranks_that_are_done_go_on_where_they_share_parameters() -> None:
    """At stage 3 every token of every rank gathers layers: one prompt ends at once, the other does not."""

    def fn(rank: int) -> int:
        engine = made(3)
        first = int(engine.generate(PROMPTS[:1], **{**GREEDY, "max_new_tokens": 1, "eos_token_id": None})[0, -1])
        ends = first if rank == 0 else 96
        found = engine.generate(PROMPTS[:1], **{**GREEDY, "eos_token_id": ends})
        return int(found.shape[1])

    assert sim.run(2, fn) == [4, 8]


@pytest.mark.dear
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_share_a_model_to_generate(stage: int) -> None:
    """Each gets the tokens of its own prompts, from the newest weights, as if it had generated alone; and the next
    random number is what it would have been."""

    def fn(rank: int, degree: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
        engine = made(stage, model_of("Llama", torch.float64).train(), inference_tp_size=degree)
        torch.manual_seed(rank)
        found = []
        for step in range(2):
            train(engine, rank, step)
            prompts = PROMPTS[:, : 2 + step] + rank
            found.append(engine.generate(prompts, attention_mask=torch.ones_like(prompts), **GREEDY))
        state, drawn = engine.engine.optimizer.consolidated_parameters(), float(torch.rand(()))
        engine.destroy()
        return found, state, drawn

    alone, shared = ([*sim.run(2, lambda rank, n=n: fn(rank, n))] for n in (1, 2))
    for (found, state, drawn), (right, other, expected) in zip(shared, alone, strict=True):
        assert all(torch.equal(one, theirs) for one, theirs in zip(found, right, strict=True))
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert drawn == expected


def test_a_size_that_is_carried_out_is_not_said_to_have_no_effect(recwarn: pytest.WarningsRecorder) -> None:
    sim.run(2, lambda rank: made(3, inference_tp_size=2).destroy())
    assert not [str(w.message) for w in recwarn if "inference_tp_size" in str(w.message)]


@pytest.mark.dear
def test_prompts_of_ranks_that_share_a_model_have_one_width() -> None:
    def fn(rank: int) -> None:
        engine = made(3, inference_tp_size=2)
        with pytest.raises(ValueError, match=r"their prompts have \[2, 3\] columns"):
            engine.generate(PROMPTS[:, : 2 + rank], **GREEDY)
        with pytest.raises(ValueError, match="from one tensor of prompts"):
            engine.generate(PROMPTS, **GREEDY, return_dict_in_generate=True)

    sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.parametrize("degree", [1, 2])
def test_what_one_rank_refuses_is_told_on_all(degree: int) -> None:
    """Else the others would wait for it."""

    def fn(rank: int) -> list[torch.Tensor]:
        engine = made(3, inference_tp_size=degree, max_out_tokens=12)
        found = [engine.generate(PROMPTS, **GREEDY)]
        wrong = torch.ones(1, 20, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="a prompt of 20 tokens"):
            engine.generate(wrong if rank == 0 else PROMPTS, **GREEDY)
        if degree > 1:
            with pytest.raises(ValueError, match="ask for other things: max_new_tokens is 5 and 6"):
                engine.generate(PROMPTS, **{**GREEDY, "max_new_tokens": 5 + rank})
            with pytest.raises(ValueError, match=r"rank 1: .*from one tensor of prompts"):
                engine.generate(None if rank else PROMPTS, **GREEDY)
        return [*found, engine.generate(PROMPTS, **GREEDY)]

    for before, after in sim.run(2, fn):
        assert torch.equal(before, after)


@pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
def test_layers_are_fast_in_eval_and_leave_with_the_engine() -> None:
    engine = made(2)
    layers = [module for module in engine.module.modules() if isinstance(module, Decoder)]
    assert len(layers) == len(engine.injection.layers) - 1 or len(layers) <= len(engine.injection.layers)
    train(engine, 0, 0)
    assert {layer.__dict__["_zoo_injected"].runs for layer in layers} == {0}
    engine.eval()
    engine.module.generate(PROMPTS, **GREEDY)  # as trl's unwrapped model is called
    assert {layer.__dict__["_zoo_injected"].runs for layer in layers} == {5}
    engine.destroy()
    assert not any(isinstance(module, Decoder) for module in engine.module.modules())


def test_a_model_of_no_known_kind_generates_as_it_is() -> None:
    engine = made(1, model_of("GPTNeoX").train())
    before = copy.deepcopy(engine.module).eval()
    assert torch.equal(engine.generate(PROMPTS, **GREEDY), before.generate(PROMPTS, **GREEDY))


def test_auto_and_null_say_nothing() -> None:
    for value in ("auto", None):
        assert type(made(1, enabled=value)) is deepspeed.DeepSpeedEngine
        assert made(1, max_out_tokens=value).max_out_tokens == 512


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"max_out_tokens": 0}, r"hybrid_engine.max_out_tokens=0; it must be a whole number"),
        ({"inference_tp_size": 0}, r"hybrid_engine.inference_tp_size=0; it must be a whole number"),
        ({"max_tokens": 3}, "max_out_tokens"),
    ],
)
def test_what_cannot_be_is_told_at_initialize(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(1, **section)


def test_rows_have_a_most_and_pipelines_do_not_generate() -> None:
    engine = made(1, max_out_tokens=7)
    assert engine.generate(PROMPTS, **{**GREEDY, "max_new_tokens": 4}).shape[1] <= 7
    with pytest.raises(RuntimeError, match=r"max_out_tokens=7, prompt included.*give the section hybrid_engine"):
        engine.generate(PROMPTS, **GREEDY)
    layers = [torch.nn.Linear(2, 2)]
    with pytest.raises(sim.RankError, match="the model is a PipelineModule"):
        sim.run(
            1, lambda rank: made(0, deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss()))
        )
