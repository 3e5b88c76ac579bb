"""What careless users do with a layer: right all the same, on every rank, or a sentence that says what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.engine import initialize
from zoo.moe import (
    Capacity,
    GroupedExperts,
    MixtureOfExperts,
    ModuleExperts,
    MoE,
    Top1Gate,
    TopKGate,
    exchange,
    use_mesh,
)
from zoo.zero import Init, ZeroOptimizer

WIDTH = 4


def expert_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))


def drawn(rank: int, tokens: int = 3) -> torch.Tensor:
    return torch.rand(tokens, WIDTH, generator=torch.Generator().manual_seed(rank)) + 0.1


def to_one_expert(layer: MixtureOfExperts, expert: int = 0) -> None:
    """All of what :func:`drawn` gives."""
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[expert] = 5.0


def test_input_without_gradient_and_a_rank_without_rows() -> None:
    """The rank whose experts got nothing goes backward as the other one does, and does not leave it waiting."""

    def made(ep_size: int) -> MoE:
        torch.manual_seed(0)
        layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, ep_size=ep_size, drop_tokens=False)
        to_one_expert(layer)
        return layer

    def fn(rank: int) -> torch.Tensor | None:
        layer = made(2)
        use_mesh(layer, expert_mesh())
        layer(drawn(rank))[0].square().sum().backward()
        found: torch.Tensor | None = layer.experts.list[0].weight.grad
        return found

    whole = made(1)
    for rank in range(2):
        whole(drawn(rank))[0].square().sum().backward()
    first, second = sim.run(2, fn)
    torch.testing.assert_close(first, whole.experts.list[0].weight.grad)
    assert second is None


@pytest.mark.parametrize("stage", [0, 3])
def test_some_experts_and_all_before_them_frozen(stage: int) -> None:
    def made(ep_size: int, rank: int) -> nn.Module:
        torch.manual_seed(0)
        layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=ep_size, k=1, drop_tokens=False)
        for number, expert in enumerate(layer.experts.list, start=layer.experts.first):
            expert.requires_grad_(number % 2 == 1)
        to_one_expert(layer, expert=1)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), layer)

    def fn(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "expert"))
        model = made(2, rank)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, mesh=mesh, data_axes=("data", "expert")
        )
        model(drawn(rank))[0].square().sum().backward()
        optimizer.step()
        optimizer.close()
        return [p.detach().clone() for p in model[1].experts.parameters()]

    whole = made(1, 0)
    for rank in range(2):
        (whole(drawn(rank))[0].square().sum() / 2).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    torch.testing.assert_close([p for rank in sim.run(2, fn) for p in rank], list(whole[1].experts.parameters()))


def test_experts_that_return_another_dtype() -> None:
    """On the rank without rows nothing says what they would have returned."""

    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()  # as a normalisation in autocast does

    def fn(rank: int) -> torch.dtype:
        layer = MoE(WIDTH, Wide(WIDTH, WIDTH), 2, ep_size=2, drop_tokens=False)
        to_one_expert(layer)
        use_mesh(layer, expert_mesh())
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = layer(drawn(rank))[0]
        found.sum().backward()
        return found.dtype

    assert sim.run(2, fn) == [torch.bfloat16, torch.bfloat16]
    one = MoE(WIDTH, Wide(WIDTH, WIDTH), 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert one(drawn(0))[0].dtype is torch.bfloat16  # at every ep_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_what_routes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, x = TopKGate(64, 8, k=2), torch.randn(500, 64)
    expected = gate(x)
    with torch.autocast("cpu", dtype):
        found = gate(x)
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.balance, expected.balance)


@pytest.mark.parametrize("shape", [(1,), (3, 2), (5,), (2, 3, 1), ()])
def test_masks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer, x = MoE(WIDTH, nn.Identity(), 2), torch.randn(2, 3, WIDTH)
    with pytest.raises(ValueError, match=r"mask of used tokens .* for \(2, 3, 4\); it has one number for each token"):
        layer(x, torch.ones(shape))


def test_masks_of_tokens_or_of_the_inputs_shape() -> None:
    layer, x = MoE(WIDTH, nn.Identity(), 2, k=2), torch.randn(2, 3, WIDTH)
    used = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    for given in (used, used.bool(), used.reshape(-1)):
        assert layer(x, given)[2].tolist() == [3, 3]


class Returns(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x: (x, None), "the expert Returns returned a tuple for rows"),
        (lambda x: x[:, :2], r"returned \(6, 2\) for rows \(6, 4\); an expert returns one tensor of the shape"),
        (lambda x: x[:1], r"returned \(1, 4\) for rows"),
    ],
)
def test_experts_that_return_something_else(what: Callable[[torch.Tensor], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoE(WIDTH, Returns(what), 1)(torch.randn(6, WIDTH))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MoE(WIDTH, nn.Identity())(torch.randn(3, 5)), r"MoE got float32 \(3, 5\); it takes numbers \(…, 4\)"),
        (lambda: MoE(WIDTH, nn.Identity())(torch.tensor(1.0)), r"MoE got float32 \(\)"),
        (lambda: MoE(WIDTH, nn.Identity())(torch.ones(3, WIDTH).long()), r"MoE got int64 \(3, 4\)"),
        (lambda: MoE(WIDTH, nn.Identity(), capacity_factor=float("inf")), "positive and finite"),
        (lambda: MixtureOfExperts(TopKGate(4, 4), GroupedExperts(4, 5, 6)), "hidden_size=4 and experts of 5"),
        (
            lambda: MixtureOfExperts(TopKGate(4, 4), GroupedExperts(4, 4, 6), capacity=1.25),  # type: ignore[arg-type]
            r"capacity=1\.25; it is a Capacity\(factor=\.\.\.\)",
        ),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_inference_in_training_mode_leaves_training_possible() -> None:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, k=2)
    with torch.inference_mode():
        layer(torch.randn(3, WIDTH))
    layer(torch.randn(5, WIDTH))[0].sum().backward()
    assert layer.tally is not None
    assert layer.tally[0].tolist() == [5, 5]


def test_layers_of_one_mesh_share_their_groups() -> None:
    def fn(rank: int) -> int:
        model = nn.Sequential(
            *(MixtureOfExperts(TopKGate(WIDTH, 4), GroupedExperts(4, WIDTH, 6, ep_size=2, ep_rank=rank % 2))
              for _ in range(3))
        )  # fmt: skip
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        for _ in range(2):
            use_mesh(model, mesh)
        return len({id(layer.expert_ranks.group) for layer in model})

    assert sim.run(4, fn) == [1] * 4


def test_another_mesh_between_forward_and_backward() -> None:
    def fn(rank: int) -> None:
        layer = MixtureOfExperts(TopKGate(WIDTH, 4), GroupedExperts(4, WIDTH, 6, ep_size=2, ep_rank=rank))
        use_mesh(layer, expert_mesh())
        found = layer(drawn(rank)).output
        use_mesh(layer, expert_mesh())
        found.sum().backward()
        assert layer.gate.weight.grad is not None

    sim.run(2, fn)


def test_an_exception_between_sending_and_receiving_keeps_nothing() -> None:
    def fn(rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        fails = [True, False]

        def shared(x: torch.Tensor) -> torch.Tensor:
            if fails.pop(0):
                raise OSError("on purpose")
            return x

        experts = GroupedExperts(4, WIDTH, 6, ep_size=2, ep_rank=rank)
        layer = MixtureOfExperts(TopKGate(WIDTH, 4), experts, shared=Returns(shared), chunks=2)
        use_mesh(layer, expert_mesh())
        with pytest.raises(OSError, match="on purpose"):
            layer(drawn(rank))
        found: torch.Tensor = layer(drawn(rank)).output
        found.sum().backward()
        return found.detach()

    before = len(exchange._on_the_way)
    found = sim.run(2, fn)
    assert len(exchange._on_the_way) == before
    torch.manual_seed(0)
    experts = GroupedExperts(4, WIDTH, 6)
    whole = MixtureOfExperts(TopKGate(WIDTH, 4), experts, shared=nn.Identity())
    torch.testing.assert_close(found, [whole(drawn(rank)).output.detach() for rank in range(2)])


def test_recomputation_draws_what_its_forward_drew() -> None:
    """Also where other micro-batches come between a forward and its backward."""

    class Model(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.recomputes = nn.Linear(WIDTH, WIDTH), recomputes
            gate = Top1Gate(WIDTH, 4, noise="RSample")
            self.layer = MixtureOfExperts(gate, GroupedExperts(4, WIDTH, 6), capacity=Capacity(minimum=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            if self.recomputes:
                found = torch.utils.checkpoint.checkpoint(lambda h: self.layer(h).output, h, use_reentrant=False)
                return found.square().sum()  # type: ignore[no-any-return]
            return self.layer(h).output.square().sum()  # type: ignore[no-any-return]

    def trained(recomputes: bool) -> list[torch.Tensor]:
        config = {
            "train_batch_size": 3, "gradient_accumulation_steps": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}
        }  # fmt: skip
        engine: Any = initialize(config, Model(recomputes))[0]
        first, second = engine(drawn(0, 8)), engine(drawn(1, 8))
        for loss in (second, lambda: engine(drawn(2, 8)), first):
            engine.backward(loss() if callable(loss) else loss)
            engine.step()
        return [p.detach().clone() for p in engine.module.parameters()]

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


@pytest.mark.parametrize("whole", [True, False])
def test_experts_of_a_rank_inside_of_init(whole: bool) -> None:
    """Init gives all ranks the values of rank 0; of what other ranks have other parts it does not."""

    def fn(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "expert"))
        with Init():
            if whole:
                experts: Any = GroupedExperts(4, WIDTH, 6, ep_size=2, ep_rank=rank)
            else:
                with pytest.raises(
                    ValueError, match=r"built inside of zoo\.zero\.Init, which gives all ranks the values"
                ):
                    ModuleExperts([nn.Linear(WIDTH, WIDTH)], 2, ep_size=2, ep_rank=rank)
                return {}
            model = MixtureOfExperts(TopKGate(WIDTH, 4), experts)
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=0.1, mesh=mesh, data_axes=mesh.mesh_dim_names
        )
        return {name: value.clone() for name, value in optimizer.sharded.whole_model()}

    found = sim.run(2, fn)[0]
    if whole:
        torch.manual_seed(0)
        expected = GroupedExperts(4, WIDTH, 6)
        torch.testing.assert_close(found["experts.up"], expected.up.detach(), rtol=0, atol=0)
        torch.testing.assert_close(found["experts.down"], expected.down.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": "2"}, "MoE got k='2'; hidden_size, num_experts, ep_size, k are whole numbers"),
        ({"num_experts": [4]}, r"MoE got num_experts=\[4\]"),
        ({"hidden_size": 4.0}, "MoE got hidden_size=4.0"),
        ({"hidden_size": 0}, "Top1Gate got hidden_size=0; it is at least 1"),
        ({"expert": nn.Linear}, "MoE got Linear as its expert; give one module"),
        ({"expert": [nn.Linear(4, 4)]}, "MoE got a list as its expert"),
        ({"capacity_factor": None}, "Capacity got factor=None; factors are numbers"),
        ({"eval_capacity_factor": "2"}, "Capacity got eval_factor='2'"),
        ({"min_capacity": 2.5}, "Capacity got minimum=2.5"),
    ],
)
def test_arguments_of_other_kinds_are_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoE(**{"hidden_size": 4, "expert": nn.Linear(4, 4), "num_experts": 4, **given})
