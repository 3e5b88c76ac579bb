"""``deepspeed.moe``: gates equal to DeepSpeed's, the layer in an engine, what is an expert."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo.deepspeed.moe import ep_kernels, ep_repack, ep_router, sharded_moe, utils
from zoo.deepspeed.moe.ep_count import count_tokens_per_expert
from zoo.deepspeed.moe.ep_experts import GroupedExperts
from zoo.deepspeed.moe.layer import MoE

import zoo.deepspeed as deepspeed
from zoo import sim

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "gating.json").read_text(encoding="utf-8"))
"""What DeepSpeed 0.19.8 makes of logits."""


def called(case: dict[str, Any], **more: Any) -> Any:
    arguments = dict(case["arguments"])
    if "used_token" in arguments:
        arguments["used_token"] = torch.tensor(arguments["used_token"])
    return getattr(sharded_moe, case["function"])(torch.tensor(case["logits"]), **arguments, **more)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['function']}-{case['arguments']}")
def test_gates_say_what_deepspeeds_say(case: dict[str, Any]) -> None:
    l_aux, combine, dispatch, counts = called(case)
    assert float(l_aux) == pytest.approx(case["l_aux"], abs=1e-6)
    assert list(combine.shape) == case["shape"]
    assert torch.allclose(combine.flatten(), torch.tensor(case["combine"]), atol=1e-6)
    assert torch.equal(dispatch, combine != 0)
    assert counts.tolist() == case["counts"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['function']}-{case['arguments']}")
def test_sparse_routes_are_the_dense_ones(case: dict[str, Any]) -> None:
    l_aux, combine, _, counts = called(case)
    also, places, num_experts, experts, slots, weights, same = called(case, sparse_routes=True)
    dense = torch.zeros_like(combine)
    for e, slot, weight in zip(experts, slots, weights, strict=True):
        for token in range(len(e)):
            if e[token] >= 0:
                dense[token, e[token], slot[token]] += weight[token]
            else:
                assert weight[token] == 0
    assert (experts.dtype, slots.dtype, num_experts, int(places)) == (torch.int32, torch.int32, *combine.shape[1:])
    assert torch.allclose(dense, combine)
    assert also == l_aux
    assert torch.equal(counts, same)


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.bfloat16, (1.12060546875, 2.552734375, 0.94921875, 3.99609375)),
        (torch.float16, (1.12078857421875, 2.55615234375, 0.9488525390625, 3.99951171875)),
    ],
)
def test_logits_of_16_bits_give_a_loss_and_weights_in_float32(dtype: torch.dtype, found: tuple[float, ...]) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.3], [2.0, 0.0, 0.7], [3.0, 0.0, 1.1], [0.2, 0.4, 0.9]], dtype=dtype)
    one = sharded_moe.top1gating(logits, 1.0, 1, use_rts=False)
    two = sharded_moe.topkgating(logits, 2, 1.0, 1)
    numbers = [one[0], one[1].sum(), two[0], two[1].sum()]
    assert {t.dtype for t in (*one[:2], *two[:2])} == {torch.float32}
    assert tuple(float(x) for x in numbers) == found  # DeepSpeed 0.19.8's


def test_gates_draw_and_have_gradients() -> None:
    torch.manual_seed(0)
    gate = sharded_moe.TopKGate(4, 3, noisy_gate_policy="RSample", min_capacity=2)
    x = torch.randn(40, 4)
    seen = {tuple(gate(x)[3].tolist()) for _ in range(5)}
    assert len(seen) > 1  # drawn
    l_aux, combine, *_ = gate(x)
    (l_aux + combine.sum()).backward()
    assert gate.wg.weight.grad.abs().sum() > 0
    gate.eval()
    assert torch.equal(gate(x)[3], gate(x)[3])
    for k in (2, 3):
        assert sharded_moe.TopKGate(4, 3, k=k, noisy_gate_policy="Jitter")(x)[1].shape[1] == 3
    kept = {tuple(sharded_moe.top1gating(x[:, :3], 0.3, 1)[2].any(2).any(1).tolist()) for _ in range(5)}
    assert len(kept) > 1  # random token selection
    with pytest.raises(ValueError, match="drop_policy: 'best'; allowed are"):
        sharded_moe.topkgating(x, 2, 1.0, 1, drop_policy="best")
    assert sharded_moe.TUTEL_INSTALLED is False
    assert sharded_moe.gumbel_rsample((2, 3), torch.device("cpu")).shape == (2, 3)
    assert sharded_moe.multiplicative_jitter(x, x.device, 0) is x
    assert (sharded_moe.multiplicative_jitter(x, x.device) / x - 1).abs().max() <= 0.0101


def test_the_fullest_expert_of_all_ranks() -> None:
    def job(rank: int) -> Any:
        import torch.distributed as dist

        logits = F.one_hot(torch.arange(4) % (rank + 1), 3).float()
        found = sharded_moe.top1gating(logits, 1.0, 1, drop_tokens=False, use_rts=False, ep_group=dist.group.WORLD)
        return found[1].shape

    assert sim.run(2, job) == [(4, 3, 4)] * 2


class Net(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.moe = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=ep_size, k=2, capacity_factor=4.0,
                       top2_2nd_expert_sampling=False)  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, l_aux, counts = self.moe(self.inner(x))
        assert counts.shape == (4,)
        found: torch.Tensor = y.square().mean() + 0.01 * l_aux
        return found


def steps(rank: int, ep_size: int, stage: int, *, split: bool) -> list[float]:
    model = Net(ep_size)
    with torch.no_grad():  # experts are alike at every ep_size
        for expert in model.moe.experts.parameters():
            expert.fill_(0.3)
    params: Any = [{"params": list(model.parameters()), "name": "all", "lr": 0.1}]
    if split:
        params = utils.split_params_into_different_moe_groups_for_optimizer(params)
        assert [group.get("moe", False) for group in params] == [False, True]
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    assert engine.has_moe_layers
    losses = []
    dice = torch.Generator().manual_seed(rank)
    for _ in range(3):
        loss = engine(torch.randn(3, 4, generator=dice))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_on_other_ranks_need_no_mesh(stage: int) -> None:
    alone = sim.run(2, lambda rank: steps(rank, 1, stage, split=False))
    shared = sim.run(2, lambda rank: steps(rank, 2, stage, split=True))
    for mine, theirs in zip(shared, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_layers_without_an_engine_find_each_other() -> None:
    alone = steps_by_hand(0, 1)

    def job(rank: int) -> list[float]:
        groups = deepspeed.utils.groups
        with pytest.raises(AssertionError, match="no expert-parallel group 'ep_size_2'"):
            groups._get_expert_data_parallel_group("ep_size_2")
        assert groups._get_expert_parallel_group_dict() == {}
        with pytest.raises(AssertionError, match="4 ranks cannot form groups of 3"):
            groups._create_expert_and_data_parallel(3)
        with pytest.raises(ValueError, match="consecutive ranks share the experts"):
            groups._create_expert_and_data_parallel(2, use_data_before_expert_parallel_=True)
        return steps_by_hand(rank, 2)

    for losses in sim.run(4, job):
        assert losses == pytest.approx(alone, rel=1e-6)


def steps_by_hand(rank: int, ep_size: int) -> list[float]:
    """Every rank has the same data; gradients of experts are those of all ranks that share them."""
    model = Net(ep_size)
    with torch.no_grad():
        for parameter in model.moe.expert_parameters():
            parameter.fill_(0.1)
    for _ in range(2):  # the second call does nothing
        model.moe.set_deepspeed_parallelism()
    if ep_size > 1:
        groups = deepspeed.utils.groups
        first, name = rank // 2 * 2, "ep_size_2"
        assert groups._get_expert_parallel_group_ranks(name) == [first, first + 1]
        assert groups._get_expert_parallel_src_rank(name) == first
        assert groups._get_expert_data_parallel_group_ranks(name) == [rank % 2, rank % 2 + 2]
        assert groups._get_expert_data_parallel_world_size(name) == 2
        assert groups._get_expert_data_parallel_rank(name) == rank // 2
        assert groups._get_expert_broadcast_src_rank(name) == rank % 2
        assert list(groups._get_expert_data_parallel_group_dict()) == [name]
        dense = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4})[0]
        model.moe.set_deepspeed_parallelism()  # whatever other engines there are, or were
        dense.destroy()
        assert groups._get_max_expert_size_name() == "ep_size_2"
        groups._create_expert_and_data_parallel(2)  # they are there
        groups._create_expert_and_data_parallel(4)  # and beside them others
        assert list(groups._get_expert_parallel_group_dict()) == ["ep_size_2", "ep_size_4"]
        assert groups._get_expert_parallel_group_ranks("ep_size_4") == [0, 1, 2, 3]
        assert groups._get_expert_data_parallel_group_ranks("ep_size_4") == [rank]
        assert (groups._get_max_expert_size(), groups._get_max_expert_size_name()) == (4, "ep_size_4")
    x, found = torch.randn(6, 4, generator=torch.Generator().manual_seed(5)), []
    for _ in range(2):
        loss = model(x)
        model.zero_grad()
        loss.backward()
        found.append(float(loss.detach()))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad / (ep_size if utils.is_moe_param(p) else 1)
    return found


def test_experts_that_every_rank_has_are_groups_too() -> None:
    def job(rank: int) -> None:
        model = Net(1)
        deepspeed.initialize(model=model, config={"train_batch_size": 2})
        groups = deepspeed.utils.groups
        assert groups._get_expert_parallel_group_ranks("ep_size_1") == [rank]
        assert groups._get_expert_data_parallel_group_ranks("ep_size_1") == [0, 1]
        assert groups._get_max_expert_size_name() == "ep_size_1"
        with pytest.raises(AssertionError, match=r"there are \['ep_size_1'\]"):
            groups._get_expert_parallel_group("ep_size_2")
        mixed = nn.ModuleList([MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=n) for n in (1, 2)])
        engine = deepspeed.initialize(model=mixed, config={"train_batch_size": 2})[0]
        assert list(groups._get_expert_parallel_group_dict()) == ["ep_size_1", "ep_size_2"]
        assert groups._get_expert_data_parallel_group_ranks("ep_size_1") == [0, 1]
        assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == [rank]
        assert [gate.wg.weight.shape for gate in engine.gate_modules] == [(4, 4), (4, 4)]

    sim.run(2, job)


def test_two_sizes_are_refused() -> None:
    def job(rank: int) -> None:
        model = nn.ModuleList([MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=n) for n in (2, 4)])
        with pytest.raises(ValueError, match="a model has one size for each axis"):
            deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})

    sim.run(4, job)


def test_which_parameters_are_experts() -> None:
    model = Net(1)
    assert utils.has_moe_layers(model) == (True, 4)
    assert utils.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    assert model.moe.expert_group_name == "ep_size_1"
    assert (model.moe.num_local_experts, model.moe.ep_size, model.moe.num_experts) == (4, 1, 4)
    assert model.moe.set_deepspeed_parallelism() is None
    with pytest.raises(ValueError, match="consecutive ranks share the experts"):
        model.moe.set_deepspeed_parallelism(True)
    marked = nn.Parameter(torch.zeros(2))
    marked.allreduce, marked.group_name = False, "mine"  # type: ignore[attr-defined]
    shared, experts = utils.split_params_into_shared_and_expert_params([*model.parameters(), marked])
    assert len(experts) == 4 * 2 + 1
    assert all(p.allreduce is False for p in experts)
    assert not any(utils.is_moe_param(p) for p in shared)
    shared[0].grad = torch.ones_like(shared[0])
    assert [len(g) for g in utils.split_params_grads_into_shared_and_expert_params(model.parameters())] == [1, 0]


def test_groups_of_experts() -> None:
    model = Net(1)
    split = utils.split_params_into_different_moe_groups_for_optimizer
    given = {"params": list(model.parameters()), "name": "all", "lr": 0.5}
    before = len(given["params"])  # type: ignore[arg-type]
    shared, experts = split(given)
    assert len(given["params"]) == before  # type: ignore[arg-type]
    assert (experts["name"], experts["moe"], experts["lr"]) == ("ep_size_1", True, 0.5)
    assert "moe" not in shared
    assert len(shared["params"]) + len(experts["params"]) == before
    sizes = [sum(p.numel() for p in g["params"]) for g in split((given,), max_group_size=20)[1:]]
    assert sizes == [20, 20, 20, 20]
    assert [len(g["params"]) for g in split([given], max_group_size=1)[1:]] == [1] * 8
    assert len(split([given], max_group_size=None)) == 2
    assert len(split({"params": list(model.inner.parameters()), "name": "d"})) == 1
    with pytest.raises(ValueError, match="Unknown param group type"):
        split(iter([given]))
    assert len(utils.configure_moe_param_groups(list(model.parameters()))) == 2
    assert len(utils.configure_moe_param_groups([given])) == 2
    assert utils.configure_moe_param_groups([shared, experts]) == [shared, experts]
    assert [utils.is_moe_param_group(g) for g in (shared, experts)] == [False, True]
    with pytest.raises(TypeError, match="got a str"):
        utils.configure_moe_param_groups(["a"])


# -- routed experts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, (3, 2, "max"), (3, 1, "top2_sum")])
def test_a_router(score: str, groups: Any) -> None:
    torch.manual_seed(1)
    num_groups, limited, kind = groups or (None, None, "top2_sum")
    router = ep_router.TokenChoiceTopKRouter(5, 6, num_groups, limited, 2, score, True, 2.5, True, kind)
    x = torch.randn(9, 5)
    scores, experts, counts = router(x)
    assert (scores.shape, experts.shape, counts.dtype) == ((9, 2), (9, 2), torch.int32)
    assert torch.allclose(scores.sum(1), torch.full((9,), 2.5))
    assert torch.equal(counts.long(), torch.bincount(experts.flatten(), minlength=6))
    assert torch.equal(counts, count_tokens_per_expert(experts, 6))
    if limited == 1:
        assert bool((experts[:, 0] // 2 == experts[:, 1] // 2).all())
    bias = torch.zeros(6)
    bias[3] = 100.0
    assert bool((router(x, expert_bias=bias)[1] == 3).any(1).all())
    (scores[:, 0] / scores[:, 1]).sum().backward()
    assert router.gate.weight.grad.abs().sum() > 0


def test_wrong_routers_are_refused() -> None:
    make = ep_router.TokenChoiceTopKRouter
    with pytest.raises(NotImplementedError, match="score_func='relu'"):
        make(5, 6, None, None, 2, "relu", True, 1.0, False)
    with pytest.raises(ValueError, match="4 groups of 6 experts"):
        make(5, 6, 4, 2, 2, "softmax", True, 1.0, False)
    with pytest.raises(ValueError, match="num_limited_groups=None"):
        make(5, 6, 3, None, 2, "softmax", True, 1.0, False)


@pytest.mark.parametrize("form", ["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"])
def test_grouped_experts(form: str) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(4, 6, 3, activation=form, activation_limit=0.5)
    for weight in experts.parameters():
        nn.init.normal_(weight)
    x = torch.randn(8, 4)
    y = experts(x, torch.tensor([2, 0, 4]))
    assert torch.equal(y[6:], torch.zeros(2, 4))
    for row, e in [(0, 0), (1, 0), (2, 2), (5, 2)]:
        g, u = experts.w1[e] @ x[row], experts.w3[e] @ x[row]
        low, near = g.clamp(max=0.5), u.clamp(-0.5, 0.5)
        h = {
            "swiglu": F.silu(g) * u,
            "geglu_tanh": F.gelu(g, approximate="tanh") * u,
            "swiglu_clamped": F.silu(low) * near,
            "swiglu_oai": (near + 1) * low * torch.sigmoid(1.702 * low),
        }[form]
        assert torch.allclose(y[row], experts.w2[e] @ h, atol=1e-5)
    y.sum().backward()
    assert experts.w1.grad[1].abs().sum() == 0
    with pytest.raises(ValueError, match="allowed are swiglu"):
        GroupedExperts(4, 6, 3, activation="relu")
    with pytest.raises(ValueError, match="allowed are 'separate'"):
        GroupedExperts(4, 6, 3, gate_up_impl="both")


@pytest.mark.parametrize("alignment", [1, 4])
def test_rows_come_back(alignment: int) -> None:
    counts = torch.tensor([2, 0, 1, 3, 0, 4])  # 2 ranks, 3 experts each
    index, sizes, ends = ep_kernels.generate_permute_indices(counts, 3, 2, 40, alignment)
    assert (index.dtype, sizes.dtype, ends.dtype, index.shape) == (torch.int32, torch.int32, torch.int32, (40,))
    per_expert = [5, 0, 5]
    assert sizes.tolist() == [max(-(-n // alignment), 1) * alignment for n in per_expert]
    assert ends.tolist() == torch.cumsum(sizes, 0).tolist()
    first = index[: int(ends[0])]
    assert first[first >= 0].tolist() == [0, 1, 3, 4, 5]
    third = index[int(ends[1]) : int(ends[2])]
    assert third[third >= 0].tolist() == [2, 6, 7, 8, 9]
    rows = torch.randn(10, 2, requires_grad=True)
    there = ep_kernels.permute_rows(rows, index)
    assert bool((there[index < 0] == 0).all())
    assert torch.equal(ep_kernels.unpermute_rows(there, index, 10), rows)
    there.sum().backward()
    assert torch.equal(rows.grad, torch.ones(10, 2))
    assert ep_kernels.permute_rows_supported(rows)
    assert ep_kernels.TOKEN_GROUP_ALIGN_SIZE_M == 8
    assert index[ep_kernels.inverse_permutation(index, 10)].tolist() == list(range(10))


def spec(**options: Any) -> Any:
    names = {"expert_w1_name": "up", "expert_w2_name": "down", "expert_w3_name": None, "num_experts": 4}
    return SimpleNamespace(**{**names, **options})


def test_weights_are_repacked() -> None:
    gate, up, down = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.randn(4, 5, 3)
    fused = nn.Module()
    fused.up, fused.down = nn.Parameter(torch.cat([gate, up], 1)), nn.Parameter(down.clone())
    turned = nn.Module()
    turned.up = nn.Parameter(fused.up.detach().transpose(1, 2).contiguous())
    turned.down = nn.Parameter(down.transpose(1, 2).contiguous())
    for module in (fused, turned):
        w1, w2, w3 = ep_repack.repack_expert_weights(module, spec(expert_storage="fused_3d"), 1, 2)
        assert torch.equal(w1, gate[2:])
        assert torch.equal(w2, down[2:])
        assert torch.equal(w3, up[2:])
    listed = nn.ModuleList([nn.Module() for _ in range(4)])
    for e, expert in enumerate(listed):
        expert.up, expert.down, expert.more = nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3)
        expert.up.weight.data, expert.down.weight.data, expert.more.weight.data = gate[e], down[e], up[e]
    w1, w2, w3 = ep_repack.repack_expert_weights(
        listed, spec(expert_storage="module_list", expert_w3_name="more"), 0, 4
    )
    assert torch.equal(w1, gate[:1])
    assert torch.equal(w2, down[:1])
    assert torch.equal(w3, up[:1])
    with pytest.raises(ValueError, match="allowed are 'fused_3d'"):
        ep_repack.repack_expert_weights(fused, spec(expert_storage="other"), 0, 1)
    with pytest.raises(ValueError, match="4 experts on rank 0 of 3"):
        ep_repack.repack_expert_weights(fused, spec(expert_storage="fused_3d"), 0, 3)
    with pytest.raises(ValueError, match="has no 'absent'"):
        ep_repack.repack_expert_weights(listed, spec(expert_storage="module_list", expert_w1_name="absent"), 0, 1)
    fused.down = nn.Parameter(torch.zeros(4, 9, 9))
    with pytest.raises(ValueError, match="of the shapes"):
        ep_repack.repack_expert_weights(fused, spec(expert_storage="fused_3d"), 0, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("written", ["experts", "experts_stage0"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_of_deepspeed_with_experts_goes_on_with_its_losses(stage: int, written: str) -> None:
    from tests.checkpointing.foreign.golden_model import BEFORE, DECAY, LR, ROWS, Experts, batches, loss_of
    from tests.checkpointing.foreign.test_deepspeed import GOLDEN as CHECKPOINTS

    def job(rank: int) -> list[float]:
        model = Experts(MoE)
        groups = utils.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all", "weight_decay": DECAY}
        )
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=LR), config=config)[0]
        engine.load_checkpoint(CHECKPOINTS / written, tag="step")
        found = []
        for batch in batches(rank)[BEFORE:]:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        return found

    theirs = json.loads((CHECKPOINTS / written / "losses.json").read_text())
    for mine, expected in zip(sim.run(2, job), theirs, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_an_expert_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="got a int as its expert; give a module"):
        MoE(4, 3, num_experts=2)


def test_what_cannot_be_routed_is_one_sentence() -> None:
    """Else tokens went to experts of groups that they may not use, and rows to no expert at all."""
    for groups, top_k, most in (((2, 1), 3, 2), ((None, None), 5, 4), ((None, None), 0, 4)):
        with pytest.raises(ValueError, match=f"top_k={top_k}, where a token may choose among {most} of 4 experts"):
            ep_router.TokenChoiceTopKRouter(8, 4, *groups, top_k, "softmax", True, 1.0, False)
    experts = GroupedExperts(6, 3, 4)
    for counts in ([1, 2, 3], [1, 2, 3, 1], [-1, 2, 3, 1]):
        with pytest.raises(ValueError, match="for 4 experts and 5 rows; it has one number for each expert"):
            experts(torch.ones(5, 6), torch.tensor(counts))
    with pytest.raises(ValueError, match="got 4 numbers for 2 ranks of 2 experts and alignment=0"):
        ep_kernels.generate_permute_indices(torch.ones(4), 2, 2, 16, 0)
    logits = torch.randn(5, 4)
    for call, said in (
        (lambda: sharded_moe.topkgating(logits, 5, 1.0, 1), "topkgating got k=5 of 4 experts"),
        (lambda: sharded_moe.top1gating(logits, 1.0, 1, torch.ones(4)), "used_token .4,. for 5 tokens"),
        (lambda: sharded_moe.top2gating(logits[None], 1.0, 1), "logits float32 .1, 5, 4.; they are"),
        (lambda: sharded_moe.top2gating(logits, None, 1), "capacity_factor=None"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    parameter = nn.Parameter(torch.ones(2, 2))
    split = utils.split_params_into_different_moe_groups_for_optimizer
    assert split({"params": parameter})[0]["params"][0] is parameter
    with pytest.raises(ValueError, match=r"parameter group 0 is {'lr': 1}; a group is"):
        split({"lr": 1})
