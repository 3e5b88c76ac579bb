"""Models of transformers are whole graphs, with the bits of the hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

from zoo import sim
from zoo.compile import compile_whole
from zoo.zero import ZeroOptimizer

transformers = pytest.importorskip("transformers")

_SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}


def gpt2(dropout: float) -> Any:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2, use_cache=False, **drops
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: gpt2(0.0),
    "GPT-2 with dropout": lambda: gpt2(0.1),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **_HEADS)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**_SMALL, **_HEADS, head_dim=8, tie_word_embeddings=True)
    ),
}  # fmt: skip


def gradients(name: str, compiles: bool) -> list[torch.Tensor]:
    """Of one process without zoo."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if compiles:
        model.compile(backend="aot_eager")
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@functools.cache
def torch_keeps_bits(name: str) -> bool:
    """torch's own graph has the bits of the model: how products of matrices round depends on the machine."""
    return all(map(torch.equal, gradients(name, True), gradients(name, False)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threshold", [0, 10**4])
def test_it_has_no_break_and_the_bits_of_the_hooks(name: str, threshold: int) -> None:
    def fn(rank: int, compiles: bool) -> Any:
        torch.manual_seed(0)
        model = MODELS[name]().train()
        optimizer = ZeroOptimizer(
            model, stage=3, lr=0.1, optimizer=torch.optim.SGD, param_persistence_threshold=0,
            reduce_bucket_size=threshold or None, max_live_parameters=0,
        )  # fmt: skip
        whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
        losses, starts = [], []
        for step in range(2):
            ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(2 * step + rank))
            torch.manual_seed(step)
            with optimizer.sharded.record() as actions:
                loss = model(input_ids=ids, labels=ids).loss
                optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            starts.append(actions.starts())
        assert whole is None or (not whole.reasons and len(whole.plans) == 1)
        return losses, starts, optimizer.consolidated_parameters()

    torch._dynamo.reset()
    graphs, hooks = (sim.run(2, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (losses, starts, values), (right, others, parameters) in zip(graphs, hooks, strict=True):
        assert starts == others
        bits = {} if torch_keeps_bits(name) else {"rtol": 1e-4, "atol": 1e-6}
        same = functools.partial(torch.testing.assert_close, **(bits or {"rtol": 0, "atol": 0}))
        same(losses, right)
        same(values, parameters)
