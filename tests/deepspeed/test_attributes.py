"""What programs ask and set on an engine, beside training."""

from __future__ import annotations

import argparse
import csv
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net, start
from tests.monitor.battery import read_tensorboard
from torch import nn
from zoo.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError
from zoo.report.reading import read_log


def train(engine: Any, rank: int, steps: int = 3) -> list[torch.Tensor]:
    for x in batches(rank, steps * engine.gradient_accumulation_steps()):
        engine.backward(loss_of(engine, x))
        engine.step()
    return [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def test_sizes_are_those_that_are_obeyed() -> None:
    given = {"reduce_bucket_size": 2**21, "allgather_bucket_size": 2**20, "stage3_max_live_parameters": 77}
    asked = start(3, zero={**given, "sub_group_size": 5, "round_robin_gradients": True})
    sharded = asked.engine.sharded
    assert asked.zero_reduce_bucket_size() == asked.zero_allgather_bucket_size() == sharded.config.bucket_size == 2**20
    assert asked.zero_max_live_parameters() == 77 == sharded.runtime.residency.policy.keep_bytes // 4
    assert asked.zero_sub_group_size() == 5
    assert asked.zero_round_robin_gradients()  # what was said; that it has no effect is in the method's docstring
    assert "changes nothing: every rank holds a chunk" in str(type(asked).zero_round_robin_gradients.__doc__)
    assert not asked.zero_save_muon_momentum_buffer_in_memory()


def test_there_is_a_question_for_every_key_of_the_section() -> None:
    engine = start(1)
    other = {
        "enable_sanity_checks": "is_sanity_checks_enabled",
        "use_multi_rank_bucket_allreduce": "zero_multi_rank_bucket_allreduce",
        "stage": "zero_optimization_stage",
    }
    for key in type(engine._config.zero_config).model_fields:
        if key not in ("leaf_module", "zenflow", "zeropp_loco_param"):
            getattr(engine, other.get(key, key if key.startswith("zero_") else f"zero_{key}"))()


@pytest.mark.slow
def test_ranks_along_the_axes_of_layers_of_the_configurations_mesh() -> None:
    def job(rank: int) -> None:
        document = config(1, mesh={"axes": {"data": 2, "tensor": 2}})
        engine = deepspeed.initialize(model=net(), config=document)[0]
        assert (engine.mp_world_size, engine.checkpoint_mp_rank) == (2, rank % 2)
        assert (engine.dp_world_size, engine.get_tensor_parallel_rank()) == (2, rank % 2)
        said = engine._config
        assert said.world_size == deepspeed.DeepSpeedConfig(document).world_size == 2
        sizes = said.train_batch_size, said.train_micro_batch_size_per_gpu, said.gradient_accumulation_steps
        assert sizes == engine.get_batch_info()

    sim.run(4, job)


def test_the_configuration_says_the_sizes_of_now() -> None:
    engine = start(1)
    kept = engine._config
    assert (kept.train_batch_size, kept.gradient_accumulation_steps) == (4, 2)
    engine.set_train_batch_size(12)
    assert engine._config is kept
    assert (kept.train_batch_size, kept.gradient_accumulation_steps) == (12, 6)
    engine.set_train_micro_batch_size(3)
    assert (engine._config.train_batch_size, kept.train_micro_batch_size_per_gpu) == (18, 3)


def test_answers_of_defaults() -> None:
    engine = start(3)
    sizes = (
        engine.zero_reduce_bucket_size(), engine.zero_allgather_bucket_size(), engine.zero_prefetch_bucket_size(),
        engine.zero_max_live_parameters(), engine.zero_sub_group_size(), engine.zero_param_persistence_threshold(),
    )  # fmt: skip
    assert sizes == (2**20, 2**20, 0, 2**22, 2**22, 0)  # one rank gathers nothing ahead
    assert engine.zero_offload_optimizer() is engine.zero_offload_param() is engine.steps_per_print() is None
    assert (engine.zero_overlap_comm(), engine.zero_reduce_scatter(), engine.dump_state()) == (True, True, False)
    assert (engine._config.zero_config.stage, engine._config.train_batch_size) == (3, 4)
    assert (engine.optimizer_name(), engine.scheduler_name(), engine.scheduler_params()) == ("adamw", None, None)
    assert engine.optimizer_params() == {"lr": 0.01, "weight_decay": 0.01}
    assert engine.communication_data_type == torch.float32
    assert start(0, bf16={"enabled": True}).communication_data_type == torch.bfloat16
    assert start(0, communication_data_type="fp16").communication_data_type == torch.float16
    assert start(2, zero={"offload_optimizer": {"device": "cpu"}}).zero_offload_optimizer().device == "cpu"
    assert start(1, zero={"buffers": "broadcast"}).zero_reduce_bucket_size() == 2**20
    assert (engine.get_type(), engine.mp_world_size, engine.seq_dp_world_size, engine.num_experts) == ([0.0], 1, 1, [])
    assert engine.param_names[engine.module[0].weight] == "0.weight"
    assert engine.enable_backward_allreduce
    assert not engine.curriculum_learning_enabled()
    assert not engine.random_ltd_enabled()
    with pytest.raises(NotImplementedError, match="no_sync"):
        engine.enable_backward_allreduce = False
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (
        3 * engine.gradient_accumulation_steps(),
        3,
        engine.gradient_accumulation_steps(),
    )
    with pytest.raises(ValueError, match="from 1 to"):
        engine.set_train_micro_batch_size(0)
    nobody = deepspeed.initialize(model=net(), config={"train_micro_batch_size_per_gpu": 1})[0]
    assert nobody.get_lr() == nobody.get_mom() == nobody.get_type() == []


@pytest.mark.parametrize("stage", [0, 2])
def test_the_norm_is_a_tensor_where_it_is_deepspeeds(stage: int) -> None:
    engine = start(stage)
    train(engine, 0, 1)
    norm = engine.get_global_grad_norm()
    assert isinstance(norm, torch.Tensor if stage else float)
    assert float(norm) > 0


def test_counts_may_be_set() -> None:
    engine = start(1)
    train(engine, 0, 1)
    engine.global_samples, engine.skipped_steps, engine.global_steps = 96, 2, 24
    train(engine, 0, 1)
    assert (engine.global_samples, engine.skipped_steps, engine.global_steps) == (100, 2, 25)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_step_for_several_backwards_counts_all_samples(stage: int) -> None:
    engine = start(stage)
    for k, x in enumerate(batches(0, 4)):
        engine.set_gradient_accumulation_boundary(k % 2 == 1)
        engine.backward(loss_of(engine, x))
        if k % 2:
            engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 8)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reductions_are_put_together(stage: int) -> None:
    def job(rank: int, together: bool) -> list[torch.Tensor]:
        engine = start(stage, gradient_accumulation_steps=1)
        for k in range(2):
            xs = batches(rank, 4)[2 * k : 2 * k + 2]
            if together:
                with engine.coalesce_grad_reduction():
                    for x in xs:
                        engine.backward(loss_of(engine, x))
            else:
                engine.backward(sum(loss_of(engine, x) for x in xs))
            engine.step()
        assert engine.global_samples == 8  # a step counts as many as the configuration says
        return [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]

    own, plain = (sim.run(2, lambda rank, t=t: job(rank, t))[0] for t in (True, False))
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_reductions_that_cannot_be_put_together() -> None:
    with pytest.raises(NotImplementedError, match="stages 1 to 3"), start(0).coalesce_grad_reduction():
        pass
    engine = start(1, managed_gradient_accumulation=False)
    with pytest.raises(AssertionError, match="managed"), engine.coalesce_grad_reduction():
        pass


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("of_optimizer", [False, True])
def test_states_go_away_and_come_back(stage: int, of_optimizer: bool) -> None:
    states = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer]
    states += [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads]

    def job(rank: int, away: bool) -> list[torch.Tensor]:
        engine = start(stage, bf16={"enabled": True})
        engine.module[0].register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16(),))
        train(engine, rank, 1)
        owner = engine.optimizer if of_optimizer else engine
        if away:
            owner.offload_states(include=states, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
            owner.reload_states(non_blocking=True)
            owner.offload_states(device=OffloadDeviceEnum.cpu, pin_memory=False)
            owner.reload_states()
            owner.offload_states(device=OffloadDeviceEnum.none)
        return train(engine, rank, 2)

    for one, other in zip(*(sim.run(2, lambda rank, a=a: job(rank, a))[0] for a in (True, False)), strict=True):
        assert torch.equal(one, other)


def test_states_that_cannot_go_away() -> None:
    with pytest.raises(ValueError, match="stage 1, 2 or 3"):
        start(0).offload_states()
    with pytest.raises(ValueError, match="they leave at stage 3"):
        start(1).offload_states([OffloadStateTypeEnum.lp_params])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_engine_has_the_numbers_of_one_that_is_not(stage: int) -> None:
    def job(rank: int, compiled: bool) -> list[torch.Tensor]:
        engine = start(stage)
        if compiled:
            engine.compile(backend="eager")
        return train(engine, rank, 3)

    for one, other in zip(*(sim.run(2, lambda rank, c=c: job(rank, c))[0] for c in (True, False)), strict=True):
        assert torch.equal(one, other)


def test_the_weights_of_stage_3_under_their_newer_name() -> None:
    def job(rank: int) -> None:
        engine = start(3)
        found, known = engine._consolidated_16bit_state_dict(), engine._zero3_consolidated_16bit_state_dict()
        assert (found is None) == (known is None) == (rank == 1)
        for name, value in (known or {}).items():
            assert torch.equal(value, found[name])

    sim.run(2, job)
    with pytest.raises(ValueError, match=r"at stage 2: only stage 3 .* module_state_dict"):
        start(2)._consolidated_16bit_state_dict()


def test_the_speed_of_training() -> None:
    engine = start(1)
    train(engine, 0, 4)
    assert (engine.tput_timer.global_step_count, engine.tput_timer.batch_size) == (4, 4)
    assert engine.tput_timer.avg_samples_per_sec() > 0
    engine.eval()
    engine(batches(0, 1)[0])
    assert not engine.tput_timer.started
    assert not start(1, timers={"throughput": {"enabled": False}}).tput_timer.config.enabled


def test_events_of_the_program_go_to_its_monitors(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = start(1, csv_monitor=section)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Train/mine", 1.5, 7), ("Train/mine", 2.5, 9)])
    engine.destroy()
    engine.engine.feed.close()
    found = [path for path in tmp_path.rglob("*.csv") if "mine" in path.name]
    assert len(found) == 1
    rows = list(csv.reader(found[0].open()))
    assert [(float(a), float(b)) for a, b in (row[-2:] for row in rows[1:])] == [(7, 1.5), (9, 2.5)]
    assert not start(1).monitor.enabled


def test_events_that_count_otherwise_void_no_steps(tmp_path: Path) -> None:
    """Of validation by epoch, say: their x is far below that of training."""
    section = {"enabled": True, "output_path": str(tmp_path)}
    for again in range(2):  # the second run continues in the same folder
        engine = start(1, tensorboard={**section, "job_name": "board"}, jsonl_monitor={**section, "job_name": "lines"})
        engine.monitor.write_events([("Val/loss", 0.25, 2 * again), ("step", 0.5, 2 * again)])
        train(engine, 0, 3)
        engine.monitor.write_events([("Val/loss", 0.75, 2 * again + 1)])
        engine.destroy()
        assert engine.engine.feed.failed == {}
    rows = read_tensorboard(tmp_path / "board")
    assert [(x, value) for name, x, value in rows if name == "Val/loss"] == [(0, 0.25), (1, 0.75), (2, 0.25), (3, 0.75)]
    assert [value for name, _, value in rows if name == "Train/Samples/step"] == [1.0, 2.0, 3.0]  # of the second run
    lines = [json.loads(line) for line in (tmp_path / "lines" / "records.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [None, 1, 2, 3, None] * 2
    assert lines[0] == {"step": None, "total_samples": 0, "Val/loss": 0.25, "events/step": 0.5}
    log = read_log(tmp_path / "lines" / "records.jsonl")
    assert (log.broken, log.buckets.last) == (0, 3)


# -- parameters and optimizers ----------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["parameters", "groups", "instance"])
def test_parameters_in_no_group_stay_as_they_are(stage: int, form: str, caplog: pytest.LogCaptureFixture) -> None:
    def job(rank: int) -> None:
        model = net()
        before = model[2].weight.detach().clone()
        given: Any = list(model[0].parameters())
        more: dict[str, Any] = {"model_parameters": [{"params": given}] if form == "groups" else iter(given)}
        document = config(stage)
        if form == "instance":
            more = {"optimizer": torch.optim.AdamW(given, lr=0.01)}
            del document["optimizer"]
        engine = deepspeed.initialize(model=model, config=document, **more)[0]
        weights = train(engine, rank)
        assert torch.equal(weights[2], before)
        assert not torch.equal(weights[0], net()[0].weight)

    with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
        sim.run(2, job)
    assert "2 parameters are in no group of the optimizer and are frozen" in caplog.text
    assert "2.weight, 2.bias" in caplog.text


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens, self.hidden, self.lm_head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.hidden(self.embed_tokens(x))))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_takes_the_matrices_of_hidden_layers(stage: int) -> None:
    params = {"muon_lr": 0.03, "adam_lr": 0.002, "lr": 1.0, "momentum": 0.9, "betas": [0.8, 0.9], "weight_decay": 0.1}

    def job(rank: int, by_name: bool) -> Any:
        model, document = Words(), config(stage, gradient_accumulation_steps=1, gradient_clipping=0.0)
        groups: Any = [{"params": model.parameters()}, {"params": [], "weight_decay": 0.0}]
        optimizer = None
        if by_name:
            document["optimizer"] = {"type": "Muon", "params": params}
        else:
            del document["optimizer"]
            aux = [model.embed_tokens.weight, model.hidden.bias, model.lm_head.weight]
            own = {"params": [model.hidden.weight], "lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
            other = {"params": aux, "lr": 0.002, "betas": (0.8, 0.9), "weight_decay": 0.1, "use_muon": False}
            from zoo.deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam

            optimizer = MuonWithAuxAdam([own, other])
            groups = None
        engine = deepspeed.initialize(model=model, model_parameters=groups, optimizer=optimizer, config=document)[0]
        assert engine.optimizer_name() == ("muon" if by_name else None)
        if by_name:
            assert [p.use_muon for p in model.parameters()] == [False, True, False, False]
        for step in range(3):
            x = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(10 * rank + step))
            engine.backward(engine(x).square().mean())
            engine.step()
        return {n: deepspeed.utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}

    named, given = (sim.run(2, lambda rank, b=b: job(rank, b))[0] for b in (True, False))
    for name, value in named.items():
        torch.testing.assert_close(value, given[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("params", "said"), [({"nesterov": 1}, "has nesterov"), ({"per_head_muon": True}, "are not there")]
)
def test_what_muon_cannot_do(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start(0, optimizer={"type": "Muon", "params": params})


def test_one_cycle_as_deepspeed_has_it() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    document = config(1, scheduler={"type": "OneCycle", "params": params}, gradient_accumulation_steps=1)
    engine = deepspeed.initialize(model=net(), config=document)[0]
    assert (engine.scheduler_name(), engine.scheduler_params()) == ("OneCycle", params)
    seen = []
    for x in batches(0, 4):
        seen.append((engine.get_lr()[0], engine.optimizer.param_groups[0]["betas"]))
        engine.backward(loss_of(engine, x))
        engine.step()
    rates, betas = zip(*seen, strict=True)
    assert rates == pytest.approx((0.01, 0.055, 0.1, 0.055))
    assert [b[0] for b in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85])
    assert {b[1] for b in betas} == {0.99}
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.7}}
    engine = deepspeed.initialize(model=net(), config={**document, "optimizer": sgd})[0]
    assert engine.optimizer.param_groups[0]["momentum"] == 0.7
    with pytest.raises(ConfigError, match="OneCycle"):
        start(1, scheduler={"type": "OneCycle", "params": {"cycle_min": 1}})


def test_arguments_of_schedules() -> None:
    from zoo.deepspeed.runtime import lr_schedules

    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "3", "--cycle_momentum", "true"])
    assert (args.warmup_num_steps, args.cycle_momentum, args.warmup_type, args.cycle_min_lr) == (3, True, "log", 0.01)
    section, error = lr_schedules.get_config_from_args(args)
    assert (section["type"], section["params"]["warmup_num_steps"], error) == ("WarmupLR", 3, None)
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert lr_schedules.get_torch_optimizer(inner) is inner
    assert lr_schedules.get_torch_optimizer(argparse.Namespace(optimizer=inner)) is inner
    with pytest.raises(TypeError, match="not a subclass"):
        lr_schedules.get_torch_optimizer(3)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_saving_between_the_micro_batches_of_a_step(stage: int, tmp_path: Path) -> None:
    """The file has the state of the latest step; training here goes on as if nothing had been saved."""

    def job(rank: int, saves: bool) -> Any:
        engine = start(stage)
        xs = batches(rank, 6)
        for k, x in enumerate(xs):
            engine.backward(loss_of(engine, x))
            if k == 4 and saves:
                engine.save_checkpoint(tmp_path / str(stage), client_state={"k": k})
            engine.step()
        weights = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        other = start(stage)
        if saves:
            _, client = other.load_checkpoint(tmp_path / str(stage))
            assert client == {"k": 4}
            assert other.global_steps == 2
            for x in xs[4:]:
                other.backward(loss_of(other, x))
                other.step()
        return weights, [deepspeed.utils.safe_get_full_fp32_param(p) for p in other.module.parameters()]

    weights, again = sim.run(2, lambda rank: job(rank, True))[0]
    plain = sim.run(2, lambda rank: job(rank, False))[0][0]
    assert all(map(torch.equal, weights, plain))
    assert all(map(torch.equal, again, plain))


