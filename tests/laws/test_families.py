"""Law 2 where parameters are parts along other axes of the mesh: experts, and columns and rows of tensor parallelism.

Both layers here are small and plain; they know nothing of ZeRO, and say what they are with ``zoo.layout``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zoo.optim
from zoo import sim
from zoo.comm import Communicator
from zoo.comm.exchange import exchange
from zoo.layout import Box, Boxes, declare_first, declare_split
from zoo.zero import ZeroOptimizer, safe_get_full_fp32_param, safe_set_full_fp32_param

WIDTH = 4
RATE = 0.1
AXES = ("data", "expert", "tensor")
TIERS = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Case:
    data: int = 2
    expert: int = 2
    tensor: int = 1
    order: tuple[str, ...] = AXES
    per_rank: int = 1
    stage: int = 3
    clip_norm: float = 0.0
    bucket_size: int = 1
    threshold: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def world(self) -> int:
        return self.data * self.expert * self.tensor


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def cuts_alike(case: Case, size: int) -> bool:
    """Whether every block of ``size`` consecutive data-parallel ranks has equally many of the ranks of each expert."""
    first = next(axis for axis in case.order if axis != "tensor")
    found = set()
    for e in range(case.expert):
        numbers = [d * case.expert + e if first == "data" else e * case.data + d for d in range(case.data)]
        found |= set(Counter(number // size for number in numbers).values())
    return len(found) == 1


@st.composite
def groups_within(draw: st.DrawFn, case: Case) -> dict[str, Any]:
    """MiCS, hpZ, transfers of two stages and offloading, as they fit."""
    num = case.data * case.expert
    options: dict[str, Any] = {}
    regular = case.expert != 3  # powers of two divide one another
    if regular:
        options["ranks_per_node"] = draw(st.sampled_from([None, *divisors(case.world)]))
    known = options.get("ranks_per_node") is not None
    if case.stage == 0:
        return {**options, "hierarchical_all_reduce": known}
    if draw(st.booleans()):
        options["mics_shard_size"] = draw(st.sampled_from([d for d in divisors(num) if cuts_alike(case, d)]))
    options["offload_optimizer"] = {"device": draw(st.sampled_from(TIERS)), "nvme_path": gettempdir()}
    if case.stage == 3:
        size = options.get("mics_shard_size", num)
        fitting = [d for d in divisors(size) if cuts_alike(case, d)]
        options["zero_hpz_partition_size"] = draw(st.sampled_from([1, *fitting]))
        options["mics_hierarchical_params_gather"] = known and draw(st.booleans())
        options["offload_param"] = {"device": draw(st.sampled_from(TIERS)), "nvme_path": gettempdir(), "max_in_cpu": 8}
        options["max_live_parameters"] = draw(st.sampled_from([None, 0]))
    return options


@st.composite
def cases(draw: st.DrawFn, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Case:
    expert, tensor = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]))
    case = Case(
        data=draw(st.integers(1, 2)) if expert * tensor > 2 else draw(st.sampled_from([1, 2, 4])),
        expert=expert,
        tensor=tensor,
        order=tuple(draw(st.permutations(AXES))),
        per_rank=draw(st.integers(1, 2)),
        stage=draw(st.sampled_from(stages)),
        clip_norm=draw(st.sampled_from([0.0, 0.01])),
        bucket_size=draw(st.sampled_from([1, 10**6])),
        threshold=draw(st.sampled_from([0, 10])),
        seed=draw(st.integers(0, 20)),
    )
    return replace(case, options=tuple(draw(groups_within(case)).items()))


def weight(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5


class Experts(nn.Module):
    """Tokens (E, t, D): row e goes to expert e, wherever it lives. All experts here without a communicator."""

    def __init__(self, num: int, comm: Communicator | None) -> None:
        super().__init__()
        self.comm = comm
        size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        first = rank * (num // size)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(num // size))
        declare_first(self.experts, first)
        for index, expert in enumerate(self.experts):
            expert.weight.data = weight(f"expert {first + index}", WIDTH, WIDTH)
            expert.bias.data = weight(f"bias {first + index}", WIDTH)
            for parameter in expert.parameters() if comm is not None else ():
                declare_split(parameter, ["expert"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.comm is not None:
            (x,) = exchange([x], self.comm, split_dim=0, join_dim=1)
        y = torch.stack([torch.tanh(expert(x[i])) for i, expert in enumerate(self.experts)])
        return y if self.comm is None else exchange([y], self.comm, split_dim=1, join_dim=0)[0]


class Enter(torch.autograd.Function):
    """The same in; gradients are summed over the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        ctx.comm.all_reduce(grad.view(-1)).wait()
        return grad, None


