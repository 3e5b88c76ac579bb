"""Models whose matrices are codes are injected too, and give what they gave."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import SIZES, model_of
from tests.inject.test_inject import counted, generated, logits, ran_injected
from tests.profiles import examples

pytest.importorskip("transformers")

from zoo.inject import detach, inject
from zoo.inject.decoder import STATE
from zoo.kernels.packed_linear import Activations
from zoo.nn import PackedLinear, pack_linears

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""q, k and v are whole blocks of rows: one product."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(
    family: str, dtype: torch.dtype = torch.float32, *, bits: int = 8, activations: Activations = "exact",
    **options: Any,
) -> Any:  # fmt: skip
    model = model_of(family, dtype, **options)
    left = pack_linears(model, bits=bits, group_size=16, symmetric=bits == 8, activations=activations)
    assert left == {}
    return model


def joints(model: Any) -> list[int]:
    """How many products of each layer are one call for several matrices."""
    return [len(layer.__dict__[STATE].pieces.joint) for layer in model.model.layers]


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3"])
def test_it_gives_what_it_gave(family: str, wide: bool, bits: int) -> None:
    model = packed(family, bits=bits, **(WIDE if wide else {}))
    plain = copy.deepcopy(model)
    inject(model)
    several = 0 if family == "Phi3" else 2 if wide else 0
    assert joints(model) == [several, several]
    calls = counted(model)
    for side in (None, "left", "right"):
        assert ran_injected(model, calls, lambda side=side: logits(model, side))
        torch.testing.assert_close(logits(model, side), logits(plain, side), rtol=1e-4, atol=1e-4)
        tokens = generated(model, side)
        assert torch.equal(tokens, generated(plain, side))
    detach(model)
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.matrix
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_activations_in_8_bits_stay_so(bits: int, wide: bool) -> None:
    """In layers of few tokens, in two calls, and of many, by operations: each product rounds what comes into it."""
    model = packed("Llama", bits=bits, activations="int8", **(WIDE if wide else {}))
    exact = packed("Llama", bits=bits, **(WIDE if wide else {}))
    exact.load_state_dict(model.state_dict())
    plain = copy.deepcopy(model)
    inject(model)
    assert joints(model) == ([2, 2] if wide else [0, 0])
    ids = torch.randint(3, SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for tokens in (ids[:, :1], ids):
            mine, theirs, without = model(tokens).logits, plain(tokens).logits, exact(tokens).logits
            near, far = (mine - theirs).abs().max(), (theirs - without).abs().max()
            # Where rounding before it differs in its last bit, a code may be the next one: some, and not all, are.
            assert float(near) < 0.5 * float(far)
            assert float((mine - without).abs().max()) > 0.25 * float(far)
    assert [layer.__dict__[STATE].runs for layer in model.model.layers] == [2, 2]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("bits", "dtype", "activations"),
    [  # each dtype with both ways to multiply, and both widths of codes
        pytest.param(bits, dtype, how, marks=[] if (bits == 8) == (how == "exact") else pytest.mark.slow)
        for bits in (8, 4) for dtype in DTYPES for how in ("exact", "int8")
    ],
    ids=str,
)  # fmt: skip
def test_scoring_and_generating_give_the_same_bits(bits: int, dtype: torch.dtype, activations: Activations) -> None:
    model = packed("Qwen2", dtype, bits=bits, activations=activations, **WIDE)
    inject(model, invariant=True)
    ids = torch.randint(3, SIZES["vocab_size"], (1, 30), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        scored = model(out.sequences, use_cache=False).logits[0, 29:-1]
    made = torch.cat(out.logits)
    assert torch.equal(made, scored.to(made.dtype)[: len(made)])


@pytest.mark.dear
@examples(times=1)
@given(
    change=st.sampled_from(["bias", "codes", "layer", "moved", "copied", "loaded"]), bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_what_is_changed_afterwards_counts(change: str, bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = packed("Qwen2", bits=bits, **WIDE)
    plain = copy.deepcopy(model)
    inject(model)
    before = logits(model)
    for one in (model, plain):
        attention = one.model.layers[seed % 2].self_attn
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if change == "bias":
                attention.k_proj.bias.add_(torch.randn(attention.k_proj.bias.shape, generator=generator))
            elif change == "codes":
                attention.v_proj.scales.mul_(torch.rand(attention.v_proj.scales.shape, generator=generator))
            elif change == "layer":
                made = torch.nn.Linear(64, 32)
                made.weight.copy_(torch.randn(32, 64, generator=generator) / 8)
                made.bias.zero_()
                attention.q_proj, attention.v_proj = attention.q_proj, made
            elif change == "loaded":
                state = {name: value + 0 for name, value in one.state_dict().items()}
                name = "model.layers.0.self_attn.q_proj.scales"
                state[name] = state[name] * 2
                one.load_state_dict(state)
    if change == "moved":
        model.to(torch.float32)
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.q, module.scales = module.q.clone(), module.scales.clone()
    if change == "copied":
        model = copy.deepcopy(model)
        assert joints(model) == [2, 2]
    assert torch.equal(logits(model), before) == (change in ("moved", "copied"))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(model), generated(plain))


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("change", ["codes", "scales", "beside one of several", "beside one alone"])
def test_memory_that_is_replaced_and_what_comes_beside_codes_counts(change: str, invariant: bool, bits: int) -> None:
    """``data = ...`` keeps the tensor, and its codes no longer lie beside the others."""
    model = packed("Llama", bits=bits, **WIDE)
    plain = copy.deepcopy(model)
    inject(model, invariant=invariant)
    logits(model)
    generated(model)
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(64, 2, generator=generator)
    for one in (model, plain):
        layer = one.model.layers[0]
        part = layer.mlp.down_proj if "alone" in change else layer.self_attn.v_proj
        if change == "codes":
            part.q.data = part.q.roll(64)
        elif change == "scales":
            part.scales.data = part.scales * 2
        else:
            part.left, part.right = low[: part.out_features], torch.ones(2, part.in_features) / 8
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(model), generated(plain))


def test_layers_that_are_codes_in_part() -> None:
    model = model_of("Llama", **WIDE)
    pack_linears(model, leave_out=["*.down_proj", "*.k_proj"])
    plain = copy.deepcopy(model)
    inject(model)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(model), generated(plain))


def test_what_stands_beside_codes_is_multiplied_too() -> None:
    model = packed("Llama", **WIDE)
    layer = model.model.layers[0].mlp.up_proj
    torch.manual_seed(0)
    layer.register_buffer("left", torch.randn(96, 2))
    layer.register_buffer("right", torch.randn(2, 64))
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match="codes with a low-rank part beside them"):
        inject(model, invariant=True)
    inject(model)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(generated(model), generated(plain))
