"""An mpu whose ranks share layers, and experts: what one process computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zoo.deepspeed.moe.layer import MoE

from zoo import deepspeed
from zoo.config import ConfigError
from zoo.sim import run

WIDTH, HIDDEN, BATCH = 4, 8, 4
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.1}


class Mpu:
    """Tensor-parallel ranks are consecutive, or with ``far`` far apart."""

    def __init__(self, size: int, *, far: bool = False) -> None:
        world = dist.get_world_size()
        table = torch.arange(world).view(size, -1).T if far else torch.arange(world).view(-1, size)
        for ranks in table.tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.tensor, self.rank = group, ranks.index(dist.get_rank())
        for ranks in table.T.tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.data, self.data_rank = group, ranks.index(dist.get_rank())
        self.size = size

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: Any) -> torch.Tensor:
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return dy, None


class Layers(nn.Module):
    """A norm and an MLP, the second of which is split in the way of Megatron's layers."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, down = (torch.randn(shape, generator=generator) for shape in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)))
        self.norm, self.group = nn.LayerNorm(WIDTH), mpu.tensor
        self.up = nn.Parameter(up.chunk(mpu.size, 0)[mpu.rank].clone())
        self.down = nn.Parameter(down.chunk(mpu.size, 1)[mpu.rank].clone())
        for parameter, dim in ((self.up, 0), (self.down, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Copied.apply(self.norm(x), self.group)
        return _Summed.apply((x @ self.up.T).relu() @ self.down.T, self.group)


def trained(size: int, stage: int, *, far: bool = False, save: Path | None = None) -> Any:
    mpu = Mpu(size, far=far)
    model = Layers(mpu)
    document = {"train_batch_size": BATCH, "zero_optimization": {"stage": stage}, **ADAMW}
    engine = deepspeed.initialize(model=model, config=document, model_parameters=model.parameters(), mpu=mpu)[0]
    norms = []
    for step in range(3):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = engine(x.chunk(dist.get_world_size(mpu.data))[mpu.data_rank]).square().mean()
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    if save is not None:
        engine.save_checkpoint(save, "t")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return norms, {name: p.detach().clone() for name, p in model.named_parameters()}, mpu.rank


@settings(max_examples=4, deadline=None)
@given(stage=st.integers(0, 3), size=st.sampled_from([2, 4]), far=st.booleans())
def test_ranks_of_an_mpu_that_share_layers(stage: int, size: int, far: bool) -> None:
    ((norms, whole, _),) = run(1, lambda rank: trained(1, stage))
    for own, values, place in run(4, lambda rank: trained(size, stage, far=far)):
        assert own == pytest.approx(norms, rel=1e-5)  # of all parts, and of what all ranks have once
        whole_parts = {"up": whole["up"].chunk(size, 0)[place], "down": whole["down"].chunk(size, 1)[place]}
        torch.testing.assert_close(values, {**whole, **whole_parts}, rtol=1e-4, atol=1e-5)


def test_their_checkpoint_has_the_whole_model_and_fits_one_rank(tmp_path: Path) -> None:
    parts = run(4, lambda rank: trained(2, 1, save=tmp_path))

    def load(rank: int) -> Any:
        model = Layers(Mpu(1))
        document = {"train_batch_size": BATCH, "zero_optimization": {"stage": 2}, **ADAMW}
        engine = deepspeed.initialize(model=model, config=document, model_parameters=model.parameters())[0]
        engine.load_checkpoint(tmp_path, "t")
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (whole,) = run(1, load)
    for _, values, place in parts:
        torch.testing.assert_close(values["up"], whole["up"].chunk(2, 0)[place], rtol=0, atol=0)
        torch.testing.assert_close(values["norm.weight"], whole["norm.weight"], rtol=0, atol=0)


def mixed(size: int, ep_size: int, *, split_experts: bool) -> list[float]:
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    model = MoE(
        WIDTH, expert, num_experts=4, ep_size=ep_size, capacity_factor=4.0, use_rts=False,
        enable_expert_tensor_parallelism=split_experts,
    )  # fmt: skip
    mpu = Mpu(size)
    document = {"train_batch_size": BATCH, "zero_optimization": {"stage": 1}, **ADAMW}
    engine = deepspeed.initialize(model=model, config=document, model_parameters=model.parameters(), mpu=mpu)[0]
    assert engine.num_local_experts == 4 // ep_size
    assert deepspeed.utils.groups._get_expert_model_parallel_world_size() == (size if split_experts else 1)
    losses = []
    for step in range(3):
        x = torch.randn(BATCH, 5, WIDTH, generator=torch.Generator().manual_seed(step))
        y, balance, _ = engine(x.chunk(dist.get_world_size(mpu.data))[mpu.data_rank])
        loss = y.square().mean() + balance
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("split_experts", [False, True])
def test_experts_beside_ranks_that_share_layers(split_experts: bool) -> None:
    alone = run(2, lambda rank: mixed(1, 2, split_experts=split_experts))
    both = run(4, lambda rank: mixed(2, 2, split_experts=split_experts))
    for rank, losses in enumerate(both):
        assert losses == pytest.approx(alone[rank // 2], rel=1e-5)


def test_mpus_that_describe_no_mesh() -> None:
    def job(rank: int) -> None:
        document = {"train_batch_size": BATCH, **ADAMW}
        mpu: Any = Mpu(2)
        model = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            model.weight.fill_(mpu.rank)
        with pytest.raises(ConfigError, match="'weight' differs between the tensor-parallel ranks"):
            deepspeed.initialize(model=model, config=document, model_parameters=model.parameters(), mpu=mpu)
        model.weight.tensor_model_parallel = True  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="set partition_dim to the dimension"):
            deepspeed.initialize(model=model, config=document, model_parameters=model.parameters(), mpu=mpu)
        layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=4)
        with pytest.raises(ConfigError, match="ep_size=4, and the mpu's data-parallel groups 2 ranks"):
            deepspeed.initialize(model=layer, config=document, model_parameters=layer.parameters(), mpu=mpu)
        mpu.get_pipeline_model_parallel_world_size = lambda: 2
        with pytest.raises(NotImplementedError, match="PipelineModule"):
            deepspeed.initialize(model=layer, config=document, model_parameters=layer.parameters(), mpu=mpu)
        uneven = SimpleNamespace(get_data_parallel_group=lambda: groups[0 if rank < 3 else 1])
        groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
        with pytest.raises(ConfigError, match="all are of one size"):
            deepspeed.initialize(model=layer, config=document, model_parameters=layer.parameters(), mpu=uneven)

    run(4, job)


@pytest.mark.parametrize("required", [None, False])
def test_an_mpu_of_one_process_without_a_group(required: bool | None) -> None:
    mpu = SimpleNamespace(get_data_parallel_group=lambda: None, get_model_parallel_world_size=lambda: 1)
    model = nn.Linear(WIDTH, WIDTH)
    document = {"train_batch_size": 1, **ADAMW}
    engine = deepspeed.initialize(model=model, config=document, mpu=mpu, dist_init_required=required)[0]
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    assert engine.global_steps == 1
