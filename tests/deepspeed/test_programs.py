"""Names that programs use beside the engine: each is imported, and used, on simulated ranks where there are several."""

from __future__ import annotations

import csv
import logging
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.deepspeed.surface.utilities import TABLE

dist: Any = deepspeed.comm


@pytest.mark.parametrize("path", sorted(TABLE))
def test_every_name_of_the_table_is_there(path: str) -> None:
    module = import_module(".".join(filter(None, ["zoo.deepspeed", path])))
    names = TABLE[path]
    for name in () if isinstance(names, str) else names:
        assert getattr(module, name) is not None, name


# -- leaves, groups, access -------------------------------------------------------------------------------------------


class Choosing(nn.Module):
    """The data decide which of its two layers is used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts[int(x[0, 0] > 0)](x)
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.choosing, self.last = nn.Linear(4, 4), Choosing(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.choosing(self.first(x) + x.sign() * 9)).square().mean()  # type: ignore[no-any-return]


def test_leaf_modules_are_set_found_and_unset() -> None:
    utils, model = deepspeed.utils, Model()
    assert utils.set_z3_leaf_modules(model, [Choosing]) == [model.choosing]
    assert utils.get_z3_leaf_modules(model) == [model.choosing]
    assert utils.z3_leaf_module(model.choosing) if callable(utils.z3_leaf_module) else True
    assert utils.z3_leaf_parameter(model.choosing.experts[0].weight)
    assert not utils.z3_leaf_parameter(model.first.weight)
    assert utils.unset_z3_leaf_modules(model, ["Choosing"]) == [model.choosing]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["choosing", "x"], raise_if_not_found=False)[1] == ["x"]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["oosing"]) == ([model.choosing], [])
    with pytest.raises(ValueError, match="raise_if_not_found"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    with pytest.raises(ValueError, match="'absent'"):
        utils.set_z3_leaf_modules_by_name(model, ["absent"])
    with pytest.raises(AssertionError, match="list of classes"):
        utils.set_z3_leaf_modules(model, [3])


def test_the_configurations_leaf_modules_are_set(caplog: pytest.LogCaptureFixture) -> None:
    apply, model = import_module("zoo.deepspeed.utils.z3_leaf_module").apply_zero_leaf_module_config, Model()
    assert apply(model, None) == apply(model, {}) == []
    assert not caplog.records
    assert apply(model, {"classes": "Choosing", "names": ["last", "absent"], "name_suffixes": ["oosing"]}) == [
        model.choosing, model.last,
    ]  # fmt: skip
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model.choosing, model.last]
    assert "leaf_module.names: the model, a Model, has no module of 'absent'" in caplog.text
    apply(Model(), {"classes": ["Strange"]})
    assert "leaf_module.classes: the model, a Model, has no module of 'Strange'" in caplog.text


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def choose(rank: int, stage: int, in_config: bool) -> list[torch.Tensor]:
    model, document = Model(), config(stage)
    if in_config:
        document["zero_optimization"]["leaf_module"] = {"classes": ["Choosing"]}
    else:
        deepspeed.utils.set_z3_leaf_modules(model, [Choosing])
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]
    assert engine.config == document
    x = torch.full((1, 4), 1.0 - 2 * rank)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    return [deepspeed.utils.safe_get_full_fp32_param(p) for p in model.parameters()]


@pytest.mark.parametrize("in_config", [False, True])
def test_ranks_may_choose_differently_inside_of_a_leaf(in_config: bool) -> None:
    runs = (sim.run(2, lambda rank, s=s: choose(rank, s, in_config))[0] for s in (0, 3))
    for other, own in zip(*runs, strict=True):
        assert torch.equal(own, other)


def accessed(rank: int, stage: int) -> None:
    utils, model = deepspeed.utils, Model()
    stranger = nn.Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    assert utils.safe_get_full_fp32_param(stranger) is None
    assert utils.safe_get_full_optimizer_state(stranger, "exp_avg") is None
    assert utils.safe_get_full_grad(stranger) is stranger.grad
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))[0]
    engine.backward(engine(torch.ones(1, 4)))
    p = model.first.weight
    before = utils.safe_get_full_grad(p)
    utils.safe_update_full_grad_vectorized(list(model.parameters()), lambda g, _: 2 * g)
    assert torch.equal(utils.safe_get_full_grad(p), 2 * before)
    utils.safe_set_full_grad(p, before)
    engine.step()
    assert utils.safe_get_full_optimizer_state(p, "exp_avg").shape == p.shape
    utils.safe_set_full_fp32_param(p, torch.ones(4, 4))
    assert (utils.safe_get_full_fp32_param(p) == 1).all()
    if stage == 3:
        local = utils.safe_get_local_fp32_param(p)
        utils.safe_set_local_fp32_param(p, local * 2)
        assert (utils.safe_get_full_fp32_param(p) == 2).all()
    else:
        with pytest.raises(AssertionError, match="stage 3"):
            utils.safe_get_local_fp32_param(p)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_reached_by_their_parameters(stage: int) -> None:
    sim.run(2, lambda rank: accessed(rank, stage))


def test_groups_follow_the_engine_and_the_mpu() -> None:
    groups = deepspeed.utils.groups

    def job(rank: int) -> None:
        assert groups._get_data_parallel_world_size() == 2
        with pytest.raises(AssertionError, match="no engine yet"):
            groups.get_data_parallel_group()
        model = Model()
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(1))[0]
        assert groups.get_data_parallel_world_size() == 2
        assert groups.get_data_parallel_rank() == rank
        assert groups._get_sequence_parallel_world_size() == 1
        assert groups._get_sequence_parallel_rank() == 0
        with pytest.raises(KeyError, match="sequence"):
            groups._get_sequence_parallel_group()
        with pytest.raises(AssertionError, match="tensor-parallel"):
            groups.get_tensor_model_parallel_world_size()

    sim.run(2, job)
    with pytest.raises(Exception, match="ep_size"):
        groups.initialize(ep_size=2)
    groups.mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 4, get_model_parallel_group=lambda: "g")
    try:
        assert sim.run(1, lambda rank: groups._get_sequence_parallel_world_size()) == [4]
        assert groups.get_tensor_model_parallel_group() == "g"
    finally:
        groups.mpu = None


# -- the rest of utils ------------------------------------------------------------------------------------------------


def test_messages_of_some_ranks(caplog: pytest.LogCaptureFixture) -> None:
    logs = import_module("zoo.deepspeed.utils.logging")
    level = logs.logger.level
    logs.logger.propagate = True
    try:
        logs.set_log_level_from_string("info")
        assert logs.logger.getEffectiveLevel() == logging.INFO
        assert logs.should_log_le("info")

        def job(rank: int) -> None:
            logs.log_dist(f"hello from {rank}", ranks=[1])
            assert (logs.get_dist_msg("x", [0]) is None) == (rank != 0)
            assert logs.get_dist_msg("x") is None

        sim.run(2, job)
        assert {r.getMessage() for r in caplog.records} == {"[Rank 1] hello from 1"}
        logs.log_dist_once("once", ranks=[0])
        logs.log_dist_once("once", ranks=[0])
        assert len({id(r) for r in caplog.records if "once" in r.getMessage()}) == 1
        with pytest.raises(ValueError, match="debug, info"):
            logs.set_log_level_from_string("loud")
    finally:
        logs.logger.propagate = False
        logs.logger.setLevel(level)


def test_timers() -> None:
    timer = import_module("zoo.deepspeed.utils.timer")
    assert timer.trim_mean([1, 100, 3, 2, 4, 5, 6, 7, 8, -50], 0.1) == 4.5
    assert timer.trim_mean([], 0.1) == 0
    with pytest.raises(AssertionError, match="from 0 to 1"):
        timer.trim_mean([1], 2)
    timers = timer.SynchronizedWallClockTimer()
    timers("fwd").start()
    timers("fwd").stop()
    assert timers("fwd").elapsed(reset=False) > 0
    assert timers.get_mean(["fwd"])["fwd"] > 0
    with pytest.raises(AssertionError, match="start"):
        timers("fwd").stop()
    said: list[str] = []
    speed = timer.ThroughputTimer(SimpleNamespace(enabled=True), 4, 1, 1, logging_fn=said.append)
    assert speed.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0
    assert len(said) == 2


def _numbers_of_constructors_are_computed() -> None:
    before = torch.Tensor.__dict__.get("__new__")
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        rates = [x.item() for x in torch.linspace(0, 1, 3)]
        total = int(torch.tensor([1, 2, 3]).sum()), float(torch.eye(2).sum()), torch.randn(2).isfinite().all().item()
        made = torch.Tensor(2, 3), torch.Tensor(torch.Size([2, 3])), torch.empty(2, 3), torch.full((2, 3), 0.5)
        values = torch.Tensor([1.0, 2.0]).tolist(), torch.zeros(1, device="cpu").tolist()
        with deepspeed.OnDevice(dtype=torch.bfloat16, device="cpu"):
            inner = torch.Tensor(2)
        table = nn.Embedding(4, 2)
    assert rates == [0.0, 0.5, 1.0]
    assert total == (6, 2.0, True)
    assert values == ([1.0, 2.0], [0.0])
    assert {(t.device.type, t.dtype, t.shape) for t in made} == {("meta", torch.float16, torch.Size([2, 3]))}
    assert (inner.device.type, inner.dtype) == ("cpu", torch.bfloat16)
    assert table.weight.is_meta
    assert torch.Tensor.__dict__.get("__new__") is before
    assert torch.Tensor(1).dtype is torch.float32


def test_small_helpers() -> None:
    utils = deepspeed.utils
    assert import_module("zoo.deepspeed.utils.numa").parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for wrong in ("2-1", "a", "1-2-3", "3,1", "0-2,2"):
        with pytest.raises(ValueError, match="range"):
            import_module("zoo.deepspeed.utils.numa").parse_range_list(wrong)
    required = import_module("zoo.deepspeed.utils.torch").required_torch_version
    assert required(min_version=2.1)
    assert required("1.10", max_version="99.0")
    assert not required(max_version=1.13)
    with pytest.raises(AssertionError, match="min_version"):
        required()
    with utils.OnDevice(dtype=torch.float16, device="meta"):
        layer = nn.Linear(3, 2)
    assert layer.weight.is_meta
    assert layer.weight.dtype is torch.float16
    _numbers_of_constructors_are_computed()
    with utils.OnDevice(dtype=torch.bfloat16, device="cpu"):
        made = nn.BatchNorm1d(3)
        whole = torch.full((2,), 3), torch.zeros(2, dtype=torch.long)
    assert made.weight.dtype is torch.bfloat16
    assert all(t.dtype is torch.long for t in whole)
    assert nn.Linear(1, 1).weight.dtype is torch.float32
    assert utils.instrument_w_nvtx(lambda x: x + 1)(1) == 2
    model = Model()
    assert utils.recursive_getattr(model, "choosing.experts.0") is model.choosing.experts[0]
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    weights = import_module("zoo.deepspeed.utils.zero_to_fp32")

    def job(rank: int) -> None:
        model = Model()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(3))[0]
        engine.save_checkpoint(str(tmp_path / "run"), tag="a")

    sim.run(2, job)
    expected = Model().state_dict()
    found = weights.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))
    lazy = weights.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"), lazy_mode=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(lazy["first.weight"].contiguous(), expected["first.weight"])
    model = nn.Module()
    model.first, model.more = nn.Linear(4, 4), nn.Linear(1, 1)
    assert torch.equal(
        weights.load_state_dict_from_zero_checkpoint(model, str(tmp_path / "run"), "a").first.weight,
        expected["first.weight"],
    )
    weights.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "run"), str(tmp_path / "out"))
    assert set(torch.load(tmp_path / "out" / "pytorch_model.bin")) == set(expected)
    with pytest.raises(FileNotFoundError, match="_optim_states"):
        weights.get_optim_files(str(tmp_path / "run" / "a"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        weights.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "absent"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_of_a_checkpoint_of_deepspeed(stage: int) -> None:
    """Names as DeepSpeed's own function gives them, the tied one twice, and files as it lists them."""
    weights = import_module("zoo.deepspeed.utils.zero_to_fp32")
    folder = Path(__file__).parent.parent / "checkpointing" / "foreign" / "golden" / f"stage{stage}"
    found = weights.get_fp32_state_dict_from_zero_checkpoint(folder)
    layers = ("again", "first", "last", "middle", "mixed")
    assert set(found) == {"shift", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))}
    assert found["again.weight"].data_ptr() == found["middle.weight"].data_ptr()
    files = weights.get_optim_files(folder / "step")
    assert [Path(file).name for file in files] == [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1)]
    state = weights.parse_model_states(weights.get_model_state_files(folder / "step"))[0]
    assert torch.equal(state.buffers["shift"], found["shift"])
    assert state.shared_params == [["again.weight", "middle.weight"]]


