"""``init_inference`` over ranks, and weights that it reads and writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.checkpointing.foreign.golden_model import Net
from tests.checkpointing.foreign.test_deepspeed import GOLDEN
from tests.deepspeed.test_init_inference import FP32, TRAINING, small, words
from tests.deepspeed.test_tensor_parallel import Layers
from tests.inject.models import SIZES, model_of, prompts
from torch import nn
from zoo.deepspeed.moe.layer import MoE

pytest.importorskip("transformers")

import transformers

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.comm import Communicator
from zoo.config import ConfigError
from zoo.deepspeed.adapters.inference import codes
from zoo.inject.decoder import Decoder
from zoo.nn import PackedLinear
from zoo.tensor import parameters_on_meta, plan_of, split


def whole(family: str = "Llama") -> Any:
    return model_of("Llama") if family == "Llama" else small(family).eval()


def wide() -> Any:
    """With parts of whole groups of 32."""
    return model_of("Llama", hidden_size=64, intermediate_size=128, head_dim=16)


def empty() -> Any:
    with parameters_on_meta():
        return transformers.LlamaForCausalLM(whole().config)


# -- tensor_parallel --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "injects"), [("Llama", False), ("Llama", True), ("GPT2", False), ("OPT", True)])
def test_ranks_generate_what_one_does(family: str, injects: bool) -> None:
    expected = words(whole(family))

    def fn(rank: int) -> None:
        model = whole(family)
        engine = deepspeed.init_inference(model, **FP32, tp={"tp_size": 2}, kernel_inject=injects)
        assert sum(p.numel() for p in model.parameters()) < 0.8 * sum(p.numel() for p in whole(family).parameters())
        assert dist.get_process_group_ranks(engine.mp_group) == [0, 1]
        assert torch.equal(words(engine), expected)
        assert any(isinstance(module, Decoder) for module in model.modules()) == (injects and family == "Llama")
        again = deepspeed.init_inference(model, **FP32, tp={"tp_size": 2}, kernel_inject=injects)
        assert torch.equal(words(again), expected)
        with pytest.raises(ConfigError, match=r"split over the ranks \[0, 1\] already, and tensor_parallel asks for 1"):
            deepspeed.init_inference(model, **FP32)

    sim.run(2, fn)


@pytest.mark.dear
@pytest.mark.parametrize("injects", [False, True])
def test_ranks_with_parts_in_codes_generate_what_one_with_all_codes_does(injects: bool) -> None:
    given = {"dtype": torch.int8, "kernel_inject": injects, "quant": {"weight": {"q_groups": 1}}}
    alone = deepspeed.init_inference(wide(), **given)
    ids = prompts()["input_ids"]
    expected = alone(ids).logits

    def fn(rank: int) -> None:
        engine = deepspeed.init_inference(wide(), **given, tp={"tp_size": 2})
        assert set(engine.not_packed) == set(alone.not_packed)
        torch.testing.assert_close(engine(ids).logits, expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(words(engine), words(alone))

    sim.run(2, fn)


def test_what_one_rank_cannot_pack_no_rank_does() -> None:
    def fn(rank: int) -> None:
        model = wide()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[0, -1] = float("nan")  # in the part of rank 1
        with pytest.raises(ValueError, match=r"mlp\.down_proj has NaN"):
            deepspeed.init_inference(model, dtype=torch.int8, tp={"tp_size": 2})

    sim.run(2, fn)


def test_groups_are_of_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have less elements, and are packed as the whole ones are; one that is no whole number of groups stays."""
    told: list[str] = []
    monkeypatch.setattr(codes, "warning_once", told.append)
    alone = deepspeed.init_inference(wide(), dtype=torch.int8, quant=100)
    kinds = {name: m.group_size for name, m in alone.module.named_modules() if isinstance(m, PackedLinear)}
    assert len(set(kinds.values())) == 2

    def fn(rank: int) -> None:
        engine = deepspeed.init_inference(wide(), dtype=torch.int8, quant=100, tp={"tp_size": 2})
        found = {name: m.group_size for name, m in engine.module.named_modules() if isinstance(m, PackedLinear)}
        assert found == kinds
        odd = model_of("Llama", hidden_size=64, intermediate_size=80, head_dim=16)
        how = {"post_init_quant": {"q_proj": {"group_size": 32}, "down_proj": {"group_size": 16}}}
        engine = deepspeed.init_inference(odd, dtype=torch.bfloat16, quant={"weight": how}, tp={"tp_size": 2})
        left = {name: why for name, why in engine.not_packed.items() if "down_proj" in name}
        assert set(left.values()) == {"its rows of 40 are no whole number of groups of 16"}
        assert type(engine.module.model.layers[0].self_attn.q_proj).__name__ == "ColumnPackedLinear"

    sim.run(2, fn)
    assert "this rank's part of model.layers.0.mlp.down_proj stays as it is: its rows of 40" in told[0]


