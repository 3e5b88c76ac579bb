"""What goes wrong: right all the same, or a clear error, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.moe.test_parallel import Case, build, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.moe import (
    Capacity,
    GroupedExperts,
    MixtureOfExperts,
    MoE,
    Top1Gate,
    TopKGate,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
    use_mesh,
)
from zoo.zero import safe_get_full_fp32_param

WIDTH = 4


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(TopKGate(WIDTH, 4, k=2), GroupedExperts(4, WIDTH, 6, activation="silu"), **options)


def test_nan_stays_with_its_token() -> None:
    mixture, x = layer(), torch.randn(6, WIDTH)
    expected = mixture(x).output
    x[2] = torch.nan
    found = mixture(x).output
    assert bool(found[2].isnan().all())
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[rest], expected[rest])


def test_one_expert_gets_everything() -> None:
    mixture = layer()
    with torch.no_grad():
        mixture.gate.weight.zero_()
        mixture.gate.weight[1] = 10.0
    x = torch.rand(50, WIDTH) + 0.1
    found = mixture(x)
    assert found.demand[1] == 50
    found.output.sum().backward()
    unused = [e for e in range(4) if not found.demand[e]]
    gradient = mixture.experts.up.grad
    assert len(unused) == 2
    assert gradient is not None
    assert not gradient[unused].any()
    assert bool(gradient[1].any())


@pytest.mark.parametrize("capacity", [None, Capacity()])
def test_no_token_at_all(capacity: Capacity | None) -> None:
    mixture = layer(capacity=capacity, shared=torch.nn.Linear(WIDTH, WIDTH))
    for x in (torch.zeros(0, WIDTH), torch.zeros(2, 0, WIDTH)):
        found = mixture(x)
        assert found.output.shape == x.shape
        assert found.balance == 0
        (found.output.sum() + found.balance).backward()
    found = mixture(torch.randn(5, WIDTH), torch.zeros(5))  # none that counts
    assert found.demand.sum() == 0
    assert found.balance == 0


def test_any_leading_dims_and_any_mask() -> None:
    mixture, x = layer(), torch.randn(3, 5, WIDTH)
    whole = mixture(x).output
    torch.testing.assert_close(whole, mixture(x.reshape(15, WIDTH)).output.view(x.shape))
    torch.testing.assert_close(whole, mixture(x.transpose(0, 1)).output.transpose(0, 1))
    for used in (torch.arange(15).view(3, 5) % 2, (torch.arange(15) % 2 == 1).view(3, 5)):
        found = mixture(x, used).output
        assert not found[used == 0].any()
        torch.testing.assert_close(found[used != 0], whole[used != 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype: torch.dtype) -> None:
    mixture, x = layer(), torch.randn(20, WIDTH)
    expected = mixture(x).output
    with torch.autocast("cpu", dtype):
        found = mixture(x).output
    assert found.dtype is dtype
    assert (found.float() - expected).abs().max() < 30 * torch.finfo(dtype).eps * expected.abs().max()
    with torch.no_grad():
        low = mixture.to(dtype)
        again = low(x.to(dtype)).output
    assert again.dtype is dtype
    assert bool(torch.isfinite(again).all())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_expert_without_tokens_on_any_rank(stage: int) -> None:
    case = Case(gate="top1", capacity=None, grouped=False, stage=stage, tokens=(0, 1), clip_norm=0.1)

    def fn(rank: int) -> tuple[list[int], list[int]]:
        model, optimizer, replica = build(case, rank)
        before = {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}
        wanted = torch.zeros(case.experts, dtype=torch.int64)
        for step in range(2):
            model(tokens(case, replica, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted += model.moe.tally[0]
        moved = {n for n, p in model.named_parameters() if not torch.equal(safe_get_full_fp32_param(p), before[n])}
        first = model.moe.experts.first
        return wanted.tolist(), [first + e for e in range(2) if f"moe.experts.list.{e}.0.weight" in moved]

    (none, here), (some, there) = sim.run(2, fn)
    assert sum(none) == 0
    assert sum(some) == 2
    assert here + there == [e for e in range(case.experts) if some[e]]


def test_a_rank_that_leaves_is_noticed() -> None:
    case = Case(expert=2, experts=4, gate="top2", tokens=(3, 3), stage=1)

    def fn(rank: int) -> None:
        model, _, replica = build(case, rank)
        if rank == 1:
            raise OSError("its machine is gone")
        model(tokens(case, replica, 0))

    with pytest.raises(Exception, match="its machine is gone"):
        sim.run(2, fn)


def test_a_layer_that_knows_no_mesh_says_so() -> None:
    mixture = MixtureOfExperts(Top1Gate(WIDTH, 4), GroupedExperts(4, WIDTH, 6, ep_size=2))
    with pytest.raises(ValueError, match=r"does not know the other ranks\. Give mesh=DeviceMesh with an axis 'expert'"):
        mixture(torch.randn(3, WIDTH))


def test_plain_torch_with_a_mesh() -> None:
    """Without ZeRO or an engine: use_mesh, and the gradients of experts are those of all tokens that came to them."""

    def made(ep_size: int) -> MoE:
        found = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), 4, ep_size=ep_size, k=2, drop_tokens=False).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            found.gate.weight.normal_()
            for parameter in found.experts.parameters():
                parameter.fill_(0.1)
        return found

    def batch(rank: int) -> torch.Tensor:
        return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(rank))

    def gradients(layer: MoE) -> torch.Tensor:
        return torch.stack(
            [e.weight.new_zeros(WIDTH, WIDTH) if e.weight.grad is None else e.weight.grad for e in layer.experts.list]
        )

    def fn(rank: int) -> torch.Tensor:
        layer = made(2)
        use_mesh(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("expert",)))
        layer(batch(rank))[0].square().sum().backward()
        return gradients(layer)

    whole = made(1)
    for rank in range(2):
        whole(batch(rank))[0].square().sum().backward()
    torch.testing.assert_close(torch.cat(sim.run(2, fn)), gradients(whole))


def test_helpers_for_groups() -> None:
    whole, shared = (
        MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), 4, ep_size=2, use_residual=True),
        MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), 4),
    )
    assert has_moe_layers(torch.nn.Sequential(torch.nn.Linear(1, 1))) == (False, 0)
    assert has_moe_layers(whole) == (True, 4)
    assert [is_moe_param(p) for p in whole.experts.parameters()] == [True] * 4
    assert [is_moe_param(p) for p in shared.experts.parameters()] == [True] * 8  # one rank has them all
    assert not any(map(is_moe_param, [whole.gate.weight, shared.gate.weight, *whole.shared.parameters()]))
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(whole.parameters()), "lr": 0.1, "name": "all"}, max_group_size=20
    )
    assert [(g["name"], g["moe"], g["lr"], len(g["params"])) for g in groups] == [
        ("all", False, 0.1, 5), ("all-experts0", True, 0.1, 2), ("all-experts1", True, 0.1, 2)
    ]  # fmt: skip
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in whole.parameters()}
    with pytest.raises(ValueError, match='parameter group 0 has no "params"'):
        split_params_into_different_moe_groups_for_optimizer([{"lr": 1.0}])
    with pytest.raises(ValueError, match="parameter group 0 is a Parameter; a group is"):
        split_params_into_different_moe_groups_for_optimizer(whole.parameters())  # type: ignore[arg-type]


def test_a_group_of_one_parameter_is_that_parameter() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2)
    shared, experts = (
        split_params_into_different_moe_groups_for_optimizer({"params": parameter, "lr": 1.0})
        for parameter in (layer.gate.weight, layer.experts.list[0].weight)  # type: ignore[union-attr]
    )
    assert [len(group["params"]) for group in shared] == [1]
    assert shared[0]["params"][0] is layer.gate.weight
    assert experts[1]["params"][0] is layer.experts.list[0].weight  # type: ignore[union-attr]
