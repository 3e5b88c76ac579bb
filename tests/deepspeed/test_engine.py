"""``DeepSpeedEngine`` on simulated ranks: equal to zoo's engine, and what programs of DeepSpeed rely on."""

from __future__ import annotations

import argparse
import base64
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import engine as zoo_engine
from zoo import sim

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero.update(more.pop("zero", {}))
    return {**copy.deepcopy(CONFIG), "zero_optimization": zero, **more}


def batches(rank: int, count: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(2, 5, generator=dice) for _ in range(count)]


def loss_of(engine: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (engine(x) - x[:, :3]).square().mean()
    return found


def start(stage: int, **more: Any) -> Any:
    torch.set_num_threads(1)
    model = net()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, **more)
    )
    assert engine.module is model
    assert engine.optimizer is optimizer
    assert loader is None
    assert schedule is None
    return engine


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_program_that_steps_the_optimizer_itself_need_not_drop_the_gradients(stage: int) -> None:
    """As Lightning Fabric does. Stage 0 in fp32 is torch's optimizer, which keeps them."""

    def weights(rank: int, drops: bool) -> list[torch.Tensor]:
        engine = start(stage, gradient_accumulation_steps=1)
        for x in batches(rank, 3):
            engine.backward(loss_of(engine, x))
            engine.optimizer.step()
            if drops:
                engine.optimizer.zero_grad()
        return [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]

    own, dropped = (sim.run(2, lambda rank, d=d: weights(rank, d))[0] for d in (False, True))
    assert all(map(torch.equal, own, dropped)) == (stage > 0)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_zoos_engine_does(stage: int) -> None:
    def theirs(rank: int) -> list[float]:
        engine, losses = start(stage), []
        for x in batches(rank, 6):
            loss = loss_of(engine, x)
            assert engine.backward(loss) == loss / 2
            engine.step()
            losses.append(loss.item())
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 6, 0)
        assert isinstance(engine, nn.Module)
        assert [name for name, _ in engine.named_parameters()] == [
            "module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias",
        ]  # fmt: skip
        return losses

    def ours(rank: int) -> list[float]:
        engine, losses = zoo_engine.initialize(config(stage), net())[0], []
        for x in batches(rank, 6):
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    assert sim.run(2, theirs) == sim.run(2, ours)


@given(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=6), st.booleans())
def test_the_boundary_is_whatever_is_set_before_a_backward(stage: int, flags: list[bool], scale: bool) -> None:
    """As accelerate drives it: the flag, backward, and ``step`` at boundaries only."""
    flags = [*flags, True]

    def driven(rank: int) -> tuple[list[float], int]:
        engine, losses = start(stage), []
        for x, flag in zip(batches(rank, len(flags)), flags, strict=True):
            loss = loss_of(engine, x)
            engine.set_gradient_accumulation_boundary(is_boundary=flag)
            assert engine.is_gradient_accumulation_boundary() is flag
            engine.backward(loss, scale_wrt_gas=scale)
            if flag:
                engine.step()
                assert engine.was_step_applied()
                assert engine.get_global_grad_norm() > 0
                assert engine.optimizer.overflow is False
            losses.append(loss.item())
        return losses, engine.global_steps

    def plain() -> tuple[list[float], int]:
        model, losses, steps = net(), [], 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
        for pair, flag in zip(zip(batches(0, len(flags)), batches(1, len(flags)), strict=True), flags, strict=True):
            both = [loss_of(model, x) for x in pair]
            (sum(both) / 2 / (2 if scale else 1)).backward()
            if flag:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            losses.append([loss.item() for loss in both])
        return losses, steps

    (one, steps), (other, _) = sim.run(2, driven)
    expected, count = plain()
    torch.testing.assert_close(torch.tensor([*zip(one, other, strict=True)]), torch.tensor(expected))
    assert steps == count


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_is_durable_when_save_returns_and_goes_on_exactly(stage: int, tmp_path: Path) -> None:
    def train(engine: Any, some: list[torch.Tensor]) -> list[float]:
        losses = []
        for x in some:
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def whole(rank: int) -> list[float]:
        engine, data = start(stage), batches(rank, 8)
        train(engine, data[:4])
        assert engine.load_checkpoint(str(tmp_path / "nothing")) == (None, None)
        assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3}) is True
        assert (tmp_path / "latest").read_text().strip() == "global_step2"
        assert (tmp_path / "global_step2").is_dir()
        return train(engine, data[4:])

    def resumed(rank: int) -> list[float]:
        engine = start(stage)
        path, client = engine.load_checkpoint(str(tmp_path))
        assert path.endswith("global_step2")
        assert client["epoch"] == 3
        assert engine.global_steps == 2
        with pytest.raises(ValueError, match="none"):
            engine.load_checkpoint(str(tmp_path), tag="none")
        return train(engine, batches(rank, 8)[4:])

    assert sim.run(2, whole) == sim.run(2, resumed)