# -- optimizers, schedules, monitors, operations ----------------------------------------------------------------------

MAKERS = {
    "ops.adam.FusedAdam": {"adam_w_mode": False},
    "ops.adam.DeepSpeedCPUAdam": {"adamw_mode": True, "bias_correction": False},
    "ops.lamb.FusedLamb": {"max_coeff": 5.0},
    "ops.lion.FusedLion": {"set_grad_none": False},
    "ops.lion.DeepSpeedCPULion": {},
    "ops.adagrad.DeepSpeedCPUAdagrad": {"eps": 1e-8},
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_alone_and_given_to_initialize(name: str) -> None:
    path, _, cls_name = name.rpartition(".")
    cls = getattr(import_module(f"zoo.deepspeed.{path}"), cls_name)
    alone = Model()
    optimizer = cls(alone.parameters(), lr=0.01, **MAKERS[name])
    for _ in range(2):
        optimizer.zero_grad()
        alone(torch.ones(1, 4)).backward()
        optimizer.step()

    def job(rank: int) -> list[torch.Tensor]:
        model = Model()
        document = {k: v for k, v in config(2).items() if k != "optimizer"} | {"gradient_clipping": 0.0}
        given = cls(model.parameters(), lr=0.01, **MAKERS[name])
        engine = deepspeed.initialize(model=model, optimizer=given, config=document)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)))
            engine.step()
        return [p.detach().clone() for p in model.parameters()]

    for own, expected in zip(sim.run(2, job)[0], alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_lamb_refuses_what_it_does_not_do() -> None:
    lamb = deepspeed.ops.lamb.FusedLamb
    with pytest.raises(RuntimeError, match="amsgrad"):
        lamb([nn.Parameter(torch.ones(2))], amsgrad=True)
    with pytest.raises(ValueError, match="gradient_clipping"):
        lamb([nn.Parameter(torch.ones(2))], max_grad_norm=1.0)


def test_adams_say_what_they_are_and_refuse_amsgrad() -> None:
    adam = deepspeed.ops.adam
    first, second = (adam.DeepSpeedCPUAdam([nn.Parameter(torch.ones(2))], adamw_mode=w) for w in (True, False))
    assert second.opt_id == first.opt_id + 1
    assert (first.adam_w_mode, second.adam_w_mode, first.fp32_optimizer_states) == (True, False, True)
    for cls in (adam.DeepSpeedCPUAdam, adam.FusedAdam):
        with pytest.raises(RuntimeError, match=f"{cls.__name__} has no AMSGrad variant"):
            cls([nn.Parameter(torch.ones(2))], amsgrad=True)


def test_builders_have_deepspeeds_names_of_modules() -> None:
    builders = deepspeed.ops.op_builder
    families = {"CPUAdam": "adam", "CPUAdagrad": "adagrad", "CPULion": "lion", "FusedAdam": "adam", "AsyncIO": "aio"}
    for name, family in families.items():
        builder = getattr(builders, f"{name}Builder")()
        assert builder.absolute_name() == f"deepspeed.ops.{family}.{builder.NAME}_op"
        assert deepspeed.ops.__compatible_ops__[builder.NAME] is builder.is_compatible()


def test_schedules_and_the_names_of_their_options() -> None:
    schedules = import_module("zoo.deepspeed.runtime.lr_schedules")
    assert schedules.VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    for name in (
        "CYCLE_MAX_LR", "CYCLE_MIN_LR", "COS_MIN_RATIO", "CYCLE_FIRST_STEP_SIZE", "CYCLE_MAX_MOM", "CYCLE_MIN_MOM",
        "DECAY_LR_RATE", "DECAY_MOM_RATE", "DECAY_STEP_SIZE", "LR_RANGE_TEST_MIN_LR", "LR_RANGE_TEST_STAIRCASE",
        "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "TOTAL_NUM_STEPS", "WARMUP_MAX_LR", "WARMUP_MIN_LR",
        "WARMUP_MIN_RATIO", "WARMUP_NUM_STEPS", "WARMUP_TYPE",
    ):  # fmt: skip
        assert getattr(schedules, name) == name.lower()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = schedules.WarmupLR(optimizer, warmup_max_lr=None, warmup_num_steps=2, warmup_type="linear")
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == [0.5]
    section, wrong = schedules.get_config_from_args(SimpleNamespace(lr_schedule="WarmupLR", warmup_max_lr=0.1))
    assert (section, wrong) == ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}, None)
    assert schedules.get_lr_from_config(section) == (0.1, "")
    assert schedules.get_config_from_args(SimpleNamespace())[0] is None
    assert schedules.get_lr_from_config({"type": "x", "params": {}})[0] is None