class Leave(torch.autograd.Function):
    """Sums over the tensor ranks out; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        x = x.contiguous().clone()
        comm.all_reduce(x.view(-1)).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Pair(nn.Module):
    """Two column-parallel matrices, each with the gates and the inputs of a rank side by side, and a row-parallel one.

    ``columns`` has the rows of a linear layer, ``turned`` is its transpose: the boxes lie along the other dim.
    """

    def __init__(self, comm: Communicator | None) -> None:
        super().__init__()
        self.comm = comm
        size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        hidden = 6 // size
        first, second = rank * hidden, 6 + rank * hidden
        fused = torch.cat([torch.arange(first, first + hidden), torch.arange(second, second + hidden)])
        columns, turned, rows = weight("columns", 12, WIDTH), weight("turned", WIDTH, 12), weight("rows", WIDTH, 6)
        self.columns, self.turned = nn.Parameter(columns[fused]), nn.Parameter(turned[:, fused])
        self.rows = nn.Parameter(rows[:, first : first + hidden].clone())
        self.bias = nn.Parameter(weight("pair", WIDTH))
        declare_split(
            self.columns, ["tensor"], shape=(12, WIDTH),
            boxes=[Box((at, 0), (hidden, WIDTH)) for at in (first, second)],
        )  # fmt: skip
        declare_split(
            self.turned, ["tensor"], shape=(WIDTH, 12),
            boxes=Boxes.side_by_side([Box((0, at), (WIDTH, hidden)) for at in (first, second)], dim=1),
        )  # fmt: skip
        declare_split(self.rows, ["tensor"], shape=(WIDTH, 6), offsets=(0, first))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        gates, inputs = (x @ self.columns.t() + x @ self.turned).chunk(2, dim=-1)
        return torch.tanh(gates) * inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.comm is None:
            return self._hidden(x) @ self.rows.t() + self.bias
        inner: torch.Tensor = Enter.apply(x, self.comm)
        out: torch.Tensor = Leave.apply(self._hidden(inner) @ self.rows.t(), self.comm)
        return out + self.bias


class Model(nn.Module):
    def __init__(self, num_experts: int, expert: Communicator | None, tensor: Communicator | None) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH).double()
        self.first.weight.data, self.first.bias.data = weight("first", WIDTH, 3), weight("first bias", WIDTH)
        self.moe = Experts(num_experts, expert)
        self.pair = Pair(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.pair(x + self.moe(x))
        return out


def tokens(case: Case, replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(case.expert * case.per_rank, 2, 3, generator=generator, dtype=torch.float64)


def build(
    case: Case, rank: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Model, ZeroOptimizer, int]:  # fmt: skip
    mesh = init_device_mesh("cpu", tuple(getattr(case, axis) for axis in case.order), mesh_dim_names=case.order)
    expert = Communicator.of_axes(mesh, ["expert"]) if case.expert > 1 else None
    tensor = Communicator.of_axes(mesh, ["tensor"]) if case.tensor > 1 else None
    model = Model(case.expert * case.per_rank, expert, tensor).to(dtype)
    given = {"optimizer": torch.optim.SGD, "lr": RATE, "momentum": 0.9, **dict(case.options), **options}
    if name := given.pop("whole", None):
        groups, of_kind = whole_tensors(name, model)
        given = {**dict(case.options), "optimizer": getattr(zoo.optim, name), "params": groups, **of_kind}
    optimizer = ZeroOptimizer(
        model, stage=case.stage, mesh=mesh, data_axes=[axis for axis in case.order if axis != "tensor"],
        clip_norm=case.clip_norm, reduce_bucket_size=case.bucket_size, param_persistence_threshold=case.threshold,
        **given,
    )  # fmt: skip
    replica = mesh.get_local_rank("data") * case.expert + mesh.get_local_rank("expert")
    return model, optimizer, replica


def train(model: Model, optimizer: ZeroOptimizer, case: Case, replica: int, steps: range) -> None:
    for step in steps:
        model(tokens(case, replica, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(case: Case, steps: int, make: Any = None) -> dict[str, torch.Tensor]:
    """One process with the tokens of all replicas."""
    model = Model(case.expert * case.per_rank, None, None)
    make = make or (lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    optimizer = make(model)
    num = case.data * case.expert
    for step in range(steps):
        for replica in range(num):
            (model(tokens(case, replica, step)).square().mean() / num).backward()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def states(optimizer: ZeroOptimizer, errors: Any = "ranks") -> list[Any]:
    """(name, role, first element, shape, values) of runs; a slice that is a box is one for each of its rows."""
    found = []
    for s in optimizer.state_slices(errors=errors):
        values = s.tensor.clone()
        for start, length in [(s.start, s.length)] if s.box is None else s.box.runs_in(s.shape):
            found.append((s.name, s.role, start, s.shape, values[:length]))
            values = values[length:]
    return found


def pick(whole: torch.Tensor, where: int | Box, length: int) -> torch.Tensor:
    """What an optimizer asks for of a tensor."""
    if isinstance(where, Box):
        ranges = zip(where.offsets, where.stops, strict=True)
        return whole[tuple(slice(low, high) for low, high in ranges)].reshape(-1)
    return whole.view(-1)[where : where + length]


def whole(runs: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """All states of all ranks put together; every element comes once."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for name, role, start, shape, values in (piece for run in runs for piece in run):
        flat = found.setdefault((name, role), torch.full(shape, torch.nan, dtype=values.dtype)).view(-1)
        assert bool(flat[start : start + values.numel()].isnan().all()), f"two ranks own {name} {role} at {start}"
        flat[start : start + values.numel()] = values
    assert not any(bool(value.isnan().any()) for value in found.values())
    return found


