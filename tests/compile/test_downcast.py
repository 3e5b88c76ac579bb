"""Parameters that are cast before anything reads them are cast before they travel: the same bits, no other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from zoo import sim
from zoo.compile import compile_whole, use_dtypes
from zoo.cost import Start
from zoo.zero import Precision, ZeroOptimizer

WIDTH, WORDS, STEPS = 64, 128, 2
SMALL = 64  # bytes: what ranks agree on
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Under autocast: a table and a norm that are read as they are, and matrices that are cast."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            x = self.table(tokens)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(seed))


CAST = {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "head.weight"}


def test_which_parameters_are_cast_before_anything_reads_them() -> None:
    model = Model()
    assert use_dtypes(model, tokens(0)) == dict.fromkeys(CAST, BF16)
    tied = use_dtypes(Model(tied=True), tokens(0))
    assert set(tied) == CAST - {"head.weight"}  # the table is read as it is
    ZeroOptimizer(model, stage=3, lr=0.1)
    with pytest.raises(ValueError, match="call it before the optimizer"):
        use_dtypes(model, tokens(0))


def train(rank: int, fused: bool, compiles: bool, **options: Any) -> list[torch.Tensor]:
    """Losses of steps, then what a rank keeps of each bucket."""
    model = Model()
    precision = Precision(gather=use_dtypes(model, tokens(0)) if fused else {})
    optimizer = ZeroOptimizer(
        model, stage=3, optimizer=torch.optim.SGD, lr=0.5, precision=precision, param_persistence_threshold=0,
        reduce_bucket_size=1, max_live_parameters=0, prefetch_bucket_size=0, **options,
    )  # fmt: skip
    whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
    losses = []
    for step in range(STEPS):
        loss = model(tokens(10 * step + rank))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    assert whole is None or not whole.reasons
    return losses + [bucket.parameters.shard.read().clone() for bucket in optimizer.sharded.buckets]


def gathered(fused: bool, compiles: bool) -> tuple[Any, int]:
    """What a rank computes, and the bytes of whole buffers that two ranks gather to that end."""
    programs = sim.Programs()
    found = sim.run(2, lambda rank: train(rank, fused, compiles), programs=programs)
    starts = [one for one in programs.programs()[0] if isinstance(one, Start) and "gather" in one.op]
    return found[0], sum(round(2 * one.num_bytes) for one in starts if one.num_bytes > SMALL)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_bits_are_the_same_and_the_bytes_those_in_use(compiles: bool) -> None:
    plain, all_bytes = gathered(False, compiles)
    found, fused_bytes = gathered(True, compiles)
    assert all(map(torch.equal, plain, found))
    sizes = {name: p.numel() for name, p in Model().named_parameters()}
    gathers = 2 * STEPS  # before forward and before backward; no bucket is padded
    assert all_bytes == gathers * 4 * sum(sizes.values())
    assert fused_bytes == gathers * sum(size * (2 if name in CAST else 4) for name, size in sizes.items())


@pytest.mark.dear
def test_what_a_graph_shows_of_each_bucket_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(gather: dict[str, torch.dtype]) -> list[str]:
        def fn(rank: int) -> list[str]:
            model = Model()
            optimizer = ZeroOptimizer(
                model, stage=3, lr=0.1, precision=Precision(gather=gather), param_persistence_threshold=0,
                reduce_bucket_size=10**6,
            )  # fmt: skip
            whole = compile_whole(optimizer.sharded, "aot_eager")
            optimizer.backward(model(tokens(rank)))
            return list(whole.plans[0].report["downcast"])

        torch._dynamo.reset()
        found: Any = sim.run(2, fn)[0]
        return [str(text) for text in found]

    mixed = told({})[0]
    assert "has mixed uses, and travels as torch.float32" in mixed
    assert "table.weight" in mixed.split(" as torch.float32: ")[1].split(" as ")[1]
    apart = told(dict.fromkeys(CAST, BF16))
    size = sum(p.numel() for name, p in Model().named_parameters() if name in CAST)
    assert any(f"travels as torch.bfloat16: {2 * size:,} bytes" in text for text in apart)
    assert not any("mixed" in text for text in apart)
    assert "rounded" not in caplog.text
    wrong = told({"table.weight": BF16})
    assert any("table.weight is read as it is" in text for text in wrong)
    assert "rounded. Leave it out of Precision(gather=...)" in caplog.text


F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("own", "travels", "read", "rounded"),
    [(F32, BF16, BF16, False), (F32, BF16, F16, True), (F32, F16, BF16, True), (F32, F16, F16, False),
     (F32, BF16, F64, True), (F64, F32, BF16, False), (F64, F32, F32, False), (F64, BF16, F32, True),
     (F32, BF16, torch.float8_e5m2, True), (F32, BF16, torch.int32, True), (BF16, None, F32, False)],
)  # fmt: skip
def test_a_warning_comes_where_bits_may_be_others(
    own: torch.dtype, travels: torch.dtype | None, read: torch.dtype, rounded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=own), requires_grad=False)
            self.other = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight.to(read).float() * self.other).sum()

    gather = {"weight": travels} if travels is not None else {}
    optimizer = ZeroOptimizer(
        Reads(), stage=3, lr=0.1, precision=Precision(gather=gather), param_persistence_threshold=0
    )
    whole = compile_whole(optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place", "downcast"])])
    optimizer.backward(optimizer.model(torch.ones(WIDTH)))
    assert len(whole.plans) == 1
    assert ("rounded. Leave it out" in caplog.text) == rounded


class Widens(nn.Module):
    """It reads weights in other dtypes, of which some are narrower."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wide", "same", "narrow", "whole", "eighth"):
            setattr(self, name, nn.Parameter(torch.ones(WIDTH, dtype=F16 if name == "same" else F32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eighth = self.eighth.to(torch.float8_e5m2).float()
        return self.wide.double() + self.same.bfloat16() + self.narrow.bfloat16() + x + self.whole.int() + eighth


def test_what_would_travel_in_no_fewer_bytes_is_left_out() -> None:
    assert use_dtypes(Widens(), torch.ones(WIDTH)) == {"narrow": BF16}


class Remembers(nn.Linear):
    """It makes tables when it is called first, and counts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table: Any = None
        self.tables: dict[int, Any] = {}
        self.list: list[Any] = []
        self.calls, self.asks = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = self.tables[0] = torch.arange(WIDTH) + 0 * x
            self.list += [self.table]
        if self.asks and self.table.sum().item() < 0:
            raise ValueError
        with torch.autocast("cpu", dtype=BF16):
            return super().forward(x + self.table + self.tables[0] + self.list[0])


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(Remembers())
    assert use_dtypes(model, torch.ones(WIDTH)) == {"0.weight": BF16, "0.bias": BF16}
    assert (model[0].calls, model[0].table, model[0].tables, model[0].list) == (0, None, {}, [])
    assert type(model(torch.ones(WIDTH))) is torch.Tensor
    model[0].asks, model[0].table = True, None
    with pytest.raises(ValueError, match=r"use_dtypes\(\) runs the forward of Sequential without values, and it asks"):
        use_dtypes(model, torch.ones(WIDTH))
    assert model[0].table is None


def test_what_cannot_travel_so_is_said() -> None:
    for gather, says in (
        ({"head.weight": F64}, "computed with as torch.float32: it would travel in no fewer bytes"),
        ({"nothing": BF16}, "the model has no such parameter"),
        ({"head.weight": torch.int8}, "of a dtype that models compute in"),
    ):
        with pytest.raises(ValueError, match=says):
            ZeroOptimizer(Model(), stage=3, lr=0.1, precision=Precision(gather=gather))

    def fn(rank: int) -> None:
        precision = Precision(gather={"head.weight": BF16})
        with pytest.raises(ValueError, match="both say how parameters travel"):
            ZeroOptimizer(
                Model(),
                stage=3,
                lr=0.1,
                precision=precision,
                zero_quantized_weights=True,
                param_persistence_threshold=0,
            )

    sim.run(2, fn)