def test_monitors_write_events(tmp_path: Path) -> None:
    monitors = import_module("zoo.deepspeed.monitor.monitor")
    get = import_module("zoo.deepspeed.monitor.config").get_monitor_config
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    master = monitors.MonitorMaster(get({"csv_monitor": section, "train_batch_size": 3}))
    assert master.enabled
    assert master.tb_monitor is None
    master.write_events([("Train/loss", 1.5, 10), ("Train/lr", 0.1, 10)])
    master.write_events([("Train/loss", torch.tensor(0.5), 20)])
    (file,) = (tmp_path / "job").glob("*loss*.csv")
    with file.open() as lines:
        assert list(csv.reader(lines))[1:] == [["10", "1.5"], ["20", "0.5"]]
    assert len(list((tmp_path / "job").glob("*.csv"))) == 2
    master.write_events([("Mine/a", 1.0, 7), ("Mine/b", 3.0, 8), ("Mine/a", 2.0, 7)])  # none takes another's place
    (file,) = (tmp_path / "job").glob("*_a.csv")
    with file.open() as lines:
        assert list(csv.reader(lines))[1:] == [["7", "1.0"], ["7", "2.0"]]
    quiet = monitors.csvMonitor(SimpleNamespace(enabled=False, output_path="", job_name=""))
    quiet.write_events([("a", 1, 1)])
    assert not get({}).enabled


