"""Every field of ``DeepSpeedInferenceConfig``: honoured, refused with the reason, or unnecessary."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deepspeed.test_init_inference import FP32, small, words
from tests.inject.models import model_of, prompts
from torch import nn

pytest.importorskip("transformers")

from zoo.deepspeed.accelerator import get_accelerator
from zoo.deepspeed.inference import config as classes

import zoo.deepspeed as deepspeed
from zoo.config import ConfigError
from zoo.deepspeed.adapters.utilities import logs
from zoo.inject.decoder import Decoder
from zoo.nn import PackedLinear

INT8: dict[str, Any] = {"dtype": torch.int8}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    logs._warn_once.cache_clear()
    monkeypatch.setattr(logs.logger, "warning", lambda message, *args, **_: found.append(str(message)))
    yield found
    logs._warn_once.cache_clear()


def packed(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def refused(error: type[Exception], told: str, model: Any = None, **fields: Any) -> None:
    """And nothing has changed, though the model would have been cast."""
    model = (model_of("Llama") if model is None else model).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=told):
        deepspeed.init_inference(model, **{"dtype": torch.bfloat16, **fields})
    after = model.state_dict()
    assert {name: str(value.dtype) for name, value in after.items()} == {n: str(v.dtype) for n, v in before.items()}
    assert all(torch.equal(after[name].nan_to_num(9), value.nan_to_num(9)) for name, value in before.items())
    assert model.training
    assert not any(isinstance(module, Decoder) for module in model.modules())


def test_every_field_and_alias_is_there_with_its_default() -> None:
    known = {
        "replace_with_kernel_inject": ("kernel_inject", False), "dtype": (None, torch.float16),
        "tensor_parallel": ("tp", classes.DeepSpeedTPConfig()), "enable_cuda_graph": (None, False),
        "use_triton": (None, False), "triton_autotune": (None, False), "triangular_masking": ("tm", True),
        "moe": (None, classes.DeepSpeedMoEConfig()), "keep_module_on_host": (None, False),
        "quant": (None, classes.QuantizationConfig()), "checkpoint": (None, None), "base_dir": (None, ""),
        "set_empty_params": (None, False), "save_mp_checkpoint_path": (None, None),
        "checkpoint_config": ("ckpt_config", classes.InferenceCheckpointConfig()), "return_tuple": (None, True),
        "training_mp_size": (None, 1), "injection_policy": ("injection_dict", None),
        "injection_policy_tuple": (None, None), "config": ("args", None), "max_out_tokens": ("max_tokens", 1024),
        "min_out_tokens": ("min_tokens", 1), "transposed_mode": (None, False),
    }  # fmt: skip
    fields, made = classes.DeepSpeedInferenceConfig.model_fields, classes.DeepSpeedInferenceConfig()
    assert set(fields) == {*known, "zero"}
    assert {name: (fields[name].alias, getattr(made, name)) for name in known} == known
    assert made.zero.stage == 0
    assert {name: getattr(made.tensor_parallel, name) for name in type(made.tensor_parallel).model_fields} == {
        "enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None,
    }  # fmt: skip
    assert {name: getattr(made.moe, name) for name in type(made.moe).model_fields} == {
        "enabled": True, "ep_size": 1, "moe_experts": [1], "type": "standard", "ep_mp_group": None, "ep_group": None,
    }  # fmt: skip
    quant = {"enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1}
    assert made.quant.activation.model_dump() == quant
    assert made.quant.weight.model_dump() == {**quant, "quantized_initialization": {}, "post_init_quant": {}}
    assert made.quant.qkv.model_dump() == {"enabled": True}
    assert made.checkpoint_config.model_dump() == dict.fromkeys(
        ("checkpoint_dir", "save_mp_checkpoint_path", "base_dir")
    )


# -- dtype and quant --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "half"])
@pytest.mark.parametrize("injects", [False, True])
def test_floating_point(dtype: Any, injects: bool) -> None:
    kind = torch.float16 if dtype == "half" else dtype
    model = model_of("Llama")
    plain = copy.deepcopy(model).to(kind)
    plain.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    engine = deepspeed.init_inference(model, dtype=dtype, kernel_inject=injects)
    assert {p.dtype for p in model.parameters()} == {kind}
    with torch.no_grad():
        found, expected = engine(**prompts("right")).logits, plain(**prompts("right")).logits
    if injects:
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=40 * torch.finfo(kind).eps * scale)
    else:
        assert torch.equal(found, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("injects", [False, True])
def test_weights_are_codes(bits: int, injects: bool) -> None:
    model = model_of("Llama")
    whole = copy.deepcopy(model)
    engine = deepspeed.init_inference(model, **INT8, quant={"weight": {"num_bits": bits}}, kernel_inject=injects)
    found = packed(model)
    assert len(found) == 2 * 7 + 1
    assert {layer.bits for layer in found.values()} == {bits}
    assert {layer.group_size for name, layer in found.items() if "down" not in name} == {32}
    assert engine.not_packed == {}
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # what is no matrix stays
    for name, layer in found.items():
        whole.get_submodule(name).weight.data = layer.dense()
    assert torch.equal(words(engine), words(whole))
    scale = model_of("Llama").lm_head.weight.abs().max()
    error = (found["lm_head"].dense() - model_of("Llama").lm_head.weight).abs().max()
    assert 0 < error <= 0.51 * scale / (2 ** (bits - 1) - 1)


def test_groups_are_at_least_as_many_as_asked() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
            self.up_proj, self.other = nn.Linear(64, 64), nn.Linear(64, 256)
            self.odd = nn.Linear(17, 3)

    def sizes(**fields: Any) -> dict[str, int | None]:
        model = Block()
        engine = deepspeed.init_inference(model, **INT8, **fields)
        assert "no whole number of groups of 16" in engine.not_packed["odd"]
        return {name: layer.group_size for name, layer in packed(model).items()}

    same = dict.fromkeys(("q_proj", "out", "up_proj", "other"), 32)
    assert sizes() == sizes(quant=8) == sizes(quant={"weight": {"q_groups": 128}}) == same
    assert sizes(quant=129) == {**same, "q_proj": 16, "out": 16, "up_proj": 16}
    assert sizes(quant=(True, 100)) == {**same, "up_proj": 16}
    assert sizes(quant=(False, 100)) == sizes(quant=[False, 100]) == same
    assert sizes(quant={"mlp_extra_grouping": True, "weight": {"q_groups": 65}}) == {**same, "up_proj": 16}
    with pytest.raises(ConfigError, match="512 groups of up_proj, whose 64 x 64 elements make 256 of 16 at most"):
        deepspeed.init_inference(Block(), **INT8, quant=(True, 256))


def test_queries_keys_and_values_may_stay() -> None:
    model = model_of("Llama")
    engine = deepspeed.init_inference(model, **INT8, quant={"qkv": {"enabled": False}})
    assert set(engine.not_packed.values()) == {"quant.qkv.enabled is False"}
    assert {name.rpartition(".")[2] for name in engine.not_packed} == {"q_proj", "k_proj", "v_proj"}
    assert len(packed(model)) == 2 * 4 + 1


def test_codes_with_minima() -> None:
    model = model_of("Llama")
    deepspeed.init_inference(model, **INT8, quant={"weight": {"q_type": "asymmetric", "num_bits": 4}})
    assert all(layer.minima is not None for layer in packed(model).values())


def test_layers_are_packed_by_their_names() -> None:
    model = model_of("Llama")
    how = {"gate_proj": {"num_bits": 4, "group_size": 16, "group_dim": 1, "symmetric": False}, "lm_head": {}}
    deepspeed.init_inference(model, dtype=torch.bfloat16, quant={"weight": {"post_init_quant": how}})
    found = packed(model)
    assert sorted(found) == ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj"]
    assert (found["lm_head"].bits, found["lm_head"].minima) == (8, None)
    gate = found["model.layers.0.mlp.gate_proj"]
    assert (gate.bits, gate.group_size, gate.minima is None) == (4, 16, False)


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"quant": {"weight": {"num_bits": 3}}, **INT8}, ConfigError, "num_bits=3; codes have 8 or 4 bits"),
        ({"quant": False, **INT8}, ConfigError, "dtype is int8, and quant.enabled is False"),
        ({"quant": {"weight": {"enabled": False}}, **INT8}, ConfigError, "quant.weight.enabled is False"),
        ({"quant": (True, 8)}, ConfigError, "it is for dtype=torch.int8"),
        ({"quant": (8, True), **INT8}, ConfigError, r"a tuple is \(mlp_extra_grouping, groups\), as \(True, 8\)"),
        ({"quant": {"activation": {"num_bits": 4}}, **INT8}, NotImplementedError, "activations are multiplied as"),
        ({"quant": {"weight": {"quantized_initialization": {"a": 1}}}}, NotImplementedError, "post_init_quant packs"),
        ({"quant": {"weight": {"post_init_quant": {"wrong": {}}}}}, ConfigError, "no linear layer has 'wrong'"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {}, "gate": {}}}}}, ConfigError, "'gate' and 'mlp' are both"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"bits": 4}}}}}, ConfigError, "has 'bits'; near it: num_b"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": 4}}}}, ConfigError, "it takes num_bits"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"group_dim": 0}}}}}, ConfigError, "along rows, dim 1"),
        ({"quant": 100000, **INT8}, ConfigError, "quant asks for 100000 groups"),
        ({**INT8, "save_mp_checkpoint_path": "x"}, ConfigError, "codes are none; save with another dtype before"),
    ],
)  # fmt: skip
def test_quantisation_that_cannot_be(fields: Any, error: type[Exception], told: str) -> None:
    refused(error, told, **fields)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"num_bits": 3}, r"\['mlp'\]: bits=3"), ({"group_size": 20}, "group_size=20"),
        ({"group_size": 64}, r"\['mlp'\]: no layer can be packed.*rows of 32 are no whole number"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_packed_so(how: Any, told: str) -> None:
    refused(ConfigError, told, quant={"weight": {"post_init_quant": {"q_proj": {}, "mlp": how}}})


def test_names_and_no_codes() -> None:
    weight: Any = {"post_init_quant": {"mlp": {}}}
    refused(ConfigError, "and quant.enabled is False", quant={"enabled": False, "weight": weight})
    refused(ConfigError, "quant.weight.enabled is False", quant={"weight": {**weight, "enabled": False}})


@pytest.mark.parametrize(
    "fields", [INT8, {"quant": {"weight": {"post_init_quant": {"q_proj": {}, "down_proj": {"group_size": 16}}}}}]
)
def test_numbers_that_codes_have_not_are_told_before_any_layer_is_packed(fields: Any) -> None:
    model = model_of("Llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")  # in groups of 16, the others in those of 32
    refused(ValueError, "down_proj has NaN or infinite", model, **fields, kernel_inject=True)


@pytest.mark.dear
def test_activations_are_rounded_where_that_is_asked_for() -> None:
    """``enabled`` is True by default, and rounds nothing."""
    said: list[Any] = [{}, {"activation": {}}, {"activation": {"num_bits": 8}}, {"activation": {"enabled": False}}]
    for quant in said:
        model = model_of("Llama")
        deepspeed.init_inference(model, **INT8, quant=quant)
        assert {layer.activations for layer in packed(model).values()} == {"exact"}
    model = model_of("Llama")
    ids = prompts("right")
    engine = deepspeed.init_inference(model, **INT8, quant={"activation": {"enabled": True}}, kernel_inject=True)
    assert {layer.activations for layer in packed(model).values()} == {"int8"}
    exact = deepspeed.init_inference(model_of("Llama"), **INT8, kernel_inject=True)
    with torch.no_grad():
        assert not torch.equal(engine(**ids).logits, exact(**ids).logits)
    model = model_of("Llama")
    how = {"weight": {"post_init_quant": {"mlp": {}}}, "activation": {"enabled": True}}
    deepspeed.init_inference(model, **FP32, quant=how)
    assert {layer.activations for layer in packed(model).values()} == {"int8"}


def test_a_model_without_a_layer_for_codes() -> None:
    with pytest.raises(ConfigError, match=r"no layer of Embedding can be packed. It has no linear layers"):
        deepspeed.init_inference(nn.Embedding(3, 3), **INT8)


def test_layers_that_lie_the_other_way_round_stay() -> None:
    engine = deepspeed.init_inference(small("GPT2"), **INT8)
    assert list(packed(engine)) == ["module.lm_head"]
    assert engine.not_packed["transformer.h.1.mlp.c_fc"] == "it is a Conv1D, whose matrix lies the other way round"
    assert words(engine).shape == (3, 13)
    with pytest.raises(ConfigError, match=r"no layer of GPT2Model can be packed. h.0.attn.c_attn: it is a Conv1D"):
        deepspeed.init_inference(small("GPT2").transformer, **INT8)


def test_quantisation_that_is_off_is_for_every_dtype() -> None:
    model = model_of("Llama")
    off = {"enabled": False}
    deepspeed.init_inference(model, **FP32, quant={"activation": off, "qkv": off})
    deepspeed.init_inference(model, **FP32, quant={"enabled": False, "weight": {"q_groups": 8}})
    deepspeed.init_inference(model, **INT8, quant={"activation": {"enabled": False, "num_bits": 4}})
    assert packed(model)


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_what_is_generated_has_room() -> None:
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, max_tokens=13, min_tokens=2)
    assert words(engine).shape == (3, 13)
    ids = prompts()["input_ids"]
    for call in (
        lambda: engine.generate(ids, max_new_tokens=7), lambda: engine.generate(input_ids=ids, max_length=14),
        lambda: engine.generate(inputs=ids, max_new_tokens=7), lambda: engine.generate(ids.repeat(1, 2)),
        lambda: engine.generate(ids, generation_config=engine.generation_config.__class__(max_new_tokens=7)),
        lambda: engine.generate(ids, engine.generation_config.__class__(max_new_tokens=7)),
        lambda: engine.generate(inputs_embeds=torch.zeros(1, 7, 32), max_new_tokens=7),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"14 in all, which exceeds maximum length: max_out_tokens=13, prompt"):
            call()
        with pytest.raises(ValueError, match="max_out_tokens=13"):
            call()
    with pytest.raises(ValueError, match="a prompt of 7 tokens and is to add 20, 27 in all"):
        engine.generate(ids)  # so many it would have added
    engine.module.config.max_position_embeddings = 13  # or as many as have positions
    assert engine.generate(ids, do_sample=False, pad_token_id=0, eos_token_id=None).shape == (3, 13)
    engine.module.generation_config.max_length = 14
    with pytest.raises(ValueError, match="14 in all"):
        engine.generate(ids)
    engine.module.generation_config.max_length = 13
    with pytest.raises(ValueError, match=r"prompt of 12 tokens, and max_out_tokens=13 leaves 1 .* min_out_tokens=2"):
        engine.generate(torch.ones(1, 12, dtype=torch.long), max_new_tokens=1)
    both = {"input_ids": ids, "inputs_embeds": torch.zeros(3, 7, 32)}  # one prompt
    assert engine.generate(**both, max_new_tokens=6, do_sample=False, pad_token_id=0).shape == (3, 13)
    refused(ConfigError, "min_out_tokens=5 and max_out_tokens=4", max_tokens=4, min_tokens=5)


def test_the_least_that_is_generated_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = get_accelerator()
    each = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their size, fp32
    monkeypatch.setattr(type(accelerator), "available_memory", lambda self, device_index=None: 3 * 10 * each)
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, min_tokens=3)
    assert words(engine).shape == (3, 13)
    with pytest.raises(ValueError, match=rf"4 rows of 10 tokens, .* take {40 * each:,} bytes, and {30 * each:,} are"):
        engine.generate(torch.ones(4, 7, dtype=torch.long), max_new_tokens=3)
    refused(ConfigError, "1 rows of 31 tokens", min_tokens=31)


# -- what is refused, and what says nothing ---------------------------------------------------------------------------


def test_graphs() -> None:
    refused(AssertionError, "no graph has collectives", enable_cuda_graph=True, tp={"tp_size": 2})
    if not torch.cuda.is_available():
        engine = deepspeed.init_inference(model_of("Llama"), **FP32, enable_cuda_graph=True)  # nothing on a CPU
        assert torch.equal(words(engine), words(model_of("Llama")))


def test_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the name is a GPU's: tensors of the CPU are not recorded. tests/gpu has a real one."""
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, enable_cuda_graph=True)
    expected = engine(**prompts("right"), use_cache=False).logits
    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "cuda")
    monkeypatch.setattr(type(get_accelerator()), "current_device_name", lambda self: "cpu")
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda self, index=None: None)
    monkeypatch.setattr(type(get_accelerator()), "available_memory", lambda self, index=None: 1 << 40)
    engine = deepspeed.init_inference(model_of("Llama"), **FP32, enable_cuda_graph=True)
    engine.profile_model_time()
    found = engine(**prompts("right"), use_cache=False).logits
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert len(engine.model_times()) == 1  # of the call, and no hook's beside it
    words(engine)
    assert len(engine.model_times()) > 1
    refused(AssertionError, "moe.ep_size=2: no graph has", enable_cuda_graph=True, moe={"enabled": True, "ep_size": 2})
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "somewhere"}}
    refused(AssertionError, "no graph reads files", enable_cuda_graph=True, zero=nvme)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_streaming_is_from_nvme_alone(stage: int) -> None:
    refused(NotImplementedError, "weights are streamed from NVMe alone, with stage 3 and", zero={"stage": stage})
    refused(ConfigError, "nvme_path is not given", zero={"stage": 3, "offload_param": {"device": "nvme"}})


