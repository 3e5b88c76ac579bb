"""Law 2 where parameters are DTensors: tensor-parallel layers as torch makes them, next to plain ones."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import WIDTH, pick, states, weight, whole
from tests.profiles import deep_example
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from zoo import sim
from zoo.shard.dtensors import HoldsDTensors
from zoo.zero import Precision, ShardedModel, ZeroConfig, ZeroOptimizer, safe_get_full_fp32_param

AXES = ("data", "tensor")


@dataclass(frozen=True)
class Case:
    data: int = 2
    tensor: int = 2
    stage: int = 3
    hidden: int = 6  # of the layer by hand, whose parts need not be equal
    clip_norm: float = 0.0
    bucket_size: int = 1
    threshold: int = 0
    outside: bool = False  # a parameter is used outside of its module too
    seed: int = 0

    @property
    def world(self) -> int:
        return self.data * self.tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data, tensor = draw(st.sampled_from([(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)]))
    return Case(
        data=data, tensor=tensor, stage=draw(st.integers(0, 3)), hidden=draw(st.sampled_from([6, 5, 7])),
        clip_norm=draw(st.sampled_from([0.0, 0.01])), bucket_size=draw(st.sampled_from([1, 10**6])),
        threshold=draw(st.sampled_from([0, 10])), outside=draw(st.booleans()), seed=draw(st.integers(0, 20)),
    )  # fmt: skip


class Pair(nn.Module):
    """A column-parallel and a row-parallel matrix in DTensor code; on one process the same code with plain tensors."""

    def __init__(self, hidden: int, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.columns = self._split(weight("columns", hidden, WIDTH), 0)
        self.rows = self._split(weight("rows", WIDTH, hidden), 1)
        self.bias = self._split(weight("pair", WIDTH), None)

    def _split(self, value: torch.Tensor, dim: int | None) -> nn.Parameter:
        if self.mesh is None:
            return nn.Parameter(value)
        return nn.Parameter(distribute_tensor(value, self.mesh, [Replicate() if dim is None else Shard(dim)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        out = torch.tanh(x @ self.columns.t()) @ self.rows.t() + self.bias
        return out if self.mesh is None else out.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]


class Model(nn.Module):
    def __init__(self, case: Case, mesh: Any) -> None:
        super().__init__()
        self.outside = case.outside
        self.first = nn.Linear(3, WIDTH).double()
        self.block = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)).double()
        for name, parameter in self.named_parameters():
            parameter.data = weight(name, *parameter.shape)
        if mesh is not None:
            parallelize_module(self.block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.pair = Pair(case.hidden, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.pair(x + self.block(x))
        if self.outside:
            bias: Any = self.pair.bias
            x = x * (bias.to_local() if isinstance(bias, DTensor) else bias)
        return x


def tokens(replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def mesh_of(case: Case) -> Any:
    return init_device_mesh("cpu", (case.data, case.tensor), mesh_dim_names=AXES)


def options_of(case: Case) -> dict[str, Any]:
    return {
        "stage": case.stage, "data_axes": ("data",), "clip_norm": case.clip_norm,
        "reduce_bucket_size": case.bucket_size, "param_persistence_threshold": case.threshold,
    }  # fmt: skip


def build(case: Case, rank: int) -> tuple[Model, ZeroOptimizer, int]:
    mesh = mesh_of(case)
    model = Model(case, mesh["tensor"])
    optimizer = ZeroOptimizer(model, mesh=mesh, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, **options_of(case))
    return model, optimizer, rank // case.tensor


def train(model: nn.Module, optimizer: ZeroOptimizer, replica: int, steps: range) -> None:
    for step in steps:
        model(tokens(replica, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(case: Case, steps: int, make: Any = None) -> tuple[dict[str, torch.Tensor], float]:
    """One process with the tokens of all data ranks."""
    model = Model(case, None)
    optimizer = (make or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)))(model)
    norm = 0.0
    for step in range(steps):
        for replica in range(case.data):
            (model(tokens(replica, step)).square().mean() / case.data).backward()
        if case.clip_norm:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norm


def assert_equal(got: dict[Any, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {name for name, role in got if role == "parameter"} == set(expected)
    for name, value in expected.items():
        # fp64; sums over ranks have another order than in one process.
        torch.testing.assert_close(
            got[name, "parameter"], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.dear
@given(case=cases())
@example(case=Case(stage=1, clip_norm=0.01))
@deep_example(case=Case(stage=2, clip_norm=0.01))
@example(case=Case(stage=3, clip_norm=0.01))
def test_tensor_parallel_layers_of_torch_equal_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, replica, range(3))
        return states(optimizer), optimizer.grad_norm

    ranks = sim.run(case.world, fn, seed=case.seed)
    assert len({norm for _, norm in ranks}) == 1, "ranks clipped by different factors"
    expected, norm = reference(case, 3)
    if case.clip_norm:
        assert ranks[0][1] == pytest.approx(norm, rel=1e-10)
    assert_equal(whole([found for found, _ in ranks]), expected)


@pytest.mark.dear
@given(case=cases(), tensor=st.integers(1, 3), stage=st.integers(0, 3), dtensors=st.booleans())
def test_a_state_goes_on_with_and_without_tensor_parallelism(
    case: Case, tensor: int, stage: int, dtensors: bool
) -> None:
    case = Case(**{**case.__dict__, "data": 2})
    other = Case(**{**case.__dict__, "stage": stage, "tensor": tensor if dtensors else 1})

    def save(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, replica, range(2))
        return states(optimizer), optimizer.state_scalars()

    saved = sim.run(case.world, save)
    kept = whole([found for found, _ in saved])
    scalars = {key: value for _, found in saved for key, value in found.items()}

    def read(name: str, role: str, start: Any, length: int) -> torch.Tensor:
        return pick(kept[name, role], start, length)

    def load(rank: int) -> Any:
        if dtensors:
            model, optimizer, replica = build(other, rank)
        else:
            model, replica = Model(other, None), rank
            options = {k: v for k, v in options_of(other).items() if k != "data_axes"}
            optimizer = ZeroOptimizer(model, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, **options)
        optimizer.load_state(read, scalars)
        loaded = states(optimizer)
        train(model, optimizer, replica, range(2, 3))
        return loaded, states(optimizer)

    ranks = sim.run(other.world, load)
    again = whole([found for found, _ in ranks])
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], kept[key]) for key in kept)
    assert_equal(whole([found for _, found in ranks]), reference(case, 3)[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_and_instances_are_given_with_the_dtensors_themselves(stage: int) -> None:
    case = Case(stage=stage)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "lr": 0.3}],
            lr=0.01,
            eps=1e-3,
            foreach=False,
        )

    def fn(rank: int) -> Any:
        mesh = mesh_of(case)
        model = Model(case, mesh["tensor"])
        instance = make(model)
        optimizer = ZeroOptimizer(model, mesh=mesh, optimizer=instance, **options_of(case))
        train(model, optimizer, rank // case.tensor, range(3))
        found = states(optimizer)
        optimizer.close()
        assert {id(p) for g in instance.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
        return found

    assert_equal(whole(sim.run(case.world, fn)), reference(case, 3, make)[0])


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_module_has_its_dtensors_inside_in_copies_and_afterwards(stage: int) -> None:
    case = Case(stage=stage, hidden=5)
    expected, _ = reference(case, 2)

    def full(named: Any) -> dict[tuple[str, str], torch.Tensor]:
        return {(name, "parameter"): (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}

    def fn(rank: int) -> None:
        model, optimizer, replica = build(case, rank)
        assert isinstance(model.block[0], nn.Linear)
        assert type(model.block[0]) is type(model.block[2])
        train(model, optimizer, replica, range(2))
        with optimizer.gathered():
            assert type(model.pair.columns) is DTensor
            assert model.pair.columns.shape == (5, WIDTH)
            assert_equal(full(model.state_dict().items()), expected)
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.pair))):
                assert not any(isinstance(m, HoldsDTensors) for m in copied.modules())
            again = copy.deepcopy(model)
            assert_equal(full(again.named_parameters()), expected)
            assert type(again.pair) is Pair
            torch.testing.assert_close(again(tokens(0, 9)), model(tokens(0, 9)))
        original = optimizer.sharded.dtensors.original(model.pair._parameters["columns"])
        optimizer.close()
        assert model.pair.columns is original
        assert type(model.block[0]) is nn.Linear
        assert_equal(full(model.named_parameters()), expected)
        torch.testing.assert_close(model(tokens(0, 9)), again(tokens(0, 9)))
        model(tokens(0, 9)).sum().backward()  # an ordinary model
        assert type(model.pair.columns.grad) is DTensor

    sim.run(case.world, fn)


def test_whole_tensors_and_dtensors_are_loaded_into_the_module() -> None:
    case = Case(stage=1)

    def fn(rank: int) -> Any:
        model, optimizer, _ = build(case, rank)
        given = {name: torch.full_like(value, 3.0) for name, value in reference(case, 0)[0].items()}
        given["pair.rows"] = distribute_tensor(given["pair.rows"] + 1, model.pair.mesh, [Shard(0)])
        model.load_state_dict(given)
        with torch.no_grad():
            model.pair.bias.fill_(5.0)  # type: ignore[operator]
        optimizer.sharded.writes.take()
        assert bool((safe_get_full_fp32_param(model.pair._parameters["rows"]) == 4).all())
        return states(optimizer)

    got = whole(sim.run(case.world, fn))
    for (name, role), value in got.items():
        wanted = {"pair.rows": 4.0, "pair.bias": 5.0}.get(name, 3.0)
        assert role != "parameter" or bool((value == wanted).all()), name


def test_forward_only_from_shards() -> None:
    case = Case()
    expected = Model(case, None)(tokens(0, 0))

    def fn(rank: int) -> None:
        mesh = mesh_of(case)
        model = Model(case, mesh["tensor"])
        sharded = ShardedModel(model, config=ZeroConfig(stage=3), mesh=mesh, data_axes=("data",), trains=False)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(0, 0)), expected.detach())
        sharded.close()
        assert all(p.requires_grad for p in model.parameters())

    sim.run(case.world, fn)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
def test_they_compute_in_another_dtype_and_come_back_as_they_were(stage: int) -> None:
    case = Case(stage=stage, hidden=5)
    expected, _ = reference(case, 0)

    def fn(rank: int) -> None:
        mesh = mesh_of(case)
        model = Model(case, mesh["tensor"]).float()
        held = model.pair.columns
        optimizer = ZeroOptimizer(
            model, mesh=mesh, lr=0.0, precision=Precision(param=torch.bfloat16), **options_of(case)
        )
        train(model, optimizer, rank // case.tensor, range(1))
        with optimizer.gathered():
            assert model.pair.columns.dtype is model(tokens(0, 0)).dtype is torch.bfloat16
        optimizer.close()
        assert model.pair.columns is held
        for name, p in model.named_parameters():
            whole_p = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.equal(whole_p, expected[name].float()), name

    sim.run(case.world, fn)


def test_what_cannot_be_is_said_and_leaves_the_model_as_it_was() -> None:
    case = Case()

    def fn(rank: int) -> None:
        mesh = mesh_of(case)
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        model = Model(case, mesh["tensor"])
        before = dict(model.named_parameters())

        def refused(error: type[Exception], match: str, **options: Any) -> None:
            with pytest.raises(error, match=match):
                ZeroOptimizer(model, lr=0.1, stage=2, **options)
            assert type(model.pair) is Pair
            assert all(p is before[name] for name, p in model.named_parameters() if name in before)

        axes = {"mesh": mesh, "data_axes": ("data",)}
        refused(ValueError, r"'block\.0\.weight' is a DTensor.*there is no mesh")
        refused(ValueError, r"a mesh of the axes \('tensor',\).*Cut the former out", mesh=other, data_axes=("rows",))
        refused(ValueError, "momentum", optimizer=torch.optim.SGD, momentum=-1, **axes)
        partial = DTensor.from_local(torch.ones(3), mesh["tensor"], [Partial()])
        model.register_parameter("sum", nn.Parameter(partial))
        refused(NotImplementedError, r"'sum' is a DTensor of shape \(3,\).*Partial", **axes)
        del model.sum
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["data"])
        with pytest.raises(ValueError, match="split by fully_shard"):
            ZeroOptimizer(model, lr=0.1, stage=2, **axes)

    sim.run(case.world, fn)
