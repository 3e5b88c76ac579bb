"""``deepspeed.init_inference``: its call forms, the engine, and careless uses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inject.models import model_of, prompts
from torch import nn

pytest.importorskip("transformers")

import transformers
from zoo.deepspeed.inference.config import DeepSpeedInferenceConfig
from zoo.deepspeed.inference.engine import InferenceEngine

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError
from zoo.deepspeed.adapters.utilities import logs
from zoo.inject.decoder import Decoder

FP32: dict[str, Any] = {"dtype": torch.float32}


def small(family: str) -> Any:
    """Not in eval mode, with dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **sizes)
        return transformers.GPT2LMHeadModel(config)
    if family == "OPT":
        config = transformers.OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
                                        max_position_embeddings=64, word_embed_proj_dim=32, **sizes)  # fmt: skip
        return transformers.OPTForCausalLM(config)
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                                     max_position_embeddings=64, vocab_size=97)  # fmt: skip
    return transformers.BertForMaskedLM(config)


def words(model: Any, side: str | None = "left", **more: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(**prompts(side), max_new_tokens=6, do_sample=False, pad_token_id=0, **more)
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings, each as often as it is given."""
    found: list[str] = []
    logs._warn_once.cache_clear()
    monkeypatch.setattr(logs.logger, "warning", lambda message, *args, **_: found.append(str(message)))
    return found


# -- the four call forms ----------------------------------------------------------------------------------------------


def test_without_anything_the_defaults_count(said: list[str]) -> None:
    engine = deepspeed.init_inference(model_of("Llama"))
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert {p.dtype for p in engine.parameters()} == {torch.float16}
    deepspeed.init_inference(model_of("Llama"))
    assert len([told for told in said if "dtype is float16" in told]) == 1
    assert engine.module.model.rotary_emb.inv_freq.dtype is torch.float32
    assert words(engine).shape == (3, 13)


@pytest.mark.dear
def test_with_a_configuration_with_arguments_and_with_both(tmp_path: Path) -> None:
    model, path = model_of("Llama"), tmp_path / "config.json"
    expected = words(model)
    path.write_text(json.dumps({"kernel_inject": True, "dtype": "fp32"}))
    given = {"dtype": torch.float32}
    for config, more in (
        ({**given, "replace_with_kernel_inject": True}, {}), (str(path), {}),
        (None, {**given, "kernel_inject": True}), (given, {"replace_with_kernel_inject": True}),
        ({**given, "kernel_inject": True}, {"replace_with_kernel_inject": True, **given}),
    ):  # fmt: skip
        engine = deepspeed.init_inference(copy.deepcopy(model), config, **more)
        assert engine._config.replace_with_kernel_inject
        assert len(engine.injection.layers) == 4
        assert torch.equal(words(engine), expected)
    assert given == {"dtype": torch.float32}  # as it was


@pytest.mark.parametrize(
    ("config", "more", "told"),
    [
        ({"kernel_inject": True}, {"kernel_inject": False}, "Conflicting argument 'replace_with_kernel_inject'"),
        ({"kernel_inject": True}, {"replace_with_kernel_inject": False}, "Conflicting argument"),
        ({"tp": {"tp_size": 1}, "tensor_parallel": {"tp_size": 2}}, {}, "tensor_parallel is .*another name of it"),
        ({"mp_size": 2}, {"tp": {"tp_size": 4}}, r"mp_size is 2, and tensor_parallel.tp_size, its name now, is 4"),
        ({"kernels_inject": True}, {}, "'kernels_inject' is no key .*near it: kernel_inject"),
        ({"tp": {"tpsize": 2}}, {}, "tensor_parallel: 'tpsize' is no key .*near it: tp_size"),
        ({"quant": {"weight": {"num_bit": 4}}}, {}, "quant.weight: 'num_bit' is no key .*near it: num_bits"),
        ({"zero": {"stag": 1}}, {}, "zero.stag: it is no key of that section; near it: stage"),
        ({"xyz": 1}, {}, "its keys are replace_with_kernel_inject, dtype"),
        ({"dtype": torch.float64}, {}, "dtype: torch.float64; it is fp32, bf16, fp16 or int8"),
        ({"zero": 3}, {}, "zero: Input should be a valid dictionary"), ({"zero": None}, {}, "zero: Input should be"),
        ({"zero": [3]}, {}, "zero: Input should be"), ({"zero": "3"}, {}, "zero: Input should be"),
        ({"max_out_tokens": "many"}, {}, "max_out_tokens: "), ({"tp": {"tp_size": 0}}, {}, "tensor_parallel.tp_size"),
        (7, {}, "expected string or dictionary, got <class 'int'>"), ("nowhere.json", {}, "nowhere.json"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_is_unknown(config: Any, more: Any, told: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=told):
        deepspeed.init_inference(model, config, **more)
    assert model.weight.dtype is torch.float32


def test_the_default_configuration_is_one() -> None:
    found = deepspeed.default_inference_config()
    assert (found["dtype"], found["max_out_tokens"], found["tensor_parallel"]["tp_size"]) == ("torch.float16", 1024, 1)
    assert set(found) == set(DeepSpeedInferenceConfig.model_fields)
    assert DeepSpeedInferenceConfig(**found) == DeepSpeedInferenceConfig()
    assert deepspeed.init_inference(nn.Linear(2, 2), found)._config.dtype is torch.float16


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
@pytest.mark.parametrize("injects", [False, True])
def test_greedy_tokens_are_those_of_the_model(family: str, injects: bool, said: list[str]) -> None:
    model = model_of("Llama") if family == "Llama" else small(family)
    expected = words(copy.deepcopy(model).eval())
    engine = deepspeed.init_inference(model, **FP32, replace_with_kernel_inject=injects)
    assert engine.module is model
    assert not model.training
    assert not engine.training
    assert torch.equal(words(engine), expected)
    layers = [module for module in model.modules() if isinstance(module, Decoder)]
    assert len(layers) == (2 if injects and family == "Llama" else 0)
    why = [told for told in said if "replace_with_kernel_inject" in told]
    assert len(why) == (1 if injects and family != "Llama" else 0)
    assert all("can be injected" in told and "there is no" in told and "runs as it is" in told for told in why)


def test_a_pipeline_generates_with_it() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    known = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 97)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    generator = transformers.pipeline("text-generation", model=model_of("Llama"), tokenizer=tokens)
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2}
    expected = generator(["w5 w6 w7", "w8"], **how)
    generator.model = deepspeed.init_inference(generator.model, **FP32, replace_with_kernel_inject=True)
    assert generator(["w5 w6 w7", "w8"], **how) == expected


def test_a_model_without_generate_computes_its_forward() -> None:
    model = small("BERT")
    ids = prompts("right")
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(**ids).logits
    engine = deepspeed.init_inference(model, **FP32, kernel_inject=True, triangular_masking=False)
    assert torch.equal(engine(**ids).logits, expected)
    assert torch.equal(engine.forward(**ids).logits, expected)
    plain = deepspeed.init_inference(nn.Linear(2, 2), **FP32)
    assert not hasattr(plain, "generate")
    assert plain(torch.ones(1, 2)).requires_grad  # nothing is injected: what the model computes


def test_an_injected_model_computes_no_gradients() -> None:
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, kernel_inject=True)
    assert not engine(**prompts()).logits.requires_grad


def test_what_the_engine_does_not_have_is_the_models() -> None:
    model = model_of("Llama")
    engine = deepspeed.init_inference(model, **FP32)
    assert engine.config is model.config
    assert (engine.device, engine.main_input_name) == (torch.device("cpu"), "input_ids")
    assert engine.can_generate()
    assert deepspeed.init_inference(model, {**FP32, "config": {"hidden_size": 3}}).config == {"hidden_size": 3}
    assert deepspeed.init_inference(model, **FP32, args={"hidden_size": 4}).config == {"hidden_size": 4}
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018
    assert [name for name, _ in engine.named_children()] == ["module"]


def test_times_of_forwards_are_given_once() -> None:
    engine = deepspeed.init_inference(model_of("Llama"), **FP32)
    with pytest.raises(AssertionError, match="profiling is not enabled"):
        engine.model_times()
    engine(**prompts())
    engine.profile_model_time()
    engine.profile_model_time(use_cuda_events=False)
    engine(**prompts())
    words(engine)
    found = engine.model_times()
    assert len(found) == 1 + 6
    assert all(0 < ms < 60_000 for ms in found)
    assert engine.model_times() == []
    engine.destroy()
    engine(**prompts())
    assert not engine._model_times


def test_a_copy_times_its_own_forwards() -> None:
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, kernel_inject=True)
    engine.profile_model_time()
    copied = copy.deepcopy(engine)
    assert torch.equal(words(copied), words(engine))
    copied(**prompts())
    assert (len(engine.model_times()), len(copied.model_times())) == (6, 7)


def test_destroy_gives_the_model_back() -> None:
    model = model_of("Llama")
    engine = deepspeed.init_inference(model, **FP32, kernel_inject=True)
    engine.destroy()
    engine.destroy()
    assert not any(isinstance(module, Decoder) for module in model.modules())
    assert torch.equal(words(engine), words(model))


def test_it_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = nn.Linear(2, 2), []
    monkeypatch.setattr(model, "compile", lambda **given: seen.append(given))
    engine = deepspeed.init_inference(model, **FP32)
    for wrong, said in ((("inducto",), "no such backend; it has .*eager"), (("eager", {"dynamics": 1}), "dynamics")):
        with pytest.raises(ValueError, match=said):
            engine.compile(*wrong)
    assert not engine.is_compiled
    engine.compile("eager", {"dynamic": True})
    engine.compile()
    assert engine.is_compiled
    assert seen == [{"backend": "eager", "dynamic": True}]


# -- careless uses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injects", [False, True])
def test_a_model_becomes_codes_after_an_engine_with_fast_layers(injects: bool) -> None:
    """Its head was injected, and stayed numbers."""
    model = model_of("Llama")
    deepspeed.init_inference(model, **FP32, kernel_inject=True)
    engine = deepspeed.init_inference(model, dtype=torch.int8, kernel_inject=injects)
    once = deepspeed.init_inference(model_of("Llama"), dtype=torch.int8, kernel_inject=injects)
    assert engine.not_packed == once.not_packed == {}
    assert torch.equal(words(engine), words(once))


def test_a_model_twice() -> None:
    model = model_of("Llama")
    expected = words(model)
    first = deepspeed.init_inference(model, **FP32, kernel_inject=True)
    second = deepspeed.init_inference(model, **FP32, kernel_inject=True)
    for engine in (first, second):
        assert torch.equal(words(engine), expected)
    first.destroy()
    assert torch.equal(words(second), expected)
    packed = deepspeed.init_inference(model, dtype=torch.int8)
    tokens = words(packed)
    assert torch.equal(words(deepspeed.init_inference(model, dtype=torch.int8)), tokens)


@pytest.mark.parametrize(
    ("given", "told"),
    [("gpt2", "got a str"), (None, "got a NoneType"), (nn.Linear, "got a type"),
     (lambda: deepspeed.init_inference(nn.Linear(2, 2), **FP32), "give .module")],
)  # fmt: skip
def test_what_is_no_model(given: Any, told: str) -> None:
    model = given() if callable(given) and given is not nn.Linear else given
    with pytest.raises(ConfigError, match=told):
        deepspeed.init_inference(model, **FP32)
    with pytest.raises(ConfigError, match="got a dict"):
        InferenceEngine(nn.Linear(2, 2), {})


def test_wrapped_models_and_numbers_with_scales_beside_them() -> None:
    with pytest.raises(ConfigError, match=r"got a DataParallel; give it the model without a wrapper"):
        deepspeed.init_inference(nn.DataParallel(nn.Linear(2, 2)), **FP32)
    with pytest.raises(ConfigError, match="PipelineModule, of which each rank has some layers"):
        deepspeed.init_inference(deepspeed.PipelineModule([nn.Linear(2, 2)], num_stages=1), **FP32)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match=r"weight is torch.float8_e4m3fn, numbers that have a scale"):
        deepspeed.init_inference(model, **FP32)


TRAINING: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_that_an_engine_trains_is_injected_and_not_changed(stage: int) -> None:
    def fn(rank: int) -> None:
        model, ids = model_of("Llama"), prompts()["input_ids"]
        trained = deepspeed.initialize(model=model, config={**TRAINING, "zero_optimization": {"stage": stage}})[0]
        with pytest.raises(ConfigError, match=r"an engine trains, in torch.float32, and dtype=torch.float16 would"):
            deepspeed.init_inference(trained.module)
        with pytest.raises(ConfigError, match=r"give \.module"):
            deepspeed.init_inference(trained)
        with pytest.raises(ConfigError, match="and tensor_parallel and checkpoint would change it"):
            deepspeed.init_inference(trained.module, **FP32, tp={"tp_size": 2}, checkpoint="x")
        with pytest.raises(ConfigError, match=r"engine\.save_checkpoint saves it"):
            deepspeed.init_inference(trained.module, **FP32, save_mp_checkpoint_path="x")
        engine = deepspeed.init_inference(trained.module, **FP32, kernel_inject=True)
        trained.train()
        for _ in range(2):
            trained.backward(trained(ids, labels=ids).loss)
            trained.step()
        trained.eval()
        found = words(engine)
        plain = model_of("Llama")
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        assert torch.equal(found, words(plain))
        trained.destroy()
        assert deepspeed.init_inference(model, dtype=torch.bfloat16).dtype is torch.bfloat16

    sim.run(1, fn)


def test_a_model_that_an_engine_trains_in_parts() -> None:
    def fn(rank: int) -> None:
        trained = deepspeed.initialize(model=model_of("Llama"), config={**TRAINING, "zero_optimization": {"stage": 3}})[
            0
        ]
        with pytest.raises(ConfigError, match="at stage 3, whose parameters are split"):
            deepspeed.init_inference(trained.module, **FP32, kernel_inject=True)
        assert words(trained.module.eval()).shape == (3, 13)
        trained.destroy()
        engine = deepspeed.init_inference(trained.module, **FP32, kernel_inject=True)
        assert torch.equal(words(engine), words(model_of("Llama")))
        with deepspeed.zero.Init():
            parts = nn.Linear(4, 4)
        with pytest.raises(ConfigError, match=r"weight was made under deepspeed.zero.Init, and each rank has a part"):
            deepspeed.init_inference(parts, **FP32)

    sim.run(2, fn)


def test_a_model_without_values(tmp_path: Path) -> None:
    whole = model_of("Llama")
    whole.save_pretrained(tmp_path)
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = transformers.LlamaForCausalLM(whole.config)
    with pytest.raises(ConfigError, match=r"parameters on the meta device, .* no checkpoint="):
        deepspeed.init_inference(model, **FP32)
    engine = deepspeed.init_inference(model, **FP32, checkpoint=str(tmp_path), kernel_inject=True)
    assert torch.equal(words(engine), words(whole))
