"""Names that libraries (gpt-neox, Megatron-DeepSpeed, SwissArmyTransformer, diffusion-pipe, OpenRLHF) import at their
top, or wrap, whether they use the feature or not."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.deepspeed.test_attributes import net
from torch import nn
from zoo.deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from zoo.deepspeed.runtime.data_pipeline.data_routing import helper
from zoo.deepspeed.runtime.pipe import schedule
from zoo.deepspeed.runtime.pipe.engine import DeepSpeedEngine, PipelineEngine

from zoo import deepspeed, sim
from zoo.deepspeed import checkpointing

TRACKER = checkpointing._CUDA_RNG_STATE_TRACKER
NAME = checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME


@pytest.fixture
def clean() -> Any:
    checkpointing.get_cuda_rng_tracker().reset()
    yield
    checkpointing.get_cuda_rng_tracker().reset()


def test_the_tracker_of_random_states_is_one_constant(clean: None) -> None:
    assert NAME == "model-parallel-rng"
    assert isinstance(TRACKER, checkpointing.CudaRNGStatesTracker)
    TRACKER.add(NAME, 7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    before = torch.get_rng_state()
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(3)
    assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="there is a state"):
        checkpointing.get_cuda_rng_tracker().add(NAME, 8)
    TRACKER.states_ = {}
    assert checkpointing.get_cuda_rng_tracker().get_states() == {}


def test_simulated_ranks_have_trackers_of_their_own(clean: None) -> None:
    def job(rank: int) -> int:
        checkpointing.model_parallel_cuda_manual_seed(rank)
        (seed,) = TRACKER.seeds_
        return seed

    assert sim.run(2, job) == [2718, 2719]


def test_a_random_state_is_set() -> None:
    state = torch.Generator().manual_seed(11).get_state()
    before = torch.get_rng_state()
    checkpointing._set_cuda_rng_state(state)
    drawn = torch.rand(2)
    checkpointing._set_cuda_rng_state(before, device="cpu")
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(11)))
    assert torch.equal(torch.get_rng_state(), before)


def test_arguments_are_detached_and_sorted() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    detached, other = checkpointing.detach_variable((x, "a"))
    assert detached.is_leaf
    assert detached.requires_grad
    assert (other, torch.equal(detached, x)) == ("a", True)
    with pytest.raises(ValueError, match="got a list"):
        checkpointing.detach_variable([x])
    objects = (x, 1, detached, None)
    tensors, others, flags = checkpointing.extract_tensors(objects)
    assert (others, flags) == ((1, None), (True, False, True, False))
    assert all(a is b for a, b in zip(checkpointing.merge_tensors(tensors, others, flags), objects, strict=True))


def test_builders_say_what_torch_is_built_for() -> None:
    assert OpBuilder.is_rocm_pytorch() is (torch.version.hip is not None)
    assert OpBuilder.is_sycl_enabled() is False
    assert OpBuilder.installed_rocm_version() == (0, 0) or OpBuilder.is_rocm_pytorch()
    from zoo.deepspeed.ops.op_builder import CPUAdamBuilder
    from zoo.deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    assert issubclass(FusedAdamBuilder, CUDAOpBuilder)
    assert not issubclass(CPUAdamBuilder, CUDAOpBuilder)


def test_the_map_of_instructions_is_read_and_not_written() -> None:
    kinds = {"OptimizerStep", "ReduceGrads", "ReduceTiedGrads", "LoadMicroBatch", "ForwardPass", "BackwardPass"}
    kinds |= {"SendActivation", "RecvActivation", "SendGrad", "RecvGrad"}
    assert {kind.__name__ for kind in PipelineEngine._INSTRUCTION_MAP} == kinds
    assert issubclass(PipelineEngine, DeepSpeedEngine)
    for write in (
        lambda: PipelineEngine._INSTRUCTION_MAP.update({schedule.ForwardPass: print}),
        lambda: PipelineEngine._INSTRUCTION_MAP.__setitem__(schedule.ForwardPass, print),
        lambda: PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass](None),
    ):
        with pytest.raises(NotImplementedError, match=r"zoo's pipelines run"):
            write()
    assert {**PipelineEngine._INSTRUCTION_MAP}.keys() == PipelineEngine._INSTRUCTION_MAP.keys()


def test_a_wrapped_internal_method_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    inner = DeepSpeedEngine._configure_optimizer

    def wrapper(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
        return inner(self, client_optimizer, model_parameters)

    monkeypatch.setattr(DeepSpeedEngine, "_configure_optimizer", wrapper)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
        engine, *_ = deepspeed.initialize(model=net(), config=config)
    assert "DeepSpeedEngine._configure_optimizer is replaced by a function of tests.deepspeed.test_libraries" in (
        caplog.text
    )
    with pytest.raises(NotImplementedError, match="initialize makes the optimizer"):
        engine._configure_optimizer(None, None)


# Random-LTD ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """(B, T, C) → the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def start(ltd: bool) -> Any:
    routing = {
        "min_value": 2, "max_value": 8, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 2},
    }  # fmt: skip
    section = {"enabled": True, "random_ltd": {"enabled": True, "random_ltd_schedule": routing}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }  # fmt: skip
    if ltd:
        config["data_efficiency"] = {"enabled": True, "data_routing": section}
    return deepspeed.initialize(model=nn.Sequential(*(Block() for _ in range(4))), config=config)[0]


def test_a_converted_engine_is_the_engine_whose_blocks_drop_tokens() -> None:
    engine = start(ltd=True)
    assert helper.convert_to_random_ltd(engine, Block) is engine
    with pytest.raises(ValueError, match="the blocks that drop tokens are others, '1' is a Block"):
        helper.convert_to_random_ltd(engine, nn.Linear)
    with pytest.raises(ValueError, match=r"enable data_efficiency\.data_routing\.random_ltd"):
        helper.convert_to_random_ltd(start(ltd=False), Block)
    with pytest.raises(ValueError, match="it takes the engine"):
        helper.convert_to_random_ltd(engine.module, Block)
    assert list(helper.save_without_random_ltd(engine)) == list(engine.module.state_dict())


def test_names_of_deepspeeds_checkpoints_with_random_ltd_are_plain_ones() -> None:
    given = {"0.random_ltd_layer.linear.weight": 1, "0.linear.bias": 2}
    assert helper.remove_random_ltd_state_dict(given) == OrderedDict([("0.linear.weight", 1), ("0.linear.bias", 2)])
