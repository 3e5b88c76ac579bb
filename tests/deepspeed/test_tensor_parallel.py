"""AutoTP under DeepSpeed's names: layers, specs, ``tp_model_init``, the section, an mpu beside it."""

from __future__ import annotations

import copy
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpointing.foreign.golden_model import BEFORE, LR, PARTS, ROWS, Cut, batches, loss_of
from tests.checkpointing.foreign.test_deepspeed import GOLDEN
from tests.deepspeed.test_tensor_ranks import Mpu
from torch import nn
from torch.nn import functional as F
from zoo.deepspeed.module_inject import tp_shard
from zoo.deepspeed.module_inject.auto_tp import AutoTP
from zoo.deepspeed.module_inject.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from zoo.deepspeed.module_inject.layers import (
    GateUpPack_LinearLayer,
    LinearAllreduce,
    LinearLayer,
    LmHeadLinearAllreduce,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
    get_auto_tp_mode,
    is_autotp_training_mode,
)
from zoo.deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from zoo.deepspeed.runtime.tensor_parallel.config import AUTOTP_MODE, TPTrainingConfig, get_tensor_parallel_config
from zoo.deepspeed.runtime.tensor_parallel.tp_manager import TpTrainingManager
from zoo.deepspeed.utils import groups

from zoo import deepspeed
from zoo.config import ConfigError
from zoo.layout import split_of
from zoo.sim import run

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
UP, DOWN = [r".*up\.weight$"], [r".*down\.weight$"]
SPECS = {"layer_specs": [{"patterns": UP, "partition_type": "column"}, {"patterns": DOWN, "partition_type": "row"}]}