def test_tensors_to_and_from_files(tmp_path: Path) -> None:
    builder = deepspeed.ops.aio.AsyncIOBuilder()
    assert builder.NAME == "async_io"
    assert builder.is_compatible()
    handle = builder.load().aio_handle(1 << 16, 8, False, True, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 16, 8, 2)
    given = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float32)).copy_(torch.arange(1000.0))
    assert handle.sync_pwrite(given, str(tmp_path / "f"), 0) == 1
    got = torch.empty(1000)
    assert handle.async_pread(got, str(tmp_path / "f"), 0) == 0
    assert handle.wait() == 1
    assert torch.equal(got, given)
    assert handle.free_cpu_locked_tensor(given)


# -- runtime.utils ----------------------------------------------------------------------------------------------------


def test_partitions_and_norms(capsys: pytest.CaptureFixture[str]) -> None:
    utils = import_module("zoo.deepspeed.runtime.utils")
    assert utils.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert utils.partition_uniform(10, 3) == [0, 4, 7, 10]
    assert utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([1, 2, 3, 4, 5], 2) == [0, 3, 5]
    assert utils.call_to_str("f", 1, x="a") == "f(1, x='a')"
    with pytest.raises(RuntimeError, match="one value"):
        utils.get_only_unique_item([1, 2])
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([3.0, 4.0])
    assert utils.get_weight_norm(p) == 5.0
    assert float(utils.clip_grad_norm_([p], 1.0)) == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    assert not utils.CheckOverflow([[p]]).check()
    p.grad[0] = float("inf")
    assert utils.CheckOverflow([[p]]).check()
    assert utils.get_global_norm([3.0, 4.0]) == 5.0
    assert not utils.is_model_parallel_parameter(p)
    moved = utils.move_to_device({"a": [p.detach()]}, "cpu", lambda t: True)
    assert moved["a"][0] is not None
    assert utils.get_tensor_bytes(moved) == 8
    utils.see_memory_usage("quiet")
    utils.see_memory_usage("here", force=True)
    assert "here" in capsys.readouterr().out

    def job(rank: int) -> None:
        for numel in (0, 1, 5, 6):
            whole = torch.arange(float(numel))
            part = utils.PartitionedTensor(whole, dist.get_world_group())
            again = utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.get_world_group(), "cpu")
            assert torch.equal(part.full(), whole)
            assert torch.equal(again.full(), whole)
        q = nn.Parameter(torch.ones(1))
        q.grad = torch.tensor([float("nan") if rank else 1.0])
        assert utils.CheckOverflow([[q]]).check()

    sim.run(3, job)


def test_activations_are_computed_again() -> None:
    ckpt = deepspeed.checkpointing
    ckpt.configure(None, {"train_batch_size": 1, "activation_checkpointing": {}})
    assert ckpt.is_configured()
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    ckpt.checkpoint(layer, x).sum().backward()
    assert x.grad is not None
    ckpt.non_reentrant_checkpoint(layer, x).sum().backward()
    ckpt.reset()
