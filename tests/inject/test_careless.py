"""What people do with a model after it is injected: it computes what the plain one does, or says why not."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.inject.models import model_of, prompts
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers")
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from zoo.inject import detach, inject
from zoo.inject.decoder import STATE

IDS = prompts()["input_ids"]


def same(run: Callable[[Any], torch.Tensor], family: str = "Llama", dtype: Any = torch.float32, **options: Any) -> None:
    """``run`` gives the same with the plain model and with the injected one."""
    found = []
    for fast in (False, True):
        model = model_of(family, dtype, **options)
        if fast:
            inject(model)
        torch.manual_seed(0)
        found.append(run(model).detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def logits(model: Any, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(given.pop("ids", IDS), **given).logits
    return found


def test_attention_in_both_directions() -> None:
    same(logits, is_causal=False)
    same(lambda model: logits(model, is_causal=False))


@pytest.mark.parametrize("case", [("Llama", {"attention_dropout": 0.5}), ("Phi3", {"resid_pdrop": 0.5})], ids=str)
def test_dropout_in_training_without_gradients(case: tuple[str, dict[str, Any]]) -> None:
    same(lambda model: logits(model.train()), case[0], **case[1])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_that_are_computed_again_in_backward(dropout: float) -> None:
    found = []
    for fast in (False, True):
        model = model_of("Llama", attention_dropout=dropout).train()
        if fast:
            inject(model)
        torch.manual_seed(0)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_that_differ_by_a_buffer_or_a_patch_are_proved_each() -> None:
    class Shifted(llama.LlamaDecoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) + self.shift

    model = model_of("Llama")
    for i, layer in enumerate(model.model.layers):
        layer.__class__ = Shifted
        layer.register_buffer("shift", torch.tensor(float(i)))
    before = logits(model)
    done = inject(model)
    assert list(done.refused) == ["model.layers.1"]
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.fixture
def patched() -> Iterator[Callable[[Any, str, Any], None]]:
    before: list[tuple[Any, str, Any]] = []

    def patch(of: Any, name: str, value: Any) -> None:
        before.append((of, name, getattr(of, name)))
        setattr(of, name, value)

    yield patch
    for of, name, value in before:
        setattr(of, name, value)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["scaling", "eps", "forward", "rope"])
def test_options_and_functions_that_are_changed_afterwards(name: str, patched: Any) -> None:
    model = model_of("Llama")
    before = logits(model)
    inject(model)
    if name == "scaling":
        model.model.layers[0].self_attn.scaling = 1.0
    elif name == "eps":
        model.model.layers[0].input_layernorm.variance_epsilon = 10.0
    elif name == "forward":
        patched(llama.LlamaMLP, "forward", lambda self, x: 0 * x)
    else:
        patched(llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
    fast = logits(model)
    detach(model)
    right = logits(model)
    assert not torch.allclose(right, before, atol=1e-2)
    torch.testing.assert_close(fast, right, rtol=1e-4, atol=1e-4)


def test_another_attention_function_under_the_same_name() -> None:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = model_of("Llama")
    inject(model)
    try:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *a, **k: (0 * own(*a, **k)[0], None)
        fast = logits(model)
        detach(model)
        torch.testing.assert_close(fast, logits(model), rtol=1e-4, atol=1e-4)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


def test_function_modes_see_every_operation() -> None:
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return 2 * found if func is F.linear else found

    def run(model: Any) -> torch.Tensor:
        with Twice():
            return logits(model)

    same(run)
    with torch.device("cpu"):  # a mode too, which changes nothing
        model = model_of("Llama")
        inject(model)
        logits(model)
    assert model.model.layers[0].__dict__[STATE].runs == 1


@pytest.mark.parametrize("form", ["bool", "int"])
def test_masks_that_eager_attention_adds(form: str) -> None:
    see = torch.ones(7, 7, dtype=torch.bool).tril()[None, None].expand(3, 1, 7, 7)
    mask = see if form == "bool" else (see.int() - 1) * 10**6
    same(lambda model: logits(model, attention_mask=mask), attn_implementation="eager")


def test_tangents_are_not_lost() -> None:
    def run(model: Any) -> torch.Tensor:
        x = model.get_input_embeddings()(IDS).detach()
        with torch.no_grad():
            found: torch.Tensor = torch.func.jvp(
                lambda x: model(inputs_embeds=x, use_cache=False).logits, (x,), (torch.ones_like(x),)
            )[1]
        return found

    same(run, attn_implementation="eager")


@pytest.mark.dear
def test_a_model_generates_while_another_thread_injects_it() -> None:
    model, wrong = model_of("Gemma"), []
    right, going = logits(model), True

    def serve() -> None:
        while going:
            wrong.append(float((logits(model) - right).abs().max()))

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(5):
        inject(model)
        detach(model)
    going = False
    thread.join()
    assert max(wrong) < 1e-3


def _flex(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return logits(model)


def _heads(model: Any) -> torch.Tensor:
    attention = model.model.layers[0].self_attn
    for matrix, rows in ((attention.q_proj, 16), (attention.k_proj, 8), (attention.v_proj, 8)):
        matrix.weight = nn.Parameter(matrix.weight[:rows])
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :16])
    return logits(model)


def _bias(model: Any) -> torch.Tensor:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.ones(16))
    return logits(model)


def _sparse(model: Any) -> torch.Tensor:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to_sparse_csr())
    return logits(model, ids=IDS[:, :1])


def _strided(model: Any) -> torch.Tensor:
    model.model.layers[0].input_layernorm.weight = nn.Parameter(torch.ones(32, 2)[:, 0])
    model.model.norm.weight = nn.Parameter(torch.ones(32, 2)[:, 0])
    return logits(model)


class _Cache(DynamicCache):
    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any) -> Any:
        return super().update(key_states, value_states, layer_idx)


def _named(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.lm_head(input=torch.ones(2, 32))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    "run",
    [
        _flex, _heads, _bias, _sparse, _strided, _named,
        lambda model: logits(model, cache=_Cache()),
        lambda model: logits(model, ids=IDS[:, :1], position_ids=torch.tensor([5])),
        lambda model: logits(model, position_ids=torch.tensor([[0]])),
    ],
    ids=["implementation", "heads", "bias", "sparse", "strided", "named", "cache", "position", "positions"],
)  # fmt: skip
def test_calls_and_weights_that_the_fast_forward_does_not_know(run: Callable[[Any], torch.Tensor]) -> None:
    same(run)


@pytest.mark.dear
def test_copies_and_pickles_of_what_has_changed_since() -> None:
    peft = pytest.importorskip("peft")
    model = model_of("Llama")
    inject(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    torch.testing.assert_close(logits(copy.deepcopy(adapted)), logits(adapted))
    model = model_of("Llama")
    before = logits(model)
    inject(model)
    model.model.layers[0].compile(backend="eager")
    torch.testing.assert_close(logits(pickle.loads(pickle.dumps(model))), before)
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
    torch.testing.assert_close(logits(copy.deepcopy(model)), before, rtol=1e-4, atol=1e-4)
    detach(model)
    torch.testing.assert_close(logits(model), before)


def test_a_forward_that_was_bound_before_detach_goes_on() -> None:
    def wrap(module: Any) -> None:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs)

    for pick in (lambda m: m.model.layers[0], lambda m: m.model.norm, lambda m: m.lm_head):
        model = model_of("Llama")
        before = logits(model)
        inject(model)
        wrap(pick(model))
        detach(model)
        torch.testing.assert_close(logits(model), before)
    model = model_of("Llama")
    wrap(model.model.layers[0])
    assert inject(model).refused == {"model.layers.0": "it has a forward of its own, on the instance"}


def test_a_layer_that_is_there_twice_is_injected_once() -> None:
    def shared(fast: bool) -> torch.Tensor:
        model = model_of("Llama")
        model.model.layers[1] = model.model.layers[0]
        if fast:
            assert inject(model).layers == ("model.layers.0", "model.norm", "lm_head")
        return logits(model)

    torch.testing.assert_close(shared(True), shared(False), rtol=1e-4, atol=1e-4)


def test_the_moment_of_a_proof_does_not_matter() -> None:
    model = model_of("Llama", num_hidden_layers=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(inject(model).layers) == 5
    detach(model)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not inject(model).refused  # it runs its own forward while it has the hook
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
        assert "model.layers.0" in inject(model).layers
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    model.load_state_dict(plain.state_dict(), assign=True)
    model.model.rotary_emb = plain.model.rotary_emb
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(logits(model, ids=ids), logits(plain, ids=ids), rtol=1e-4, atol=1e-4)


def test_a_batch_of_weights() -> None:
    def run(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = torch.func.vmap(
                lambda w: torch.func.functional_call(model.lm_head, {"weight": w}, (torch.ones(2, 32),))
            )(torch.ones(3, 97, 32))
        return found

    same(run)


def test_a_trace_has_operations_of_torch_alone() -> None:
    class Alone(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(inputs_embeds=x, use_cache=False).logits
            return found

    model = model_of("Llama")
    inject(model)
    with torch.no_grad():
        traced = torch.jit.trace(Alone(model), (torch.ones(1, 3, 32),), check_trace=False)
    assert "zoo" not in str(traced.inlined_graph)


def test_sentences_name_the_nearest_kind() -> None:
    with pytest.raises(
        ValueError, match=r"QuickGELU.* is another activation than silu, gelu and relu \(kind 'llama'\)"
    ):
        inject(model_of("Llama", hidden_act="quick_gelu"))
    model = model_of("Llama")
    model.model.layers.append(nn.Identity())
    inject(model)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_a_model_in_training_mode_generates_fast_where_it_drops_nothing(family: str, drop: float) -> None:
    options = {"attention_dropout": drop} | ({"resid_pdrop": drop} if family == "Phi3" else {})
    model, plain = (model_of(family, **options).train() for _ in range(2))
    inject(model)
    layer: Any = model.model.layers[0]
    with torch.no_grad():
        torch.manual_seed(0)
        found = model(IDS, use_cache=True)
        torch.manual_seed(0)
        right = plain(IDS, use_cache=True)
        torch.testing.assert_close(found.logits, right.logits, rtol=1e-4, atol=1e-5)
        # A prompt, and what a trainer scores.
        assert layer.__dict__["_zoo_injected"].runs == 0
        torch.manual_seed(1)
        token = model(IDS[:, :1], cache=found.cache, use_cache=True).logits
        torch.manual_seed(1)
        other = plain(IDS[:, :1], cache=right.cache, use_cache=True).logits
    assert layer.__dict__["_zoo_injected"].runs == (drop == 0)
    torch.testing.assert_close(token, other, rtol=1e-4, atol=1e-5)
    layer.self_attn.attention_dropout = 0.3  # from now on
    with torch.no_grad():
        model(IDS[:, :1], cache=found.cache, use_cache=True)
    assert layer.__dict__["_zoo_injected"].runs == (drop == 0)
