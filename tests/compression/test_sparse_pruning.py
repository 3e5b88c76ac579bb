"""Sparse pruning: which weights are zero when, what learns, and what contradicts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.test_masks import block_reference, reference
from tests.profiles import examples
from torch import Tensor, nn

from zoo.compression import CompressionScheduler, init_compression, redundancy_clean
from zoo.compression.attach import transforms_of
from zoo.compression.pruning.elements import LearnedElementMask
from zoo.compression.pruning.snip import FLOOR, SnipMask

WHERE = "compression_training.sparse_pruning"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(torch.relu(self.conv(x)).mean((2, 3)))))
        return out


def sparse(ratio: float | None = 0.5, modules: tuple[str, ...] = ("*",), **shared: Any) -> dict[str, Any]:
    group = {"modules": list(modules), "params": {} if ratio is None else {"dense_ratio": ratio}}
    section: dict[str, Any] = {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}
    if shared.get("method") == "snip_momentum":
        del section["different_groups"]
    return {"compression_training": {"sparse_pruning": section}}


def zeros(weight: Tensor) -> np.ndarray:
    return (weight != 0).numpy()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int, config: dict[str, Any] | None = None, lr: float = 0.05) -> CompressionScheduler:
    scheduler = CompressionScheduler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return scheduler


@examples(times=2)
@given(st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_l1_keeps_the_largest_of_each_weight(ratio: float) -> None:
    model = init_compression(Net(), sparse(ratio))
    plain = Net()
    model(batch())
    redundancy_clean(model, sparse(ratio))
    for name in ("conv", "fc1", "fc2"):
        before = getattr(plain, name).weight.detach()
        stays = reference(before.abs().numpy(), max(1, round(ratio * before.numel())))
        np.testing.assert_array_equal(getattr(model, name).weight.detach().numpy(), before.numpy() * stays)
        assert torch.equal(getattr(model, name).bias, getattr(plain, name).bias)


def test_the_mask_is_made_at_the_offset_and_stays_while_weights_move() -> None:
    config = sparse(0.25, schedule_offset=2)
    model, plain = init_compression(Net(), config), Net()
    scheduler = train(model, 2)
    train(plain, 2)
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    model(batch())
    masks = [t.mask.clone() for t in transforms_of(model)]  # type: ignore[attr-defined]
    for name, mask in zip(("conv", "fc1", "fc2"), masks, strict=True):
        weight = getattr(plain, name).weight.detach().abs()
        np.testing.assert_array_equal(mask.numpy(), reference(weight.numpy(), round(weight.numel() / 4)))
    x = batch()
    weight = model.fc1.weight
    assert torch.autograd.grad(model(x).square().sum(), weight)[0][~masks[1]].eq(0).all()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter)
    scheduler.set_step(9)
    model(x)
    assert all(torch.equal(a, t.mask) for a, t in zip(masks, transforms_of(model), strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_blocks_and_two_of_four(method: str) -> None:
    for pattern, ratio in (("4x1", 0.25), ("2:4", None)):
        config = sparse(ratio, ("fc",), method=method, block_pattern=pattern)
        model = redundancy_clean(init_compression(Net(), config), config)
        for name in ("fc1", "fc2"):
            before, after = getattr(Net(), name).weight.detach().numpy(), getattr(model, name).weight.detach()
            if ratio:
                np.testing.assert_array_equal(zeros(after), block_reference(before, 4, 1, ratio))
            else:
                assert (zeros(after).reshape(-1, 4).sum(1) == 2).all()
                order = np.sort(np.abs(before).reshape(-1, 4), 1)[:, 2:].sum()
                assert float(after.abs().sum()) == pytest.approx(float(order), rel=1e-5)


def test_two_of_four_goes_along_the_input_channels_of_a_convolution() -> None:
    config = sparse(None, ("conv",), block_pattern="2:4")
    model = redundancy_clean(init_compression(Net(), config), config)
    assert ((model.conv.weight != 0).sum(1) == 2).all(), "of four input channels two, at each place of the kernel"


def test_learned_scores_begin_as_magnitudes_get_the_gradient_of_the_mask_and_move_it() -> None:
    config = sparse(0.5, ("fc1",), method="topk")
    model = init_compression(Net(), config)
    transform = transforms_of(model)[0]
    assert isinstance(transform, LearnedElementMask)
    scores = model.fc1.weight_sparse_scores
    assert scores is transform.scores
    assert torch.equal(scores, model.fc1.weight.abs())
    weight, x = model.fc1.weight.detach().clone(), torch.randn(3, 8)
    model.fc1(x).sum().backward()
    dense = x.sum(0).expand(16, 8)  # dL/dW' of a sum over outputs
    torch.testing.assert_close(scores.grad, dense * weight)
    stays = torch.from_numpy(reference(weight.abs().numpy(), 64))
    torch.testing.assert_close(model.fc1.weight.grad, dense * stays)
    with torch.no_grad():
        scores.copy_(scores.max() - scores)  # now the small ones stay
    redundancy_clean(model, config)
    ranked = (weight.abs().max() - weight.abs()).numpy()
    np.testing.assert_array_equal(zeros(model.fc1.weight), reference(ranked, 64))
    assert "weight_sparse_scores" not in model.state_dict()


def test_a_score_that_is_not_a_number_shows_in_the_output() -> None:
    model = init_compression(Net(), sparse(0.5, ("fc1",), method="topk"))
    with torch.no_grad():
        model.fc1.weight_sparse_scores[0, 0] = float("nan")
    assert model.fc1(torch.ones(1, 8)).isnan().any()


# ------------------------------------------------------------------------------------------------------- snip_momentum

SNIP = {"method": "snip_momentum", "schedule_offset": 1, "schedule_offset_end": 5, "schedule_offset_stride": 2,
        "dense_ratio": 0.25}  # fmt: skip


class SnipByHand:
    """The same in NumPy: whole gradients from autograd on a copy, one number after the other."""

    def __init__(self, net: Net, names: list[str], rows: int, columns: int) -> None:
        self.net, self.names, self.block = net, names, (rows, columns)
        self.scores = {n: np.zeros((w.shape[0] // rows, w.numel() // w.shape[0] // columns))
                       for n in names for w in [getattr(net, n).weight]}  # fmt: skip
        self.masks = {n: np.ones(getattr(net, n).weight.shape, dtype=bool) for n in names}

    def matrix(self, value: np.ndarray) -> np.ndarray:
        return np.moveaxis(value, 1, -1).reshape(value.shape[0], -1)

    def step(self, x: Tensor, t: int, lr: float) -> None:
        net = copy.deepcopy(self.net)
        for n in self.names:
            getattr(net, n).weight.data *= torch.from_numpy(self.masks[n])
        net(x).square().sum().backward()
        for n in self.names:
            w, g = getattr(self.net, n).weight.detach().numpy(), getattr(net, n).weight.grad.numpy()
            seen = self.matrix(np.abs(w.astype(np.float64) * g))
            (r, c), (a, b) = self.block, self.scores[n].shape
            if 1 <= t < 5:
                self.scores[n] += 0.9 * seen.reshape(a, r, b, c).sum((1, 3))
        for name, parameter in self.net.named_parameters():
            grad = net.get_parameter(name).grad
            assert grad is not None
            owner = name.partition(".")[0]
            if name.endswith("weight") and owner in self.masks:
                grad = grad * torch.from_numpy(self.masks[owner])
            parameter.data -= lr * grad
        if t + 1 in (3, 5):
            self.prune((t + 1 - 1) / 4)

    def prune(self, p: float) -> None:
        ratio = 1 - 0.75 * (1 - (1 - p) ** 3)
        ranked = {}
        for n, s in self.scores.items():
            least = reference(s, max(1, round(FLOOR * s.size)))
            ranked[n] = np.where(least, np.inf, s)
        flat = np.concatenate([s.reshape(-1) for s in ranked.values()])
        stays, at = reference(flat, round(ratio * flat.size)), 0
        for n, s in self.scores.items():
            mask = stays[at : at + s.size].reshape(s.shape)
            at += s.size
            mask = mask.repeat(self.block[0], 0).repeat(self.block[1], 1)
            o, i, *places = self.masks[n].shape
            self.masks[n] = np.moveaxis(mask.reshape(o, *places, i), -1, 1)


@pytest.mark.parametrize("pattern", ["4x1", "1x1", "1x4"])
def test_snip_momentum_is_what_it_says_over_all_weights(pattern: str) -> None:
    config = sparse(None, **SNIP, block_pattern=pattern)
    model = init_compression(Net(), config)
    rows, _, columns = pattern.partition("x")
    hand = SnipByHand(Net(), ["conv", "fc1", "fc2"], int(rows), int(columns))
    scheduler = CompressionScheduler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for t in range(7):
        optimizer.zero_grad()
        for part in batch(t).split(1):  # two micro-batches
            model(part).square().sum().backward()
        optimizer.step()
        scheduler.step()
        hand.step(batch(t), t, 0.01)
        for transform in transforms_of(model):
            assert isinstance(transform, SnipMask)
            mask = hand.masks[transform.site.module]
            assert (transform.mask is None) == bool(mask.all())
            if transform.mask is not None:
                np.testing.assert_array_equal(transform.mask.numpy(), mask)
    torch.testing.assert_close(dict(model.named_parameters()), dict(hand.net.named_parameters()), rtol=1e-4, atol=1e-5)
    assert all(t.scores is None and t.seen is None for t in transforms_of(model))  # type: ignore[attr-defined]
    total = sum(float(t.mask.numel()) for t in transforms_of(model))  # type: ignore[attr-defined]
    kept = sum(float(t.mask.sum()) for t in transforms_of(model))  # type: ignore[attr-defined]
    assert kept / total == pytest.approx(0.25, abs=0.01)
    x = batch()
    masked = model(x)
    redundancy_clean(model, config)
    assert torch.equal(model(x), masked)


def test_snip_momentum_with_two_of_four_goes_one_after_the_other() -> None:
    config = sparse(None, **{**SNIP, "dense_ratio": 0.5}, block_pattern="2:4", excluded_modules=["conv"])
    model = init_compression(Net(), config)
    assert [t.site.module for t in transforms_of(model)] == ["fc1", "fc2"]
    scheduler = train(model, 3)
    assert all((t.mask.reshape(-1, 4).sum(1) == 3).all() for t in transforms_of(model))  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while scheduler.steps < 5:
        model(batch()).sum().backward()
        optimizer.step()
        scheduler.step()
    assert all((t.mask.reshape(-1, 4).sum(1) == 2).all() for t in transforms_of(model))  # type: ignore[attr-defined]


def test_a_step_that_is_skipped_counts_nothing_and_neither_does_evaluation() -> None:
    config = sparse(None, **{**SNIP, "schedule_offset": 0})
    model = init_compression(Net(), config)
    scheduler = CompressionScheduler(model)
    model(batch()).sum().backward()
    scheduler.step(skipped=True)
    with torch.no_grad():
        model(batch())
    assert all(t.scores is None and t.seen is None for t in transforms_of(model))  # type: ignore[attr-defined]
    assert all(getattr(model, name).weight.grad is not None for name in ("conv", "fc1", "fc2"))


@pytest.mark.parametrize("pattern", ["1x1", "2:4"])
def test_snip_momentum_leaves_frozen_weights_whole(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    config = sparse(None, **{**SNIP, "dense_ratio": 0.5}, block_pattern=pattern, excluded_modules=["conv"])
    model = init_compression(Net(), config)
    model.fc1.weight.requires_grad_(False)
    before = model.fc1.weight.clone()
    train(model, 6)
    shares = {t.site.module: float(t.mask.float().mean()) for t in transforms_of(model)}  # type: ignore[attr-defined]
    assert shares == {"fc1": 1.0, "fc2": 0.5}  # half of what is ranked
    told = [record.getMessage() for record in caplog.records if "is it frozen?" in record.getMessage()]
    assert len(told) == 1
    assert "fc1.weight" in told[0]
    assert torch.equal(redundancy_clean(model, config).fc1.weight, before)


def test_a_copy_ranks_its_own_weights() -> None:
    config = sparse(None, **SNIP)
    model = init_compression(Net(), config)
    scheduler = train(model, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        theirs = {id(t) for t in transforms_of(other)}
        together = transforms_of(other)[0].together  # type: ignore[attr-defined]
        assert {id(t) for t in together.members} == theirs
        train(other, 1)
    assert scheduler.steps == 2
    assert transforms_of(model)[0].mask is None  # type: ignore[attr-defined]


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["l1", "topk", "snip_momentum"])
@pytest.mark.parametrize("stop", [0, 2, 4, 6])
def test_a_schedule_goes_on_from_its_state_exactly(method: str, stop: int) -> None:
    shared = SNIP if method == "snip_momentum" else {"method": method, "schedule_offset": 3}
    config = sparse(None if method == "snip_momentum" else 0.3, **shared)
    model = init_compression(Net(), config)
    scheduler = CompressionScheduler(model)
    again, other = None, None
    for step in range(8):
        if step == stop:
            other = init_compression(Net(), config)
            other.load_state_dict(model.state_dict())
            again = CompressionScheduler(other)
            again.load_state_dict(pickle.loads(pickle.dumps(scheduler.state_dict())))
        for net, plan in ((model, scheduler), (other, again)):
            if net is None or plan is None:
                continue
            net.zero_grad()
            net(batch(step)).square().sum().backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.05 * parameter.grad
            plan.step()
    assert other is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert torch.equal(model(batch()), other(batch()))


def test_a_mask_is_saved_as_one_bit_an_element() -> None:
    model = init_compression(Net(), sparse(0.5))
    model(batch())
    states = CompressionScheduler(model).state_dict()["transforms"]
    assert {name: state["mask"].numel() for name, state in states.items()} == {
        "conv.weight/sparse_pruning": 36, "fc1.weight/sparse_pruning": 16, "fc2.weight/sparse_pruning": 8,
    }  # fmt: skip


def test_masks_come_before_bits_on_one_layer() -> None:
    config = sparse(0.5, ("fc1",))
    config["compression_training"]["weight_quantization"] = {
        "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": 1},
        "different_groups": {"w": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["fc1"]}},
    }
    model, plain = init_compression(Net(), config), Net()
    weight = plain.fc1.weight.detach()
    kept = weight.numpy() * reference(weight.abs().numpy(), 64)
    step = np.abs(kept).max() / 7
    wanted = np.round(kept / step) * step
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        model.fc1(x), x @ torch.from_numpy(wanted).T.float() + plain.fc1.bias, rtol=1e-5, atol=1e-5
    )
    redundancy_clean(model, config)
    np.testing.assert_allclose(model.fc1.weight.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert len(np.unique(zeros(model.fc1.weight) * 1)) == 2


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize(("kind", "bits"), [("symmetric", 1), ("symmetric", 2), ("symmetric", 4), ("asymmetric", 4)])
def test_what_a_mask_has_taken_stays_zero_behind_every_quantiser(kind: str, bits: int, method: str) -> None:
    """A binary or asymmetric quantiser has no zero of its own; and the values of others do not depend on zeros."""
    config = sparse(0.25, ("fc1",), method=method)
    config["compression_training"]["weight_quantization"] = {
        "shared_parameters": {
            "enabled": True, "quantize_weight_in_forward": True, "quantization_type": kind, "quantize_groups": 4,
        },
        "different_groups": {"w": {"params": {"start_bits": bits, "target_bits": bits}, "modules": ["fc1"]}},
    }  # fmt: skip
    model, plain = init_compression(Net(), config), Net()
    mask = reference(plain.fc1.weight.detach().abs().numpy(), 32)
    x = torch.randn(3, 8)
    y = model.fc1(x)
    y.sum().backward()
    grads = {name: p.grad for name, p in model.fc1.named_parameters()}
    wanted = x.sum(0).expand(16, 8).numpy()
    np.testing.assert_allclose(grads["weight"].numpy(), wanted * mask, rtol=1e-5)
    if method == "topk":  # what is masked learns too
        np.testing.assert_allclose(
            grads["weight_sparse_scores"].numpy(), wanted * plain.fc1.weight.detach().numpy(), rtol=1e-5, atol=1e-7
        )
    redundancy_clean(model, config)
    weight = model.fc1.weight.detach()
    assert not weight.numpy()[~mask].any()
    torch.testing.assert_close(model.fc1(x), y)
    if bits == 1:
        kept = np.where(mask, plain.fc1.weight.detach().numpy(), 0).reshape(4, -1)
        means = np.abs(kept).sum(1) / (kept != 0).sum(1)
        np.testing.assert_allclose(weight.numpy().reshape(4, -1), np.sign(kept) * means[:, None], rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (sparse(0.5, ("fc",), block_pattern="3x1"),
         f"{WHERE}.shared_parameters: the block_pattern '3x1' does not fit fc1.weight, which has 16 outputs and 8"),
        (sparse(0.3, ("fc",), block_pattern="2:4"),
         f"{WHERE}.different_groups.g: dense_ratio = 0.3, and the block_pattern '2:4' leaves 0.5"),
        (sparse(0.3, ("fc",), excluded_modules=["classifier"]),
         f"{WHERE}.shared_parameters.excluded_modules: the pattern 'classifier' matches no module"),
        (sparse(None, **{**SNIP, "dense_ratio": 0.3}, block_pattern="2:4"),
         f"{WHERE}.shared_parameters: dense_ratio = 0.3, and the block_pattern '2:4' leaves 0.5"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_section_and_module(config: dict[str, Any], sentence: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=sentence):
        init_compression(model, config)
    assert not transforms_of(model)


def test_weights_that_are_no_numbers_are_refused_by_name() -> None:
    model = init_compression(Net(), sparse(0.5, ("fc1",)))
    model.fc1.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"fc1\.weight: a mask was to be made, and the values have inf or NaN"):
        model(batch())


def test_cleaning_before_there_is_a_mask_says_how_far_to_train() -> None:
    config = sparse(None, **SNIP)
    model = init_compression(Net(), config)
    with pytest.raises(ValueError, match=r"snip_momentum has no mask of conv.weight yet.*schedule_offset_end = 5"):
        redundancy_clean(model, config)
