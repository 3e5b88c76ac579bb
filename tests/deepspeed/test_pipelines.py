"""``deepspeed.pipe``: modules, engines, topologies and schedules under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpointing.foreign import golden_model as golden
from torch import nn
from zoo.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zoo.deepspeed.runtime.pipe import schedule as schedules
from zoo.deepspeed.runtime.pipe.engine import PipelineEngine, PipelineError
from zoo.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

import zoo.deepspeed as deepspeed
from zoo import sim

CHECKPOINTS = Path(__file__).parents[1] / "checkpointing" / "foreign" / "golden"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
}


def turned(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight


def layers() -> list[Any]:
    return [
        TiedLayerSpec("both", nn.Linear, 4, 6, bias=False), torch.tanh, LayerSpec(nn.Linear, 6, 6),
        TiedLayerSpec("both", nn.Linear, 4, 6, forward_fn=turned, bias=False),
    ]  # fmt: skip


def batches(count: int) -> list[Any]:
    dice = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 4, generator=dice), torch.randn(2, 4, generator=dice)) for _ in range(count)]


def start(**options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = PipelineModule(
        layers(),
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        seed_layers=True,
        dynamic_shape=True,
        **options,
    )
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=CONFIG)
    assert type(engine) is PipelineEngine
    return engine


def trained(engine: Any) -> list[float]:
    data = iter(batches(12))
    return [float(engine.train_batch(data)) for _ in range(3)] + [float(engine.eval_batch(data))]


def test_a_pipeline_trains_as_one_stage_does() -> None:
    alone = sim.run(1, lambda rank: trained(start(num_stages=1)))[0]
    for losses in sim.run(2, lambda rank: trained(start(num_stages=2))):
        assert losses == pytest.approx(alone, rel=1e-6)
    for losses in sim.run(2, lambda rank: trained(start(topology=PipeDataParallelTopology(2, 1)))):
        assert losses == pytest.approx(alone, rel=1e-6)


def test_where_a_rank_stands_in_a_grid() -> None:
    """Four ranks: two stages, two replicas; what DeepSpeed 0.19.8 says of them."""

    def job(rank: int) -> None:
        engine = start(topology=PipeDataParallelTopology(2, 2))
        grid, module = engine.grid, engine.module
        assert isinstance(grid, PipelineParallelGrid)
        assert engine.mpu is grid is module.mpu() is deepspeed.utils.groups.mpu
        pipe, data = divmod(rank, 2)
        assert (grid.stage_id, grid.data_parallel_id) == (pipe, data)
        assert (grid.dp_group, grid.dp_groups) == ([2 * pipe, 2 * pipe + 1], [[0, 1], [2, 3]])
        assert (grid.pp_group, grid.pipe_groups) == ([data, data + 2], [[0, 2], [1, 3]])
        assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
        assert (grid.slice_group, grid.model_parallel_size, grid.ds_model_world_size) == ([rank], 1, 2)
        assert grid.ds_model_rank == grid.get_pipeline_model_parallel_rank() == pipe
        assert grid.get_data_parallel_group_ranks() == grid.dp_group
        assert grid.get_pipeline_model_parallel_world_size() == 2
        assert (grid.get_tensor_model_parallel_rank(), grid.get_tensor_model_parallel_world_size()) == (0, 1)
        assert grid.dp_proc_group is engine.data_parallel_group is engine.seq_data_parallel_group
        assert [g.size() for g in (grid.dp_proc_group, grid.pp_proc_group, grid.ds_model_proc_group)] == [2, 2, 2]
        assert grid.slice_proc_group.size() == 1
        assert (engine.get_data_parallel_rank(), engine.mp_world_size, engine.dp_world_size) == (data, 2, 2)
        assert engine.checkpoint_mp_rank == pipe
        assert (module.global_rank, module.world_size, module.world_group.size()) == (rank, 4, 4)
        assert (engine.prev_stage, engine.next_stage) == (pipe - 1, pipe + 1)
        both = module.tied_comms["both"]
        assert (both["ranks"], both["weight_attr"], both["group"].size()) == ([data, data + 2], ["weight"], 2)
        assert both["module"] is module.tied_modules["both"]
        assert module.tied_weight_attrs == {"both": ["weight"]}
        names = [getattr(call, "func", call) for call in module.forward_funcs]
        if pipe == 0:
            assert names == [module.tied_modules["both"], torch.tanh]
            assert module.fwd_map == {}
        else:
            assert names == [getattr(module, "2"), turned]
            assert module.fwd_map == {"2": 0}
        assert engine.agg_train_loss is None
        loss = engine.train_batch(iter(batches(3)))
        assert engine.agg_train_loss is loss
        more = iter(batches(6))
        engine.train_batch(more)
        engine.train_batch()  # goes on with those
        assert list(more) == []
        replicated = [p.ds_pipe_replicated for p in module.tied_modules["both"].parameters()]
        assert replicated == [pipe == 1]

    sim.run(4, job)


def test_what_an_engine_of_a_pipeline_says() -> None:
    def job(rank: int) -> None:
        engine = start(num_stages=2)
        assert (engine.is_first_stage(), engine.is_last_stage()) == (rank == 0, rank == 1)
        assert (engine.stage_id, engine.get_pipeline_parallel_rank(), engine.num_stages) == (rank, rank, 2)
        assert engine.grid.get_stage_id() == rank
        assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, False, False)
        assert (engine.micro_batches, engine.micro_batch_size) == (3, 2)
        assert engine.is_gradient_accumulation_boundary()
        for refused in (engine, engine.forward, engine.backward, engine.step):
            with pytest.raises(PipelineError, match="Only train_batch"):
                refused(torch.ones(1))
        module = engine.module
        assert module.partitions() == module.parts == [0, 2, 4]
        assert [module.stage_owner(n) for n in range(4)] == [0, 0, 1, 1]
        assert module.num_pipeline_stages() == 2
        with pytest.raises(ValueError, match="there are the layers 0 to 3"):
            module.stage_owner(4)
        [(weight, group)] = module.get_tied_weights_and_groups()
        assert weight.shape == (6, 4)
        assert group.size() == 2
        module.set_checkpoint_interval(1)
        with pytest.raises(ValueError, match="0, or a number of layers"):
            module.set_checkpoint_interval(-1)
        engine.reset_activation_shape()
        engine.set_has_attention_mask(True)
        with pytest.raises(ValueError, match="takes True or False"):
            engine.set_has_attention_mask("yes")
        with pytest.raises(ValueError, match="a list of the names of classes"):
            PipelineModule(layers(), num_stages=2, checkpointable_layers="Linear")
        engine.set_dataloader(batches(3))
        engine.set_batch_fn(lambda batch: (batch[0], batch[1] * 0))
        assert engine.train_batch() > engine.train_batch()  # towards labels of 0
        engine.set_batch_fn(None)
        assert engine.get_additional_losses() is None
        state = engine.module_state_dict()
        assert list(state) == ["tied_modules.both.weight", "2.weight", "2.bias"] or len(state) == 3
        again = {"module": {name: torch.ones_like(value) for name, value in state.items()}}
        engine.load_module_state_dict(again)
        assert all(bool((p == 1).all()) for p in module.parameters())
        with pytest.raises(AssertionError, match="custom_load_fn not supported"):
            engine.load_module_state_dict(again, custom_load_fn=print)
        loss, outputs = engine.eval_batch(iter(batches(3)), return_logits=True)
        assert loss.shape == ()
        assert (outputs is None) == (rank == 0)

    sim.run(2, job)


def test_training_data_and_batch_sizes() -> None:
    def job(rank: int) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        module = PipelineModule(layers(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
        data = [(x[0], y[0]) for x, y in batches(20)]
        engine, _, loader, _ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), training_data=data, config=CONFIG
        )
        assert loader is not None
        engine.train_batch()
        engine.set_train_batch_size(4)
        assert engine.micro_batches == 2
        return float(engine.train_batch())

    first, second = sim.run(2, job)
    assert first == second


def test_topologies() -> None:
    where = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert where.get_axis_names() == ["pipe", "data", "model"]
    assert where.get_coord(3) == (0, 1, 1)
    assert where.get_rank_repr(3) == "model_01"
    assert where.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert where.filter_match(pipe=0, data=1) == [2, 3]
    assert ProcessTopology(axes=["x", "y"], dims=[2, 3]).get_axis_list(axis="x", idx=0) == [0, 1, 2]
    with pytest.raises(ValueError, match="get_rank"):
        where.get_rank(pipe=0)

    def job(rank: int) -> Any:
        grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=2))
        return grid.get_stage_id(), grid.get_data_parallel_id(), grid.stage_to_global(1, data=0)

    assert sim.run(4, job) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


def test_schedules() -> None:
    first = list(schedules.TrainSchedule(micro_batches=2, stages=2, stage_id=0))
    assert first[0] == [schedules.LoadMicroBatch(buffer_id=0), schedules.ForwardPass(buffer_id=0)]
    assert first[-1][-3:] == [schedules.ReduceTiedGrads(), schedules.ReduceGrads(), schedules.OptimizerStep()]
    kinds = {type(one) for stage in (0, 1) for step in schedules.TrainSchedule(2, 2, stage) for one in step}
    assert {schedules.SendActivation, schedules.RecvActivation, schedules.SendGrad, schedules.RecvGrad} <= kinds
    assert schedules.InferenceSchedule(2, 2, 0).num_pipe_buffers() == 2
    assert len(list(schedules.DataParallelSchedule(3, 1, 0))) == 3
    assert issubclass(schedules.BackwardPass, schedules.BufferOpInstruction)
    assert issubclass(schedules.BufferOpInstruction, schedules.PipeInstruction)
    assert schedules.ForwardPass(1, more=2).more == 2  # type: ignore[attr-defined]

    class OneByOne(schedules.PipeSchedule):  # type: ignore[misc,name-defined]
        def steps(self) -> Any:
            yield [schedules.ForwardPass(0)]

    assert (OneByOne(1, 1, 0).stage, OneByOne(1, 1, 0).num_micro_batches) == (0, 1)


@pytest.mark.parametrize("how", ["class", "steps"])
def test_a_schedule_that_a_program_puts_in_is_told_of(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(schedules.TrainSchedule):  # type: ignore[name-defined,misc]
        """One that a program has."""

    def steps(self: Any) -> Any:
        yield []

    sim.run(2, lambda rank: start(num_stages=2))
    assert "zoo's pipelines run the schedule" not in caplog.text
    if how == "class":
        monkeypatch.setattr(schedules, "TrainSchedule", Mine)
    else:
        monkeypatch.setattr(schedules.TrainSchedule, "steps", steps)
    sim.run(2, lambda rank: start(num_stages=2))
    assert "TrainSchedule is replaced, or its steps() are: zoo's pipelines run the schedule" in caplog.text


def losses_after(model: Any, written: str, stage: int) -> list[float]:
    """Of the batches that follow a checkpoint which DeepSpeed wrote, at a stage of ZeRO."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": golden.ROWS, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    config |= {"gradient_clipping": 0.0} if written.endswith("_stage0") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=golden.LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.load_checkpoint(CHECKPOINTS / written, tag="step")
    data = iter(golden.batches(0)[golden.BEFORE :])
    return [float(engine.train_batch(data)) for _ in range(golden.AFTER)]


