"""Layers that are asked once: the bits of those that are asked at each call, and nothing that came since is missed."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.inject.models import SIZES, model_of
from tests.profiles import examples

pytest.importorskip("transformers")
from zoo.inference import Cache, Sampling, generate
from zoo.inference import generation as loop
from zoo.inject import inject
from zoo.inject import prepared as module
from zoo.inject.decoder import STATE
from zoo.inject.prepared import Prepared, prepared
from zoo.kernels import loading
from zoo.nn import pack_linears

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
PROMPTS = [[5, 9, 4], [7, 3, 8, 6, 11], [13]]
MODELS: dict[Any, Any] = {}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a prepared layer, whether it computed."""
    calls: list[bool] = []
    own = Prepared.__call__

    def counting(self: Prepared, *args: Any) -> Any:
        found = own(self, *args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(Prepared, "__call__", counting)
    return calls


def injected(family: str, dtype: torch.dtype, bits: int, int8: bool, invariant: bool) -> Any:
    key = family, dtype, bits, int8, invariant
    if key not in MODELS:
        model = model_of(family, dtype, head_dim=16, intermediate_size=64)  # codes of q, k and v are one product
        if bits:
            pack_linears(model, bits=bits, group_size=16, activations="int8" if int8 else "exact")
        inject(model, invariant=invariant)
        MODELS[key] = model
    return MODELS[key]


def is_prepared(model: Any) -> list[bool]:
    states = [module.__dict__[STATE] for module in model.modules() if STATE in module.__dict__]
    return [state.prepared is not None for state in states if state.pieces is not None]


def generated(model: Any, **options: Any) -> Any:
    return generate(model, PROMPTS, max_new_tokens=6, end=[], logprobs=True, **options)


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) for part, with_ in zip(one, other, strict=True) for a, b in zip(part, with_, strict=True)
    )


