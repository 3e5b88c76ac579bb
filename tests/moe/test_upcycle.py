"""Dense models whose MLPs become mixtures compute the same at first, and train as mixtures do."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.moe.models import VOCABULARY, AsInGPT2, Dense, Gated, Odd, Own, needs_transformers, of_transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.engine import initialize
from zoo.layout import split_of
from zoo.moe import (
    Capacity,
    GroupedExperts,
    MLPPreset,
    ModuleExperts,
    UpcycledMLP,
    balance_loss,
    is_moe_param,
    upcycle,
    whole_state_dict,
)
from zoo.zero import ZeroOptimizer

RATE = 0.05
KINDS = {"gated": Gated, "gpt2": AsInGPT2, "own": Own, "odd": Odd}
DESCRIBED = MLPPreset(mlp="Own", up="a", down="b", activation="phi")
IDS = torch.arange(9) * 3 % VOCABULARY


def up(model: nn.Module, kind: str, num_experts: int, **options: Any) -> nn.Module:
    modules = tuple(f"layers.{i}.mlp" for i in range(len(model.layers))) if kind == "odd" else ("*",)  # type: ignore[arg-type]
    return upcycle(model, num_experts, modules=modules, presets=(DESCRIBED,), **options)


def summed(layer: UpcycledMLP, kind: str) -> dict[str, torch.Tensor]:
    """The gradients of all experts, added up, by the names of the dense MLP."""
    experts: Any = layer.experts
    if kind == "odd":
        found = [dict(e.named_parameters()) for e in experts.list]
        return {name: sum(f[name].grad for f in found if f[name].grad is not None) for name in found[0]}  # type: ignore[misc]
    first, down = experts.up.grad.sum(0), experts.down.grad.sum(0)
    if kind == "gated":
        gate, rise = first.chunk(2, -1)
        return {"gate_proj.weight": gate.t(), "up_proj.weight": rise.t(), "down_proj.weight": down.t()}
    if kind == "own":
        return {"a.weight": first.t(), "b.weight": down.t(), "a.bias": experts.up_bias.grad.sum(0)}
    return {
        "c_fc.weight": first, "c_fc.bias": experts.up_bias.grad.sum(0), "c_proj.weight": down,
        "c_proj.bias": experts.down_bias.grad.sum(0),
    }  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_it_is_the_same_function(kind: str, num_experts: int, k: int) -> None:
    """And, because weights sum to 1, the gradients of the copies sum to that of what was copied."""
    dense = Dense(KINDS[kind])
    mixed = up(copy.deepcopy(dense), kind, num_experts, k=k)
    a, b = dense(IDS), mixed(IDS)
    torch.testing.assert_close(b, a)
    a.backward()
    b.backward(retain_graph=True)
    for old, new in zip(dense.layers, mixed.layers, strict=True):
        layer = new["mlp"]
        assert isinstance(layer, UpcycledMLP)
        assert isinstance(layer.experts, ModuleExperts if kind == "odd" else GroupedExperts)
        wanted = {name: p.grad for name, p in old["mlp"].named_parameters()}
        torch.testing.assert_close(summed(layer, kind), wanted)
    used = balance_loss(mixed)
    assert float(used.detach()) >= 2 - 1e-9  # 1 a layer where experts are used evenly
    mixed.zero_grad()
    used.backward()
    moved = [float(layer["mlp"].gate.weight.grad.abs().sum()) > 1e-9 for layer in mixed.layers]
    assert moved == [num_experts > k] * 2  # with all of them chosen there is nothing to balance


@dataclass(frozen=True)
class Case:
    data: int
    expert: int
    kind: str
    k: int
    stage: int
    clip_norm: float
    chunks: int
    recomputes: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data, expert = draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 1)]))
    return Case(
        data=data, expert=expert, kind=draw(st.sampled_from(sorted(KINDS))), k=draw(st.integers(1, 4)),
        stage=draw(st.integers(0, 3)), clip_norm=draw(st.sampled_from([0.0, 0.1])),
        chunks=draw(st.sampled_from([1, 2] if expert < 4 else [1])), recomputes=draw(st.booleans()),
    )  # fmt: skip


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    found: torch.Tensor = model((IDS[: 3 + 2 * rank] + step) % VOCABULARY)
    return found + 0.5 * balance_loss(model)


@pytest.mark.dear
@given(case=cases())
def test_any_split_trains_as_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (case.data, case.expert), mesh_dim_names=("data", "expert"))
        model = up(Dense(KINDS[case.kind]), case.kind, 4, k=case.k, ep_size=case.expert, mesh=mesh, chunks=case.chunks)
        model.recomputes = case.recomputes  # type: ignore[assignment]
        optimizer = ZeroOptimizer(
            model, stage=case.stage, mesh=mesh, data_axes=("data", "expert"), clip_norm=case.clip_norm, lr=RATE,
            optimizer=torch.optim.SGD, reduce_bucket_size=30, param_persistence_threshold=0,
        )  # fmt: skip
        for step in range(3):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = whole_state_dict(model, everywhere=True)
        optimizer.close()
        return found

    plain = up(Dense(KINDS[case.kind]), case.kind, 4, k=case.k)
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    num = case.data * case.expert
    for step in range(3):
        for rank in range(num):
            (loss_of(plain, rank, step) / num).backward()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), case.clip_norm)
        sgd.step()
        sgd.zero_grad()
    for found in sim.run(num, fn):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-9, atol=1e-9)


def test_an_engine_adds_the_balance_loss() -> None:
    document = {
        "train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "moe": {"enabled": True, "balance_coefficient": 0.5},
    }  # fmt: skip
    plain = upcycle(Dense(), 4)
    engine, *_ = initialize(document, copy.deepcopy(plain))
    loss_of(plain, 3, 0).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    engine.backward(engine(IDS))
    engine.step()
    torch.testing.assert_close(dict(engine.module.state_dict()), dict(plain.state_dict()))
    assert engine.record.metrics["moe/layers.0.mlp/load"] >= 1
    with pytest.raises(ValueError, match="whose part 'moe' changes the loss"):
        engine(IDS).backward()
    engine.destroy()
    engine, *_ = initialize({**document, "moe": {"enabled": True}}, plain)  # without a coefficient it changes none
    engine(IDS).backward()
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gated", "odd"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_saved_as_one_file_has_all_experts(kind: str, stage: int, tmp_path: Path) -> None:
    document = {
        "train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }  # fmt: skip

    def fn(rank: int) -> Any:
        engine, *_ = initialize(document, up(Dense(KINDS[kind]), kind, 4, ep_size=2))
        engine.backward(engine((IDS + rank) % VOCABULARY))
        engine.step()
        engine.save_16bit_model(tmp_path, "model.safetensors")
        found = whole_state_dict(engine.module)
        engine.destroy()
        return found

    found = sim.run(4, fn)[0]
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), found, rtol=0, atol=0)
    plain = up(Dense(KINDS[kind]), kind, 4)
    assert {name: t.shape for name, t in plain.state_dict().items()} == {name: t.shape for name, t in found.items()}


def test_what_is_chosen_drawn_and_kept() -> None:
    model = upcycle(Dense(layers=5), 4, every=2, router_std=0.5, seed=3, capacity=Capacity(factor=2.0))
    assert [isinstance(layer["mlp"], UpcycledMLP) for layer in model.layers] == [True, False, True, False, True]
    again = upcycle(Dense(layers=5), **json.loads(json.dumps(model.config.upcycled)))
    assert again.layers[0]["mlp"].capacity == Capacity(factor=2.0)
    assert [isinstance(layer["mlp"], UpcycledMLP) for layer in again.layers] == [True, False, True, False, True]
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    first, last = (model.layers[i]["mlp"].gate.weight for i in (0, 4))
    assert not torch.equal(first, last)
    assert 0.2 < float(first.detach().std()) < 0.8
    assert not any(split_of(p).axes for p in model.parameters())
    assert {is_moe_param(p) for p in again.layers[0]["mlp"].experts.parameters()} == {True}
    before = torch.random.get_rng_state()
    upcycle(Dense(), 4)
    fresh = Dense()
    torch.random.set_rng_state(before)
    Dense()
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(before)
    upcycle(Dense(), 4)
    assert torch.equal(torch.random.get_rng_state(), after)  # upcycle draws nothing from the generator of all
    frozen = fresh.requires_grad_(False).eval()
    upcycle(frozen, 4)
    layer = frozen.layers[0]["mlp"]
    assert not layer.training
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["gate.weight"]


def test_balance_losses_count_once() -> None:
    model = upcycle(Dense(), 4)
    with pytest.raises(ValueError, match="no forward in training mode with gradients since the last time"):
        balance_loss(model)
    model(IDS)
    copy.deepcopy(model)  # the graph of the last forward is not copied
    balance_loss(model)
    for forward in (lambda: model.eval()(IDS), lambda: torch.no_grad()(model.train())(IDS)):
        forward()
        with pytest.raises(ValueError, match="no forward in training mode"):
            balance_loss(model)
    with pytest.raises(ValueError, match="no upcycled layers"):
        balance_loss(Dense())
    model.recomputes = True  # type: ignore[assignment]
    (model(IDS) + balance_loss(model)).backward()
    with pytest.raises(ValueError, match="no forward in training mode"):
        balance_loss(model)  # what was recomputed is not another forward


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_experts": 4, "ep_size": 3}, "4 experts on ep_size=3 ranks"),
        ({"num_experts": 2, "k": 3}, "k=3 of 2 experts"),
        ({"num_experts": 4, "every": 0}, "every=0"),
        ({"num_experts": 4, "modules": "*"}, r"modules='\*'; it is a sequence"),
        ({"num_experts": 4, "modules": ("head.*",)}, "no MLP was found in Dense by the patterns"),
        ({"num_experts": 4, "chunks": 3}, "chunks=3 of 4 experts"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    model = Dense()
    with pytest.raises(ValueError, match=said):
        upcycle(model, **options)
    assert isinstance(model.layers[0]["mlp"], Gated)


# -- transformers itself ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma", "gpt_neox", "phi"])
def test_models_of_transformers(family: str, tmp_path: Any) -> None:
    """The same logits; trained, saved with the configuration, and made anew from the two."""
    from safetensors.torch import save_file

    dense = of_transformers(family)
    model = upcycle(copy.deepcopy(dense), 4, every=2 if family == "llama" else 1)
    assert sum(isinstance(m, UpcycledMLP) for m in model.modules()) == (1 if family == "llama" else 2)
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-9, atol=1e-9)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        (loss + 0.01 * balance_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)
    experts = next(m for m in model.modules() if isinstance(m, UpcycledMLP)).experts
    assert not torch.equal(experts.up[0], experts.up[1])  # they have become different

    model.config.save_pretrained(tmp_path)
    save_file({name: t.contiguous().clone() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    config = type(model.config).from_pretrained(tmp_path)
    again = upcycle(type(dense)(config).double(), **config.upcycled)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-9, atol=1e-9)
