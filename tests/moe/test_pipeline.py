"""Experts in the stages of a pipeline: pipe × expert × data at every ZeRO stage computes what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zoo.engine
from zoo import sim
from zoo.moe import MoE
from zoo.pipe import LayerSpec, PipelineModule, attach_loss

WIDTH, NUM_MICRO = 8, 3


class ExpertBlock(nn.Module):
    """Experts, with their balance loss attached to what the block returns."""

    def __init__(self, k: int, ep_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.moe = MoE(
            WIDTH, expert, num_experts=4, ep_size=ep_size, k=k, drop_tokens=False, use_rts=False,
            top2_2nd_expert_sampling=False,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance, _ = self.moe(self.norm(x))
        return attach_loss(x + out, 0.1 * balance, "balance")


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def layers(ep_size: int) -> list[Any]:
    return [LayerSpec(Dense), LayerSpec(ExpertBlock, 1, ep_size), LayerSpec(ExpertBlock, 2, ep_size), LayerSpec(Dense)]


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return x, x.roll(1, 0)


def run(num_stages: int, ep_size: int, stage: int, replicas: list[int], weights: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = PipelineModule(
        layers(ep_size), num_stages=num_stages, loss_fn=nn.functional.mse_loss, partition_method="uniform", **options
    )
    if weights is not None:
        mine = model.state_dict().keys()
        numbers = {name.split(".")[0] for name in mine}
        model.load_state_dict({name: value for name, value in weights.items() if name.split(".")[0] in numbers})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": NUM_MICRO * len(replicas or [0]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine, *_ = zoo.engine.initialize(config, model)
    losses = []
    for step in range(2):  # the second has momentum
        places = replicas or [engine.batch_rank]
        losses.append(float(engine.train_batch(iter([batch(step, m, r) for r in places for m in range(NUM_MICRO)]))))
    extra = engine.get_additional_losses()
    return before, losses, engine.get_global_grad_norm(), engine.optimizer.consolidated_parameters(), extra


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "world", "ep_size", "stage"),
    [*(("1f1b", 4, 2, stage) for stage in range(4)), ("zb_v", 2, 1, 2), ("interleaved_1f1b", 8, 2, 3)],
)
def test_a_pipeline_with_experts_trains_as_one_process(schedule: str, world: int, ep_size: int, stage: int) -> None:
    replicas = list(range(world // 2))
    weights, losses, norm, expected, extra = run(1, 1, 0, replicas, None)
    ranks = sim.run(world, lambda rank: run(2, ep_size, stage, [], weights, schedule=schedule), seed=0)
    names = set()
    for _, found_losses, found_norm, found, found_extra in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        assert found_extra == pytest.approx(extra, rel=1e-5)
        names |= found.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert names == set(expected)