def test_whole_weights_of_stage_3(tmp_path: Path) -> None:
    def gather(rank: int) -> Any:
        engine = start(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
        expected = net().state_dict()
        assert engine.zero_gather_16bit_weights_on_model_save() is True
        found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=False)
        assert (found is None) == (rank != 0)
        if found is not None:
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert engine.save_16bit_model(str(tmp_path)) is True
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        assert all(torch.equal(saved[name], expected[name]) for name in expected)
        return None

    sim.run(2, gather)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_parameters_are_left_out_under_all_their_names(stage: int) -> None:
    def job(rank: int) -> set[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[0].weight.requires_grad_(False)
        engine = deepspeed.initialize(model=model, config=config(stage))[0]
        return set(engine.module_state_dict(exclude_frozen_parameters=True))

    assert sim.run(2, job) == [{"0.bias", "1.bias", "2.weight", "2.bias"}] * 2


def test_parameters_of_stage_3_have_the_attributes_that_tell_them_apart() -> None:
    from zoo.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from zoo.zero import safe_set_local_fp32_param

    def look(rank: int) -> None:
        for stage in (0, 2):
            assert not any(hasattr(p, "ds_id") for p in start(stage).parameters())
        engine = start(3)
        parameters = list(engine.parameters())
        assert len({p.ds_id for p in parameters}) == len(parameters)
        for p, expected in zip(parameters, net().parameters(), strict=True):
            assert p.ds_shape == expected.shape
            assert p.ds_numel == expected.numel()
            assert p.ds_status is ZeroParamStatus.NOT_AVAILABLE
            p.ds_active_sub_modules.clear()
            p.is_mine = True
            with deepspeed.zero.GatheredParameters(p):
                assert p.ds_status is ZeroParamStatus.AVAILABLE
                assert torch.equal(p.data, expected)
            safe_set_local_fp32_param(p, torch.full_like(p.ds_tensor, float(rank)))
        for p in parameters:
            assert p.is_mine
            with deepspeed.zero.GatheredParameters(p):
                assert p.data.unique().tolist() in ([0.0], [1.0], [0.0, 1.0])
        every = sim_gather([p.ds_tensor.numel() for p in parameters])
        assert [sum(n) for n in zip(*every, strict=True)] == [p.ds_numel for p in parameters]
        with pytest.raises(RuntimeError, match=r"nn\.Parameter"):
            deepspeed.zero.register_external_parameter(engine.module, torch.ones(2))

    sim.run(2, look)


def sim_gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def test_models_of_init_have_them_too() -> None:
    def look(rank: int) -> None:
        with deepspeed.zero.Init(config_dict_or_path=config(3)):
            model = net()
        assert all(hasattr(p, "ds_id") and p.ds_shape == p.shape for p in model.parameters())
        ids = [p.ds_id for p in model.parameters()]
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(3))[0]
        assert [p.ds_id for p in engine.parameters()] == ids

    sim.run(2, look)


def test_what_trl_does_before_it_generates() -> None:
    def generate(rank: int) -> None:
        engine, x = start(3), batches(0, 1)[0]
        before = loss_of(engine, x).item()
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            offload = engine.optimizer.parameter_offload
            for p in [*offload.module.parameters(), *(p for _, p in offload.module.ds_external_parameters())]:
                p.ds_active_sub_modules.clear()
            offload.forward_hooks, offload.backward_hooks = [], []
            with torch.no_grad():
                if rank == 0:  # as many as each rank likes
                    engine.module(x)
                inside = loss_of(engine.module, x).item()
            offload._register_deepspeed_module(offload.module)
        assert inside == before
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()

    sim.run(2, generate)