@pytest.mark.matrix
@pytest.mark.parametrize("written", ["pipeline_tied", "pipeline_tied_stage0"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_checkpoint_of_deepspeed_with_a_shared_layer_goes_on_with_its_losses(stage: int, written: str) -> None:
    def job(rank: int) -> list[float]:
        model = golden.shared_ends(deepspeed.pipe, nn.MSELoss())
        return losses_after(model, written, stage)

    theirs = json.loads((CHECKPOINTS / written / "losses.json").read_text())
    for mine, expected in zip(sim.run(2, job), theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("written", ["pipeline", "pipeline_stage0"])
@pytest.mark.parametrize(("stage", "stages"), [(0, 2), (1, 1)])
def test_a_checkpoint_of_deepspeeds_pipeline_goes_on_with_its_losses(written: str, stage: int, stages: int) -> None:
    def job(rank: int) -> list[float]:
        spec = deepspeed.pipe.LayerSpec
        layers = [
            spec(nn.Linear, 5, 7), torch.tanh, spec(nn.Linear, 7, 7), spec(nn.Linear, 7, 3), torch.tanh,
            spec(nn.Linear, 3, 1),
        ]  # fmt: skip
        model = deepspeed.pipe.PipelineModule(
            layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform"
        )
        return losses_after(model, written, stage)

    theirs = json.loads((CHECKPOINTS / written / "losses.json").read_text())
    for mine, expected in zip(sim.run(stages, job), theirs, strict=False):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_weights_alone_of_a_shared_layer_without_zero() -> None:
    def job(rank: int) -> None:
        model = golden.shared_ends(deepspeed.pipe, nn.MSELoss())
        optimizer = torch.optim.AdamW(model.parameters(), lr=golden.LR)
        config = {"train_micro_batch_size_per_gpu": golden.ROWS}
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.load_checkpoint(CHECKPOINTS / "pipeline_tied_stage0", tag="step", load_optimizer_states=False)
        expected = load_file(CHECKPOINTS / "pipeline_tied_stage0" / "expected.safetensors")
        mine = dict(model.named_parameters())
        assert set(mine) == ({"tied_modules.ends.weight"} | {f"{(2, 5)[rank]}.{x}" for x in ("weight", "bias")})
        assert all(torch.equal(p, expected[f"parameter|{name}"]) for name, p in mine.items())

    sim.run(2, job)


def test_a_pipeline_orders_its_own_accumulation() -> None:
    """A program that would end a step at any backward has no such backward in a pipeline: refused on all ranks."""

    def job(rank: int) -> None:
        model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.MSELoss())
        with pytest.raises(AssertionError, match=r"not supported with pipeline parallelism.*Leave it out"):
            deepspeed.initialize(model=model, config={**CONFIG, "managed_gradient_accumulation": False})

    sim.run(2, job)
