"""Law: with Precision.param the run is that of one process with fp32 masters and a copy of the model in that dtype.

The masters are the values that the model came with, the copy computes, its gradients are averaged in their own dtype in
the order of the ranks, the optimizer runs on the masters, and the copy is the rounded masters: bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import zoo.optim
from zoo import sim
from zoo.zero import Precision, ZeroOptimizer

OPTIMIZERS: list[Any] = [torch.optim.AdamW, zoo.optim.AdamW, torch.optim.SGD]
USUAL: dict[str, Any] = {"dtype": torch.bfloat16, "threshold": 0, "num_steps": 3, "seed": 0}
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Tied weights, a frozen layer, a parameter of odd shape, and a buffer that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.blocks[1].weight = self.blocks[0].weight
        self.register_buffer("shift", torch.linspace(0, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in [*self.blocks, self.frozen]:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.last(x) * self.scale + self.shift
        return out


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def train_reference(cls: Any, world: int, dtype: torch.dtype, num_steps: int) -> tuple[Values, Values]:
    """Plain torch in one process: the masters and the computing copy after training."""
    model = Net()
    masters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = cls(list(masters.values()), lr=0.01)
    computing = copy.deepcopy(model)
    for p in computing.parameters():
        p.data = p.data.to(dtype)
    copies = dict(computing.named_parameters())
    for step in range(num_steps):
        gradients: list[Values] = []
        for rank in range(world):
            computing.zero_grad()
            loss_of(computing, data(rank, step).to(dtype)).backward()  # type: ignore[no-untyped-call]
            gradients.append({n: copies[n].grad.clone() for n in masters})  # type: ignore[union-attr]
        for name, master in masters.items():
            total = gradients[0][name]
            for other in gradients[1:]:
                total = total + other[name]
            master.grad = (total * (1.0 / world)).float()
        optimizer.step()
        for name, master in masters.items():
            copies[name].data.copy_(master.data)
    return {n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in copies.items()}


def whole(parts: list[list[tuple[str, int, torch.Tensor]]]) -> Values:
    """The logical tensors of which ``parts`` are what each rank has."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for part in parts:
        for name, start, tensor in part:
            assert start not in pieces.setdefault(name, {}), "two ranks own one element"
            pieces[name][start] = tensor
    return {name: torch.cat([of[start] for start in sorted(of)]) for name, of in pieces.items()}


def parameter_slices(optimizer: ZeroOptimizer) -> list[tuple[str, int, torch.Tensor]]:
    return [(s.name, s.start, s.tensor.clone()) for s in optimizer.state_slices() if s.role == "parameter"]