def test_ranks_that_share_a_model_draw_the_same_tokens() -> None:
    def drawn(model: Any) -> torch.Tensor:
        found: torch.Tensor = model.generate(**prompts(), max_new_tokens=6, do_sample=True)
        return found

    alone = whole()
    torch.manual_seed(7)
    expected = drawn(alone)

    def fn(rank: int) -> None:
        model = whole()
        torch.manual_seed(7 + rank)
        engine = deepspeed.init_inference(model, **FP32, tp={"tp_size": 2})
        assert torch.equal(drawn(engine), expected)

    sim.run(2, fn)


def test_an_encoder_and_a_decoder_with_the_policy_that_the_tutorials_have() -> None:
    from transformers.models.t5.modeling_t5 import T5Block

    def made() -> Any:
        torch.manual_seed(0)
        config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                       decoder_start_token_id=0)  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).eval()

    ids = prompts()["input_ids"]
    expected = made().generate(ids, max_length=6, do_sample=False)

    def fn(rank: int) -> None:
        policy = {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}
        engine = deepspeed.init_inference(made(), **FP32, mp_size=2, injection_policy=policy, max_out_tokens=13)
        assert torch.equal(engine.generate(ids, max_length=6, do_sample=False), expected)
        with pytest.raises(ValueError, match="14 in all"):
            engine.generate(ids, max_length=7)

    sim.run(2, fn)


def test_ranks_that_are_told_differently() -> None:
    def fn(rank: int) -> None:
        for fields, name in (
            ({"dtype": (torch.float32, torch.bfloat16)[rank]}, "dtype"),
            ({**FP32, "kernel_inject": rank == 0}, "replace_with_kernel_inject"),
        ):
            with pytest.raises(ValueError, match=f"another {name} than rank 0"):
                deepspeed.init_inference(whole(), **fields, tp={"tp_size": 2})

    sim.run(2, fn)


def test_consecutive_ranks_share_a_model() -> None:
    def fn(rank: int) -> None:
        first = rank // 2 * 2
        engine = deepspeed.init_inference(whole(), **FP32, mp_size=2)
        assert dist.get_process_group_ranks(engine.mp_group) == [first, first + 1]
        assert deepspeed.init_inference(whole(), **FP32, mp_size=2).mp_group is engine.mp_group
        ids = prompts()["input_ids"] + rank // 2  # other prompts for the other model
        assert torch.equal(engine.generate(ids, max_new_tokens=3, do_sample=False),
                           whole().generate(ids, max_new_tokens=3, do_sample=False))  # fmt: skip

    sim.run(4, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["mpu", "tp_group", "former"])
def test_a_group_says_which_ranks_share_it(way: str) -> None:
    expected = words(whole())

    def fn(rank: int) -> None:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        mpu = SimpleNamespace(get_model_parallel_group=lambda: group)
        given = {"mpu": {"tp": {"mpu": mpu}}, "tp_group": {"tp": {"tp_size": 2, "tp_group": group}},
                 "former": {"mpu": mpu, "mp_size": 2}}[way]  # fmt: skip
        engine = deepspeed.init_inference(whole(), **FP32, **given)
        assert dist.get_process_group_ranks(engine.mp_group) == [rank % 2, rank % 2 + 2]
        assert engine.mpu is (None if way == "tp_group" else mpu)
        assert torch.equal(words(engine), expected)

    sim.run(4, fn)


