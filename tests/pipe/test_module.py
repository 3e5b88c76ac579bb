"""What a PipelineModule is asked for beside training: files by layer, groups, tied gradients, refusals."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

import zoo.engine
from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, TiedLayerSpec, split
from zoo.pipe.partition import balanced, split_layers
from zoo.pipe.schedules.one_f_one_b import OneFOneB


def linears(num: int) -> list[Any]:
    return [LayerSpec(nn.Linear, 4, 4) for _ in range(num)]


def test_files_have_numbers_of_the_whole_model_and_places(tmp_path: Path) -> None:
    def one(rank: int) -> tuple[str, list[str]]:
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        module = PipelineModule(linears(5), topology=topology, partition_method="uniform")
        own = [module.ckpt_layer_path(tmp_path, i) for i in range(len(module._calls))]
        return module.ckpt_prefix(tmp_path, "step5"), own

    found = sim.run(4, one)
    assert [prefix for prefix, _ in found] == [
        f"{tmp_path}/step5/module-pipe_{pipe:02d}-model_{model:02d}" for pipe in range(2) for model in range(2)
    ]
    assert [[Path(path).name for path in own] for _, own in found] == [
        [f"layer_{n:02d}-model_{model:02d}-model_states.pt" for n in numbers]
        for numbers in (range(3), range(3, 5)) for model in range(2)
    ]  # fmt: skip


def test_files_of_a_layer_are_listed(tmp_path: Path) -> None:
    module = PipelineModule(linears(2), num_stages=1)
    assert module.ckpt_layer_path(tmp_path, 1) == f"{tmp_path}/layer_01-model_states.pt"
    assert module.ckpt_prefix(tmp_path, "a") == f"{tmp_path}/a/module-pipe_00"
    names = ["layer_01-model_01-model_states.pt", "layer_01-model_00-model_states.pt", "layer_01-model_states.pt"]
    for name in [*names, "layer_00-model_states.pt", "layer_010-model_states.pt", "layer_01-optim_states.pt"]:
        (tmp_path / name).touch()
    assert module.ckpt_layer_path_list(tmp_path, 1) == sorted(f"{tmp_path}/{name}" for name in names)
    with pytest.raises(ValueError, match="local_layer_idx=2; this rank has 2 layers, 0 to 1 locally"):
        module.ckpt_layer_path(tmp_path, 2)


def test_the_mpu_knows_the_groups_of_the_topology() -> None:
    def one(rank: int) -> tuple[int, int, int, bool]:
        mpu = (module := PipelineModule(linears(4), num_stages=2)).mpu()
        return mpu.get_stage_id(), mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), module.mpu() is mpu

    assert sim.run(4, one) == [(pipe, data, 2, True) for pipe in range(2) for data in range(2)]


def tied(num_stages: int, method: Any) -> PipelineModule:
    layers = [
        TiedLayerSpec("w", nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("w", nn.Linear, 4, 4),
        TiedLayerSpec("v", nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("w", nn.Linear, 4, 4),
    ]  # fmt: skip
    return PipelineModule(layers, num_stages=num_stages, partition_method=method)


def test_gradients_of_tied_weights_are_added_up_over_the_ranks_that_have_them() -> None:
    # Two pipelines of three ranks; w is on all three, v on the middle one alone; biases are not tied.
    def one(rank: int) -> tuple[int, dict[str, Any]]:
        module = tied(3, "uniform")
        for name, parameter in module.named_parameters():
            if not (rank == 0 and name == "tied_modules.w.weight"):  # one of them has no gradient: zero
                parameter.grad = torch.full_like(parameter, 10.0**rank)
        module.allreduce_tied_weight_gradients()
        return rank, {name: parameter.grad.flatten()[0].item() for name, parameter in module.named_parameters()}

    for rank, grads in sim.run(6, one):
        expected = 0.0 + 10**2 + 10**4 if rank % 2 == 0 else 10 + 10**3 + 10**5
        assert grads["tied_modules.w.weight"] == expected
        assert all(grad == 10**rank for name, grad in grads.items() if name != "tied_modules.w.weight")


def test_so_are_those_of_a_traced_model() -> None:
    def one(rank: int) -> dict[str, float]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        part = split(model, ["2"], example=torch.ones(2, 4))
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        part.allreduce_tied_weight_gradients()
        return {name: p.grad.flatten()[0].item() for name, p in part.named_parameters() if p.grad is not None}

    first, last = sim.run(2, one)
    assert first == {"0.weight": 3.0, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0}
    assert last == {"0.weight": 3.0, "2.bias": 2.0}


def test_an_engine_adds_them_up_itself() -> None:
    def one(rank: int) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        module = tied(2, "uniform")
        module.loss_fn = nn.functional.mse_loss
        engine, *_ = zoo.engine.initialize(config, module)
        with pytest.raises(RuntimeError, match="an engine has, which adds these gradients up itself"):
            module.allreduce_tied_weight_gradients()
        engine.destroy()

    sim.run(2, one)


def test_what_layers_on_several_ranks_share_is_refused() -> None:
    def sentence(rank: int, layers: Any, method: Any) -> str:
        try:
            PipelineModule(layers(), num_stages=2, partition_method=method)
        except ValueError as error:
            return str(error)
        return ""

    def same_module() -> list[Any]:
        one = nn.Linear(4, 4)
        return [one, nn.Linear(4, 4), one]

    def same_parameter() -> list[Any]:
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
        return [first, LayerSpec(nn.Linear, 4, 4), last]

    for layers in (same_module, same_parameter):
        for found in sim.run(2, lambda rank, layers=layers: sentence(rank, layers, "uniform")):
            assert found.startswith(
                "layers 0 (Linear) and 2 (Linear) have one tensor, there 'weight' and here 'weight', and are on the "
                "pipeline ranks 0 and 1"
            )
    # On one rank it is one thing.
    assert (
        sim.run(2, lambda rank: sentence(rank, lambda: [nn.Linear(4, 4), *[nn.Linear(4, 4)] * 2], [2, 1, 1]))
        == [""] * 2
    )


@examples(times=4)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))

    def cost(bounds: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(sums), sum(s * s for s in sums)

    every = [(0, *inner, len(weights)) for inner in itertools.combinations(range(1, len(weights)), parts - 1)]
    found = tuple(balanced(weights, parts))
    assert found in every
    assert cost(found) == min(map(cost, every))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 3e153, 2e307])
def test_weights_of_any_size_balance_stages(scale: float) -> None:
    weights = [1, 1, 1, 3, 0, 2, 1]
    found = split_layers([scale * w for w in weights], 3, [""] * 7, list)
    assert found == split_layers(weights, 3, [""] * 7, list) == [0, 3, 5, 7]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (None, "partition_method=None; allowed are"),
        (5, "partition_method=5; allowed are"),
        (["a", "b"], "finite numbers of at least 0; got"),
        ([1.0, math.nan], "finite numbers of at least 0; got"),
    ],
)
def test_weights_that_are_none_are_told(method: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineModule(linears(2), num_stages=1, partition_method=method)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": nn.Linear(2, 2)}, "got a Linear as layers; it takes a list"),
        ({"layers": None}, "got a NoneType as layers"),
        ({"loss_fn": "mse"}, "loss_fn='mse'; it takes a function"),
        ({"activation_checkpoint_interval": 1.5}, "activation_checkpoint_interval=1.5; 0, or a number of layers"),
        ({"schedule": 3}, "schedule=3; it takes a name, a mapping"),
        ({"schedule": None}, "schedule=None; it takes a name"),
        ({"schedule": OneFOneB}, "OneFOneB'>; it takes a name"),
    ],
)
def test_arguments_of_another_kind_are_said_when_the_model_is_made(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PipelineModule(**{"layers": [LayerSpec(nn.Linear, 2, 2)], "num_stages": 1, **given})


def test_names_of_no_layer_checkpoint_nothing_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def made(names: Any, interval: int) -> None:
        PipelineModule(linears(2), num_stages=1, activation_checkpoint_interval=interval, checkpointable_layers=names)

    for names, interval in ((["Linear", "Lnear"], 1), (["Lnear"], 0), (None, 1)):
        made(names, interval)
    assert caplog.text == ""
    made(["Lnear"], 1)
    assert "no layer is one of these" in caplog.text
    with pytest.raises(ValueError, match="checkpointable_layers='Linear'; give a list"):
        made("Linear", 0)