@pytest.mark.dear
@given(case=cases())
def test_experts_and_tensor_parallel_layers_equal_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, case, replica, range(3))
        return states(optimizer), optimizer.grad_norm

    ranks = sim.run(case.world, fn, seed=case.seed)
    assert len({norm for _, norm in ranks}) == 1, "ranks clipped by different factors"
    got = whole([found for found, _ in ranks])
    expected = reference(case, 3)
    assert {name for name, role in got if role == "parameter"} == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name, "parameter"], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def whole_tensors(name: str, model: Model) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and options of an optimizer that needs whole tensors."""
    if name == "Lamb":
        return [{"params": list(model.parameters())}], {"lr": RATE, "weight_decay": 0.1}
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = {"params": [p for p in model.parameters() if p.dim() != 2], "use_muon": False}
    return [{"params": matrices}, rest], {"lr": 0.02}


@pytest.mark.dear
@given(case=cases(), name=st.sampled_from(["Lamb", "Muon"]))
@example(case=Case(tensor=2, stage=2, bucket_size=10**6), name="Lamb")
@example(case=Case(stage=2, per_rank=2, bucket_size=10**6), name="Muon")
def test_optimizers_of_whole_tensors_equal_one_process(case: Case, name: str) -> None:
    """Trust ratios are of whole tensors: an expert's own, and all columns of a matrix that ranks have parts of."""
    kind: Any = getattr(zoo.optim, name)
    options = {**dict(case.options), "offload_optimizer": {"device": "none"}}
    case = replace(case, tensor=1 if name == "Muon" else case.tensor, options=tuple(options.items()) * (name == "Lamb"))

    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank, whole=name)
        train(model, optimizer, case, replica, range(3))
        return states(optimizer)

    def make(model: Any) -> Any:
        groups, options = whole_tensors(name, model)
        return kind(groups, **options)

    got, expected = whole(sim.run(case.world, fn, seed=case.seed)), reference(case, 3, make)
    close = {"rtol": 1e-9, "atol": 1e-9} if name == "Lamb" else {"rtol": 1e-2, "atol": 1e-3}  # directions are bf16
    for key, value in expected.items():
        torch.testing.assert_close(got[key, "parameter"], value, **close, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.dear
@given(case=cases(), other=cases())
def test_a_state_moves_between_meshes(case: Case, other: Case) -> None:
    """save → load → continue under another number of ranks on any axis, as if it had never stopped."""
    num = case.expert * case.per_rank
    if num % other.expert:
        return
    other = replace(other, per_rank=num // other.expert, clip_norm=case.clip_norm)

    def save(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, case, replica, range(2))
        return states(optimizer), optimizer.state_scalars()

    saved = sim.run(case.world, save)
    kept = whole([found for found, _ in saved])
    scalars = {key: value for _, found in saved for key, value in found.items()}

    def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
        return pick(kept[name, role], start, length)

    def load(rank: int) -> Any:
        _, optimizer, _ = build(other, rank)
        optimizer.load_state(read, scalars)
        return states(optimizer)

    again = whole(sim.run(other.world, load))
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], kept[key]) for key in kept)