class Layers(nn.Module):
    """A norm, and an MLP of seven features, which two ranks do not get evenly."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, document: dict[str, Any], share: tuple[int, int] = (0, 1), mpu: Any = None) -> Any:
    """(engine, norms) after three steps of this share of the batch, (which, of how many)."""
    engine = deepspeed.initialize(
        model=model, config={"train_batch_size": 4, **SGD, **document}, model_parameters=model.parameters(), mpu=mpu
    )[0]
    norms = []
    for step in range(3):
        engine.backward(engine(batch(step).chunk(share[1])[share[0]]).square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return engine, norms


def alone() -> Any:
    def fn(rank: int) -> Any:
        engine, norms = trained(Layers(), {})
        return norms, {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    return run(1, fn)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_is_cut_trained_and_whole_again(stage: int) -> None:
    norms, whole = alone()

    def fn(rank: int) -> None:
        document = {"zero_optimization": {"stage": stage}, "tensor_parallel": {
            "autotp_size": 2, "partition_config": SPECS}}  # fmt: skip
        engine, own = trained(Layers(), document, (rank // 2, 2))
        assert own == pytest.approx(norms, rel=1e-4)
        assert (engine.autotp_size(), groups.get_tensor_model_parallel_world_size()) == (2, 2)
        assert (groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_world_size()) == (rank % 2, 2)
        assert engine.module.up.out_features == (4, 3)[rank % 2]
        assert isinstance(engine.module.up, LinearLayer)
        assert isinstance(engine.module.down, LinearAllreduce)
        assert (engine.module.down.name, engine.module.up.gather_output) == ("down", False)
        assert (engine.module.up.tp_world_size, engine.module.up.tp_index) == (2, rank % 2)
        found = engine._consolidated_16bit_state_dict()
        assert (found is not None) == (rank == 0)
        if found is not None:
            torch.testing.assert_close({name: value.float() for name, value in found.items()}, whole,
                                       rtol=1e-5, atol=1e-6)  # fmt: skip

    run(4, fn)


@pytest.mark.parametrize("far", [False, True])
def test_an_mpu_says_which_ranks_are_cut_over(far: bool) -> None:
    norms, _ = alone()

    def fn(rank: int) -> None:
        mpu = Mpu(2, far=far)
        document = {"tensor_parallel": {"autotp_size": 2, "partition_config": SPECS}}
        engine, own = trained(Layers(), document, (mpu.data_rank, 2), mpu)
        assert own == pytest.approx(norms, rel=1e-4)
        ranks = dist.get_process_group_ranks(groups.get_tensor_model_parallel_group())
        assert ranks == dist.get_process_group_ranks(mpu.tensor)
        assert engine.module.up.out_features == (4, 3)[mpu.rank]
        with pytest.raises(ValueError, match="asks for 4 ranks, and the mesh has 2"):
            deepspeed.initialize(
                model=Layers(), config={"train_batch_size": 4, "tensor_parallel": {
                    "autotp_size": 4, "partition_config": SPECS}}, mpu=mpu,
            )  # fmt: skip

    run(4, fn)


def test_tp_model_init_counts_for_the_model_that_it_was_given() -> None:
    norms, _ = alone()

    def fn(rank: int) -> None:
        model = Layers()
        assert deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32) is model
        assert is_autotp_training_mode()
        assert get_auto_tp_mode() is AUTOTP_MODE.TRAINING
        with pytest.raises(ConfigError, match=r"tp_size=4, .* of a model that was given tp_size=2"):
            deepspeed.tp_model_init(model, tp_size=4, dtype=torch.float32)
        with pytest.raises(ConfigError, match="an integer from 1 on"):
            deepspeed.tp_model_init(Layers(), 0, torch.float32)
        engine, own = trained(model, {"tensor_parallel": {"partition_config": SPECS}})
        assert own == pytest.approx(norms, rel=1e-4)
        assert engine.autotp_size() == 2
        engine.destroy()
        group = groups.get_tensor_model_parallel_group()  # of the engine that is gone
        assert dist.get_world_size(group) == 2
        other, _ = trained(Layers(), {}, (rank, 2))
        assert other.autotp_size() == 0

        said = Layers()
        deepspeed.tp_model_init(said, 2, torch.float32, config={"tensor_parallel": {"partition_config": SPECS}})
        said_nothing = {"tensor_parallel": {"autotp_size": 0, "partition_config": SPECS}}
        assert trained(said, said_nothing)[0].module.up.out_features == (4, 3)[rank]
        again = Layers()
        deepspeed.tp_model_init(again, 2, torch.float32, config={"tensor_parallel": {"partition_config": SPECS}})
        assert trained(again, {})[0].module.up.out_features == (4, 3)[rank]

    run(2, fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dtype_that_nothing_casts_to_is_said(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    def fn(rank: int) -> None:
        model = deepspeed.tp_model_init(Layers(), 1, dtype)
        engine = deepspeed.initialize(model=model, config={"train_batch_size": 1})[0]
        assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}

    with caplog.at_level(logging.WARNING):
        run(1, fn)
    assert (f"tp_model_init got dtype={dtype}, and the parameters stay" in caplog.text) == (dtype is torch.float16)


@pytest.mark.parametrize(
    ("said", "document", "told"),
    [
        ({}, {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2, and .* tp_size=1"),
        ({}, {"tensor_parallel": {"tp": {"tp_size": 2}}}, "tensor_parallel.tp.tp_size is 2"),
        ({}, {"bf16": {"enabled": True}}, "Conflicting dtype: bf16 is enabled, and .*torch.float16"),
        ({}, {"tensor_parallel": {"dtype": "fp32"}}, "Conflicting dtype: tensor_parallel.dtype is fp32"),
        ({"tp_group": True}, {}, "tp_model_init provided tp_group, and initialize got mpu="),
        ({"tp_group": True, "tp_size": 2}, {"mpu": None}, "tp_size=2, and a tp_group of 1 ranks"),
    ],
)
def test_what_contradicts_tp_model_init_is_told(said: dict[str, Any], document: dict[str, Any], told: str) -> None:
    def fn(rank: int) -> None:
        model, mpu = Layers(), SimpleNamespace(get_data_parallel_group=lambda: dist.group.WORLD)
        more = dict(said)
        if more.get("tp_group"):
            alone = [dist.new_group([0]), dist.new_group([1])]
            more["tp_group"] = alone[rank]
        given = dict(document)
        mpu = given.pop("mpu", mpu)
        deepspeed.tp_model_init(model, more.pop("tp_size", 1), torch.float16, **more)
        with pytest.raises(ValueError, match=told):
            deepspeed.initialize(model=model, config={"train_batch_size": 2, **given}, mpu=mpu)

    run(2, fn)


def test_layers_of_parts_compute_what_the_whole_ones_do() -> None:
    torch.manual_seed(0)
    up, down, x = nn.Linear(4, 10).double(), nn.Linear(10, 4).double(), torch.randn(3, 4, dtype=torch.float64)
    wide = torch.randn(3, 10, dtype=torch.float64)
    gate = nn.Linear(4, 20).double()

    def gated(first: Any, second: Any) -> torch.Tensor:
        a, b = first(x).chunk(2, dim=-1)
        y: torch.Tensor = second(a * torch.tanh(b))
        return y

    expected = down(torch.tanh(up(x)))
    expected.square().sum().backward()
    whole = {"up": up.weight.grad, "down": down.weight.grad}

    def fn(rank: int) -> None:
        group = dist.group.WORLD

        def own(layer: nn.Linear) -> nn.Linear:
            return copy.deepcopy(layer)

        first, second = LinearLayer(own(up), group, name="up"), LinearAllreduce(own(down), group)
        assert isinstance(first, nn.Linear)
        assert (first.tp_world_size, first.tp_index, first.name) == (3, rank, "up")
        assert first.weight.shape == (tp_shard.get_shard_size_list(10, 3)[rank], 4)
        y = second(torch.tanh(first(x)))
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        for layer, name, dim in ((first, "up", 0), (second, "down", 1)):
            start, size = split_of(layer.weight).box.offsets[dim], layer.weight.shape[dim]
            there = whole[name].narrow(dim, start, size)
            torch.testing.assert_close(layer.weight.grad, there, rtol=1e-11, atol=1e-11)
        again = copy.deepcopy(nn.Sequential(first, nn.Tanh(), second))
        torch.testing.assert_close(again(x), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(LinearLayer(own(up), group, gather_output=True)(x), up(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(LmHeadLinearAllreduce(own(down), group)(wide), down(wide), rtol=1e-12, atol=1e-12)
        packed = gated(GateUpPack_LinearLayer(own(gate), group), LinearAllreduce(own(down), group))
        torch.testing.assert_close(packed, gated(gate, down), rtol=1e-12, atol=1e-12)
        uneven = SubParamLinearLayer(own(gate), group, shape=((14, 6), 4), partition_dim=0)
        assert len(uneven.weight) == tp_shard.get_shard_size(14, 3, rank=rank) + 2
        rows = SubParamLinearAllreduce(own(down), group, shape=(-1, 2), partition_dim=1)
        assert rows.weight.shape == (4, 2 * (2, 2, 1)[rank])

    run(3, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_trains_layers_that_are_parts_already(stage: int) -> None:
    norms, whole = alone()
    skip = {"layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}

    def fn(rank: int) -> None:
        document = {"tensor_parallel": {"autotp_size": 2, "partition_config": skip}}
        trained(Layers(), document)[0].destroy()  # for the ranks
        group, model = groups.get_tensor_model_parallel_group(), Layers()
        model.up, model.down = LinearLayer(model.up, group), LinearAllreduce(model.down, group)
        engine, own = trained(model, {**document, "zero_optimization": {"stage": stage}})
        assert own == pytest.approx(norms, rel=1e-4)
        assert dist.get_world_size(groups.get_data_parallel_group()) == 1
        found = engine._consolidated_16bit_state_dict()
        if rank == 0:
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)

    run(2, fn)


def test_layers_alone_are_whole_and_refuse_what_they_do_not_take() -> None:
    linear, x = nn.Linear(4, 6), torch.randn(2, 4)
    for layer in (
        LinearLayer(linear, None), LinearAllreduce(linear, None), LmHeadLinearAllreduce(linear, None),
        SubParamLinearLayer(linear, None, (3, -1)), GateUpPack_LinearLayer(linear, name="gate"),
    ):  # fmt: skip
        assert layer.weight is linear.weight
        torch.testing.assert_close(layer(x), F.linear(x, linear.weight, linear.bias), rtol=0, atol=0)
    with pytest.raises(ValueError, match="parts already"):
        LinearLayer(linear, None, skip_partition=True)
    with pytest.raises(ValueError, match="got a Embedding"):
        LinearAllreduce(nn.Embedding(2, 3), None)
    with pytest.raises(ValueError, match="4 equal blocks of 6"):
        SubParamLinearLayer(linear, None, (4, -1), name="qkv")


def test_auto_tp_cuts_the_model_that_it_was_made_for() -> None:
    def fn(rank: int) -> None:
        whole, model = Layers(), Layers()
        made = AutoTP(model, (), "", None, None, None, partition_config=AutoTPConfig.from_dict(SPECS))
        with pytest.raises(ConfigError, match=r"mp_size=4\) with a group of 2 ranks"):
            made.set_tensor_parallel_config(4, dist.group.WORLD)
        made.set_tensor_parallel_config(2, dist.group.WORLD)
        made.update_linear_policies()
        made._replace_module(model)
        assert isinstance(model.up, LinearLayer)
        assert isinstance(model.down, LinearAllreduce)
        assert not model.up.gather_output
        torch.testing.assert_close(model(batch(0)), whole(batch(0)), rtol=1e-5, atol=1e-6)
        with pytest.raises(ConfigError, match="whole model that it was made for"):
            made._replace_module(whole)

    run(2, fn)
    for more in ({"state_dict": {}}, {"vocab_parallel_lm_head": True}):
        given = {"state_dict": None, "linear_layer_setting": None, "orig_layer_impl": None, **more}
        with pytest.raises(ConfigError):
            AutoTP(Layers(), (), "", **given)


def test_the_parser_says_the_row_parallel_layers_of_a_family() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=11,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ((kind, names),) = AutoTP.tp_parser(model)
    assert (kind.__name__, names) == ("LlamaDecoderLayer", ("self_attn.o_proj", "mlp.down_proj"))
    assert AutoTP.supported(model)
    assert not AutoTP.supported(Layers())
    assert AutoTP.get_model_num_kv_heads(config) == 1


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("deepseek_v3", ("self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj")),
        ("qwen2_moe", ("self_attn.o_proj", "mlp.shared_expert.down_proj", "mlp.down_proj")),
        ("gpt_oss", ("self_attn.o_proj",)),
    ],
)
def test_a_parsed_model_whose_layers_differ_is_cut(family: str, names: tuple[str, ...]) -> None:
    hub = pytest.importorskip("tests.tensor.hub")
    ids = torch.randint(53, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = hub.model_of(family)(ids).logits

    def fn(rank: int) -> None:
        model = hub.model_of(family)
        ((_, found),) = AutoTP.tp_parser(model)
        assert found == names
        made = AutoTP(model, found, "", None, None, None)
        made.set_tensor_parallel_config(2, dist.group.WORLD)
        made._replace_module(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-10)

    run(2, fn)


def test_specs_are_what_their_names_say() -> None:
    fused = TPLayerSpec([".*qkv"], PartitionType.COLUMN, shape=[[4, 2, 2], -1])
    assert (fused.has_unequal_sub_params(), fused.get_sub_param_sizes(), fused.get_num_sub_params()) == (
        True, (4, 2, 2), 3,
    )  # fmt: skip
    plain = TPLayerSpec([".*up"], model_types=["Llama"])
    assert (plain.has_unequal_sub_params(), plain.get_num_sub_params(), plain.get_partition_dim()) == (False, None, 0)
    assert TPLayerSpec(["x"], "row").get_partition_dim() == 1
    assert plain.matches("a.up.weight", "llama")
    assert not plain.matches("a.up.weight")
    own = AutoTPConfig(tp_size=2, layer_specs=[fused, plain])
    assert own.find_matching_spec("a.qkv.weight") is fused
    assert own.find_matching_spec("a.up.weight", "LLAMA") is plain
    assert own.find_matching_spec("b.weight") is None
    preset = AutoTPPresets.get_preset("Phi3")
    assert preset is not None
    assert AutoTPPresets.get_preset("other") is None
    merged = merge_autotp_configs(preset, own)
    assert (merged.tp_size, merged.layer_specs[:2]) == (2, [fused, plain])
    assert merged.layer_specs[2:] == AutoTPPresets.phi3().layer_specs
    assert AutoTPPresets.llama_gqa(4, 2, 8).layer_specs[0].get_sub_param_sizes() == (32, 16, 16)
    section = get_tensor_parallel_config({"tensor_parallel": {
        "autotp_size": 4, "preset_model": "llama", "partition_config": SPECS, "tp": {"tp_size": 4}}})  # fmt: skip
    assert isinstance(section, TPTrainingConfig)
    assert (section.tensor_parallel.tp_size, section.dtype) == (4, torch.float16)
    found = section.get_partition_config_object()
    assert found is not None
    assert (found.tp_size, len(found.layer_specs)) == (4, 6)
    assert TPTrainingConfig().get_partition_config_object() is None


def test_a_plan_of_transformers_becomes_specs() -> None:
    found = TPPlanConverter.convert(
        {"layers.*.q_proj": "colwise", "layers.*.o_proj.weight": "rowwise", "lm_head": "colwise_gather_output",
         "layers.*.q_norm": "replicated_with_grad_allreduce"}
    )  # fmt: skip
    assert found is not None
    assert [(spec.partition_type.value, spec.gather_output, spec.grad_allreduce) for spec in found] == [
        ("column", False, False), ("row", False, False), ("column", True, False), ("skip", False, True),
    ]  # fmt: skip
    assert found[0].matches("model.layers.11.q_proj.weight")
    assert found[1].matches("layers.0.o_proj.weight")
    assert not found[1].matches("layers.0.o_proj.weight_scale")
    assert TPPlanConverter.convert({}) is None
    with pytest.raises(ValueError, match="moe_tp_experts: unsupported partition style"):
        TPPlanConverter.convert({"a": "colwise", "b": "moe_tp_experts"})


@pytest.mark.parametrize(
    ("total", "ranks", "more", "sizes"),
    [
        (10, 4, {}, [3, 3, 2, 2]), (130, 2, {"grain": 64}, [64, 66]), (10, 4, {"grain": 64}, [3, 3, 2, 2]),
        (24, 4, {"kv": 6}, [8, 8, 4, 4]), (24, 4, {"kv": 6, "name": "mlp.up_proj"}, [6, 6, 6, 6]),
        (24, 4, {"kv": 3}, [8, 8, 8, 0]),
    ],
)  # fmt: skip
def test_what_a_rank_gets_of_a_number(total: int, ranks: int, more: dict[str, Any], sizes: list[int]) -> None:
    try:
        tp_shard.set_num_kv_heads(more.get("kv"))
        tp_shard.set_tp_grain_size(more.get("grain", 1))
        assert tp_shard.get_shard_size_list(total, ranks, more.get("name")) == sizes
        assert tp_shard.get_num_kv_heads() == more.get("kv")
    finally:
        tp_shard.set_num_kv_heads(None)
        tp_shard.set_tp_grain_size(1)


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2)])
def test_experts_of_a_model_of_transformers_are_shared_by_the_section_expert_parallel(ranks: int, tensor: int) -> None:
    hub = pytest.importorskip("tests.tensor.hub")
    ids = torch.randint(53, (4, 6), generator=torch.Generator().manual_seed(1))

    def fn(rank: int, section: dict[str, Any]) -> list[float]:
        engine = deepspeed.initialize(
            model=hub.model_of("mixtral").float().train(), config={"train_batch_size": 4, **SGD, **section}
        )[0]
        inner, losses = engine.engine, []
        for _ in range(2):
            mine = ids.chunk(inner.batch_ranks)[inner.batch_rank]
            engine.backward(engine(mine, labels=mine).loss)
            engine.step()
            losses.append(float(inner.record.loss))
        if section:
            assert engine.has_moe_layers
            assert groups._get_expert_parallel_world_size("ep_size_2") == 2
        return losses

    (alone,) = run(1, lambda rank: fn(rank, {}))
    section: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
    section |= {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    for losses in run(ranks, lambda rank: fn(rank, section)):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"autoep_size": 0}, "autoep_size is 0; it is an integer from 1 on"),
        ({"autoep": 2}, "expert_parallel.autoep: unknown key; perhaps 'autoep_size'"),
        ({"top_k": 3}, "top_k is 3: tokens are routed by the model's own router"),
        ({"expert_tensor_parallel_size": 2}, "share an expert's tokens, and have it whole"),
        ({"expert_pattern": "x"}, "expert_pattern is 'x': experts are found by themselves"),
    ],
)
def test_what_the_section_expert_parallel_cannot_say_is_told(section: dict[str, Any], told: str) -> None:
    config = {"train_batch_size": 1, "expert_parallel": {"enabled": True, **section}}
    with pytest.raises(ConfigError, match=told):
        deepspeed.initialize(model=Layers(), config=config)
    with pytest.raises(ConfigError, match="in two ways"):
        deepspeed.initialize(
            model=Layers(),
            config={"train_batch_size": 1, "expert_parallel": {"enabled": True}, "moe": {"enabled": True}},
        )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "stage", "degree", "data"), [("stage0", 0, 3, 1), ("stage1", 1, 2, 2), ("stage3", 3, 1, 2)]
)
def test_a_checkpoint_that_autotp_wrote_goes_on_at_any_degree(name: str, stage: int, degree: int, data: int) -> None:
    golden = GOLDEN / f"tensor_{name}"
    theirs = json.loads((golden / "losses.json").read_text())[0]
    document: dict[str, Any] = {
        "train_batch_size": ROWS, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
    }  # fmt: skip
    if degree > 1:
        document["tensor_parallel"] = {**PARTS, "autotp_size": degree}

    def fn(rank: int) -> None:
        engine = deepspeed.initialize(model=Cut(), config=document)[0]
        engine.load_checkpoint(golden, "step")
        losses, share = [], (rank // degree, data)
        for x, y in batches(0)[BEFORE:]:
            loss = loss_of(engine, (x.chunk(share[1])[share[0]], y.chunk(share[1])[share[0]]))
            engine.backward(loss)
            engine.step()
            losses.append(float(engine.engine.record.loss))
        assert losses == pytest.approx(theirs, rel=1e-5, abs=1e-6)

    run(degree * data, fn)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_manager_cuts_a_model_by_the_plan_of_its_family(ranks: int) -> None:
    hub = pytest.importorskip("tests.tensor.hub")
    ids = torch.randint(53, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = hub.model_of("llama")(ids).logits

    def fn(rank: int) -> None:
        model = hub.model_of("llama")
        if ranks > 1:
            with pytest.raises(AssertionError, match="the tensor-parallel group is not there"):
                TpTrainingManager(model, ranks, torch.float64)
            trained(Layers(), {"tensor_parallel": {"autotp_size": ranks, "partition_config": SPECS}})  # for the ranks
            with pytest.raises(ConfigError, match=r"TpTrainingManager\(tp_size=4\) where 2 ranks share layers"):
                TpTrainingManager(model, 4, torch.float64)
        manager = TpTrainingManager(model, ranks, torch.float64)
        assert (manager.module, manager.tp_config.tp_size, manager.config.autotp_size) == (model, ranks, ranks)
        assert manager.config.tensor_parallel.tp_size == ranks
        assert model.model.layers[0].mlp.up_proj.weight.shape[0] == 22 // ranks
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-11)

    run(ranks, fn)
