"""Routes and codecs written outside of zoo: how a bucket travels, and in which form it is kept, is theirs to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError, Communicator, Handle, RankFailedError, Then
from zoo.cost.collectives import Hop
from zoo.zero import ZeroOptimizer

WIDTH = 16


# A route: chunks go round a ring.


class Ring:
    """Each rank hands on what it got last: P (p-1)/p elements, from the left neighbour alone."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        comm, chunks = self._comm, full.view(self._comm.size, -1)
        chunks[comm.rank].copy_(shard)

        def go_round() -> None:
            for step in range(comm.size - 1):
                mine, theirs = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
                right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                sent, got = [0] * comm.size, [0] * comm.size
                sent[right] = got[left] = chunks.shape[1]
                comm.all_to_all_uneven(chunks[theirs], chunks[mine], got, sent).wait()

        return Then([], go_round)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        return [Hop("all_gather", self._comm, numel * itemsize)]  # as many bytes


# A codec that travels: parameters and gradients as bf16.


class Half:
    """A gather in bf16 over another one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        half = torch.empty_like(full, dtype=torch.bfloat16)
        inner = self._inner.start(half, shard.bfloat16(), f"{label} as bf16")

        def widen() -> None:
            full.copy_(half)

        return Then([inner], widen)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        found: list[Hop] = self._inner.hops(numel, 2)
        return found


class HalfReduce:
    """The mean of gradients that were rounded to bf16, added in fp32."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        sent = full.bfloat16()
        got = torch.empty_like(sent)
        inner = self._comm.all_to_all(got, sent, label=f"{label} as bf16")

        def add() -> None:
            out.copy_(got.view(self._comm.size, -1).float().mean(0))

        return Then([inner], add)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        return [Hop("all_to_all", self._comm, numel * 2)]


# A codec that is kept: frozen parameters as bf16.


@dataclasses.dataclass
class HalfPacked:
    raw: torch.Tensor
    inner: Any

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def to(self, device: torch.device, *, non_blocking: bool = False) -> HalfPacked:
        return HalfPacked(self.raw.to(device, non_blocking=non_blocking), self.inner)

    def start(self, full: torch.Tensor, label: str) -> Handle:
        return Half(self.inner).start(full, self.raw.view(torch.bfloat16), label)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return self.raw.view(torch.bfloat16).to(dtype)


class HalfPacker:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, values: torch.Tensor) -> HalfPacked:
        return self.over(values.bfloat16().view(torch.uint8))

    def over(self, raw: torch.Tensor) -> HalfPacked:
        return HalfPacked(raw, self._inner)

    def parts(self, numel: int, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        return start, [(2 * start, 2 * stop)]

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        return Half(self._inner).hops(numel, itemsize)


def ring(bucket: Any) -> Any:
    route = Ring(bucket.shard_group)
    return dataclasses.replace(bucket.routes, gather=route, exact=route)


def half(bucket: Any) -> Any:
    routes = bucket.routes
    return dataclasses.replace(routes, gather=Half(routes.exact), reduce=HalfReduce(bucket.shard_group))


def packed(bucket: Any) -> Any:
    routes = bucket.routes
    return routes if bucket.spec.trainable else dataclasses.replace(routes, pack=HalfPacker(routes.exact))


def trained(
    rank: int, choose: Callable[[Any], Any] | None, stage: int, frozen: bool
) -> tuple[list[torch.Tensor], int, int, dict[bool, int]]:
    """Parameters after three steps; what the last step was forecast to send, and sent; bytes kept of a bucket that is
    trained, or not."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[0].requires_grad_(not frozen)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, units=[nn.Linear], param_persistence_threshold=0
    )
    if choose is not None:
        optimizer.sharded.use_routes(choose)
    for step in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        forecast = optimizer.forecast()
        optimizer.comm.log.reset()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = optimizer.comm.log.wire_bytes
    kept = {bucket.spec.trainable: bucket.parameters.shard.nbytes for bucket in optimizer.buckets}
    return [p.detach().clone() for _, p in optimizer.whole_parameters()], sum(forecast.wire_bytes.values()), sent, kept


@pytest.mark.parametrize("stage", [2, 3])
def test_another_route_gives_the_same_bits(stage: int) -> None:
    plain = sim.run(3, lambda rank: trained(rank, None, stage, False))
    mine = sim.run(3, lambda rank: trained(rank, ring, stage, False))
    for (expected, *_), (found, forecast, sent, _) in zip(plain, mine, strict=True):
        assert forecast == sent
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_codec_rounds_and_the_forecast_knows_its_bytes(stage: int) -> None:
    plain = sim.run(2, lambda rank: trained(rank, None, stage, False))
    mine = sim.run(2, lambda rank: trained(rank, half, stage, False))
    for (expected, _, before, _), (found, forecast, sent, _) in zip(plain, mine, strict=True):
        assert forecast == sent < before
        for a, b in zip(expected, found, strict=True):
            assert not torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.01)
    for a, b in zip(mine[0][0], mine[1][0], strict=True):
        assert torch.equal(a, b)


def test_a_codec_of_what_is_kept() -> None:
    plain = sim.run(2, lambda rank: trained(rank, None, 3, True))
    mine = sim.run(2, lambda rank: trained(rank, packed, 3, True))
    for (expected, _, _, before), (found, forecast, sent, kept) in zip(plain, mine, strict=True):
        assert forecast == sent
        assert kept == {True: before[True], False: before[False] // 2}
        assert torch.equal(found[0], expected[0].bfloat16().float())
        assert not torch.equal(found[2], expected[2])


def test_what_cannot_be_changed_is_refused_on_all_ranks() -> None:
    def fn(rank: int) -> None:
        optimizer = ZeroOptimizer(nn.Linear(4, 4), stage=3, lr=0.1, param_persistence_threshold=0)
        use = optimizer.sharded.use_routes
        with pytest.raises(ValueError, match="reduces_whole"):
            use(lambda bucket: dataclasses.replace(bucket.routes, reduces_whole=True))
        with pytest.raises(ValueError, match="which is trained"):
            use(lambda bucket: dataclasses.replace(bucket.routes, pack=HalfPacker(bucket.routes.exact)))
        with pytest.raises(CollectiveMismatchError, match="routes of buckets"):
            use(half if rank else ring)
        with pytest.raises((ZeroDivisionError, RankFailedError)):
            use(lambda bucket: 1 // 0 if rank else bucket.routes)
        use(ring)

    sim.run(2, fn)