def test_columns_of_a_matrix_are_saved_and_loaded_as_boxes() -> None:
    """A rank's part is at most 2d - 1 slices, and as many questions to the reader; not one for each of the rows."""
    case = Case(data=1, expert=1, tensor=2, stage=0)  # it has all four rows of its half

    def save(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, case, replica, range(1))
        mine = [s for s in optimizer.state_slices() if (s.name, s.role) == ("pair.rows", "parameter")]
        assert all(s.length == s.tensor.numel() == (s.length if s.box is None else s.box.numel) for s in mine)
        return states(optimizer), optimizer.state_scalars(), len(mine), sum(s.box is not None for s in mine)

    saved = sim.run(case.world, save)
    assert max(num for _, _, num, _ in saved) <= 3 < WIDTH
    assert max(boxes for _, _, _, boxes in saved) >= 1
    kept = whole([found for found, _, _, _ in saved])

    def load(rank: int) -> int:
        _, optimizer, _ = build(case, rank)
        asked: list[str] = []

        def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
            asked.append(f"{role} {name}")
            return pick(kept[name, role], start, length)

        optimizer.load_state(read, saved[0][1])
        return asked.count("parameter pair.rows")

    assert sim.run(case.world, load) == [1] * case.world


def test_one_experts_values_are_read_and_set_on_its_own_ranks() -> None:
    case = Case()

    def fn(rank: int) -> None:
        model, _optimizer, _ = build(case, rank)
        mine: Any = model.moe.experts[0].weight  # type: ignore[index]
        number = rank % 2
        assert torch.equal(safe_get_full_fp32_param(mine), weight(f"expert {number}", WIDTH, WIDTH))
        safe_set_full_fp32_param(mine, torch.full((WIDTH, WIDTH), float(number + 5), dtype=torch.float64))
        assert bool((safe_get_full_fp32_param(mine) == number + 5).all())

    sim.run(4, fn)


def test_what_cannot_be_is_said() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        model = Model(2, Communicator.of_axes(mesh, ["expert"]), None)
        axes = {"mesh": mesh, "data_axes": ("data", "expert")}
        with pytest.raises(ValueError, match=r"'moe\.experts\.0\.weight' is a part along.*'expert'.*no mesh"):
            ZeroOptimizer(model, stage=2, lr=0.1)
        with pytest.raises(ValueError, match=r"'pair\.columns' is a part along 'tensor'; the mesh has the axes"):
            ZeroOptimizer(model, stage=2, lr=0.1, **axes)
        model.pair = nn.Linear(WIDTH, WIDTH).double()  # type: ignore[assignment]
        with pytest.raises(ValueError, match="data_axes=None with a mesh of the axes"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh)
        with pytest.raises(ValueError, match=r"data_axes='data' is one string; .*: data_axes=\('data',\)"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes="data")
        with pytest.raises(ValueError, match=r"layer_axes='expert' is one string"):
            ZeroOptimizer(model, stage=2, lr=0.1, mesh=mesh, data_axes=("data",), layer_axes="expert")
        with pytest.raises(ValueError, match="group= and mesh="):
            ZeroOptimizer(model, stage=2, lr=0.1, group=mesh, **axes)
        assert type(model.first.weight) is nn.Parameter
        with pytest.raises(ValueError, match="not inside"):
            declare_split(model.first.weight, ["tensor"], shape=(4, 3), offsets=(2, 0))

    sim.run(4, fn)
