"""The attributes that programs read on engines and optimizers are there: lists of what they use, by weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net, start
from torch import nn
from zoo.deepspeed.ops.adam import DeepSpeedCPUAdam
from zoo.deepspeed.pipe import PipelineModule
from zoo.deepspeed.utils import set_z3_leaf_modules

import zoo.deepspeed as deepspeed

ENGINE = """
    parameters named_parameters named_modules modules state_dict load_state_dict load_module_state_dict to train
    eval zero_grad forward __call__ backward step train_batch eval_batch destroy compile no_sync scale module
    optimizer basic_optimizer lr_scheduler config device mpu global_steps skipped_steps micro_steps was_step_applied
    set_gradient_accumulation_boundary is_gradient_accumulation_boundary save_checkpoint load_checkpoint
    save_16bit_model empty_partition_cache get_global_grad_norm gradient_clipping fp16_enabled bfloat16_enabled
    zero_optimization_partition_weights zero_quantized_gradients coalesce_grad_reduction has_moe_layers
    seq_parallel_group sequence_parallel_size data_parallel_group autotp_size tput_timer flops_profiler
""".split()  # noqa: SIM905
OF_PIPELINES = """
    is_first_stage is_last_stage set_dataiterator set_checkpoint_interval activation_checkpoint_interval
""".split()  # noqa: SIM905
OPTIMIZER = """
    optimizer param_groups state step zero_grad overflow cur_scale loss_scaler loss_scale_config needs_scaler
    dp_process_group bit16_groups fp16_groups averaged_gradients get_fp32_grad_partitions
    gradient_accumulation_dtype gradient_predivide_factor postscale_gradients overlap_comm
""".split()  # noqa: SIM905


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_attributes_of_engines_and_optimizers(stage: int) -> None:
    engine = start(stage)
    engine.backward(loss_of(engine, batches(0, 1)[0]))
    assert [name for name in ENGINE if not hasattr(engine, name)] == []
    wanted = [*OPTIMIZER, *(["leaf_parameters", "parameter_offload"] if stage == 3 else [])]
    assert [name for name in wanted if not hasattr(engine.optimizer, name)] == []
    with pytest.raises(NotImplementedError, match="Give initialize all of them"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_attributes_of_pipelines() -> None:
    model = PipelineModule([nn.Linear(3, 3)], num_stages=1, loss_fn=nn.MSELoss())
    document = {key: value for key, value in config(0).items() if key != "zero_optimization"}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]
    assert [name for name in [*ENGINE, *OF_PIPELINES] if not hasattr(engine, name)] == []
    engine.set_checkpoint_interval(1)
    assert engine.activation_checkpoint_interval == 1


def test_what_engines_are_asked_of_features() -> None:
    document = {**config(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    document["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}, "legacy_fusion": True}
    model = net()
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=0.1), [torch.ones(1)] * 4
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=document, training_data=data)[0]
    backend = "nccl" if torch.cuda.is_available() else "gloo"  # of the group of this process
    assert (engine.client_optimizer, engine.client_lr_scheduler, engine.training_data) == (optimizer, None, data)
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert (engine.dist_backend, engine.zenflow, engine.pipeline_parallelism) == (backend, False, False)
    for name in ("autotuning_enabled", "flops_profiler_enabled", "super_offload", "data_efficiency_enabled"):
        assert getattr(engine, name)() is False, name
    for name in ("data_sampling_enabled", "zero_nvme_offload_optimizer", "zero_allgather_sequential"):
        assert getattr(engine, name)() is False, name
    assert engine.optimizer_legacy_fusion()
    assert engine.zero_compute_grad_norm()
    assert (engine.zero_partial_offload(), engine.zenflow_config()) == (1.0, None)
    assert engine.initial_dynamic_scale() == engine.dynamic_loss_scale_args()["init_scale"] == 2**16
    assert (engine.moe_layers, engine.gate_modules, engine.num_experts) == ([], [], [])
    assert engine.is_map_style_dataset(data)
    assert not engine.is_iterable_style_dataset(data)
    engine.timers("mine").start()
    engine.timers("mine").stop()
    assert engine.timers("mine").elapsed() >= 0
    plain = start(2)
    assert plain.get_data_types() == (torch.float32, torch.float32)


def test_parameters_of_leaves() -> None:
    model = nn.Sequential(net(), nn.Linear(3, 3))
    model[1].bias.requires_grad_(False)
    set_z3_leaf_modules(model, [nn.Sequential])
    model._z3_leaf = False  # type: ignore[assignment]
    engine = deepspeed.initialize(model=model, config=config(3))[0]
    found = engine.optimizer.leaf_parameters
    assert sum(map(len, found.values())) >= 4
    assert all(p.requires_grad for parameters in found.values() for p in parameters)


@pytest.mark.parametrize("options", [{}, {"adamw_mode": False}, {"bias_correction": False, "weight_decay": 0.0}])
def test_a_subgroup_steps_and_goes_back(options: dict[str, Any]) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(7))
        return p, DeepSpeedCPUAdam([p], lr=0.1, **{"weight_decay": 0.1, **options})

    (p, own), (q, plain) = made(), made()
    before, calls = p.detach().clone(), []
    for step in range(3):
        p.grad = q.grad = torch.randn(7, generator=torch.Generator().manual_seed(step))
        assert own.step_subgroup(4, lambda: calls.append(1) or 5) == 5  # type: ignore[func-returns-value]
        plain.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert len(calls) == own.state[4]["step"] == 3
    for step in reversed(range(3)):
        p.grad = torch.randn(7, generator=torch.Generator().manual_seed(step))
        assert own.rollback_subgroup(4) is None
    torch.testing.assert_close(p.detach(), before, rtol=1e-4, atol=1e-5)
    for number, why in ((4, "sub_group_id 4: step count is 0"), (5, "sub_group_id 5: it has made no step")):
        with pytest.raises(RuntimeError, match=f"Cannot rollback .*{why}"):
            own.rollback_subgroup(number)