@examples(times=2)
@given(
    family=st.sampled_from(["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3", "Mistral"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), bits=st.sampled_from([0, 8, 4]), int8=st.booleans(),
    invariant=st.booleans(), slots=st.integers(1, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_generated_tokens_have_the_bits_of_layers_that_are_asked(
    family: str, dtype: torch.dtype, bits: int, int8: bool, invariant: bool, slots: int, seed: int
) -> None:
    model = injected(family, dtype, bits, int8 and bits > 0, invariant)
    sampling = Sampling(seed=seed)
    found = generated(model, slots=slots, sampling=sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "__call__", lambda *_: None)
        assert same(found, generated(model, slots=slots, sampling=sampling))


@pytest.mark.parametrize("bits", [0, 8])
def test_each_layer_of_each_token_is_one_call(bits: int, taken: list[bool]) -> None:
    model = injected("Qwen3", torch.float32, bits, False, False)
    generate(model, PROMPTS[:1], max_new_tokens=6, end=[])
    assert taken == [True] * (2 * 5)  # the first token is the prompt's
    assert is_prepared(model) == [False, False]


def test_new_weights_between_two_calls_count(taken: list[bool]) -> None:
    model = model_of("Llama")
    inject(model)
    before = generated(model)
    old = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(old.detach().flip(0))
    after = generated(model)
    assert not same(before, after)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.copy_(old)
    assert same(before, generated(model))
    assert taken.count(True) >= 3 * 2 * 5


class Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def _hook(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda *_: None)


def _pre_hook(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)


def _own_forward(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def _module_of_others(model: Any) -> None:
    model.lm_head.__class__ = Doubling


def _attentions_are_wanted(model: Any) -> None:
    model.config._output_attentions = True
    model(input_ids=torch.tensor([[5, 9]]))  # from now on transformers' hooks are there


def _compiled_layer(model: Any) -> None:
    model.model.layers[0].compile(backend="eager", fullgraph=True)


CHANGES = [_hook, _pre_hook, _own_forward, _module_of_others, _attentions_are_wanted]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_model_that_others_have_their_hands_in_is_asked_at_each_call(change: Any, taken: list[bool]) -> None:
    model = model_of("Llama")
    inject(model)
    change(model)
    generated(model)
    assert not taken


@pytest.mark.dear
def test_compiled_layers_are_asked_at_each_call(taken: list[bool]) -> None:
    model = model_of("Llama")
    inject(model)
    right = generate(model, PROMPTS[:1], max_new_tokens=3, end=[])
    taken.clear()
    _compiled_layer(model)
    assert same([right], [generate(model, PROMPTS[:1], max_new_tokens=3, end=[])])
    assert not taken


def test_biases_of_codes_that_are_one_product_are_those_of_now(taken: list[bool]) -> None:
    model = model_of("Qwen2", head_dim=None, hidden_size=64, intermediate_size=64)
    pack_linears(model, bits=8, group_size=16)
    inject(model)
    with torch.no_grad(), prepared(model):
        generated(model)
        model.model.layers[1].self_attn.q_proj.bias.add_(1.0)
        found = generated(model)
    taken.clear()
    assert same(found, generated(model))
    assert not taken


class Replacing(Sampling):
    """Gives the model another weight while it generates."""

    model: Any = None

    def pick(self, *args: Any) -> torch.Tensor:
        layer = Replacing.model.model.layers[1].mlp.up_proj
        layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))
        return super().pick(*args)


def test_samplings_of_others_may_change_the_model(taken: list[bool]) -> None:
    found = []
    for own in (True, False):
        model = Replacing.model = model_of("Llama")
        inject(model)
        with pytest.MonkeyPatch.context() as patch:
            if not own:
                patch.setattr(Prepared, "__call__", lambda *_: None)
            found.append(generated(model, sampling=Replacing()))
    assert same(*found)
    assert not taken


def test_a_global_hook_that_puts_another_one_into_a_layer() -> None:
    model = injected("Llama", torch.float32, 0, False, False)
    right = generated(model)
    down = model.model.layers[0].mlp.down_proj
    handles: list[Any] = []

    def first(*_: Any) -> None:
        handles.pop(0).remove()
        handles.append(down.register_forward_hook(lambda _module, _args, y: 2 * y))

    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(first))
    try:
        assert not same(right, generated(model))
    finally:
        handles.pop().remove()
    assert same(right, generated(model))


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_interrupted_is_not_called_later(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose layers stayed prepared, a weight that is replaced counts."""
    model = model_of("Llama")
    inject(model)
    if when == "before":
        own, calls = module._prepared, []

        def interrupted(*args: Any) -> Any:
            calls.append(args)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return own(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_prepared", interrupted)
            with pytest.raises(KeyboardInterrupt):
                generated(model)
    else:
        state = model.model.layers[0].__dict__[STATE]
        with torch.no_grad(), prepared(model):
            stayed = state.prepared
        state.prepared = stayed
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach().flip(0))
    found = generated(model)
    monkeypatch.setattr(Prepared, "__call__", lambda *_: None)
    assert same(found, generated(model))
    assert is_prepared(model) == [False, False]


def test_a_call_that_is_refused_leaves_the_cache_as_it_was() -> None:
    model = injected("Llama", torch.float32, 0, False, False)
    layer: Any = model.model.layers[0]
    with torch.no_grad(), prepared(model):
        cache = Cache(model.config, room=8)
        model(input_ids=torch.tensor([[5, 9, 4]]), cache=cache, use_cache=True)
        x, angles = torch.randn(1, 1, SIZES["hidden_size"]), torch.zeros(1, 1, 7)
        with pytest.raises(ValueError, match="cos has shape"):
            layer(x, cache=cache, use_cache=True, position_embeddings=(angles, angles))
    assert [one.length for one in cache.layers] == [3, 3]  # type: ignore[attr-defined]


def test_what_a_prepared_layer_does_not_know_is_computed_as_ever(taken: list[bool]) -> None:
    model = model_of("Llama")  # whose attentions keep a hook of transformers
    inject(model)
    ids = torch.tensor([[5, 9, 4]])
    with torch.no_grad():
        right = model(input_ids=ids).logits
        with prepared(model):
            assert is_prepared(model) == [True, True]
            assert torch.equal(model(input_ids=ids).logits, right)
            alone = model(input_ids=ids[:, :1]).logits  # no cache of zoo.inference
            several = model(input_ids=ids, output_attentions=True).logits
    torch.testing.assert_close(several, right)
    torch.testing.assert_close(alone, right[:, :1])
    assert True not in taken
    with prepared(model):  # where gradients are wanted
        assert is_prepared(model) == [False, False]


def test_another_thread_asks_at_each_call(taken: list[bool]) -> None:
    model = injected("Llama", torch.float32, 0, False, False)
    right, found = generated(model), []
    taken.clear()
    with torch.no_grad(), prepared(model):
        thread = threading.Thread(target=lambda: found.append(generated(model)))
        thread.start()
        thread.join()
        assert is_prepared(model) == [True, True]  # the other thread took nothing away
    assert same(found[0], right)
    assert True not in taken
    assert is_prepared(model) == [False, False]


def test_a_failure_leaves_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = injected("Llama", torch.float32, 0, False, False)
    right = generated(model)

    def fail(*_: Any) -> Any:
        assert is_prepared(model) == [True, True]
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Step, "done", fail)
        with pytest.raises(RuntimeError, match="no more"):
            generated(model)
    assert is_prepared(model) == [False, False]
    assert same(right, generated(model))


def test_a_copy_is_not_prepared_by_the_model_it_is_of() -> None:
    model = model_of("Llama")
    inject(model)
    right = generated(model)
    with torch.no_grad(), prepared(model):
        other = copy.deepcopy(model)
    assert is_prepared(other) == [False, False]
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.zero_()
    assert not same(right, generated(other))


def test_without_kernels_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch, taken: list[bool]) -> None:
    model = injected("Llama", torch.float32, 0, False, False)
    right = generated(model)
    taken.clear()
    monkeypatch.setattr(loading, "classes", lambda: None)
    assert same(right, generated(model))
    assert not taken
    assert SIZES["vocab_size"] > max(int(tokens.max()) for tokens in right.tokens)
