"""Compressed means: what was sent plus what is kept is what was given, whatever the compressor (law 7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as examples_of
from hypothesis import strategies as st
from tests.comm.compression.cases import CODECS, COMPRESSORS, NUMELS, given

from zoo import sim
from zoo.comm import Communicator
from zoo.comm.compression import Hierarchical, OneBit, RandomK, ReduceLeg, TopK, fold

Tensor = torch.Tensor
ONE = 2.0**-23


def worker_of(reducer: Any, numel: int) -> Tensor:
    value = reducer.worker.value
    return torch.zeros(numel) if value is None else value


def server_of(reducer: Any, numel: int) -> Tensor:
    """What this rank's chunk of the mean owes, at its place."""
    found = torch.zeros(numel)
    if reducer.server is not None and reducer.server.value is not None:
        found[reducer.reduce.where(reducer.comm.rank)] = reducer.server.value
    return found


@examples_of(
    name=st.sampled_from(sorted(COMPRESSORS)), size=st.integers(1, 4), numel=NUMELS, seed=st.integers(0, 99),
    kind=st.sampled_from(["normal", "spread", "zeros"]),
    steps=st.lists(st.sampled_from(["step", "skip", "twice"]), min_size=1, max_size=4),
)  # fmt: skip
def test_nothing_is_lost(name: str, size: int, numel: int, seed: int, kind: str, steps: list[str]) -> None:
    """D·mean + D·s' + Σ e' = Σ x + D·s + Σ e, up to a rounding for each operation; a skipped step changes nothing."""

    def fn(rank: int) -> list[tuple[Tensor, ...]]:
        comm = Communicator()
        reducer, found = COMPRESSORS[name].reducer(comm, numel), []
        for number, step in enumerate(steps):
            before = worker_of(reducer, numel).clone(), server_of(reducer, numel).clone()
            gave, got, most = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
            for part in range(1 + (step == "twice")):
                x, out = given(numel, rank, 10 * number + part, seed, kind=kind), torch.full((numel,), 7.0)
                gave += x
                reducer.start(x, out).wait()
                got += out if numel else 0.0
                most = torch.stack([most, x.abs(), out.abs()]).amax(0)  # two parts may cancel, and their rounding stays
            if step == "skip":
                reducer.roll_back()
                assert torch.equal(worker_of(reducer, numel), before[0])
                assert torch.equal(server_of(reducer, numel), before[1])
                continue
            reducer.commit()
            found.append((gave, got, *before, worker_of(reducer, numel).clone(), server_of(reducer, numel), most))
        return found

    each = sim.run(size, fn)
    for ranks in zip(*each, strict=True):
        gave, got, e, s, e_, s_, most = (torch.stack([of_rank[k] for of_rank in ranks]).double() for k in range(7))
        assert bool((got == got[0]).all()), "ranks got different means"
        left = size * got[0] + size * s_.sum(0) + e_.sum(0)
        right = gave.sum(0) + size * s.sum(0) + e.sum(0)
        scale = torch.cat([gave.abs(), got.abs(), e.abs(), e_.abs(), s.abs(), s_.abs(), most]).amax(0)
        # PowerSGD and the norm round what depends on all elements; the others element by element.
        if "power" in name or "norm" in name:
            scale = scale.max() if numel else scale
        assert bool(((left - right).abs() <= 40 * size * ONE * scale).all()), (left - right).abs().max()


