"""Optimizers that compress what ranks tell each other, under every placement: laws 2, 3, 5 and 7."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from tests.zero.saved import collect, whole
from torch import nn

from zoo import sim
from zoo.optim import AdamW, DiLoCo, LocalSGD, OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.zero import DryRun, Precision, ZeroOptimizer

GROUP = {"type": "onebit", "params": {"group_size": 64}}
PURE = [{"stage": s} for s in range(4)]
GROUPS = [{"stage": s, "mics_shard_size": 2} for s in (1, 2, 3)]
ADAM = {"optimizer": OnebitAdam, "freeze_step": 2, "lr": 0.05}
LAMB = {"optimizer": OnebitLamb, "freeze_step": 2, "coeff_beta": 0.5, "lr": 0.05}
ZERO_ONE = {
    "optimizer": ZeroOneAdam, "lr": 0.05, "var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2,
}  # fmt: skip


LOCAL = {
    "optimizer": LocalSGD,
    "lr": 0.1,
    "sync_every": 3,
    "momentum": 0.5,
    "outer_momentum": 0.4,
    "outer_nesterov": True,
}
DILOCO = {"optimizer": DiLoCo, "lr": 0.05, "sync_every": 3, "compressor": GROUP}


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)


def build(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = make(dtype)
    given = {"betas": (0.8, 0.95), "eps": 1e-4, "compressor": GROUP, "param_persistence_threshold": 0, **options}
    unknown = {AdamW: ["compressor"], LocalSGD: ["betas", "eps", "compressor"]}
    for key in unknown.get(given["optimizer"], []):
        del given[key]
    return model, ZeroOptimizer(model, **given)


def data(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def advance(model: nn.Module, optimizer: ZeroOptimizer, rank: int, step: int, factor: float = 1.0) -> None:
    x = data(rank, step, next(model.parameters()).dtype)
    optimizer.backward(model(x).square().mean() * factor)
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = build(**options)
    for step in range(steps):
        advance(model, optimizer, rank, step)
    return optimizer.consolidated_parameters()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.matrix
@pytest.mark.parametrize("placement", PURE + GROUPS, ids=str)
def test_a_warm_up_is_adam_bit_for_bit(placement: dict[str, Any]) -> None:
    ways = (ADAM | {"freeze_step": 9}, {"optimizer": AdamW, "lr": 0.05, "weight_decay": 0.0})
    warm, plain = (sim.run(4, lambda r, w=way: train(r, 3, **w, **placement))[0] for way in ways)
    assert same(warm, plain)


@pytest.mark.matrix
@pytest.mark.parametrize("way", [ADAM, LAMB, ZERO_ONE | {"local_step_clipper": 1}], ids=["Adam", "Lamb", "ZeroOne"])
@pytest.mark.parametrize("placements", [PURE[1:], GROUPS], ids=["all ranks", "groups"])
def test_stages_have_the_same_bits(way: dict[str, Any], placements: list[dict[str, Any]]) -> None:
    found = [sim.run(4, lambda r, p=p: train(r, 6, **way, **p)) for p in placements]
    for of_stage in found:
        assert all(same(of_rank, found[0][0]) for of_rank in of_stage)
    warm = sim.run(4, lambda r: train(r, 6, **{**way, "freeze_step": 9}, **placements[0]))[0] if way is ADAM else None
    assert warm is None or not same(warm, found[0][0])


@pytest.mark.matrix
@pytest.mark.parametrize("way", [ADAM, LAMB, ZERO_ONE], ids=["Adam", "Lamb", "ZeroOne"])
@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 2, "mics_shard_size": 2}], ids=str)
def test_how_buckets_and_pieces_are_cut_does_not_matter_much(way: dict[str, Any], placement: dict[str, Any]) -> None:
    """Within the warm-up no bit; later more buckets have other groups of elements, and other scales."""
    small = {"reduce_bucket_size": 60, "sub_group_size": 50}

    def fn(rank: int, more: dict[str, Any], split: bool) -> dict[str, torch.Tensor]:
        model = make()
        parts = [model[0].parameters(), [*model[2].parameters(), *model[4].parameters()]]
        params = [{"params": list(part)} for part in parts] if split else None
        options = {"betas": (0.8, 0.95), "eps": 1e-4, "compressor": GROUP, "param_persistence_threshold": 0}
        optimizer = ZeroOptimizer(model, params=params, **{**options, **way, **placement, **more})
        for step in range(2):
            advance(model, optimizer, rank, step)
        return optimizer.consolidated_parameters()

    one = sim.run(4, lambda r: fn(r, {}, False))[0]
    many = sim.run(4, lambda r: fn(r, small, True))[0]
    assert all(bool(many[name].isfinite().all()) for name in one)
    if way is not ZERO_ONE:  # which has no warm-up
        assert same(one, many)


def kept(state: dict[tuple[str, str], torch.Tensor], name: str, peers: int) -> torch.Tensor:
    """s + 1/R Σ_r e_r: what the next means still have to be increased by, in the unit of the errors."""
    owed = state.get((name, "owed"), torch.zeros(()))
    return owed + sum(state.get((name, f"feedback.{r}"), torch.zeros(())) for r in range(peers)) / peers


PLACES = [(n, {"stage": s}) for n in (2, 3, 4) for s in (0, 2)] + [(4, {"stage": 1, "mics_shard_size": 2})]


def peers_of(world: int, placement: dict[str, Any]) -> int:
    return world // placement.get("mics_shard_size", 1)


@examples(times=1)
@given(st.sampled_from(PLACES), st.sampled_from(PLACES), st.sampled_from([ADAM, LAMB]))
def test_nothing_is_lost_over_a_change_of_ranks(before: Any, after: Any, way: dict[str, Any]) -> None:
    def save(rank: int) -> Any:
        model, optimizer = build(**way, **before[1])
        for step in range(4):
            advance(model, optimizer, rank, step)
        saved = collect(optimizer), optimizer.state_scalars(), [dict(g) for g in optimizer.param_groups]
        advance(model, optimizer, rank, 4)
        return *saved, optimizer.consolidated_parameters()

    saved = sim.run(before[0], save)
    state = whole([found for found, *_ in saved])
    scalars = {k: v for _, found, *_ in saved for k, v in found.items()}
    names = [name for name, _ in make().named_parameters()]
    assert any(bool(kept(state, name, peers_of(*before)).abs().max() > 0) for name in names)

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        return state[name, role].view(-1)[start : start + length]

    def load(rank: int) -> Any:
        model, optimizer = build(**way, **after[1])
        for group, options in zip(optimizer.param_groups, saved[0][2], strict=True):
            group.update({k: v for k, v in options.items() if k != "params"})
        optimizer.load_state(read, scalars)
        found = collect(optimizer), optimizer.state_scalars()["zero/feedback_unit"]
        advance(model, optimizer, rank, 4)
        return *found, optimizer.consolidated_parameters()

    loaded = sim.run(after[0], load)
    again, units = whole([found for found, *_ in loaded]), (scalars["zero/feedback_unit"], loaded[0][1])
    for name in names:
        got, want = kept(again, name, peers_of(*after)) * units[1], kept(state, name, peers_of(*before)) * units[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    if before == after:
        assert same(loaded[0][2], saved[0][3])


@pytest.mark.matrix
@pytest.mark.parametrize("way", [ZERO_ONE, LOCAL, DILOCO], ids=["ZeroOne", "LocalSGD", "DiLoCo"])
@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 2, "mics_shard_size": 2}], ids=str)
@pytest.mark.parametrize("other", [3, 4])
def test_ranks_that_step_by_themselves_are_saved(way: dict[str, Any], placement: dict[str, Any], other: int) -> None:
    """The same bits on as many ranks; on others all go on from the mean."""
    if other in (1, 2, 3) and "mics_shard_size" in placement:  # nothing that would be repeated
        other = 6

    def save(rank: int) -> Any:
        model, optimizer = build(**way, **placement)
        for step in range(5):
            advance(model, optimizer, rank, step)
        saved = collect(optimizer), optimizer.state_scalars(), [dict(g) for g in optimizer.param_groups]
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        for step in range(5, 8):
            advance(model, optimizer, rank, step)
        return *saved, own, optimizer.consolidated_parameters()

    saved = sim.run(4, save)
    state = whole([found for found, *_ in saved])
    scalars = {k: v for _, found, *_ in saved for k, v in found.items()}
    assert not same(saved[0][3], saved[3][3])

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        return state[name, role].view(-1)[start : start + length]

    def load(rank: int) -> Any:
        model, optimizer = build(**way, **placement)
        for group, options in zip(optimizer.param_groups, saved[0][2], strict=True):
            group.update({k: v for k, v in options.items() if k != "params"})
        optimizer.load_state(read, scalars)
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        for step in range(5, 8):
            advance(model, optimizer, rank, step)
        return own, optimizer.consolidated_parameters()

    loaded = sim.run(other, load)
    for rank, (own, after) in enumerate(loaded):
        if other == 4:
            assert same(own, saved[rank][3])
            assert same(after, saved[rank][4])
        else:
            for name in own:
                mean = torch.stack([of_rank[3][name] for of_rank in saved]).mean(0)
                torch.testing.assert_close(own[name], mean)


@pytest.mark.matrix
@pytest.mark.parametrize("way", [ADAM, LAMB, ZERO_ONE], ids=["Adam", "Lamb", "ZeroOne"])
@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 2}, {"stage": 3, "mics_shard_size": 2}], ids=str)
def test_a_state_dict_goes_on_with_the_same_bits(way: dict[str, Any], placement: dict[str, Any]) -> None:
    if placement == {"stage": 2} and way is ZERO_ONE:
        way = ZERO_ONE | {"local_step_clipper": 1}

    def fn(rank: int) -> None:
        model, optimizer = build(**way, **placement)
        for step in range(4):
            advance(model, optimizer, rank, step)
        state = optimizer.state_dict()
        for step in range(4, 6):
            advance(model, optimizer, rank, step)
        want = optimizer.consolidated_parameters()
        model, again = build(**way, **placement)
        again.load_state_dict(state)
        for step in range(4, 6):
            advance(model, again, rank, step)
        assert same(again.consolidated_parameters(), want)

    sim.run(4, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("way", [ADAM, LAMB, ZERO_ONE, DILOCO], ids=["Adam", "Lamb", "ZeroOne", "DiLoCo"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_skipped_changes_nothing(way: dict[str, Any], bad: float) -> None:
    def fn(rank: int, fails: bool) -> dict[str, torch.Tensor]:
        model, optimizer = build(**way, stage=0, clip_norm=1.0)
        for step in range(6):
            if fails and step in (1, 4):
                advance(model, optimizer, rank, 50, bad if rank == 1 else 1.0)
                assert optimizer.skipped
            advance(model, optimizer, rank, step)
            assert not optimizer.skipped
        return optimizer.consolidated_parameters()

    failed, smooth = (sim.run(3, lambda r, f=f: fn(r, f))[0] for f in (True, False))
    assert same(failed, smooth)


@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 1, "mics_shard_size": 2}], ids=str)
def test_clipping_is_by_the_root_mean_square_of_the_ranks_norms(placement: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(**ADAM, **placement, clip_norm=1e9)
        for step in range(2):
            advance(model, optimizer, rank, step)
        plain = make()
        values = optimizer.consolidated_parameters()
        plain.load_state_dict(values)
        size = placement.get("mics_shard_size", 1)
        norms = []
        for first in range(0, 4, size):
            plain.zero_grad()
            loss = sum(plain(data(r, 2)).square().mean() for r in range(first, first + size)) / size
            loss.backward()
            norms.append(torch.cat([p.grad.view(-1) for p in plain.parameters()]).norm())
        advance(model, optimizer, rank, 2)
        want = torch.stack(norms).square().mean().sqrt().item()
        assert optimizer.grad_norm == pytest.approx(want, rel=1e-5)

    sim.run(4, fn)


WAYS = {"Adam": ADAM, "Lamb": LAMB, "ZeroOne": ZERO_ONE, "LocalSGD": LOCAL, "DiLoCo": DILOCO}


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("placement", "clip"), [(p, i % 2) for i, p in enumerate(PURE + GROUPS)], ids=str)
def test_the_forecast_is_what_is_sent_and_held(way: dict[str, Any], placement: dict[str, Any], clip: float) -> None:
    if placement in PURE[1:] and way is ZERO_ONE:
        way = ZERO_ONE | {"local_step_clipper": 1}
    if placement in PURE[1:] and way in (LOCAL, DILOCO):
        return

    def fn(rank: int) -> None:
        model, optimizer = build(**way, **placement, clip_norm=clip)
        dry = build(**way, **placement, clip_norm=clip, group=DryRun(4, rank))[1]
        assert dry.forecast() == optimizer.forecast()
        for step in range(6):
            forecast = optimizer.forecast()
            optimizer.comm.log.reset()
            advance(model, optimizer, rank, step)
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items() if row.wire_bytes}
            assert sent == forecast.wire_bytes, step
            assert optimizer.memory()["optimizer"] == forecast.optimizer_bytes

    sim.run(4, fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_and_a_loss_scale(dtype: torch.dtype) -> None:
    def fn(rank: int, scale: float | None) -> dict[str, torch.Tensor]:
        model, optimizer = build(
            dtype, **ADAM, stage=0, loss_scale=scale, precision=Precision(accumulate=torch.float32)
        )
        for step in range(6):
            advance(model, optimizer, rank, step)
        return optimizer.consolidated_parameters()

    plain, scaled = (sim.run(2, lambda r, s=s: fn(r, s))[0] for s in (None, 8.0))
    for name in plain:
        torch.testing.assert_close(plain[name], scaled[name], rtol=2e-2, atol=2e-2)


def test_what_cannot_be_is_said() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (ADAM | {"freeze_step": 0}, ValueError, "at least 1"),
        (ADAM | {"amsgrad": True}, ValueError, "amsgrad"),
        (ADAM | {"compressor": "top_k"}, ValueError, "two steps"),
        (LAMB | {"freeze_step": 5, "coeff_beta": 0.9}, ValueError, "takes 1/\\(1 - coeff_beta\\) = 10 steps"),
        (ZERO_ONE | {"stage": 1}, NotImplementedError, "local_step_clipper"),
        (DILOCO | {"stage": 2}, NotImplementedError, "DiLoCo with local steps"),
        (DILOCO | {"sync_every": 0}, ValueError, "sync_every=0"),
        (ADAM | {"stage": 2, "offload_optimizer": {"device": "cpu"}}, NotImplementedError, "offload_optimizer"),
        (ADAM | {"stage": 2, "update_in_backward": True}, ValueError, "update_in_backward"),
        (ADAM | {"stage": 2, "loss_scale": 8.0}, ValueError, "with a loss scale"),
        (
            ADAM | {"stage": 3, "zero_quantized_gradients": True, "ranks_per_node": 1},
            NotImplementedError,
            "zero_quantized_gradients",
        ),
    ]

    def fn(rank: int) -> None:
        for options, kind, words in wrong:
            with pytest.raises(kind, match=words):
                build(**{"stage": 0, **options})

    sim.run(2, fn)


@pytest.mark.dear
@examples(times=3, quick=1.34)
@given(st.sampled_from(PLACES), st.sampled_from(PLACES), st.sampled_from([ADAM, LAMB]))
def test_folded_errors_lose_nothing(before: Any, after: Any, way: dict[str, Any]) -> None:
    """One tensor in the place of R + 1, on any number of ranks; who saved goes on with his own."""

    def save(rank: int) -> Any:
        model, optimizer = build(**way, **before[1])
        for step in range(4):
            advance(model, optimizer, rank, step)
        apiece, live = collect(optimizer), optimizer.memory()
        folded = [(s.name, s.role, s.start, s.shape, s.tensor) for s in optimizer.state_slices(errors="folded")]
        assert optimizer.memory() == live
        again = collect(optimizer)
        assert [s[:4] for s in again] == [s[:4] for s in apiece]
        assert all(torch.equal(a[4], b[4]) for a, b in zip(again, apiece, strict=True))
        return apiece, folded, optimizer.state_scalars(), [dict(g) for g in optimizer.param_groups]

    saved = sim.run(before[0], save)
    apiece, folded = whole([one for one, *_ in saved]), whole([one for _, one, *_ in saved])
    roles = {role for _, role in folded}
    assert not any(role.startswith("feedback.") for role in roles)
    scalars = {k: v for _, _, found, _ in saved for k, v in found.items()}
    names = [name for name, _ in make().named_parameters()]
    for name in names:
        want = kept(apiece, name, peers_of(*before))
        torch.testing.assert_close(folded[name, "owed"], want.expand_as(folded[name, "owed"]), rtol=1e-5, atol=1e-7)

    def read(name: str, role: str, start: int, length: int) -> torch.Tensor:
        return folded[name, role].view(-1)[start : start + length]

    def load(rank: int) -> Any:
        model, optimizer = build(**way, **after[1])
        for group, options in zip(optimizer.param_groups, saved[0][3], strict=True):
            group.update({k: v for k, v in options.items() if k != "params"})
        optimizer.load_state(read, scalars)
        found = collect(optimizer), optimizer.state_scalars()["zero/feedback_unit"]
        advance(model, optimizer, rank, 4)
        return found

    loaded = sim.run(after[0], load)
    again, units = whole([found for found, _ in loaded]), (scalars["zero/feedback_unit"], loaded[0][1])
    for name in names:
        got = kept(again, name, peers_of(*after)) * units[1]
        torch.testing.assert_close(got, folded[name, "owed"] * units[0], rtol=1e-5, atol=1e-7)


def test_errors_of_another_kind_are_refused() -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(**ADAM, stage=0)
        with pytest.raises(ValueError, match="errors='sum'; it is 'ranks'"):
            optimizer.state_slices(errors="sum")  # type: ignore[arg-type]

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize(("placement", "told"), [(p, p in PURE[1:]) for p in PURE + GROUPS[:1]], ids=str)
def test_what_is_saved_is_told_where_only_gradients_are_compressed(
    placement: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of the line are those that a step sends then."""
    caplog.set_level("INFO", logger="zoo.zero")

    def fn(rank: int) -> Any:
        model, optimizer = build(**ADAM, **placement)
        sent = []
        for step in range(3):
            optimizer.comm.log.reset()
            advance(model, optimizer, rank, step)
            sent.append(sum(row.wire_bytes for row in optimizer.comm.log.ops.values()))
        return sent

    first, _, last = sim.run(4, fn)[0]
    lines = [r.getMessage() for r in caplog.records if "a step that compresses sends" in r.getMessage()]
    assert len(lines) == told
    assert not told or lines[0].endswith(f"1/{first / last:.2f} of all it sends ({last:,} instead of {first:,}).")
