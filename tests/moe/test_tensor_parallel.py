"""Experts that ranks share, beside ranks that share layers: what ranks without parts of layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zoo.engine
from zoo import sim
from zoo.moe import GroupedExperts, MixtureOfExperts, MoE, TopKGate, use_mesh
from zoo.tensor import Plan, Rule

IDS = torch.randint(53, (4, 6), generator=torch.Generator().manual_seed(1))


def trained(family: str, ranks: int, **document: Any) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """By rank: losses of three steps, and the whole parameters after them."""

    model_of = pytest.importorskip("tests.tensor.hub").model_of

    def fn(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        given = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **document}
        engine = zoo.engine.initialize(given, model_of(family).float().train())[0]
        losses = []
        for _ in range(3):
            ids = IDS.chunk(engine.batch_ranks)[engine.batch_rank]
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()
            losses.append(float(engine.record.loss))
        found = losses, engine.optimizer.consolidated_parameters()
        engine.destroy()
        return found

    return sim.run(ranks, fn, seed=0)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "degree", "experts", "data", "stage"),
    [("mixtral", 2, 2, 1, 3), ("qwen3_moe", 2, 1, 2, 0), ("deepseek_v3", 2, 2, 1, 1), ("qwen2_moe", 3, 2, 1, 2)],
)
def test_tensor_expert_and_data_ranks_train_what_one_process_does(
    family: str, degree: int, experts: int, data: int, stage: int
) -> None:  # fmt: skip
    ((losses, whole),) = trained(family, 1)
    document = {
        "tensor_parallel": {"autotp_size": degree}, "moe": {"enabled": True, "ep_size": experts},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    for own, parameters in trained(family, degree * experts * data, **document):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(parameters, whole, rtol=1e-4, atol=1e-5)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Words(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)
            self.moe = MoE(
                6, Expert(), num_experts=4, ep_size=2, drop_tokens=False, enable_expert_tensor_parallelism=cut
            )
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        y, balance, _ = self.moe(x)
        return F.cross_entropy(self.head(x + y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance


def document(cut: bool, stage: int, degree: int) -> dict[str, Any]:
    rules = [Rule(module="words", rows="vocab", cut="vocab")]
    if cut:
        rules += [Rule(module="moe.experts.*.*.up", rows="inner", cut="inner"),
                  Rule(module="moe.experts.*.*.down", columns="inner", cut="inner")]  # fmt: skip
    plan = Plan("mine", sizes=(("vocab", 8),), rules=tuple(rules))
    return {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "gradient_clipping": 0.5,
        "tensor_parallel": {"autotp_size": degree, "plan": plan.as_data()} if degree > 1 else {},
    }  # fmt: skip


@pytest.mark.parametrize(("cut", "stage"), [(False, 0), (False, 3), (True, 1), (True, 3)])
def test_a_layer_whose_experts_ranks_share_beside_ranks_that_share_layers(
    cut: bool, stage: int, tmp_path: Path
) -> None:  # fmt: skip
    """The experts are those of the place on the mesh, whole or parts; what is saved has all of them."""

    def job(world: int, degree: int, stage: int, steps: range, load: bool = False) -> list[Any]:
        def fn(rank: int) -> Any:
            engine = zoo.engine.initialize(document(cut, stage, degree), Words(cut))[0]
            if load:
                engine.load_checkpoint(tmp_path)
            losses = []
            for step in steps:
                ids = torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(step))
                engine.backward(engine(ids[engine.batch_rank :: engine.batch_ranks]))
                engine.step()
                losses.append(float(engine.record.loss))
            if degree > 1:
                engine.save_checkpoint(tmp_path)
            found = losses, float(engine.get_global_grad_norm()), engine.optimizer.consolidated_parameters()
            engine.destroy()
            return found

        return sim.run(world, fn, seed=0)

    losses, norm, whole = job(2, 1, 0, range(3))[0]
    for found in (job(4, 2, stage, range(2)), job(2, 1, (stage + 1) % 4, range(2, 3), load=True)):
        own = [one[0] for one in found]
        assert own == [pytest.approx(losses[:2] if len(own[0]) == 2 else losses[2:], rel=1e-9)] * len(own)
    assert found[0][1] == pytest.approx(norm, rel=1e-9)
    torch.testing.assert_close(found[0][2], whole, rtol=1e-9, atol=1e-11)


class Grouped(Words):
    """Experts whose matrices are one tensor, which a plan cuts inside."""

    def __init__(self, gated: bool, degree: int) -> None:
        super().__init__(cut=False)
        place = dist.get_rank() // degree
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            experts = GroupedExperts(4, 6, 8, gated=gated, bias=True, ep_size=2, ep_rank=place)
            self.moe: Any = MixtureOfExperts(TopKGate(6, 4, k=1), experts, repeated=False).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return F.cross_entropy(self.head(x + self.moe(x).output)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(("gated", "stage"), [(False, 0), (True, 3)])
def test_experts_of_one_tensor_are_parts_along_both_axes(gated: bool, stage: int) -> None:
    up = "part=2 inner" if gated else "inner"
    inside = (("up", -1, up), ("up_bias", -1, up), ("down", -2, "inner"))
    plan = Plan("mine", rules=(Rule(module="moe.experts", inside=inside, once=("down_bias",), cut="inner"),))

    def job(degree: int) -> list[Any]:
        def fn(rank: int) -> Any:
            given = document(False, stage, degree)
            if degree > 1:
                given["tensor_parallel"]["plan"] = plan.as_data()
            engine = zoo.engine.initialize(given, Grouped(gated, degree))[0]
            for step in range(2):
                ids = torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(step))
                engine.backward(engine(ids[engine.batch_rank :: engine.batch_ranks]))
                engine.step()
            found = float(engine.get_global_grad_norm()), engine.optimizer.consolidated_parameters()
            engine.destroy()
            return found

        return sim.run(2 * degree, fn, seed=0)

    norm, whole = job(1)[0]
    for found, parameters in job(2):
        assert found == pytest.approx(norm, rel=1e-9)
        torch.testing.assert_close(parameters, whole, rtol=1e-9, atol=1e-11)


def test_parts_of_experts_that_get_other_tokens_are_told() -> None:
    def fn(rank: int) -> None:
        with pytest.raises(ValueError, match=r"have parts of a layer's experts, and .* other tokens"):
            zoo.engine.initialize(document(True, 0, 2), Words(False))

    sim.run(4, fn, seed=0)


def test_experts_of_another_place_on_the_mesh_are_told_on_all_ranks() -> None:
    def fn(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
        experts = GroupedExperts(4, 6, 5, ep_size=2, ep_rank=rank % 2)
        with pytest.raises(ValueError, match=r"other experts than those of its place on the mesh, on ranks 1, 2; here"):
            use_mesh(MixtureOfExperts(TopKGate(6, 4, k=1), experts), mesh)

    sim.run(4, fn, seed=0)


def test_what_experts_drop_of_their_ranks_tokens_leaves_generators_alike() -> None:
    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        layer = MoE(6, nn.Dropout(0.5), num_experts=2, drop_tokens=False)
        use_mesh(layer, mesh)
        nn.init.zeros_(layer.gate.weight)  # no gradient comes from there
        x = torch.ones(9, 6).requires_grad_()  # five tokens of one rank, four of the other
        y, *_ = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(y.detach() == 0, x.grad == 0)  # computed again, the same masks
        return y.detach(), torch.get_rng_state()

    (first, state), (second, other) = sim.run(2, fn, seed=0)
    assert torch.equal(first, second)
    assert not torch.equal(first[:4] == 0, first[5:] == 0)
    assert torch.equal(state, other)