def test_sizes_that_a_group_has_not_are_told() -> None:
    def fn(rank: int) -> None:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        mpu = SimpleNamespace(get_model_parallel_group=lambda: group)
        for wrong, told in (
            ({"tp_size": 4, "tp_group": group}, "tp_size is 4, and its tp_group has 2 ranks"),
            ({"tp_size": 4, "mpu": mpu}, "tp_size is 4, and its mpu has 2 ranks"),
            ({"tp_size": 1, "tp_group": group}, "tp_size is 1, and its tp_group has 2"),
            ({"mpu": 7}, r"without get_model_parallel_group\(\)"),
            ({"tp_size": 3}, "tp_size=3 in a job of 4 ranks, which it does not divide"),
        ):
            with pytest.raises(ConfigError, match=told):
                deepspeed.init_inference(whole(), **FP32, tp=wrong)

    sim.run(4, fn)


def test_it_is_off_or_for_more_ranks_than_there_are() -> None:
    engine = deepspeed.init_inference(whole(), **FP32, tp={"tp_size": 2, "enabled": False})
    assert torch.equal(words(engine), words(whole()))

    def fn(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"tp_size=2 in a job of 1 rank, .* zoo run --ranks 2"):
            deepspeed.init_inference(whole(), **FP32, tp={"tp_size": 2})

    sim.run(1, fn)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "policy",
    [
        {"injection_policy": {transformers.models.llama.modeling_llama.LlamaDecoderLayer: ("o_proj", "mlp.down_proj")}},
        {"injection_dict": {"LlamaDecoderLayer": ("o_proj", "down_proj")}},
        {"injection_policy_tuple": ("self_attn.o_proj", "down_proj")},
    ],
)
def test_an_injection_policy_names_row_parallel_layers(policy: dict[str, Any]) -> None:
    expected = words(whole())

    def fn(rank: int) -> None:
        model = whole()
        engine = deepspeed.init_inference(model, **FP32, tp={"tp_size": 2}, **policy)
        assert model.model.layers[0].self_attn.o_proj.in_features == 16
        assert torch.equal(words(engine), expected)

    sim.run(2, fn)
    assert torch.equal(words(deepspeed.init_inference(whole(), **FP32, **policy)), expected)


def test_a_policy_for_one_name_and_a_model_of_ones_own() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def fn(rank: int) -> None:
        engine = deepspeed.init_inference(
            nn.ModuleList([Layers()]), **FP32, tp={"tp_size": 2}, injection_policy={Layers: "down"}
        )
        layers = engine.module[0]
        assert layers.up.out_features == (4, 3)[rank]
        torch.testing.assert_close(layers(x), Layers()(x))

    sim.run(2, fn)


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"injection_policy": {"LlamaMLP": ("wrong",)}}, ValueError, "Injection policy not valid: .*names wrong"),
        ({"injection_policy": {"Other": ("a",)}}, ValueError, "has no such module"),
        ({"injection_policy": {"LlamaMLP": ("down_proj",)}, "kernel_inject": True}, AssertionError,
         "Cannot use both user specified injection policy and kernel injection"),
        ({"injection_policy": {"LlamaMLP": ("down_proj",)}, "injection_policy_tuple": ("a",)}, ValueError, "keep one"),
        ({"injection_policy": {int: ("down_proj",)}}, ValueError, "is no module"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be(fields: dict[str, Any], error: type[Exception], told: str) -> None:
    model = whole()
    with pytest.raises(error, match=told):
        deepspeed.init_inference(model, **fields)
    assert model.dtype is torch.float32


def test_features_are_dealt_in_multiples_of_the_grain() -> None:
    def fn(rank: int) -> None:
        sizes = []
        for given in ({}, {"tp_grain_size": 16}, {"tp_grain_size": 1}):
            model = model_of("Llama", intermediate_size=48 if given else 192, vocab_size=96 if given else 128)
            deepspeed.init_inference(model, **FP32, tp={"tp_size": 2, **given})
            sizes.append(model.model.layers[0].mlp.up_proj.out_features)
        assert sizes == [(128, 64)[rank], (32, 16)[rank], 24]
        model = model_of("Llama", intermediate_size=48)
        with pytest.raises(ValueError, match="multiples of 32"):
            deepspeed.init_inference(model, tp={"tp_size": 2, "tp_grain_size": 32})
        assert model.dtype is torch.float32

    sim.run(2, fn)


# -- moe --------------------------------------------------------------------------------------------------------------


def mixture() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2})
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.dear
def test_ranks_share_experts() -> None:
    expected = words(mixture())

    def fn(rank: int) -> None:
        model = mixture()
        engine = deepspeed.init_inference(model, **FP32, moe={"ep_size": 2, "num_experts": [4]})
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in mixture().parameters())
        assert torch.equal(words(engine), expected)
        former = deepspeed.init_inference(mixture(), **FP32, ep_size=2, moe_experts=[4], moe_type="standard")
        assert torch.equal(words(former), expected)
        for fields, told in (
            ({"ep_size": 3}, "moe.ep_size=3 in a job of 2 ranks"),
            ({"ep_size": 2, "moe_experts": 8}, r"moe_experts is \[8\], and the layers of the model have 4 experts"),
            ({"ep_size": 2, "type": "residual"}, "no layer of the model has a dense one beside its experts"),
            ({"ep_size": 2, "ep_mp_group": dist.group.WORLD}, "moe.ep_mp_group has other ranks"),
        ):
            with pytest.raises(ConfigError, match=told):
                deepspeed.init_inference(mixture(), **FP32, moe=fields)
        deepspeed.init_inference(mixture(), **FP32, moe={"ep_size": 2, "ep_group": dist.group.WORLD})
        with pytest.raises(NotImplementedError, match="share either experts or all layers"):
            deepspeed.init_inference(mixture(), **FP32, moe={"ep_size": 2}, tp={"tp_size": 2})

    sim.run(2, fn)


