"""Injected models compute what they computed, whatever is done with them; what is of no kind is refused by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.inject.models import INJECTED, REFUSED, model_of, prompts, with_exact_positions
from torch import nn

pytest.importorskip("transformers")

from zoo.inject import detach, inject
from zoo.inject.decoder import STATE, Decoder
from zoo.tensor.proof import exact

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@torch.no_grad()
def logits(model: Any, side: str | None = None, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model(**prompts(side), **options).logits
    return found


def generated(model: Any, side: str | None = "left", **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(**prompts(side), max_new_tokens=6, do_sample=False, **options)
    return found


def counted(model: nn.Module) -> list[bool]:
    """From now on, of each call of an injected layer: whether the injected forward ran to its end."""
    calls: list[bool] = []
    for module in model.modules():
        if isinstance(module, Decoder):
            own, before = type(module).__bases__[1], calls

            def forward(self: Any, *args: Any, own: Any = own, before: Any = before, **kwargs: Any) -> Any:
                before.append(False)
                return own.forward(self, *args, **kwargs)

            kind = type(own.__name__, (own,), {"forward": forward})
            injected = type(own.__name__, (Decoder, kind), {})
            module.__class__ = injected
            module.register_forward_hook(lambda *_: calls.append(True))
    return calls


def ran_injected(model: Any, calls: list[bool], run: Any) -> bool:
    """Whether all calls of layers in ``run`` were injected ones; none of them may be, too."""
    calls.clear()
    run()
    assert calls
    assert calls.count(False) in (0, calls.count(True))
    return False not in calls


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", INJECTED)
def test_an_injected_model_computes_what_it_computed(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype, **INJECTED[family])
    # fp64: sums in another order; else rounding of the model itself, of which fp64 shows how much it is.
    double = copy.deepcopy(model).double()
    cases: list[dict[str, Any]] = [{}, {"side": "left"}, {"side": "right"}, {"use_cache": False}]
    expected = [logits(model, **case) for case in cases]
    with exact():
        right = [logits(double, **case) for case in cases]
    words = generated(model)
    done = inject(model)
    if dtype is torch.float64:
        with_exact_positions(model)
    assert len(done.layers) == 4
    assert not done.refused
    calls = counted(model)
    assert ran_injected(model, calls, lambda: logits(model))
    for case, before, precise in zip(cases, expected, right, strict=True):
        assert ran_injected(model, calls, lambda case=case: logits(model, **case))
        seen = prompts(case.get("side"))["attention_mask"].bool()
        own = float((before - precise)[seen].abs().max())
        mine = float((logits(model, **case) - precise)[seen].abs().max())
        assert mine <= (1e-12 if dtype is torch.float64 else 2 * own) * max(1.0, float(precise.abs().max())), case
    if dtype is not torch.bfloat16:
        assert torch.equal(generated(model), words)
    detach(model)
    model.model.rotary_emb.__dict__.pop("forward", None)
    assert all(torch.equal(logits(model, **case), before) for case, before in zip(cases, expected, strict=True))
    assert not any(STATE in module.__dict__ for module in model.modules())


@pytest.mark.matrix
@pytest.mark.parametrize("family", REFUSED)
def test_what_is_of_no_kind_is_refused_and_stays_as_it_is(family: str) -> None:
    options, reason = REFUSED[family]
    model = model_of(family, **options)
    before, classes = logits(model), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"no layer of {family}ForCausalLM can be injected.*{reason}"):
        inject(model)
    assert torch.equal(logits(model), before)
    assert classes == [type(module) for module in model.modules()]


def test_layers_without_positions_are_refused_alone() -> None:
    model = model_of("SmolLM3", no_rope_layers=[1, 0], num_hidden_layers=2)
    before = generated(model)
    done = inject(model)
    assert set(done.layers) == {"model.layers.0", "model.norm", "lm_head"}
    assert "computes something else than its kind" in done.refused["model.layers.1"]
    assert "3 modules are injected" in str(done)
    assert "not model.layers.1: " in str(done)
    assert torch.equal(generated(model), before)


@pytest.mark.matrix
@pytest.mark.parametrize("cache", ["static", "dynamic", None])
def test_caches_of_transformers_serve_as_they_are(cache: str | None) -> None:
    model = model_of("Llama", torch.float64)
    options = {} if cache is None else {"cache_implementation": cache}
    before = generated(model, **options)
    inject(model)
    assert torch.equal(generated(model, **options), before)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_other_ways_of_decoding_serve_as_they_are(options: dict[str, Any]) -> None:
    model = model_of("Llama", torch.float64)
    given = {name: value[:1] for name, value in prompts().items()}
    before = model.generate(**given, max_new_tokens=6, do_sample=False, **options)
    inject(model)
    assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False, **options), before)


def test_hidden_states_and_attentions_are_those_of_the_model() -> None:
    plain, model = (model_of("Llama", attn_implementation="eager") for _ in range(2))
    inject(model)
    for options in ({"output_hidden_states": True}, {"output_attentions": True}, {"output_hidden_states": True}):
        with torch.no_grad():
            mine, theirs = (one(**prompts(), **options) for one in (model, plain))
        for name in ("hidden_states", "attentions"):
            assert (getattr(mine, name) is None) is (getattr(theirs, name) is None)
            for one, other in zip(getattr(mine, name) or (), getattr(theirs, name) or (), strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_eager_attention_is_injected_and_others_are_refused() -> None:
    model = model_of("Llama", torch.float64, attn_implementation="eager")
    with exact():
        before = [logits(model, side) for side in (None, "left", "right")]
    inject(with_exact_positions(model))
    assert ran_injected(model, counted(model), lambda: logits(model))
    seen = [prompts(side)["attention_mask"].bool() for side in (None, "left", "right")]
    for side, expected, rows in zip((None, "left", "right"), before, seen, strict=True):
        torch.testing.assert_close(logits(model, side)[rows], expected[rows], rtol=1e-12, atol=1e-12)
    detach(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation is 'flex_attention'; allowed: sdpa, eager"):
        inject(model)


# What is done with a model -------------------------------------------------------------------------------------------


def trained(model: Any, steps: int, between: Any = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(steps):
        given = prompts()
        model(**given, labels=given["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_has_the_bits_of_training_without_and_new_weights_are_seen_at_once() -> None:
    expected = trained(model_of("Qwen2"), 3)
    model = model_of("Qwen2")
    inject(model)
    calls, words = counted(model), []

    def generate() -> None:
        model.eval()
        assert ran_injected(model, calls, lambda: words.append(generated(model)))
        model.train()

    found = trained(model, 3, between=generate)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    detach(model)
    model.eval()
    assert torch.equal(generated(model), words[-1])


def test_what_layers_do_not_know_runs_their_own_forward() -> None:
    model = model_of("Llama")
    inject(model)
    calls = counted(model)
    given = prompts()
    assert not ran_injected(model, calls, lambda: model(**given))  # gradients may be wanted
    assert ran_injected(model, calls, lambda: logits(model, output_hidden_states=True))
    assert ran_injected(model, calls, lambda: logits(model))  # transformers leaves hooks behind
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not ran_injected(model, calls, lambda: logits(model))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not ran_injected(model, calls, lambda: logits(model))
    finally:
        handle.remove()
    assert ran_injected(model, calls, lambda: logits(model))
    model.to(torch.bfloat16)
    assert not ran_injected(model, calls, lambda: logits(model))
    model.to(torch.float32)
    assert ran_injected(model, calls, lambda: logits(model))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["self_attn", "mlp", "input_layernorm", "self_attn.v_proj", "mlp.act_fn"])
def test_hooks_inside_of_a_layer_are_called(name: str) -> None:
    model = model_of("Llama")
    expected = logits(model)
    inject(model)
    calls, seen = counted(model), []
    for layer in model.model.layers:
        layer.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    assert not ran_injected(model, calls, lambda: logits(model))
    assert len(seen) == 2
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.dear
def test_pieces_that_take_the_place_of_others_count() -> None:
    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = 2 * self.inner(x)
            return found

    for change in (
        lambda layer: setattr(layer.mlp, "down_proj", Twice(layer.mlp.down_proj)),
        lambda layer: setattr(layer, "mlp", Twice(layer.mlp)),
        lambda layer: nn.utils.parametrize.register_parametrization(layer.self_attn.q_proj, "weight", nn.Tanh()),
        lambda layer: setattr(layer.self_attn.o_proj, "forward", lambda x: x * 2),
    ):
        plain, model = model_of("Llama"), model_of("Llama")
        inject(model)
        for one in (plain, model):
            change(one.model.layers[0])
        assert torch.allclose(logits(model), logits(plain), atol=1e-5)


def test_values_and_sizes_of_weights_may_change() -> None:
    plain, model = model_of("Qwen3"), model_of("Qwen3")
    inject(model)
    calls = counted(model)
    for one in (plain, model):
        with torch.no_grad():
            one.model.layers[0].mlp.gate_proj.weight.mul_(1.5)
            one.model.layers[1].self_attn.q_norm.weight.add_(0.5)
        one.model.layers[1].mlp.up_proj.weight = nn.Parameter(
            one.model.layers[1].mlp.up_proj.weight.data.t().contiguous().t()
        )
        one.model.layers[0].self_attn.o_proj.weight.data = one.model.layers[0].self_attn.o_proj.weight.data * 2
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)
    assert torch.equal(generated(model), generated(plain))
    assert ran_injected(model, calls, lambda: logits(model))


def test_copies_are_injected_and_pickled_ones_are_not() -> None:
    model = model_of("Llama")
    expected = logits(model)
    inject(model)
    fast = logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    assert torch.equal(logits(other), fast)
    assert ran_injected(other, counted(other), lambda: logits(other))
    other = copy.deepcopy(model_of("Llama"))
    inject(other)
    read = pickle.loads(pickle.dumps(other))
    assert torch.equal(logits(read), expected)
    assert not any(STATE in module.__dict__ for module in read.modules())
    assert [type(m).__name__ for m in other.modules()] == [type(m).__name__ for m in read.modules()]


def test_state_dicts_are_those_of_the_model() -> None:
    model, plain = model_of("Phi3"), model_of("Phi3")
    inject(model)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    assert list(model.state_dict()) == list(state)
    model.load_state_dict({name: value * 0.5 for name, value in state.items()})
    plain.load_state_dict({name: value * 0.5 for name, value in state.items()})
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)
    model.load_state_dict(state, assign=True)
    assert torch.allclose(logits(model), logits(model_of("Phi3")), atol=1e-5)


def test_adapters_put_on_later_are_computed() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain, model = model_of("Llama"), model_of("Llama")
    inject(model)
    found = []
    for one in (plain, model):
        torch.manual_seed(1)
        found.append(logits(peft.get_peft_model(one, config)))
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert not torch.allclose(found[0], logits(model_of("Llama")), atol=1e-3)


@pytest.mark.dear
def test_a_compiled_model_computes_the_same() -> None:
    model = model_of("Llama")
    inject(model)
    expected = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(logits(compiled), expected, atol=1e-5)


def test_without_kernels_a_token_is_attended_to_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of ``cached_attention`` walks over the keys one by one."""
    from zoo.kernels import loading
    from zoo.kernels.cached_attention import reference

    def refused(*_: Any) -> None:
        raise AssertionError("the reference ran")

    model = model_of("Llama")
    before = generated(model)
    inject(model)
    monkeypatch.setattr(reference, "_of_query", refused)
    with loading.use_mode("reference"):
        assert torch.equal(generated(model), before)


def test_what_is_no_model_is_told() -> None:
    for wrong in ("gpt2", model_of("Llama").config, None):
        with pytest.raises(ValueError, match=f"inject got a {type(wrong).__name__}; give it a model"):
            inject(wrong)  # type: ignore[arg-type]


def test_inject_twice_is_refused_and_detach_twice_is_nothing() -> None:
    model = model_of("Llama")
    detach(model)
    inject(model)
    with pytest.raises(ValueError, match=r"the model is injected; zoo\.inject\.detach"):
        inject(model)
    detach(model)
    detach(model)
    inject(model)
    with pytest.raises(ValueError, match=r"no layer of Linear can be injected\. It has no decoder layers"):
        inject(nn.Linear(3, 3))


def test_a_model_of_two_dtypes_is_refused_by_layer() -> None:
    model = model_of("Llama")
    model.model.layers[1].mlp.to(torch.bfloat16)
    done = inject(model)
    assert "model.layers.1" not in done.layers
    assert "of more than one dtype" in done.refused["model.layers.1"]
