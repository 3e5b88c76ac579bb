"""Law 2 with expert axes: any ep_size, stage and routing equals one process that runs each rank's micro-batch alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from tempfile import gettempdir
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import example, given
from hypothesis import strategies as st
from tests.laws.test_families import states, whole
from tests.profiles import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.moe import (
    Capacity,
    ExpertChoiceGate,
    Gate,
    GroupedExperts,
    GroupLimitedGate,
    LossFreeGate,
    MixtureOfExperts,
    ModuleExperts,
    Top1Gate,
    Top2Gate,
    TopKGate,
    commit_balance,
)
from zoo.zero import ZeroOptimizer, safe_get_full_fp32_param

WIDTH, HIDDEN = 4, 6
RATE = 0.01


@dataclass(frozen=True)
class Case:
    data: int = 1
    expert: int = 2
    tensor: int = 1
    experts: int = 4
    gate: str = "top2"
    k: int = 2
    capacity: float | None = 1.0
    grouped: bool = True
    shared: str = "none"
    chunks: int = 1
    stage: int = 3
    clip_norm: float = 0.0
    accumulation: int = 1
    checkpointing: bool = False
    tokens: tuple[int, ...] = (5, 3)
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def world(self) -> int:
        return self.data * self.expert * self.tensor


@st.composite
def groups_within(draw: st.DrawFn, num_losses: int, world: int, stage: int) -> dict[str, Any]:
    """MiCS, hpZ, transfers of two stages and offloading; all sizes are powers of two, which divide one another."""
    local = draw(st.sampled_from([None, *(d for d in (1, 2, 4, 8) if d <= world)]))
    if stage == 0:
        return {"hierarchical_all_reduce": local is not None, "ranks_per_node": local}
    size = draw(st.sampled_from([-1, *(d for d in (1, 2, 4) if d <= num_losses)]))
    tiers = st.sampled_from(["none", "cpu", "nvme"])
    options = {
        "mics_shard_size": size, "offload_optimizer": {"device": draw(tiers), "nvme_path": gettempdir()},
        "ranks_per_node": local,
    }  # fmt: skip
    if stage < 3:
        return options
    limit = num_losses if size == -1 else size
    return {
        **options, "zero_hpz_partition_size": draw(st.sampled_from([d for d in (1, 2, 4) if d <= limit])),
        "mics_hierarchical_params_gather": local is not None and draw(st.booleans()),
        "offload_param": {"device": draw(tiers), "nvme_path": gettempdir(), "max_in_cpu": 8},
        "max_live_parameters": draw(st.sampled_from([None, 0])),
    }  # fmt: skip


MESHES = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    data, expert, tensor = draw(st.sampled_from(MESHES))
    stage = draw(st.integers(0, 3))
    experts = draw(st.sampled_from([4, 8]))
    return Case(
        data=data,
        expert=expert,
        tensor=tensor,
        experts=experts,
        gate=draw(st.sampled_from(["top1", "top2", "topk", "expert_choice", "loss_free", "group_limited"])),
        k=draw(st.integers(1, experts // 2)),
        capacity=draw(st.sampled_from([None, 0.5, 1.0, 2.0])),
        grouped=draw(st.booleans()),
        shared=draw(st.sampled_from(["none", "shared", "residual"])),
        chunks=draw(st.sampled_from([c for c in (1, 2) if not experts // expert % c])),
        stage=stage,
        clip_norm=draw(st.sampled_from([0.0, 0.01])),
        accumulation=draw(st.integers(1, 2)),
        checkpointing=draw(st.booleans()),
        tokens=tuple(draw(st.sampled_from([0, 1, 3, 5])) for _ in range(data * expert)),
        options=tuple(draw(groups_within(data * expert, data * expert * tensor, stage)).items()),
        seed=draw(st.integers(0, 10**6)),
    )


def gate_of(case: Case) -> Gate:
    size = WIDTH, case.experts
    if case.gate == "top1":
        return Top1Gate(*size, random_tokens=True, noise="Jitter")
    if case.gate == "top2":
        return Top2Gate(*size)
    if case.gate == "topk":
        return TopKGate(*size, k=case.k, noise="RSample")
    if case.gate == "expert_choice":
        return ExpertChoiceGate(*size, k=case.k)
    if case.gate == "loss_free":
        return LossFreeGate(*size, k=case.k, speed=0.1)
    return GroupLimitedGate(*size, k=case.k, num_groups=2, top_groups=1, of_group=1, speed=0.1, scale=2.5)


class Model(nn.Module):
    def __init__(self, case: Case, ep_size: int, ep_rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        mine = case.experts // ep_size
        experts: Any
        if case.grouped:
            experts = GroupedExperts(
                case.experts, WIDTH, HIDDEN, activation="gelu_tanh", bias=True, ep_size=ep_size, ep_rank=ep_rank
            )
        else:
            made = [nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)) for _ in range(mine)]
            experts = ModuleExperts(made, case.experts, ep_size=ep_size, ep_rank=ep_rank)
        self.moe = MixtureOfExperts(
            gate_of(case), experts, capacity=None if case.capacity is None else Capacity(factor=case.capacity),
            shared=nn.Linear(WIDTH, WIDTH) if case.shared != "none" else None, residual=case.shared == "residual",
            chunks=case.chunks if ep_size > 1 else 1,
        )  # fmt: skip
        self.last = nn.Linear(WIDTH, 2)
        self.case = case
        self.double()
        self.fill(ep_rank * mine)

    @torch.no_grad()
    def fill(self, first: int) -> None:
        """Values by the parameter's name in the whole model."""
        for name, parameter in self.named_parameters():
            words = name.split(".")
            if "list" in words:
                at = words.index("list") + 1
                words[at] = str(int(words[at]) + first)
            if name.startswith("moe.experts.") and self.case.grouped:
                for e, part in enumerate(parameter):
                    part.copy_(values(f"{name} {first + e}", tuple(part.shape)))
            else:
                parameter.copy_(values(".".join(words), tuple(parameter.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.case.checkpointing:
            mixed, balance, z = torch.utils.checkpoint.checkpoint(self.mixed, x, use_reentrant=False)
        else:
            mixed, balance, z = self.mixed(x)
        # A sum: a rank without tokens has a loss too.
        return self.last(x + mixed).square().sum() + 0.1 * balance + 0.01 * z

    def mixed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.moe(x)
        return found.output, found.balance, found.z_loss


def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(31**i * ord(c) for i, c in enumerate(name)) % 2**31)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7


def tokens(case: Case, replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * step + replica)
    return torch.randn(case.tokens[replica], 3, generator=generator, dtype=torch.float64)


def draw(model: Model, case: Case, replica: int, step: int) -> None:
    model.moe.gate.noise_key = torch.tensor(case.seed + 100 * step + replica)


def build(
    case: Case, rank: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Model, ZeroOptimizer, int]:  # fmt: skip
    mesh = init_device_mesh("cpu", (case.data, case.expert, case.tensor), mesh_dim_names=("data", "expert", "tensor"))
    model = Model(case, case.expert, mesh.get_local_rank("expert")).to(dtype)
    given = {"optimizer": torch.optim.SGD, "lr": RATE, "momentum": 0.9, **dict(case.options), **options}
    optimizer = ZeroOptimizer(
        model, stage=case.stage, mesh=mesh, data_axes=("data", "expert"), clip_norm=case.clip_norm,
        reduce_bucket_size=30, param_persistence_threshold=0, **given,
    )  # fmt: skip
    return model, optimizer, rank // case.tensor


def train(model: Model, optimizer: ZeroOptimizer, case: Case, replica: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(case.accumulation):
            draw(model, case, replica, 2 * step + micro)
            loss = model(tokens(case, replica, 2 * step + micro))
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        commit_balance(model, optimizer.comm)
    return losses


def reference(case: Case, steps: int) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """One process: the micro-batch of each rank by itself, the mean of their losses."""
    model = Model(case, 1, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    num = case.data * case.expert
    losses: list[list[float]] = [[] for _ in range(num)]
    for step in range(steps):
        for micro in range(case.accumulation):
            for replica in range(num):
                draw(model, case, replica, 2 * step + micro)
                loss = model(tokens(case, replica, 2 * step + micro))
                (loss / num).backward()
                losses[replica].append(float(loss.detach()))
        for parameter in model.parameters():  # an expert without tokens has a gradient of zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        commit_balance(model)
    kept = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return kept, losses


@pytest.mark.dear
@given(case=cases())
@example(case=Case(data=2, k=1, capacity=None, grouped=False, chunks=2, tokens=(0, 1, 0, 1)))  # not all experts run
def test_any_split_equals_one_process(case: Case) -> None:
    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        losses = train(model, optimizer, case, replica, range(3))
        optimizer.close()
        return losses, {n: v.detach().clone() for n, v in [*model.named_parameters(), *model.named_buffers()]}

    ranks = sim.run(case.world, fn, seed=case.seed)
    expected, losses = reference(case, 3)
    mine = case.experts // case.expert
    for rank, (got, found) in enumerate(ranks):
        torch.testing.assert_close(got, losses[rank // case.tensor], rtol=1e-9, atol=1e-9)
        first = rank // case.tensor % case.expert * mine
        for name, value in found.items():
            words = name.split(".")
            if "list" in words:
                at = words.index("list") + 1
                words[at] = str(int(words[at]) + first)
            wanted = expected[".".join(words)]
            if name.startswith("moe.experts.") and case.grouped:
                wanted = wanted[first : first + mine]
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@examples(times=0.5)
@given(case=cases(), other=cases())
def test_a_state_moves_between_meshes_and_options(case: Case, other: Case) -> None:
    """Every element has one owner, however many ranks along each axis have it."""
    model = {"experts": case.experts, "gate": case.gate, "k": case.k, "grouped": case.grouped, "shared": case.shared}
    other = replace(other, **model)

    def save(rank: int) -> Any:
        model, optimizer, replica = build(case, rank)
        train(model, optimizer, case, replica, range(1))
        return states(optimizer), optimizer.state_scalars()

    saved = sim.run(case.world, save)
    kept = whole([found for found, _ in saved])
    scalars = {key: value for _, found in saved for key, value in found.items()}

    def load(rank: int) -> Any:
        _, optimizer, _ = build(other, rank)
        optimizer.load_state(lambda name, role, start, length: kept[name, role].view(-1)[start:][:length], scalars)
        return states(optimizer)

    again = whole(sim.run(other.world, load))
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], kept[key]) for key in kept)


@pytest.mark.dear
@given(
    data=st.sampled_from([1, 2]), expert=st.sampled_from([1, 2]), tensor=st.sampled_from([1, 2]),
    local=st.sampled_from([1, 2, 4]), size=st.sampled_from([-1, 2]), grouped=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
@example(data=2, expert=2, tensor=2, local=4, size=-1, grouped=True, seed=0)
@example(data=2, expert=2, tensor=2, local=2, size=2, grouped=False, seed=1)
def test_quantised_gradients_of_experts_arrive_within_the_bound(
    data: int, expert: int, tensor: int, local: int, size: int, grouped: bool, seed: int
) -> None:
    """|g' - 1/N Σ_r x_r| <= h/(2Q) · 1/N Σ_r A_r (``collectives/quantised.py``), x_r summed over tensor-parallel ranks.

    What a rank has before the reduction is the gradient that the law above holds to one process.
    """
    num_losses = data * expert
    case = replace(
        Case(), data=data, expert=expert, tensor=tensor, grouped=grouped, capacity=None, tokens=(5,) * num_losses,
        options=(("mics_shard_size", size if num_losses > 1 else -1),), seed=seed,
    )  # fmt: skip
    options = {
        "ranks_per_node": min(local, case.world), "zero_quantized_gradients": True, "quantized_gradients_bits": 8,
        "momentum": 0.0, "lr": 1.0,
    }  # fmt: skip

    def fn(rank: int) -> Any:
        model, optimizer, replica = build(case, rank, torch.float32, **options)
        before = {n: safe_get_full_fp32_param(p).double() for n, p in model.named_parameters()}
        draw(model, case, replica, 0)
        with optimizer.no_sync():
            model(tokens(case, replica, 0).float()).backward()
        mine = {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        arrived = {n: before[n] - safe_get_full_fp32_param(p).double() for n, p in model.named_parameters()}
        return mine, arrived, before

    ranks = sim.run(case.world, fn, seed=seed)
    for rank, (mine, arrived, before) in enumerate(ranks):
        for name in before:
            # Of an expert a rank along the tensor axis has the gradient of its tokens; of all else the whole one.
            size_of, outer = (expert, tensor) if "moe.experts" in name else (tensor, 1)
            world = [ranks[r][0] for r in range(case.world) if r // outer % size_of == rank // outer % size_of]
            assert len(world) == case.world // size_of
            exact = torch.stack([given[name] for given in world]).sum(0) / num_losses
            alike = [n for n in mine if ("moe.experts" in n) == ("moe.experts" in name)]
            largest = sum(max(float(given[n].abs().max()) for n in alike) for given in world) / num_losses
            bound = 2 / (2 * 127) * largest * (1 + 1e-4) + 1e-6 * (1 + float(before[name].abs().max()))
            assert float((arrived[name] - exact).abs().max()) <= bound, name
