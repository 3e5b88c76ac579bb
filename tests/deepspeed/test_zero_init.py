"""``deepspeed.zero.Init``: who joins the ranks, what is read of a configuration, and the dtype of parameters."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_ranks
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.deepspeed.adapters.accelerator import real_accelerator as accelerators
from zoo.deepspeed.adapters.zero.parameters import ZeroParamStatus


def _of_a_new_job(rank: int, port: int) -> tuple[bool, int, int]:
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    with deepspeed.zero.Init(dtype=torch.float32):
        model = nn.Linear(64, 64, bias=False)
    size = dist.get_world_size()
    dist.barrier()
    return dist.is_initialized(), size, int(model.weight.ds_tensor.numel())  # type: ignore[operator, union-attr]


def test_ranks_that_nobody_has_joined_are_joined_before_a_model_is_built() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_ranks(2, _of_a_new_job, port) == {0: (True, 2, 2048), 1: (True, 2, 2048)}


def test_initialize_does_not_train_each_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with pytest.raises(ValueError, match="nobody has joined the 2 ranks of this job"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config, dist_init_required=False)


def dtypes_of(**arguments: Any) -> tuple[torch.dtype, torch.dtype]:
    def build(rank: int) -> tuple[torch.dtype, torch.dtype]:
        with deepspeed.zero.Init(**arguments):
            one, other = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)
        return one.weight.dtype, other.weight.dtype

    (found,) = set(sim.run(2, build))
    return found


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [  # the dtypes of the real package
        ({}, torch.float16),
        ({"dtype": torch.float32}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"config_dict_or_path": {"train_batch_size": 1}}, torch.float32),
        ({"config_dict_or_path": {"train_batch_size": 1, **BF16}}, torch.bfloat16),
        ({"config": {"train_batch_size": 1, **FP16}}, torch.float16),
        ({"config": {"bfloat16": {"enabled": True}}}, torch.bfloat16),
        ({"config": BF16, "dtype": torch.float32}, torch.float32),
        ({"config": {"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}}, torch.bfloat16),
    ],
)  # fmt: skip
def test_parameters_have_the_dtype_of_deepspeed(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    assert dtypes_of(**arguments) == (dtype, dtype)


def test_an_accelerator_without_fp16_has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(accelerators.get_accelerator()), "is_fp16_supported", lambda self: False)
    assert dtypes_of() == (torch.bfloat16, torch.bfloat16)


def test_a_configuration_comes_in_the_forms_of_initialize(tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": "3", "leaf_module": {"names": ["a"]}}, **BF16, "my_own": 1}
    commented = tmp_path / "ds.json"
    commented.write_text(json.dumps(document)[:-1] + ", // a comment\n}")
    assert dtypes_of(config_dict_or_path=document) == (torch.bfloat16, torch.bfloat16)
    assert dtypes_of(config_dict_or_path=str(commented)) == (torch.bfloat16, torch.bfloat16)


def test_what_is_off_looks_at_nothing() -> None:
    for arguments in ({"config_dict_or_path": {"zero_optimization": {"stage": 17}}}, {"config": 3}, {"mpu": 3}):
        with deepspeed.zero.Init(enabled=False, **arguments):
            assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_both_names_of_the_configuration_are_refused() -> None:
    with pytest.raises(ValueError, match="two names of one argument"):
        deepspeed.zero.Init(config={}, config_dict_or_path={})


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_a_model_built_without_a_configuration_trains(precision: str | None) -> None:
    """As DeepSpeed's tutorial builds it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }  # fmt: skip
    if precision is not None:
        config[precision] = {"enabled": True}

    def train(rank: int) -> list[float]:
        torch.manual_seed(0)
        with deepspeed.zero.Init():
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        engine = deepspeed.initialize(model=model, config=config)[0]
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank)).to(next(model.parameters()).dtype)
        losses = []
        for _ in range(3):
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    for losses in sim.run(2, train):
        assert losses[0] > losses[-1] or precision == "fp16"  # the first steps of fp16 lower the loss scale


class Borrows(nn.Module):
    """Its second layer's bias is used in the forward of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_forward_hook(lambda _, __, out: out + self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("within_init", [True, False])
def test_a_parameter_gathers_itself_and_is_let_go(within_init: bool) -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        whole = {name: p.detach().clone() for name, p in Borrows().named_parameters()}
        torch.manual_seed(0)
        with deepspeed.zero.Init(dtype=torch.float32, enabled=within_init):
            model: Any = Borrows()
        if not within_init:
            model = deepspeed.initialize(
                model=model, config={
                    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                    "zero_optimization": {
                        "stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 0,
                    },
                },
            )[0].module  # fmt: skip
        found: dict[str, Any] = dict(model.named_parameters())
        away = ZeroParamStatus.NOT_AVAILABLE
        assert all(p.ds_status == away for p in found.values())
        handle = found["first.weight"].all_gather_coalesced(list(found.values()))
        handle.wait()
        for name, p in found.items():
            assert p.ds_status == ZeroParamStatus.AVAILABLE
            assert torch.equal(p.data, whole[name])
        found["first.weight"].partition(list(found.values()))
        assert all(p.ds_status == away for p in found.values())
        found["second.bias"].all_gather()
        assert torch.equal(found["second.bias"].data, whole["second.bias"])
        with pytest.raises(ValueError, match=r"GatheredParameters\(params, modifier_rank=0\)"):
            found["second.bias"].partition(has_been_updated=True)
        found["second.bias"].partition()
        summary = found["first.weight"].ds_summary()
        assert (summary["status"], summary["ds_shape"], summary["ds_numel"]) == ("NOT_AVAILABLE", (4, 4), 16)
        assert summary["ds_tensor.shape"] == tuple(found["first.weight"].ds_tensor.shape)
        assert not any(p.is_external_param for p in found.values())
        if not within_init:
            model(torch.ones(1, 4)).sum().backward()
            assert found["second.bias"].is_external_param
            assert not found["first.bias"].is_external_param

    sim.run(2, program)


def test_at_other_stages_nothing_gathers() -> None:
    model = deepspeed.initialize(
        model=nn.Linear(2, 2), config={
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2},
        },
    )[0].module  # fmt: skip
    for name in ("all_gather_coalesced", "all_gather", "partition", "ds_summary", "is_external_param"):
        assert not hasattr(model.weight, name)