@examples_of(
    name=st.sampled_from(CODECS), size=st.integers(1, 4), chunk=st.sampled_from([64, 128]), seed=st.integers(0, 99)
)
def test_the_first_leg_alone_loses_nothing_either(name: str, size: int, chunk: int, seed: int) -> None:
    """D·mean + Σ e' = Σ x + Σ e over chunks of a size that is given, as those of a bucket are."""
    numel = size * chunk

    def fn(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        leg = ReduceLeg(Communicator(), COMPRESSORS[name], numel, chunk=chunk)
        gave, sums = torch.zeros(numel), torch.zeros(chunk)
        for step in range(3):
            x, out = given(numel, rank, step, seed), torch.empty(chunk)
            gave += x
            leg.start(x, out).wait()
            leg.commit()
            sums += out
        return gave, sums, worker_of(leg, numel)

    each = sim.run(size, fn)
    gave, kept = (sum(of_rank[k].double() for of_rank in each) for k in (0, 2))
    got = torch.cat([of_rank[1] for of_rank in each]).double() * size
    bound = 2e-4 if "norm" in name else 2e-5
    assert bool(((got + kept - gave).abs() <= bound * (1 + gave.abs() + kept.abs())).all())


@examples_of(size=st.integers(1, 4), other=st.integers(1, 4), numel=NUMELS, seed=st.integers(0, 99))
def test_other_ranks_take_over_what_is_owed(size: int, other: int, numel: int, seed: int) -> None:
    """D ranks go, D' come: s' = s + Σ e/D is what the means of the future have to be increased by, and they are."""
    workers: list[Tensor | None] = [given(numel, rank, 0, seed) if rank != 1 else None for rank in range(size)]
    server = given(numel, 9, 0, seed) if seed % 2 else None
    due = sum((e.double() for e in workers if e is not None), torch.zeros(numel).double()) / size
    due = due if server is None else due + server.double()
    owed = fold(workers, server)
    assert owed is not None
    assert torch.allclose(owed.double(), due, atol=1e-5)

    def fn(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        reducer = OneBit(OneBit.Config(group_size=64)).reducer(Communicator(), numel)
        mine = reducer.reduce.where(rank)
        reducer.server.value = owed[mine].clone()
        out, total = torch.zeros(numel), torch.zeros(numel)
        for _ in range(3):
            reducer.start(torch.zeros(numel), out).wait()
            reducer.commit()
            total += out
        return total, server_of(reducer, numel), worker_of(reducer, numel)

    totals, servers, kept = map(torch.stack, zip(*sim.run(other, fn), strict=True))
    paid = totals[0].double() + servers.double().sum(0) + kept.double().sum(0) / other
    assert torch.allclose(paid, due, atol=1e-5)


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["onebit", "int8", "top_k", "power_sgd"])
def test_the_mean_comes_out_in_the_long_run(name: str) -> None:
    """What ranks give again and again is what they get on average: the error stays bounded."""
    size, numel, steps = 3, 300, 200

    def fn(rank: int) -> tuple[Tensor, Tensor]:
        reducer = COMPRESSORS[name].reducer(Communicator(), numel)
        total, out = torch.zeros(numel), torch.empty(numel)
        x = given(numel, rank, 0, 5)
        for _ in range(steps):
            reducer.start(x.clone(), out).wait()
            reducer.commit()
            total += out
        return x, total / steps

    each = sim.run(size, fn)
    mean = torch.stack([x for x, _ in each]).mean(0)
    assert float((each[0][1] - mean).abs().mean()) < 0.02


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_is_seen_by_all_and_undone(name: str, bad: float) -> None:
    def fn(rank: int) -> tuple[bool, Tensor, Tensor]:
        reducer = COMPRESSORS[name].reducer(Communicator(), 200)
        out = torch.empty(200)
        reducer.start(given(200, rank, 0, 1), out).wait()
        reducer.commit()
        x = given(200, rank, 1, 1)
        if rank == 1:
            x[17] = bad
        reducer.start(x, out).wait()
        seen = not bool(torch.isfinite(out).all())
        reducer.roll_back()
        reducer.start(given(200, rank, 2, 1), out).wait()
        reducer.commit()
        return seen, out, worker_of(reducer, 200)

    found = sim.run(3, fn)
    # What chance does not choose does not travel: it shows when it is chosen, and is undone with its step.
    assert [seen for seen, _, _ in found] == [name != "random_k" or found[0][0]] * 3
    assert all(bool(torch.isfinite(out).all() and torch.isfinite(kept).all()) for _, out, kept in found)


@pytest.mark.parametrize("name", ["onebit", "int4", "random_k"])
def test_between_nodes_only(name: str) -> None:
    """Two nodes of two: equal to the compressor on the means of nodes, of half the elements each."""
    numel = 130

    def fn(rank: int) -> tuple[Tensor, int, int]:
        reducer = Hierarchical(Communicator(nodes=2), COMPRESSORS[name], numel)
        out = torch.empty(numel)
        total, gave = torch.zeros(numel), torch.zeros(numel)
        for step in range(3):
            x = given(numel, rank, step, 3)
            gave += x
            reducer.start(x, out).wait()
            reducer.commit()
            total += out
        return total, reducer.sent_bytes(), reducer.chunk

    found = sim.run(4, fn)

    def by_hand(rank: int) -> Tensor:
        # Node `rank` alone, its two halves one after the other.
        halves = []
        for half in range(2):
            reducer, total = COMPRESSORS[name].reducer(Communicator(), 65), torch.zeros(65)
            for step in range(3):
                a, b = (given(numel, 2 * rank + k, step, 3)[65 * half :][:65] for k in (0, 1))
                out = torch.empty(65)
                reducer.start((a + b) * 0.5, out).wait()
                reducer.commit()
                total += out
            halves.append(total)
        return torch.cat(halves)

    expected = sim.run(2, by_hand)
    assert all(torch.equal(total, expected[0]) for total, _, _ in found)


def test_the_wire_is_as_small_as_is_said() -> None:
    """By the communicator's own count, and for 1-bit 1/31 of fp32."""
    numel = 64 * 2048 * 4

    def fn(rank: int) -> list[tuple[int, int]]:
        found = []
        for compressor in COMPRESSORS.values():
            comm = Communicator()
            reducer = compressor.reducer(comm, numel)
            reducer.start(given(numel, rank, 0, 0), torch.empty(numel)).wait()
            found.append((comm.log.wire_bytes, reducer.sent_bytes()))
        return found

    found = dict(zip(COMPRESSORS, sim.run(4, fn)[0], strict=True))
    for name, (counted, said) in found.items():
        assert abs(counted - said) <= 0.01 * said + 16, name
    dense = 2 * 3 / 4 * 4 * numel
    large = found["onebit, large groups"][0]
    assert large <= dense / 31


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        OneBit(OneBit.Config(group_size=100))
    for factor in (0.0, 2.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0 and below 2"):
            OneBit(OneBit.Config(factor=factor))
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        TopK(TopK.Config(ratio=0.0))
    with pytest.raises(ValueError, match="chunk=64, 64 elements on 1 ranks; it must cover all 65"):
        ReduceLeg(Communicator(), OneBit(), 65, chunk=64)
    with pytest.raises(ValueError, match="nodes of one size"):
        Hierarchical(Communicator(), OneBit(), 10)


@examples_of(
    factor=st.floats(0.01, 1.99), numel=NUMELS, seed=st.integers(0, 99), kind=st.sampled_from(["normal", "spread"])
)
def test_one_call_by_the_mean_leaves_less_than_it_was_given(factor: float, numel: int, seed: int, kind: str) -> None:
    """‖e‖² = ‖c‖² - a·(2 - a)·‖c‖₁²/n of each group, for each a between 0 and 2."""
    group = 64
    codec, error = OneBit(OneBit.Config(group_size=group, factor=factor)), torch.empty(numel)
    c = given(numel, 0, 0, seed, kind=kind)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    codec.encode_(c.clone(), None, wire)
    codec.owed_(error, c, wire)
    for e, part in zip(error.double().split(group), c.double().split(group), strict=True):
        square = part.square().sum()
        less = factor * (2 - factor) * part.abs().sum() ** 2 / max(len(part), 1)
        assert abs(e.square().sum() - (square - less)) <= 1e-5 * square


@pytest.mark.dear
@pytest.mark.parametrize("beta", [0.9, 0.99])
def test_momentum_that_is_fed_back_stays_nearer_with_the_default_than_with_the_best_of_one_call(beta: float) -> None:
    """RMS of Σ (what all see - the true momentum) after many calls, which is how far parameters are off."""
    numel, steps = 4096, 300

    def off(factor: float | None) -> float:
        def fn(rank: int) -> Tensor:
            reducer = OneBit(OneBit.Config(factor=factor)).reducer(Communicator(), numel)
            momentum, true, total = torch.zeros(numel), torch.zeros(numel), torch.zeros(())
            far = torch.zeros(numel)
            for step in range(steps):
                grads = [given(numel, each, step, 0) for each in range(2)]
                true = beta * true + (1 - beta) * (grads[0] + grads[1]) / 2
                reducer.start(beta * momentum + (1 - beta) * grads[rank], momentum).wait()
                reducer.commit()
                far += momentum - true
                if step >= steps // 2:
                    total += far.square().mean()
            return total

        return float(sim.run(2, fn)[0]) ** 0.5

    assert off(None) < 0.75 * off(1.0)


def test_chance_is_shared_and_differs_from_draw_to_draw() -> None:
    """random_k: ranks draw the same places, and other ones each time, for each seed and for each size."""

    def places(seed: int, numel: int, draws: int) -> tuple[int, ...]:
        reducer = RandomK(RandomK.Config(ratio=0.05, block=1, seed=seed)).reducer(Communicator(), numel)
        reducer.draws = draws
        return tuple(reducer.places(torch.device("cpu")).tolist())

    assert places(3, 1000, 2) == places(3, 1000, 2)
    cases = [(seed, numel, draws) for seed in (-1, 0, 1, 2**31) for numel in (1000, 1001) for draws in range(4)]
    assert len({places(*case) for case in cases}) == len(cases)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_given_stays_the_callers(name: str, dtype: torch.dtype) -> None:
    """x does not change; writing to it afterwards changes no error; the mean may take its place."""

    def fn(rank: int) -> None:
        found = []
        for in_place in (False, True):
            reducer, means = COMPRESSORS[name].reducer(Communicator(), 200), []
            for step in range(3):
                x = given(200, rank, step, 4).to(dtype)
                before, out = x.clone(), x if in_place and dtype is torch.float32 else torch.empty(200)
                handle = reducer.start(x, out)
                assert torch.equal(x, before) or in_place
                if not in_place:
                    x.fill_(7.0)
                handle.wait()
                reducer.commit()
                means.append(out.clone())
                if in_place:
                    x.fill_(7.0)
            found.append((torch.stack(means), worker_of(reducer, 200).clone()))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    sim.run(2, fn)


@examples_of(
    name=st.sampled_from(CODECS), size=st.integers(1, 3), numel=NUMELS, seed=st.integers(0, 99),
    steps=st.lists(st.sampled_from(["step", "skip", "twice", "look", "load"]), min_size=1, max_size=6),
)  # fmt: skip
def test_an_error_is_what_the_formula_says_whenever_it_is_computed(
    name: str, size: int, numel: int, seed: int, steps: list[str]
) -> None:
    """Bit for bit: c = x + e, e' = c - C(c), whether or not somebody looks at e between two steps, or sets it."""
    codec: Any = COMPRESSORS[name]

    def fn(rank: int) -> None:
        leg = ReduceLeg(Communicator(), codec, numel)
        error: Tensor | None = None
        for number, step in enumerate(steps):
            if step == "look":
                assert torch.equal(worker_of(leg, numel), error if error is not None else torch.zeros(numel))
                continue
            if step == "load":
                error = given(numel, rank, 99, seed)
                leg.worker.value = error.clone()
                continue
            expected = error
            for part in range(1 + (step == "twice")):
                x = given(numel, rank, 10 * number + part, seed)
                leg.start(x, torch.empty(leg.where(rank).stop - leg.where(rank).start)).wait()
                expected = x if expected is None else x + expected
                for where in map(leg.where, range(size)):
                    wire, c = (
                        torch.zeros(codec.wire_bytes(where.stop - where.start), dtype=torch.uint8),
                        expected[where],
                    )
                    codec.encode_(c.clone(), None, wire)
                    y = torch.empty_like(c)
                    codec.decode_(y, wire)
                    expected = torch.cat([expected[: where.start], c - y, expected[where.stop :]])
            if step == "skip":
                leg.roll_back()
            else:
                leg.commit()
                error = expected
        assert torch.equal(worker_of(leg, numel), error if error is not None else torch.zeros(numel))

    sim.run(size, fn)


BAD: list[tuple[Tensor, Tensor, str]] = [
    (torch.ones(127), torch.zeros(128), r"x float32 \(127,\) of strides \(1,\); x has one dim of 128 floating"),
    (torch.ones(129), torch.zeros(128), r"x float32 \(129,\)"),
    (torch.ones(2, 64), torch.zeros(128), r"x float32 \(2, 64\)"),
    (torch.ones(128, dtype=torch.int64), torch.zeros(128), "x int64"),
    (torch.ones(128), torch.zeros(64), r"out float32 \(64,\) of strides \(1,\); out is contiguous: one dim of 128"),
    (torch.ones(128), torch.zeros(200), r"out float32 \(200,\)"),
    (torch.ones(128), torch.zeros(128, dtype=torch.float64), "out float64"),
    (torch.ones(128), torch.zeros(256)[::2], r"of strides \(2,\); out is contiguous"),
]


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(name: str) -> None:
    def fn(rank: int) -> None:
        comm = Communicator(nodes=2)
        for reducer in (COMPRESSORS[name].reducer(comm, 128), Hierarchical(comm, COMPRESSORS[name], 128)):
            for x, out, words in BAD:
                with pytest.raises(ValueError, match=words):
                    reducer.start(x, out)
            assert reducer.worker.value is None
            out = torch.zeros(128)
            x = torch.ones(256, requires_grad=True)[::2]  # with gaps, and a step of autograd
            reducer.start(x, out).wait()
            reducer.commit()
            assert not out.requires_grad
            assert not reducer.worker.value.requires_grad

    sim.run(4, fn)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_numbers_of_64_and_of_16_bits_make_the_same_mean_rounded(name: str) -> None:
    def fn(rank: int) -> None:
        x, found = given(200, rank, 0, 5), []
        for dtypes in ((torch.float32, torch.float32), (torch.float64, torch.bfloat16)):
            out = torch.zeros(200, dtype=dtypes[1])
            COMPRESSORS[name].reducer(Communicator(), 200).start(x.to(dtypes[0]), out).wait()
            found.append(out)
        assert torch.equal(found[0].bfloat16(), found[1])

    sim.run(2, fn)
