"""What gates choose, and the losses that keep them balanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.moe.battery import GATES, Made
from tests.profiles import examples

from zoo import sim
from zoo.moe import (
    ExpertChoiceGate,
    GroupedExperts,
    GroupLimitedGate,
    LossFreeGate,
    MixtureOfExperts,
    Top1Gate,
    Top2Gate,
    TopKGate,
)
from zoo.moe.losses import balance, z_loss
from zoo.moe.noise import gumbel, uniform
from zoo.moe.routing import place

WIDTH = 5


@pytest.mark.parametrize("made", GATES, ids=lambda made: made.name)
@given(tokens=st.sampled_from([0, 1, 2, 11]), experts=st.sampled_from([4, 8]), data=st.data())
def test_every_gate(made: Made, tokens: int, experts: int, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    gate = made.make(WIDTH, experts, data.draw(st.integers(1, made.max_k or experts // 2)))
    x = torch.randn(tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    gate.double()
    used = torch.rand(tokens) < 0.6 if data.draw(st.booleans()) else None
    found = gate(x, used)
    t, k = found.experts.shape
    assert t == tokens
    assert found.weights.shape == (t, k)
    chosen = found.experts[found.experts < experts]
    assert found.demand.tolist() == torch.bincount(chosen, minlength=experts).tolist()
    for row in found.experts.tolist():
        there = [e for e in row if e < experts]
        assert len(set(there)) == len(there)
    if used is not None:
        assert bool((found.experts[~used] == experts).all())
    assert bool(torch.isfinite(found.balance))
    assert bool(torch.isfinite(found.z_loss))
    at = place(found, None)
    kept = at.rows[at.rows >= 0].tolist()
    assert sorted(kept) == list(range(int(at.counts.sum())))
    assert torch.equal(at.counts, found.demand)
    # Rows of one expert follow each other.
    bounds = at.counts.cumsum(0)
    of_rows = torch.searchsorted(bounds, at.rows[at.rows >= 0], right=True)
    assert torch.equal(of_rows, found.experts[at.rows >= 0])
    (at.weights.sum() + found.balance + found.z_loss).backward()
    assert gate.weight.grad is not None
    assert bool(torch.isfinite(gate.weight.grad).all())


@pytest.mark.matrix
@pytest.mark.parametrize("made", GATES, ids=lambda made: made.name)
def test_evaluation_draws_nothing_and_one_key_draws_once(made: Made) -> None:
    torch.manual_seed(0)
    gate = made.make(WIDTH, 8, made.max_k or 3)
    x = torch.randn(50, WIDTH)
    gate.noise_key = torch.tensor(7)
    again = [gate(x).experts for _ in range(2)]
    assert torch.equal(*again)
    gate.eval()
    plain = [gate(x) for _ in range(2)]
    gate.noise_key = torch.tensor(8)
    assert torch.equal(plain[0].experts, gate(x).experts)
    if gate.draws:
        gate.train()
        other = gate(x)
        assert not torch.equal(other.experts, again[0]) or isinstance(other.priority, torch.Tensor)


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_imbalance_raises_the_balance_loss(experts: int, seed: int) -> None:
    """Towards one expert it rises from 1 to E."""
    torch.manual_seed(seed)
    even = torch.eye(experts, dtype=torch.float64).repeat(4, 1) * 30
    skewed = torch.zeros_like(even)
    skewed[:, 0] = 30
    losses = []
    for share in torch.linspace(0, 1, 5, dtype=torch.float64):
        cut = round(float(share) * len(even))
        logits = torch.cat([skewed[:cut], even[cut:]])
        losses.append(float(balance(torch.softmax(logits, -1), logits.argmax(1, keepdim=True))))
    assert losses == sorted(losses)
    assert losses[0] == pytest.approx(1.0, abs=1e-6)
    assert losses[-1] == pytest.approx(experts, rel=1e-6)


def test_z_loss_is_the_formula() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64)
    used = torch.tensor([True, False, True, True, False, True])
    expected = logits[used].exp().sum(1).log().square().mean()
    torch.testing.assert_close(z_loss(logits, used), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("gate", [Top1Gate(WIDTH, 4), Top2Gate(WIDTH, 4), TopKGate(WIDTH, 4, k=3)])
def test_noise_is_drawn_from_the_softmax(gate: Any) -> None:
    """RSample: how often an expert comes first is its probability."""
    gate.noise, gate.noise_key = "RSample", torch.tensor(3)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, -1)
    first = gate.route(logits, None, gate.noise_key).experts[:, 0]
    share = torch.bincount(first, minlength=4) / len(first)
    # Four standard deviations of a share of 20,000 draws are at most 0.0142.
    torch.testing.assert_close(share, torch.softmax(logits[0], -1), atol=0.0142, rtol=0)


def test_numbers_are_uniform_and_depend_on_key_place_and_salt() -> None:
    key = torch.tensor(5)
    numbers = uniform(key, (100, 100))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.012)  # 4 standard deviations
    histogram = torch.histc(numbers, 10, 0, 1)
    assert bool(((histogram - 1000).abs() < 120).all())
    assert not torch.equal(numbers, uniform(torch.tensor(6), (100, 100)))
    assert not torch.equal(numbers, uniform(key, (100, 100), salt=1))
    assert torch.equal(numbers[:50], uniform(key, (50, 100)))  # of a place, however many there are
    assert bool(torch.isfinite(gumbel(key, (1000, 10))).all())


@given(st.integers(1, 30), st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_experts_choose_the_tokens_they_want_most(tokens: int, experts: int, k: int, seed: int) -> None:
    torch.manual_seed(seed)
    k = min(k, experts)
    gate = ExpertChoiceGate(WIDTH, experts, k=k)
    logits = torch.randn(tokens, experts, dtype=torch.float64)
    found = gate.route(logits, None, None)
    count = min(-(-tokens * k // experts), tokens)
    p = torch.softmax(logits, -1)
    for e in range(experts):
        taken = {t for t in range(tokens) if int(found.experts[t, e]) == e}
        assert taken == set(p[:, e].argsort(descending=True)[:count].tolist())
    assert found.demand.tolist() == [count] * experts


def test_the_bias_moves_against_the_load() -> None:
    gate = LossFreeGate(WIDTH, 4, k=1, speed=0.5)
    gate.commit(torch.tensor([4, 2, 2, 0]))
    assert gate.bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
    # The bias chooses and does not weigh.
    logits = torch.tensor([[0.3, 0.0, 0.0, 0.2]])
    found = gate.route(logits, None, None)
    assert found.experts.tolist() == [[3]]
    torch.testing.assert_close(found.weights, torch.sigmoid(torch.tensor([[0.2]])))


@pytest.mark.dear
def test_a_bias_balances() -> None:
    """Tokens that all want one expert are spread, without a loss."""
    torch.manual_seed(0)
    gate = LossFreeGate(WIDTH, 4, k=1, speed=0.01)
    with torch.no_grad():
        gate.weight[0] += 0.5
    x = torch.randn(400, WIDTH) + 0.5
    before = gate(x).demand
    for _ in range(200):
        gate.commit(gate(x).demand)
    after = gate(x).demand
    assert int(before.max()) > 200
    assert int(after.max()) < 130


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_groups_limit_the_choice(seed: int, top: int, of_group: int) -> None:
    torch.manual_seed(seed)
    gate = GroupLimitedGate(WIDTH, 16, k=4, num_groups=4, top_groups=top, of_group=of_group)
    scores = torch.rand(9, 16, dtype=torch.float64)
    chosen = gate.choose(scores)
    for row, mine in zip(scores, chosen, strict=True):
        value = [float(row[4 * g : 4 * g + 4].sort(descending=True).values[:of_group].sum()) for g in range(4)]
        best = sorted(range(4), key=lambda g: -value[g])[:top]
        allowed = [e for e in range(16) if e // 4 in best]
        assert set(mine.tolist()) == set(sorted(allowed, key=lambda e: -float(row[e]))[:4])


@examples(times=2)
@given(
    st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1, 3, None]), st.integers(0, 10**6)
)
def test_a_full_expert_keeps_the_greatest_keys(tokens: int, experts: int, k: int, limit: int | None, seed: int) -> None:
    from zoo.kernels.gating import positions_in_expert

    torch.manual_seed(seed)
    k = min(k, experts)
    indices = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    key = torch.randint(0, 4, (tokens, k)).float()
    found = positions_in_expert(indices, experts, capacity=limit, priority=key)
    for e in range(experts):
        mine = [(t, j) for t in range(tokens) for j in range(k) if int(indices[t, j]) == e]
        kept = sorted(mine, key=lambda at: (-float(key[at]), at))[:limit]
        places = {at: place for place, at in enumerate(sorted(kept))}
        assert [int(found.positions[at]) for at in mine] == [places.get(at, -1) for at in mine]
        assert int(found.counts[e]) == len(kept)
        assert int(found.demand[e]) == len(mine)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Top1Gate(WIDTH, 4, k=2), "Top1Gate got k=2; it has 1. Use Top2Gate or TopKGate"),
        (lambda: Top2Gate(WIDTH, 4, k=1), "Top2Gate got k=1; it has 2"),
        (lambda: TopKGate(WIDTH, 4, k=5), "k=5 of 4 experts; k is from 1 to that number"),
        (lambda: LossFreeGate(WIDTH, 4, noise="RSample"), "it chooses by scores"),
        (lambda: LossFreeGate(WIDTH, 4, score="tanh"), "allowed are 'sigmoid' and 'softmax'"),
        (lambda: GroupLimitedGate(WIDTH, 6, num_groups=4), "groups are of equal size"),
        (lambda: GroupLimitedGate(WIDTH, 8, k=3, num_groups=4, top_groups=1), "k at most 2"),
        (lambda: Top1Gate(WIDTH, 4, noise="jitter"), "allowed are 'Jitter', 'RSample' and None"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@given(st.lists(st.integers(0, 6), min_size=2, max_size=3), st.booleans(), st.integers(0, 10**6))
def test_a_balance_loss_of_all_ranks_together(tokens: list[int], masks: bool, seed: int) -> None:
    """The mean of the ranks' losses, and of their gradients, are those of all tokens at once."""

    def layer() -> MixtureOfExperts:
        torch.manual_seed(seed)
        gate = TopKGate(WIDTH, 4, k=2)
        return MixtureOfExperts(gate, GroupedExperts(4, WIDTH, 3), balance_over="global").double()

    def given_to(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        dice = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(tokens[rank], WIDTH, generator=dice, dtype=torch.float64)
        return x, torch.rand(tokens[rank], generator=dice) < 0.7 if masks else torch.ones(tokens[rank]).bool()

    def fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mixture = layer()
        found = mixture(*given_to(rank)).balance
        found.backward()
        assert mixture.gate.weight.grad is not None
        return found.detach(), mixture.gate.weight.grad

    ranks = sim.run(len(tokens), fn)
    whole = layer()
    parts = [given_to(rank) for rank in range(len(tokens))]
    loss = whole(torch.cat([x for x, _ in parts]), torch.cat([used for _, used in parts])).balance
    loss.backward()
    assert whole.gate.weight.grad is not None
    torch.testing.assert_close(sum(found for found, _ in ranks) / len(ranks), loss.detach())
    torch.testing.assert_close(sum(gradient for _, gradient in ranks) / len(ranks), whole.gate.weight.grad)


def test_the_bias_stays_in_single_precision() -> None:
    gate = LossFreeGate(WIDTH, 4)
    gate.commit(torch.tensor([4, 2, 2, 0]))
    before = gate.bias.clone()
    assert gate.bfloat16().bias.dtype is torch.float32
    assert torch.equal(gate.bias, before)
    assert gate.weight.dtype is torch.bfloat16
    assert gate.double().bias.dtype is torch.float64
    low = LossFreeGate(WIDTH, 4)
    low.load_state_dict({"weight": low.weight.detach(), "bias": torch.full((4,), 0.5).bfloat16()}, assign=True)
    low.commit(torch.tensor([4, 2, 2, 0]))
    torch.testing.assert_close(low.bias, torch.tensor([0.499, 0.5, 0.5, 0.501]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert LossFreeGate(WIDTH, 4).bias.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_that_underflow_are_no_nan() -> None:
    """σ(v) is 0 in float32 for v below -104."""
    gate = LossFreeGate(WIDTH, 4)
    found = gate.route(torch.full((3, 4), -200.0, requires_grad=True), None, None)
    found.balance.backward()
    assert float(found.balance.detach()) == 0.0