def test_layers_of_experts_have_their_own_ranks() -> None:
    def made(ep_size: int) -> Any:
        torch.manual_seed(0)
        return MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=ep_size, k=1, eval_capacity_factor=4.0).eval()

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    alone = made(1)
    expected = alone(x)[0]

    def fn(rank: int) -> None:
        for size in (1, 2):
            model = made(2)
            model.gate.load_state_dict(alone.gate.state_dict())
            for mine, expert in zip(model.experts.list, alone.experts.list[2 * rank : 2 * rank + 2], strict=True):
                mine.load_state_dict(expert.state_dict())
            engine = deepspeed.init_inference(model, **FP32, moe={"ep_size": size})
            torch.testing.assert_close(engine(x)[0], expected)
        with pytest.raises(ConfigError, match="ep_size is 4, and the MoE layers were made with ep_size=2"):
            deepspeed.init_inference(made(2), **FP32, moe={"ep_size": 4})

    sim.run(2, fn)


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    def fn(rank: int) -> None:
        engine = deepspeed.init_inference(mixture(), **FP32, moe={"ep_size": 2})
        ids, more = prompts()["input_ids"][: 1 + rank], {"max_new_tokens": 3 + 3 * rank, "do_sample": False}
        assert torch.equal(engine.generate(ids, **more), mixture().generate(ids, **more))

    sim.run(2, fn)


