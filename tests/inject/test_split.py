"""Injected models that zoo.tensor has split compute what the whole model does, on all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.inject.models import model_of, prompts, with_exact_positions
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from zoo import sim
from zoo.comm import Communicator
from zoo.inject import decoder, detach, inject
from zoo.inject.decoder import Decoder
from zoo.kernels import loading
from zoo.nn import PackedLinear, pack_linears
from zoo.tensor import plan_of, split
from zoo.tensor.proof import exact

UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
CASES = [
    ("Llama", 2, {}), ("Llama", 4, {}), ("Llama", 2, UNEVEN), ("Llama", 3, UNEVEN), ("Qwen2", 2, {}), ("Qwen3", 2, {}),
    ("Phi3", 2, {}), ("Gemma", 2, {}),
]  # fmt: skip


def parts(family: str, degree: int, options: dict[str, Any]) -> Any:
    model = with_exact_positions(model_of(family, torch.float64, **options))
    mesh = init_device_mesh("cpu", (1, degree), mesh_dim_names=("data", "tensor"))
    split(model, plan_of(model), mesh, training=False)
    return model


@torch.no_grad()
def computed(model: Any, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(**prompts(side)).logits
    return logits, model.generate(**prompts(side), max_new_tokens=5, do_sample=False)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_injected_split_model_computes_what_the_whole_one_does(case: tuple[str, int, dict[str, Any]]) -> None:
    family, degree, options = case

    def fn(rank: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
        model = parts(family, degree, options)
        done = inject(model)
        assert not done.refused
        layers = [module for module in model.modules() if isinstance(module, Decoder)]
        found = [computed(model, side) for side in ("left", "right")]
        return found, [layer.__dict__["_zoo_injected"].runs for layer in layers]

    whole = with_exact_positions(model_of(family, torch.float64, **options))
    for found, runs in sim.run(degree, fn):
        assert runs == [12, 12]  # of two prompts each, and of 2 · 5 tokens, the first of which a prompt gives
        for side, (logits, words) in zip(("left", "right"), found, strict=True):
            with exact():
                right, same = computed(whole, side)
            seen = prompts(side)["attention_mask"].bool()
            torch.testing.assert_close(logits[seen], right[seen], rtol=1e-11, atol=1e-11)
            assert torch.equal(words, same)


@pytest.mark.dear
@pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
@pytest.mark.parametrize("options", [{}, UNEVEN, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_a_token_of_a_split_layer_is_three_calls(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("before_cache", "attention", "feed_forward", "after_cache"):
        real = getattr(decoder, name)
        monkeypatch.setattr(decoder, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1])

    def tokens(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(torch.tensor([[3, 1, 4]]), use_cache=True)
            return [model(torch.tensor([[i]]), cache=first.cache, use_cache=True).logits for i in (1, 5)]

    def fn(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model = model_of("Llama", torch.float32, **options)
        split(model, plan_of(model), mesh, training=False)
        inject(model)
        calls.clear()
        return tokens(model)

    ranks = sim.run(2, fn)
    first = [] if options is UNEVEN else ["before_cache"] * 8  # of 2 layers and ranks
    assert sorted(calls) == ["attention"] * 8 + first + ["feed_forward"] * 8
    for found, expected in zip(ranks[0], tokens(model_of("Llama", torch.float32, **options)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, *ranks))


WIDE = {"hidden_size": 64, "intermediate_size": 96}
UNEVEN_WIDE = {**WIDE, **UNEVEN, "hidden_size": 144, "head_dim": 16}
CODED = [("Llama", 2, WIDE), ("Qwen2", 2, WIDE), ("Llama", 2, UNEVEN_WIDE), ("Phi3", 2, WIDE)]


@pytest.mark.dear
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", CODED, ids=str)
def test_parts_in_codes_compute_what_the_whole_model_in_codes_does(
    case: tuple[str, int, dict[str, Any]], bits: int
) -> None:
    family, degree, options = case

    def coded(model: Any) -> Any:
        left = pack_linears(model, bits=bits, group_size=16)
        assert not left
        return model

    def fn(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (1, degree), mesh_dim_names=("data", "tensor"))
        model = model_of(family, torch.float32, **options)
        split(model, plan_of(model), mesh, training=False)
        coded(model)
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        assert len(packed) == len([m for m in whole.modules() if isinstance(m, PackedLinear)])
        assert sum(m.q.numel() for m in packed) < 0.8 * num_codes
        found = [computed(model, "left")]
        copied = copy.deepcopy(model)
        assert not inject(model).refused
        found += [computed(model, side) for side in ("left", "right")]
        assert torch.equal(computed(copied, "left")[0], found[0][0])
        with pytest.raises(NotImplementedError, match="not pickled"):
            pickle.dumps(packed[0])
        return found

    whole = coded(model_of(family, torch.float32, **options))
    num_codes = sum(m.q.numel() for m in whole.modules() if isinstance(m, PackedLinear))
    expected = {side: computed(whole, side) for side in ("left", "right")}
    for found in sim.run(degree, fn):
        for side, (logits, words) in zip(("left", "left", "right"), found, strict=True):
            seen = prompts(side)["attention_mask"].bool()
            # Sums of 2 parts in fp32, of some hundred terms each.
            torch.testing.assert_close(logits[seen], expected[side][0][seen], rtol=1e-3, atol=1e-4)
            assert torch.equal(words, expected[side][1])


@pytest.mark.dear
@pytest.mark.parametrize("injects", [False, True])
def test_codes_are_summed_in_pieces_too(injects: bool) -> None:
    """Of parts of 48 and 32 columns one is numbers where groups have 32: both ranks make as many sums."""
    options = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16, "vocab_size": 96}

    def fn(rank: int, overlap: bool) -> torch.Tensor:
        comm, model = Communicator(), model_of("Llama", torch.float32, **options)
        split(model, plan_of(model), comm, training=False, grain=16, overlap=overlap)
        left = pack_linears(model, group_size=32)
        assert bool(left) == (rank == 0)
        if injects:
            inject(model)
        found: torch.Tensor = computed(model, "left")[0]
        return found

    for rank in range(2):
        whole, pieces = (sim.run(2, lambda rank, on=on: fn(rank, on))[rank] for on in (False, True))
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)


def test_what_one_rank_refuses_all_do() -> None:
    def fn(rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        model = parts("Llama", 2, {})
        with torch.no_grad():
            before = model(**prompts()).logits
        if rank == 1:
            model.model.layers[0].mlp.extra = torch.nn.Linear(1, 1)
        done = inject(model)
        with torch.no_grad():
            found = model(**prompts()).logits
        detach(model)
        return done, before, found

    (first, *_), (second, *_) = found = sim.run(2, fn)
    assert first.layers == second.layers == ("model.layers.1", "model.norm")
    assert first.refused == {"model.layers.0": "another rank of its axis refuses it, and says why"}
    assert "there is mlp.extra besides" in second.refused["model.layers.0"]
    for _, before, after in found:
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
