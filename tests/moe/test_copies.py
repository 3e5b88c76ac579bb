"""Layers that are copied, converted, loaded or moved are what they were: their experts, and how these are called."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.moe.models import Small
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.layout import split_of
from zoo.moe import (
    GroupedExperts,
    LossFreeGate,
    MixtureOfExperts,
    MoE,
    TopKGate,
    is_moe_param,
    parallelise,
    split_params_into_different_moe_groups_for_optimizer,
    use_mesh,
    whole_state_dict,
)
from zoo.zero import Init, ZeroOptimizer

WIDTH, EXPERTS = 4, 4


def modules(ep_size: int, ep_rank: int = 0) -> nn.Module:
    return MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), EXPERTS, ep_size=ep_size)


def grouped(ep_size: int, ep_rank: int = 0) -> nn.Module:
    return MixtureOfExperts(
        TopKGate(WIDTH, EXPERTS), GroupedExperts(EXPERTS, WIDTH, 6, bias=True, ep_size=ep_size, ep_rank=ep_rank)
    )


def of_transformers(ep_size: int, ep_rank: int = 0) -> nn.Module:
    return parallelise(Small(experts=EXPERTS), ep_size=ep_size)


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".experts." in f".{name}"]


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "copied twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickled": pickled,
    "assigned": assigned,
    "emptied": lambda model: model.to("meta").to_empty(device="cpu"),
    "converted": lambda model: model.double().float(),
}


@pytest.mark.parametrize("make", [modules, grouped, of_transformers])
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("ep_size", [1, 2])
def test_what_parameters_are_stays(make: Callable[[int], nn.Module], way: str, ep_size: int) -> None:
    if make is of_transformers and way == "pickled":
        pytest.skip("its class is made at run time")
    model = make(ep_size)
    expected = [split_of(p) for p in experts_of(model)]
    assert expected[0].axes == (("expert",) if ep_size == 2 else ())
    found = WAYS[way](model)
    assert [split_of(p) for p in experts_of(found)] == expected
    assert all(map(is_moe_param, experts_of(found)))
    assert sum(map(is_moe_param, found.parameters())) == len(expected)


@pytest.mark.parametrize("make", [modules, grouped])
def test_a_copied_layer_keeps_the_experts_of_each_rank(make: Callable[..., nn.Module]) -> None:
    def fn(rank: int) -> list[float]:
        model = copy.deepcopy(make(2, rank))
        with torch.no_grad():
            for parameter in experts_of(model):
                parameter.fill_(rank)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "expert"))
        ZeroOptimizer(model, stage=1, optimizer=torch.optim.SGD, lr=0.1, mesh=mesh, data_axes=("data", "expert"))
        return [float(p.detach().mean()) for p in experts_of(model)]

    for rank, found in enumerate(sim.run(2, fn)):
        assert set(found) == {float(rank)}


@pytest.mark.parametrize("make", [modules, grouped])
def test_copies_and_pickles_of_a_layer_that_knows_its_mesh(make: Callable[..., nn.Module]) -> None:
    def fn(rank: int) -> None:
        layer, x = make(2, rank).eval(), torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
        use_mesh(layer, mesh)
        expected = output_of(layer, x)
        assert torch.equal(output_of(copy.deepcopy(layer), x), expected)
        again = pickled(layer)
        with pytest.raises(ValueError, match="does not know the other ranks"):
            again(x)
        use_mesh(again, mesh)
        assert torch.equal(output_of(again, x), expected)

    sim.run(2, fn)


def test_a_mesh_without_names() -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match="it needs the axis 'expert' of that size"):
            use_mesh(grouped(2, rank), init_device_mesh("cpu", (2,)))

    sim.run(2, fn)


def output_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = layer(x)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found.output
    return out


@pytest.mark.parametrize("make", [modules, grouped])
def test_a_state_of_the_whole_layer_loads_at_any_ep_size(make: Callable[..., nn.Module]) -> None:
    whole = make(1)
    with torch.no_grad():
        for number, value in enumerate(whole.state_dict().values()):
            value.copy_(torch.arange(value.numel()).view(value.shape) + 100 * number)

    def fn(rank: int) -> Any:
        model = make(2, rank)
        given = whole.state_dict()
        model.load_state_dict(given)
        assert list(given) == list(whole.state_dict())  # the caller's own is not touched
        model.load_state_dict(model.state_dict())  # a rank's own
        use_mesh(model, init_device_mesh("cpu", (2,), mesh_dim_names=("expert",)))
        return whole_state_dict(model, everywhere=True)

    expected = dict(whole.state_dict())
    for found in sim.run(2, fn):
        assert found.keys() == expected.keys()  # buffers too
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0)


def test_experts_begin_alike_at_every_ep_size_and_none_as_another() -> None:
    def fn(rank: int) -> tuple[torch.Tensor, float]:
        torch.manual_seed(3)
        experts = GroupedExperts(EXPERTS, WIDTH, 6, ep_size=2, ep_rank=rank)
        return experts.up.detach(), float(torch.rand(()))

    torch.manual_seed(3)
    whole = GroupedExperts(EXPERTS, WIDTH, 6)
    after = float(torch.rand(()))
    found = sim.run(2, fn)
    torch.testing.assert_close(torch.cat([up for up, _ in found]), whole.up.detach(), rtol=0, atol=0)
    assert [number for _, number in found] == [after, after]  # what is made after it is the same too
    assert len({float(e.detach().sum()) for e in whole.up}) == EXPERTS


def test_groups_are_the_same_at_every_ep_size() -> None:
    def shape(ep_size: int) -> list[tuple[str, bool, int]]:
        given = {"params": list(grouped(ep_size).named_parameters()), "lr": 0.1}
        found = split_params_into_different_moe_groups_for_optimizer(given)
        assert all(isinstance(p, nn.Parameter) for g in found for _, p in g["params"])
        return [(g["name"], g["moe"], len(g["params"])) for g in found]

    assert shape(1) == shape(2) == [("group0", False, 1), ("group0-experts0", True, 4)]


def test_layers_on_meta_get_values() -> None:
    def made() -> nn.Module:
        return MixtureOfExperts(LossFreeGate(WIDTH, EXPERTS), GroupedExperts(EXPERTS, WIDTH, 6, bias=True))

    with torch.device("meta"):
        model = made()
    Init(module=model)
    ZeroOptimizer(model, stage=3, optimizer=torch.optim.SGD, lr=0.1)
    found = model(torch.randn(2, 3, WIDTH))
    assert bool(torch.isfinite(found.output).all())
    assert model.gate.bias.tolist() == [0.0] * EXPERTS


@pytest.mark.parametrize("way", ["copied", "pickled"])
@pytest.mark.parametrize("ep_size", [0, 1, 2])
def test_a_balance_loss_of_all_ranks_is_one_in_copies(way: str, ep_size: int) -> None:
    """A copy is among the same ranks, and a pickle is told of them, or finds all ranks of the job (ep_size=0)."""

    def fn(rank: int) -> None:
        torch.manual_seed(0)
        split = max(ep_size, 1)
        experts = GroupedExperts(EXPERTS, WIDTH, 6, ep_size=split, ep_rank=rank % split)
        layer: Any = MixtureOfExperts(TopKGate(WIDTH, EXPERTS), experts, balance_over="global")
        mesh = init_device_mesh("cpu", (2 // split, split), mesh_dim_names=("data", "expert")) if ep_size else None
        if mesh is not None:
            use_mesh(layer, mesh)
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))
        expected = layer(x).balance.detach()
        other: Any = WAYS[way](layer)
        del layer  # and with it what it knew of the ranks
        if mesh is not None and way == "pickled":
            use_mesh(other, mesh)
        assert torch.equal(other(x).balance.detach(), expected)

    sim.run(2, fn)


def test_a_whole_state_has_the_experts_of_layers_split_over_other_numbers_of_ranks() -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size=size) for size in (2, 4)])
        for layer, size in zip(model, (2, 4), strict=True):
            use_mesh(layer, init_device_mesh("cpu", (4 // size, size), mesh_dim_names=("data", "expert")))
            with torch.no_grad():
                for e, expert in enumerate(layer.experts.list):  # type: ignore[arg-type, union-attr]
                    expert.weight.fill_(layer.experts.first + e)
        return whole_state_dict(model, everywhere=True)

    for found in sim.run(4, fn):
        weights = [[found[f"{i}.experts.list.{e}.weight"][0, 0].item() for e in range(EXPERTS)] for i in range(2)]
        assert weights == [[0.0, 1.0, 2.0, 3.0]] * 2