def test_experts_may_stay_as_they_are() -> None:
    for given in (True, False, {"ep_size": 2, "enabled": False}, {"num_experts": [4]}, {}):
        engine = deepspeed.init_inference(mixture(), **FP32, moe=given)
        assert torch.equal(words(engine), words(mixture()))
    with pytest.raises(ConfigError, match=r"moe_experts is \[4\], and no experts were found"):
        deepspeed.init_inference(whole(), **FP32, moe={"num_experts": [4]})


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Weights of :func:`whole`: a folder of safetensors, and two files of torch."""
    whole().save_pretrained(tmp_path / "hub")
    state = whole().state_dict()
    names = sorted(state)
    torch.save({name: state[name] for name in names[:7]}, tmp_path / "a.bin")
    torch.save({name: state[name] for name in names[7:]}, tmp_path / "b.bin")
    return tmp_path


@pytest.mark.dear
def test_a_checkpoint_in_each_of_its_grammars(saved: Path) -> None:
    files = {"type": "ds_model", "checkpoints": ["a.bin", "b.bin"], "version": 1.0}
    (saved / "files.json").write_text(json.dumps({**files, "base_dir": str(saved)}))
    expected = words(whole())
    for given in (
        {"checkpoint": str(saved / "hub")}, {"checkpoint": str(saved / "hub" / "model.safetensors")},
        {"checkpoint": "hub", "base_dir": str(saved)}, {"checkpoint": str(saved / "files.json")},
        {"checkpoint": files, "base_dir": str(saved)}, {"checkpoint": {**files, "base_dir": str(saved)}},
        {"checkpoint_config": {"checkpoint_dir": "hub", "base_dir": str(saved)}},
        {"ckpt_config": {"checkpoint_dir": str(saved / "hub")}, "checkpoint": str(saved / "hub")},
    ):  # fmt: skip
        assert torch.equal(words(deepspeed.init_inference(empty(), **FP32, **given)), expected)
    packed = deepspeed.init_inference(empty(), dtype=torch.int8, checkpoint=str(saved / "hub"), kernel_inject=True)
    assert torch.equal(words(packed), words(deepspeed.init_inference(whole(), dtype=torch.int8, kernel_inject=True)))
    other = whole()
    nn.init.zeros_(other.lm_head.weight)  # a model with values, which are written over
    engine = deepspeed.init_inference(other, **FP32, checkpoint=str(saved / "hub"), set_empty_params=True)
    assert torch.equal(words(engine), expected)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"checkpoint": "x.bin"}, "there is no file or folder .*x.bin', which checkpoint and base_dir name"),
        ({"checkpoint": "hub", "ckpt_config": {"checkpoint_dir": "other"}}, "keep one of them"),
        ({"checkpoint": {"checkpoints": []}}, "no checkpoints; a description has the keys"),
        ({"checkpoint": {"checkpoints": ["a.bin"], "kind": 1}}, "has 'kind'; a description"),
        ({"checkpoint": {"checkpoints": {"tp": ["a.bin"], "non_tp": []}}}, "injected layers .* order of their own"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin"], "parallelization": "zz"}}, "'pp' .whole tensors. or 'tp'"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin"], "parallelization": "tp"}, "training_mp_size": 3},
         "lists 2 files of tensor-parallel ranks, and .* says 3"),
        ({"checkpoint": {"checkpoints": ["a.bin"]}}, "tensors are missing"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin", "extra.safetensors"]}}, "1 are not the model's: extra"),
        ({"checkpoint": {"checkpoints": ["a.bin", "a.bin"]}}, "in a file before it"),
        ({"checkpoint": "text.bin"}, "cannot be read"),
        ({"checkpoint": {"checkpoints": 5}}, "checkpoints is 5; it must be a list of names"),
        ({"checkpoint": {"checkpoints": ["a.bin", None]}}, "it must be a list of names"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin"], "tp_size": "two"}}, "tp_size is 'two'; it must be a whole"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin"], "mp_size": -1}}, "mp_size is -1; it must be a whole"),
        ({"checkpoint": {"checkpoints": ["a.bin", "b.bin"], "base_dir": 5}}, "base_dir is 5; it must be the name of"),
    ],
)  # fmt: skip
def test_checkpoints_that_do_not_fit(saved: Path, given: dict[str, Any], told: str) -> None:
    save_file({"extra": torch.zeros(2)}, saved / "extra.safetensors")
    (saved / "text.bin").write_text("nothing of the kind")
    model = empty()
    with pytest.raises(ValueError, match=told):
        deepspeed.init_inference(model, **FP32, base_dir=str(saved), **given)
    assert all(p.is_meta for p in model.parameters())


def test_a_folder_of_hugging_face_with_files_of_torch(saved: Path) -> None:
    folder = saved / "old"
    folder.mkdir()
    for number, name in enumerate(("a.bin", "b.bin"), 1):
        (saved / name).rename(folder / f"pytorch_model-{number:05d}-of-00002.bin")
    engine = deepspeed.init_inference(empty(), **FP32, checkpoint=str(folder))
    assert torch.equal(words(engine), words(whole()))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_training(stage: int, tmp_path: Path) -> None:
    def train(rank: int) -> torch.Tensor:
        engine = deepspeed.initialize(model=whole(), config={**TRAINING, "zero_optimization": {"stage": stage}})[0]
        ids = prompts()["input_ids"] + rank
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(tmp_path)
        return words(engine.eval())

    expected = sim.run(2, train)[0]

    def fn(rank: int) -> None:
        engine = deepspeed.init_inference(empty(), **FP32, checkpoint=str(tmp_path), tp={"tp_size": 2})
        assert torch.equal(words(engine), expected)

    sim.run(2, fn)


@pytest.mark.parametrize("name", ["stage0", "stage2", "stage3_bf16"])
def test_a_checkpoint_that_deepspeed_wrote(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    model = Net()
    deepspeed.init_inference(model, **FP32, checkpoint=str(GOLDEN / name / "step"))
    compared = [key for key in expected if key.endswith("weight") and key.startswith("parameter|")]
    assert len(compared) >= 3
    for key in compared:
        value = model.get_parameter(key.partition("|")[2])
        assert torch.equal(value.flatten(), expected[key].float().flatten()), key


def test_keys_of_a_checkpoint_without_one() -> None:
    for given in ({"base_dir": "x"}, {"training_mp_size": 2}, {"ckpt_config": {"base_dir": "x"}}):
        with pytest.raises(ConfigError, match="is of a checkpoint, and none is given"):
            deepspeed.init_inference(whole(), **FP32, **given)


@pytest.mark.parametrize("degree", [1, 2])
def test_what_is_saved_is_read_at_any_degree(degree: int, tmp_path: Path) -> None:
    expected, folder = words(whole()), str(tmp_path / "here")

    def save(rank: int) -> None:
        deepspeed.init_inference(whole(), **FP32, tp={"tp_size": degree}, save_mp_checkpoint_path=folder)

    sim.run(degree, save)

    def read(rank: int) -> None:
        for given in (folder, f"{folder}/ds_inference_config.json"):
            engine = deepspeed.init_inference(empty(), **FP32, tp={"tp_size": 3 - degree}, checkpoint=given)
            assert torch.equal(words(engine), expected)

    sim.run(3 - degree, read)


def test_of_models_side_by_side_the_first_is_saved(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        deepspeed.init_inference(whole(), **FP32, tp={"tp_size": 2}, save_mp_checkpoint_path=str(tmp_path))

    sim.run(4, save)
    engine = deepspeed.init_inference(empty(), **FP32, checkpoint=str(tmp_path))
    assert torch.equal(words(engine), words(whole()))


def test_it_is_saved_where_the_other_section_says(tmp_path: Path) -> None:
    where = {"save_mp_checkpoint_path": str(tmp_path)}
    deepspeed.init_inference(whole(), **FP32, ckpt_config=where)
    assert (tmp_path / "ds_inference_config.json").exists()
    with pytest.raises(ConfigError, match="save_mp_checkpoint_path differ"):
        deepspeed.init_inference(whole(), **FP32, ckpt_config=where, save_mp_checkpoint_path="other")


@pytest.mark.dear
@pytest.mark.parametrize("degree", [1, 2])
def test_files_of_tensor_parallel_ranks_are_put_together(degree: int, tmp_path: Path) -> None:
    """As ranks that train write them: each its own part."""
    expected = words(whole())

    def save(rank: int) -> None:
        model = whole()
        split(model, plan_of(model), Communicator())
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        torch.save({"module": state}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")

    sim.run(2, save)
    files = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(2)]

    def read(rank: int) -> None:
        for told, more in (
            ({"parallelization": "tp"}, {}), ({"type": "Megatron", "tp_size": 2}, {}), ({}, {"training_mp_size": 2}),
        ):  # fmt: skip
            engine = deepspeed.init_inference(
                empty(), **FP32, tp={"tp_size": degree}, base_dir=str(tmp_path), **more,
                checkpoint={"checkpoints": files, "version": 1.0, **told},
            )  # fmt: skip
            assert torch.equal(words(engine), expected)
        if degree > 1:
            with pytest.raises(ValueError, match="need a plan of the model, which is cut already"):
                deepspeed.init_inference(
                    engine.module, **FP32, tp={"tp_size": degree}, base_dir=str(tmp_path), training_mp_size=2,
                    checkpoint={"checkpoints": files},
                )  # fmt: skip

    sim.run(degree, read)


def test_ranks_fail_together(saved: Path) -> None:
    def fn(rank: int) -> None:
        model = whole()
        before = copy.deepcopy(model.state_dict())
        where = str(saved / ("hub" if rank == 0 else "nowhere"))
        with pytest.raises(ValueError, match="no file or folder" if rank else "rank 1"):
            deepspeed.init_inference(model, **FP32, tp={"tp_size": 2}, checkpoint=where)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    sim.run(2, fn)