def test_what_cannot_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nvme(folder: Path) -> dict[str, Any]:
        return {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}

    refused(ConfigError, "of one class, and Linear has none", nn.Linear(4, 4), zero=nvme(tmp_path))
    refused(ConfigError, "is no folder that can be written to", zero=nvme(tmp_path / "none"))
    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "cuda")
    monkeypatch.setattr(type(get_accelerator()), "available_memory", lambda self, index=None: 1 << 40)
    refused(ConfigError, "the model would go to cuda", zero=nvme(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_are_read_from_nvme(dtype: torch.dtype, tmp_path: Path, said: list[str]) -> None:
    options: dict[str, Any] = {"dtype": dtype, "replace_with_kernel_inject": True}
    right = words(deepspeed.init_inference(model_of("Llama", num_hidden_layers=4), **options))
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 9000 if dtype is torch.float32 else 16_000}
    model = model_of("Llama", num_hidden_layers=4)
    engine = deepspeed.init_inference(model, **options, zero={"stage": 3, "offload_param": offload})
    assert len(engine.streamed.pinned) == 1
    assert len(engine.streamed.streamed) == 3
    assert torch.equal(words(engine), right)
    read = engine.streamed.bytes_read
    assert torch.equal(words(engine), right)
    assert engine.streamed.bytes_read > read
    engine.destroy()
    assert not list(tmp_path.iterdir())
    assert torch.equal(words(model), right)
    all_of_it = {**offload, "max_in_cpu": 10**6}
    engine = deepspeed.init_inference(model, dtype=dtype, zero={"stage": 3, "offload_param": all_of_it})
    assert engine.streamed.streamed == ()
    deepspeed.init_inference(model_of("Llama"), **FP32, zero={"stage": 3, "offload_param": {"device": "cpu"}})
    assert any("offload_param to the CPU is unnecessary" in one for one in said)


def test_stage_0_is_not() -> None:
    assert deepspeed.init_inference(nn.Linear(2, 2), **FP32, zero={"stage": 0})._config.zero.stage == 0


@pytest.mark.parametrize("name", ["use_triton", "triton_autotune", "transposed_mode"])
def test_what_is_unnecessary_is_said_once(name: str, said: list[str]) -> None:
    for _ in range(2):
        engine = deepspeed.init_inference(model_of("Llama"), **FP32, **{name: True})
    assert len(said) == 1
    assert f"init_inference({name}=True) is unnecessary: " in said[0]
    assert torch.equal(words(engine), words(model_of("Llama")))


def test_replace_method_says_nothing_any_more(said: list[str]) -> None:
    deepspeed.init_inference(nn.Linear(2, 2), **FP32, replace_method="auto")
    assert not said
    deepspeed.init_inference(nn.Linear(2, 2), **FP32, replace_method="other")
    assert said == ["replace_method says nothing any more; leave it out."]


@pytest.mark.parametrize("value", [False, True])
def test_layers_mask_and_return_what_the_models_own_do(value: bool) -> None:
    for model in (model_of("Llama"), small("BERT")):
        seen: list[list[Any]] = [[], []]
        plain = copy.deepcopy(model).eval()
        engine = deepspeed.init_inference(
            model, **FP32, kernel_inject=True, return_tuple=value, triangular_masking=value
        )
        for which, one in enumerate((plain, engine.module)):
            layers = one.model.layers if hasattr(one, "model") else one.bert.encoder.layer
            layers[0].register_forward_hook(lambda layer, inputs, found, to=seen[which]: to.append(found))
        with torch.no_grad():
            expected, found = plain(**prompts("right")).logits, engine(**prompts("right")).logits
        kept = prompts("right")["attention_mask"].bool()
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-4)
        assert type(seen[0][0]) is type(seen[1][0])


def test_a_model_may_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(get_accelerator()), "current_device_name", lambda self: "meta")
    moved = deepspeed.init_inference(nn.Linear(2, 2), **FP32)
    assert moved.module.weight.device.type == "meta"
    kept = deepspeed.init_inference(nn.Linear(2, 2), **FP32, keep_module_on_host=True)
    assert kept.module.weight.device.type == "cpu"


def test_empty_parameters_get_memory(said: list[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    engine = deepspeed.init_inference(model, **FP32, set_empty_params=True)
    assert {p.device.type for p in engine.parameters()} == {"cpu"}
    assert model[1].weight is model[0].weight
    assert any("set_empty_params" in told for told in said)
    whole = nn.Linear(2, 2)
    before = whole.weight.clone()
    deepspeed.init_inference(whole, **FP32, set_empty_params=True)
    assert torch.equal(whole.weight, before)
