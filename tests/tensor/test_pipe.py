"""Pipe × data × tensor by a plan: a model of transformers, cut and then traced into stages, trains as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.profiles import examples
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import zoo.engine
from zoo import sim
from zoo.pipe import split as in_stages
from zoo.tensor import plan_of, split

STEPS, REPLICAS, MICRO = 2, 2, 2


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def batch(step: int, micro: int, replica: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    ids = torch.randint(37, (2, 7), generator=draws)
    return {"input_ids": ids, "labels": ids}


def train(pipe: int, data: int, tensor: int, stage: int, tied: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    model: Any = llama(tied)
    mesh, where = None, {"num_stages": 1}
    if pipe * data * tensor > 1:
        mesh = init_device_mesh("cpu", (pipe, data, tensor), mesh_dim_names=("pipe", "data", "tensor"))
        split(model, plan_of(model), mesh)
        where = {"mesh": mesh}
    model = in_stages(model, example={**batch(0, 0, 0), "use_cache": False}, **where)  # type: ignore[arg-type]
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO * (REPLICAS // data),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine, *_ = zoo.engine.initialize(config, model, mesh=mesh)
    numbers = []
    for step in range(STEPS):
        replicas = range(REPLICAS) if data == 1 else [engine.batch_rank]
        loss = engine.train_batch(iter([batch(step, m, replica) for replica in replicas for m in range(MICRO)]))
        numbers += [float(loss), float(engine.get_global_grad_norm())]
    found = engine.optimizer.consolidated_parameters()
    engine.destroy()
    return numbers, found


@pytest.mark.dear
@examples(times=0.2)
@given(
    pipe=st.integers(1, 2), data=st.integers(1, 2), tensor=st.integers(1, 3), stage=st.integers(0, 3),
    tied=st.booleans(),
)  # fmt: skip
@example(pipe=2, data=1, tensor=2, stage=3, tied=True)
def test_losses_norms_and_parameters_are_those_of_one_process(
    pipe: int, data: int, tensor: int, stage: int, tied: bool
) -> None:
    numbers, expected = train(1, 1, 1, 0, tied)
    names: set[str] = set()
    for seen, found in sim.run(pipe * data * tensor, lambda _: train(pipe, data, tensor, stage, tied), seed=0):
        assert seen == pytest.approx(numbers, rel=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
        names |= found.keys()
    assert names == expected.keys()


def test_shares_of_tokens_are_refused_where_the_first_layer_is_elsewhere() -> None:
    def one(rank: int) -> None:
        model: Any = llama(False)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        split(model, plan_of(model), mesh, sequence=True)
        with pytest.raises(ValueError, match="without sequence=True"):
            model.model.layers[1](torch.ones(1, 4, 24, dtype=torch.float64))

    sim.run(2, one, seed=0)
