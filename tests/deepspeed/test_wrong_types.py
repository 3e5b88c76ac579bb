"""Arguments of the wrong type, at the public functions that programs call: a sentence, and never Python's own error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.runtime import lr_schedules
from zoo.deepspeed.utils import logging as logs

import zoo.deepspeed as deepspeed
from zoo import optim, sim, zero
from zoo.deepspeed import utils
from zoo.engine import initialize

HUGE = 10**5000
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}  # fmt: skip


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


READERS = ["full_fp32_param", "full_grad", "local_fp32_param", "local_grad"]
CASES: list[tuple[str, Callable[[], Any], str]] = [
    *(
        (name, lambda name=name: getattr(utils, f"safe_get_{name}")("0.weight"), r"got '0\.weight', a str; give it")
        for name in READERS
    ),
    *(
        (f"set {name}", lambda name=name: getattr(utils, f"safe_set_{name}")(5, torch.ones(1)), "5 is not a|got 5,")
        for name in READERS
    ),
    ("state", lambda: utils.safe_get_full_optimizer_state("w", "exp_avg"), "got 'w', a str; give it the parameter"),
    ("grads", lambda: utils.safe_update_full_grad_vectorized(["w"], lambda g, p: g), "got 'w', a str"),
    ("leaf class", lambda: utils.set_z3_leaf_modules(model(), nn.Linear), r"a type; give a list, as \["),
    ("leaf name", lambda: utils.set_z3_leaf_modules(model(), "Linear"), r"'Linear', a str; give a list"),
    ("leaf path", lambda: utils.set_z3_leaf_modules_by_name(model(), "0"), r"'0', a str; give a list"),
    ("leaf of an engine", lambda: utils.set_z3_leaf_modules("m", [nn.Linear]), "'m', a str, as its model"),
    ("leaves", lambda: utils.get_z3_leaf_modules(None), "None, a NoneType, as its model"),
    ("log", lambda: logs.log_dist("said", ranks=0), r"ranks=0, a int; give a list of ranks, as \[0\]"),
    ("once", lambda: logs.log_dist_once("said", ranks=0), r"ranks=0, a int; give a list of ranks"),
    ("print", lambda: logs.print_dist("said", ranks="0"), r"ranks='0', a str; give a list of ranks"),
    ("timeout", lambda: deepspeed.init_distributed(timeout=30), r"timeout=30; give a datetime\.timedelta"),
    ("lr", lambda: deepspeed.ops.adam.FusedAdam(parameters(), lr="1e-5"), r"lr='1e-5'; it must be a number >= 0"),
    ("lr list", lambda: deepspeed.ops.lion.FusedLion(parameters(), lr=[0.1]), r"lr=\[0\.1\]; it must be a number"),
    ("lr huge", lambda: deepspeed.ops.lamb.FusedLamb(parameters(), lr=HUGE), "lr=a number of more than 75 digits"),
    ("betas", lambda: deepspeed.ops.adam.FusedAdam(parameters(), betas=0.9), r"betas=0\.9; it must be two numbers"),
    ("betas text", lambda: optim.AdamW(parameters(), betas=("0.9", "0.99")), "it must be two numbers"),
    ("eps", lambda: deepspeed.ops.adam.DeepSpeedCPUAdam(parameters(), eps="1e-8"), "eps='1e-8'; it must be a number"),
    ("decay", lambda: optim.SGD(parameters(), 0.1, weight_decay=None), "weight_decay=None; it must be a number"),
    ("ratio", lambda: optim.Lamb(parameters(), max_coeff="10"), "max_coeff='10'; each is a number, or None"),
    ("schedule of a model", lambda: lr_schedules.WarmupLR(model()), "a Sequential as its optimizer; give"),
    ("rate", lambda: lr_schedules.WarmupLR(sgd(), warmup_max_lr="1e-3"), "warmup_max_lr='1e-3', a str; it takes a num"),
    ("rates", lambda: lr_schedules.WarmupLR(sgd(), warmup_max_lr={"a": 1}), "warmup_max_lr={'a': 1}, a dict; it takes"),
    ("steps", lambda: lr_schedules.WarmupDecayLR(sgd(), "1000"), "total_num_steps='1000', a str; it takes a number"),
    ("huge", lambda: lr_schedules.WarmupLR(sgd(), warmup_max_lr=HUGE), "warmup_max_lr with 16610 bits"),
    ("size", lambda: lr_schedules.OneCycle(sgd(), 0.1, 0.2, cycle_first_step_size="9"), "'9', a str; it takes"),
    ("begun", lambda: lr_schedules.WarmupLR(sgd(), last_batch_iteration=None), "last_batch_iteration=None; -1 begins"),
    ("tiles", lambda: deepspeed.zero.TiledLinear("4", 4), "in_features='4' and in_splits=1; it takes"),
    ("external", lambda: deepspeed.zero.register_external_parameter(5, parameters()[0]), "got a int as its module"),
    ("scaler", lambda: zero.LossScaler(scale="8"), "a loss scaler got '8', a str; it takes numbers"),
    ("scale", lambda: zero.ZeroOptimizer(model(), stage=1, loss_scale=HUGE), "a finite scale"),
    ("options", lambda: zero.ZeroOptimizer(model(), stage=1, optimizer_options="x"), "_options='x', a str; give"),
    ("dry", lambda: zero.DryRun(size="4"), "size='4', rank=0; whole numbers"),
    ("memory", lambda: zero.estimate_zero3_model_states_mem_needs("7e9", 1.0), "total_params='7e9'; it must"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "message"), [pytest.param(use, said, id=name) for name, use, said in CASES])
def test_they_are_refused_with_a_sentence(use: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        use()


def test_those_of_an_engine_too() -> None:
    engine = deepspeed.initialize(model=model(), config=CONFIG)[0]
    with pytest.raises(ValueError, match="compile_kwargs='max', a str; give a dict"):
        engine.compile(compile_kwargs="max")
    with pytest.raises(ValueError, match="num_local_io_workers got '2'"):
        engine.deepspeed_io([torch.ones(4)] * 4, num_local_io_workers="2")
    with pytest.raises(ValueError, match="all_gather_scalar got 5, a int"):
        engine.all_gather_scalar(5, None)


def test_numbers_in_other_types_are_taken() -> None:
    import numpy as np

    schedule = lr_schedules.WarmupDecayLR(sgd(), np.int64(100), 0, np.float32(0.5), 10)
    assert schedule.max_lrs == [0.5]
    optim.AdamW(parameters(), lr=torch.tensor(0.1), betas=[np.float64(0.9), 0.99], eps=np.float32(1e-8))
    assert utils.safe_get_full_fp32_param(torch.ones(3)) is None  # a tensor that no engine has, as in DeepSpeed


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"zero_optimization": {"stage": 2, "leaf_module": 5}}, "leaf_module is a int; it is an object"),
        (
            {"zero_optimization": {"stage": 2, "leaf_module": {"names": 5}}},
            r"leaf_module\.names is a int; it is a list",
        ),
        ({"zero_optimization": {"stage": 2, "leaf_module": {1: ["a"]}}}, "leaf_module has the key 1; its keys"),
        ({"comms_logger": 5}, r"comms_logger: given 5 \(int\); it is an object"),
        ({"comms_logger": {1: 2}}, r"comms_logger: given \{1: 2\} \(dict\); it is an object"),
        ({"sequence_parallel_size": 5, "mesh": None}, "5"),
        ({"sequence_parallel_size": 2, "mesh": 7}, "the section mesh has the axes None"),
    ],
    ids=str,
)
def test_sections_of_another_type(beside: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepspeed.initialize(model=model(), config={**CONFIG, **beside})


@pytest.mark.parametrize("rank_alone", [False, True])
def test_a_mesh_that_is_none(rank_alone: bool) -> None:
    def job(rank: int) -> None:
        wrong = "data" if rank or not rank_alone else None
        with pytest.raises((ValueError, RuntimeError), match="mesh='data', a str; give a DeviceMesh"):
            initialize(CONFIG, model(), mesh=wrong)

    sim.run(2, job)