def test_what_programs_keep_in_client_state(tmp_path: Path) -> None:
    engine, counts = start(0), defaultdict(int, a=1)
    kept = {"args": argparse.Namespace(lr=0.1, out=Path("x"), tags=["a"]), "counts": counts}
    engine.save_checkpoint(tmp_path, client_state=kept)
    found = start(0).load_checkpoint(tmp_path)[1]
    assert found == kept
    found["counts"]["new"] += 2
    assert found["counts"] == {"a": 1, "new": 2}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_loss_scale_may_be_set_between_steps(stage: int) -> None:
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4}

    def job(rank: int, scale: float | None) -> list[torch.Tensor]:
        engine = start(stage, fp16=fp16)
        if scale is not None:
            engine.optimizer.cur_scale = 2 * scale
            engine.optimizer.loss_scaler.cur_scale = 3
            engine.optimizer.loss_scale = scale
            assert engine.optimizer.cur_scale == engine.optimizer.loss_scaler.loss_scale == scale
            engine.backward(loss_of(engine, batches(rank, 1)[0]))
            with pytest.raises(ValueError, match=r"loss_scale = 4 with gradients that have the old scale"):
                engine.optimizer.loss_scale = 4
            engine.zero_grad()
            for wrong in (0, float("inf"), "8", True):
                with pytest.raises(ValueError, match=r"loss_scale = .*; give a finite number > 0"):
                    engine.optimizer.cur_scale = wrong
        return train(engine, rank)

    for expected, found in zip(
        sim.run(2, lambda rank: job(rank, None)), sim.run(2, lambda rank: job(rank, 64.0)), strict=True
    ):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match=r"losses are scaled in fp16 alone"):
        start(1).optimizer.loss_scale = 2.0