def test_configurations_come_in_every_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps(config(1))
    (tmp_path / "ds.json").write_text(text)
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    older = parser.parse_args(["--deepscale", "--deepscale_config", str(tmp_path / "ds.json")])
    in_base64 = base64.urlsafe_b64encode(text.encode()).decode()
    forms = (
        {"args": arguments},
        {"args": older},
        {"config": str(tmp_path / "ds.json")},
        {"config_params": json.loads(text)},
    )
    for form in (*forms, {"config": in_base64}):
        engine = deepspeed.initialize(model=net(), **form)[0]
        assert engine.config == json.loads(text)
        assert engine.zero_optimization_stage() == 1
    with caplog.at_level(logging.WARNING, "zoo.deepspeed"):
        for _ in range(2):
            unknown = {**config(0), "my_own_key": 1, "steps_per_print": float("inf")}
            assert deepspeed.initialize(model=net(), config=unknown)[0].config["my_own_key"] == 1
    assert caplog.text.count("my_own_key") == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "there is no configuration"),
        ({"config": "/no/such/file.json"}, "is no file"),
        ({"config": 3}, "a dict or the path"),
        ({"config": {"train_batch_size": 0}}, "train_batch_size"),
        ({"config": config(0), "mesh_param": (1, 1)}, "mesh"),
    ],
)
def test_mistakes_are_config_errors(given: dict[str, Any], says: str) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=says):
        deepspeed.initialize(model=net(), **given)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="no model"):
        deepspeed.initialize(config=config(0))
    assert str(deepspeed.DeepSpeedConfigError("one sentence")).endswith("one sentence")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_of_the_program_takes_the_place_of_the_configurations(stage: int) -> None:
    def train(rank: int) -> None:
        model = net()
        model[0].bias.requires_grad_(False)
        mine = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(mine, 1, 0.1)
        engine, optimizer, _, found = deepspeed.initialize(
            model=model,
            optimizer=mine,
            model_parameters=model.parameters(),
            config=config(stage),
            lr_scheduler=schedule,
        )
        assert found is schedule
        assert optimizer.param_groups[0]["lr"] == 0.5
        for x in batches(rank, 2):
            engine.backward(loss_of(engine, x))
            engine.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert engine.get_lr() == pytest.approx([0.05])
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer.optimizer, torch.optim.SGD)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # a schedule of the program's own

    sim.run(2, train)


def test_without_an_optimizer_it_evaluates() -> None:
    def evaluate(rank: int) -> None:
        document = config(3)
        del document["optimizer"]
        engine, optimizer, _, _ = deepspeed.initialize(model=net(), config=document)
        assert not isinstance(optimizer, torch.optim.Optimizer)
        assert engine.get_global_grad_norm() is None
        with torch.no_grad():
            assert torch.equal(engine.eval()(batches(0, 1)[0]), net()(batches(0, 1)[0]))
        assert not engine.training
        assert not engine.module.training

    sim.run(2, evaluate)


def test_what_the_engine_lacks_is_the_models() -> None:
    engine = start(0)
    engine.module.special = "yes"
    assert engine.special == "yes"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        engine.nothing_of_the_kind  # noqa: B018
    assert engine.module_state_dict().keys() == net().state_dict().keys()
    assert engine.train_batch_size() == 4
    assert engine.get_batch_info() == (4, 2, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_clipped_to_1_unless_told_otherwise(stage: int) -> None:
    def moved(**given: Any) -> Any:
        def job(rank: int) -> float:
            torch.manual_seed(0)
            model = nn.Linear(3, 3)
            document = {
                "train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
                "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **given,
            }  # fmt: skip
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
            before = torch.cat([p.flatten() for p in engine.engine.optimizer.consolidated_parameters().values()])
            engine.backward(engine(100 * torch.ones(1, 3)).sum())
            engine.step()
            after = torch.cat([p.flatten() for p in engine.engine.optimizer.consolidated_parameters().values()])
            return float((after - before).norm())

        return sim.run(1, job)[0]

    assert moved() == pytest.approx(1.0, rel=1e-4)
    assert moved(gradient_clipping=0.0) == pytest.approx((3 * (3 * 100**2 + 1)) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_torchscript_of_an_engine_is_refused_by_name(stage: int) -> None:
    def job(rank: int) -> None:
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage))
        for use in (lambda: torch.jit.script(engine), lambda: torch.jit.trace(engine, torch.ones(2, 5))):
            with pytest.raises(ValueError, match=r"Give torch.jit.trace the model, engine.module"):
                use()  # type: ignore[no-untyped-call]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 5)).sum())
            engine.step()
        assert engine.global_steps == 1

    sim.run(2, job)