@pytest.mark.dear
@given(
    world=st.integers(1, 3),
    stage=st.integers(0, 3),
    cls=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    bucket_size=st.sampled_from([1, 60, 10**6]),
    threshold=st.sampled_from([0, 10]),
    num_steps=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 20),
)
@example(**USUAL, world=3, stage=3, cls=torch.optim.AdamW, bucket_size=1)
@example(**USUAL, world=3, stage=0, cls=zoo.optim.AdamW, bucket_size=60)
@example(**USUAL, world=2, stage=1, cls=torch.optim.AdamW, bucket_size=60)
@example(**USUAL, world=2, stage=2, cls=zoo.optim.AdamW, bucket_size=60)
def test_training_is_that_of_fp32_masters_and_a_rounded_copy(
    world: int, stage: int, cls: Any, dtype: torch.dtype, bucket_size: int, threshold: int, num_steps: int, seed: int
) -> None:
    masters, copies = train_reference(cls, world, dtype, num_steps)

    def fn(rank: int) -> tuple[Values, list[tuple[str, int, torch.Tensor]], Values]:
        model = Net()
        if rank:  # the values of rank 0 count
            for p in model.parameters():
                p.data.add_(1.0)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=cls, lr=0.01, precision=Precision(param=dtype),
            reduce_bucket_size=bucket_size, param_persistence_threshold=threshold,
        )  # fmt: skip
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.shift.dtype is torch.float32
        for step in range(num_steps):
            loss_of(model, data(rank, step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        computing, state = optimizer.consolidated_parameters(), parameter_slices(optimizer)
        optimizer.close()
        return computing, state, {n: p.detach().clone() for n, p in model.named_parameters()}

    with sim.defaults(semantics="gloo", transport="native"):  # which adds in the order of the ranks
        found = sim.run(world, fn, seed=seed)
    state = whole([part for _, part, _ in found])
    for computing, _, closed in found:
        assert computing.keys() == closed.keys() == state.keys() == masters.keys()
        for name, master in masters.items():
            assert torch.equal(computing[name], copies[name]), name
            assert state[name].dtype is closed[name].dtype is torch.float32
            assert torch.equal(state[name], master.flatten()), name
            assert torch.equal(closed[name], master), name


@pytest.mark.dear
@pytest.mark.parametrize("cls", OPTIMIZERS[:2])
@given(
    where=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    stage=st.integers(0, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    clip=st.sampled_from([0.0, 0.05]),
    reduce_dtype=st.sampled_from([None, torch.float32]),
    early=st.booleans(),
    tiers=st.tuples(st.sampled_from(["none", "cpu", "nvme"]), st.sampled_from(["none", "cpu", "nvme"])),
    extra=st.sampled_from(["none", "mics", "hpz", "weights", "gradients"]),
)
@example(
    where=(2, 1), stage=3, dtype=torch.bfloat16, clip=0.0, reduce_dtype=None, early=False, tiers=("nvme", "nvme"),
    extra="none",
)  # fmt: skip
@example(
    where=(2, 2), stage=3, dtype=torch.bfloat16, clip=0.05, reduce_dtype=None, early=False, tiers=("nvme", "none"),
    extra="hpz",
)  # fmt: skip
def test_it_is_a_16_bit_model_whose_masters_are_the_originals(
    tmp_path_factory: pytest.TempPathFactory, cls: Any, where: tuple[int, int], stage: int, dtype: torch.dtype,
    clip: float, reduce_dtype: torch.dtype | None, early: bool, tiers: tuple[str, str], extra: str,
) -> None:  # fmt: skip
    """Under any option: bit by bit what a converted model computes into whose masters the originals were loaded."""
    world = math.prod(where)
    folder = tmp_path_factory.mktemp("nvme")
    options: dict[str, Any] = {
        "stage": stage, "clip_norm": 0.0 if early else clip, "update_in_backward": early,
        "param_persistence_threshold": 6, "reduce_bucket_size": 60, "optimizer": cls, "lr": 0.01, "sub_group_size": 40,
    }  # fmt: skip
    if stage > 0:
        options["offload_optimizer"] = {"device": tiers[0], "nvme_path": folder}
    if stage == 3:
        options["offload_param"] = {"device": tiers[1], "nvme_path": folder, "max_in_cpu": 30}
        options |= {
            "mics": {"mics_shard_size": where[1]}, "weights": {"zero_quantized_weights": True},
            "hpz": {"zero_hpz_partition_size": where[1], "ranks_per_node": where[1]} if where[1] > 1 else {},
            "gradients": {"zero_quantized_gradients": True, "ranks_per_node": where[1]},
        }.get(extra, {})  # fmt: skip
    check_converted(world, dtype, lambda model: options, reduce_dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@pytest.mark.parametrize("stage", range(4))
def test_optimizers_of_whole_tensors_start_from_the_originals_too(name: str, stage: int) -> None:
    def options(model: nn.Module) -> dict[str, Any]:
        trained = [p for p in model.parameters() if p.requires_grad]
        others: dict[str, Any] = {"params": [p for p in trained if p.ndim < 2]}
        if name == "Muon":
            others["use_muon"] = False
        return {
            "stage": stage, "optimizer": getattr(zoo.optim, name), "lr": 0.01, "reduce_bucket_size": 60,
            "params": [{"params": [p for p in trained if p.ndim == 2]}, others],
        }  # fmt: skip

    check_converted(2, torch.bfloat16, options)


def check_converted(
    world: int, dtype: torch.dtype, options: Callable[[nn.Module], dict[str, Any]], reduce: torch.dtype | None = None
) -> None:  # fmt: skip
    originals = {n: p.detach().flatten() for n, p in Net().named_parameters()}

    def train(rank: int, model: nn.Module, optimizer: ZeroOptimizer) -> Any:
        for step in range(2):
            optimizer.backward(loss_of(model, data(rank, step).to(dtype)))
            optimizer.step()
            optimizer.zero_grad()
        slices = [(s.name, s.role, s.start, s.tensor.clone()) for s in optimizer.state_slices()]
        found = optimizer.consolidated_parameters(), slices
        optimizer.close()
        return found

    def converted(rank: int) -> Any:
        model = Net()
        for p in model.parameters():
            p.data = p.data.to(dtype)
        optimizer = ZeroOptimizer(model, precision=Precision(reduce=reduce), **options(model))
        optimizer.load_state(lambda name, role, start, n: _only(role, originals[name][start : start + n]), {})
        return train(rank, model, optimizer)

    def with_param_dtype(rank: int) -> Any:
        model = Net()
        optimizer = ZeroOptimizer(model, precision=Precision(param=dtype, reduce=reduce), **options(model))
        return train(rank, model, optimizer)

    for (expected, slices), (got, others) in zip(
        sim.run(world, converted), sim.run(world, with_param_dtype), strict=True
    ):
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        assert [s[:3] for s in slices] == [s[:3] for s in others]
        for (name, role, start, mine), (*_, other) in zip(slices, others, strict=True):
            if name.startswith("frozen"):
                assert torch.equal(other, originals[name][start : start + other.numel()])
            else:
                assert torch.equal(mine, other), (name, role)


def _only(role: str, value: torch.Tensor) -> torch.Tensor:
    if role != "parameter":
        raise KeyError(role)
    return value
