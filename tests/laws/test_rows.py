"""Law: gradients that travel as rows are bitwise those that travel whole, and never take more bytes but for the counts.

Bitwise means that signs of zeros count; one NaN is as good as another.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import zoo.optim
from zoo import sim
from zoo.comm import Communicator
from zoo.shard.collectives.routes import FlatReduce
from zoo.shard.collectives.rows import RowReduce
from zoo.shard.placement.axes import make_axes
from zoo.zero import Precision, ShardedModel, ZeroConfig, ZeroOptimizer, safe_get_full_grad

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
USUAL: dict[str, Any] = {"rows": 40, "width": 3, "share": 0.1, "semantics": "gloo"}
DRAWN: dict[str, Any] = {
    "dtype": torch.float32, "accumulate": None, "reduce": None, "spread": 70, "options": {}, "seed": 0
}  # fmt: skip
SPECIAL = (0.0, *[-0.0] * 7, 0.5, -1.25, 3.0, 1e-3, math.inf, math.nan)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (torch.where(t.isnan(), math.nan, t).view(BITS[t.dtype]) for t in (one, other))
    return torch.equal(first, second)


# The reduction -------------------------------------------------------------------------------------------------------


@given(
    world=st.integers(2, 4),
    rows=st.integers(1, 40),
    width=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
    dtype=st.sampled_from(list(BITS)),
    whole=st.booleans(),
    predivide=st.sampled_from([1.0, 2.0, math.inf]),
    semantics=st.sampled_from(["gloo", "nccl"]),
    seed=st.integers(0, 1000),
)
@example(**USUAL, world=2, dtype=torch.float32, whole=True, predivide=1.0, seed=1)
@example(**USUAL, world=3, dtype=torch.bfloat16, whole=False, predivide=2.0, seed=2)
def test_rows_have_the_bits_of_the_dense_reduction(
    world: int, rows: int, width: int, share: float, dtype: torch.dtype, whole: bool, predivide: float, semantics: str,
    seed: int,
) -> None:  # fmt: skip
    chunk = -(-rows // world) * width

    def gradient(rank: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed * 10 + rank)
        full = torch.zeros(world, chunk, dtype=dtype).view(-1)
        table = full[: rows * width].view(rows, width)
        touched = torch.rand(rows, generator=random) < share
        shared = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < share  # by all ranks
        values = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (rows, width), generator=random)].to(dtype)
        table.copy_(torch.where((touched | shared)[:, None], values, table))
        return full

    def fn(rank: int) -> None:
        comm = Communicator(None)
        axes = make_axes(comm, ZeroConfig())
        dense = FlatReduce(axes.shard, world, predivide)
        expected = torch.empty(chunk, dtype=dtype)
        dense.start(gradient(rank), expected, "dense").wait()
        if whole:
            everywhere = torch.empty(world * chunk, dtype=dtype)
            comm.all_gather(everywhere, expected).wait()
            expected = everywhere
        for inside in (True, False):
            full = gradient(rank)
            out = full if whole else full.view(world, chunk)[rank] if inside else torch.full((chunk,), 7.0, dtype=dtype)
            reduce = RowReduce(dense, axes, (rows, width), whole=whole, predivide=predivide)
            reduce.start(full, out, "rows").wait()
            assert same_bits(out, expected)

    sim.run(world, fn, seed=seed, semantics=semantics, transport="native")


# Training ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A table, one that gives sparse gradients, a bag, and one that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows, width = 70, 5  # no chunk of the dense layout would be whole rows
        self.words = nn.Embedding(rows, width)
        self.places = nn.Embedding(rows, width, sparse=True)
        self.bag = nn.EmbeddingBag(rows, width, mode="sum")
        self.hidden = nn.Linear(width, width)
        self.classes = nn.Embedding(7, width)
        self.out = nn.Linear(width, 7)
        self.out.weight = self.classes.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).mean(1) + self.places(tokens[:, 0]) + self.bag(tokens) + self.classes(labels)
        return self.out(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, rank: int, index: int, spread: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * index + rank)
    tokens, labels = torch.randint(spread, (3, 2), generator=random), torch.randint(7, (3,), generator=random)
    return nn.functional.cross_entropy(model(tokens, labels).float(), labels)


def train(
    rank: int, steps: list[list[bool]], spread: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[dict[str, torch.Tensor], ZeroOptimizer]:
    model = Net().to(dtype)
    optimizer = ZeroOptimizer(model, **{"lr": 0.01, "param_persistence_threshold": 0, **options})
    found, index = {}, 0
    for step, syncs in enumerate(steps):
        for sync in [*syncs[:-1], True]:
            if sync:
                loss_of(model, rank, index, spread).backward()  # type: ignore[no-untyped-call]
            else:
                with optimizer.no_sync():
                    loss_of(model, rank, index, spread).backward()  # type: ignore[no-untyped-call]
            index += 1
        for name, p in model.named_parameters():
            gradient = safe_get_full_grad(p)
            assert gradient is not None
            found[f"gradient of {name} in step {step}"] = gradient
        optimizer.step()
        optimizer.zero_grad()
    return found | optimizer.consolidated_parameters(), optimizer


@pytest.mark.dear
@given(
    world=st.integers(1, 4),
    stage=st.integers(0, 3),
    cls=st.sampled_from([torch.optim.AdamW, torch.optim.SGD, zoo.optim.AdamW]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    accumulate=st.sampled_from([None, torch.float32]),
    reduce=st.sampled_from([None, torch.bfloat16]),
    spread=st.sampled_from([1, 5, 70]),
    steps=st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=2),
    options=st.sampled_from([
        {}, {"overlap_comm": False}, {"param_persistence_threshold": 10**6}, {"predivide": math.inf}, {"check": True},
        {"units": [nn.Linear]}, {"reduce_bucket_size": 1},
    ]),
    seed=st.integers(0, 20),
)  # fmt: skip
@example(**DRAWN, world=2, stage=0, cls=torch.optim.AdamW, steps=[[True, True], [False, True]])
@example(**DRAWN, world=3, stage=1, cls=torch.optim.SGD, steps=[[True, False]])
@example(**DRAWN, world=2, stage=2, cls=zoo.optim.AdamW, steps=[[False, True]])
@example(**DRAWN, world=3, stage=3, cls=torch.optim.AdamW, steps=[[True, True]])
def test_training_has_the_bits_of_dense_gradients(
    world: int, stage: int, cls: Any, dtype: torch.dtype, accumulate: torch.dtype | None, reduce: torch.dtype | None,
    spread: int, steps: list[list[bool]], options: dict[str, Any], seed: int,
) -> None:  # fmt: skip
    precision = Precision(accumulate=accumulate, reduce=reduce, predivide=options.get("predivide", 1.0))
    options = {k: v for k, v in options.items() if k != "predivide"}
    options |= {"stage": stage, "optimizer": cls, "precision": precision}

    def fn(rank: int) -> None:
        dense, _ = train(rank, steps, spread, dtype, **options)
        rows, optimizer = train(rank, steps, spread, dtype, **options, sparse_gradients=True)
        for name, value in dense.items():
            assert same_bits(rows[name], value), name
        tables = [b.spec.names for b in optimizer.buckets if b.spec.row]
        assert sorted(tables) == [["bag.weight"], ["places.weight"], ["words.weight"]]

    with sim.defaults(semantics="gloo", transport="native"):
        sim.run(world, fn, seed=seed)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["cpu", "nvme", "update_in_backward", "divergent", "quantised weights", "clipping"])
def test_next_to_other_options(stage: int, how: str, tmp_path: Any) -> None:
    offload = {"offload_optimizer": {"device": how, "nvme_path": str(tmp_path)}}
    options: dict[str, Any] = {
        "update_in_backward": {"update_in_backward": True}, "divergent": {"divergent": True},
        "quantised weights": {"zero_quantized_weights": True}, "clipping": {"clip_norm": 0.01},
    }.get(how, offload)  # fmt: skip
    if stage < 3 and how in ("divergent", "quantised weights"):
        return
    steps = [[True], [True]] if how == "update_in_backward" else [[True, False, True], [True]]

    def fn(rank: int) -> None:
        found = []
        for rows in (False, True):
            model = Net()
            optimizer = ZeroOptimizer(
                model, stage=stage, lr=0.01, reduce_bucket_size=1, param_persistence_threshold=0, sparse_gradients=rows,
                **options,
            )  # fmt: skip
            for index, syncs in enumerate(steps):
                for sync in syncs:
                    if sync:
                        loss_of(model, rank, index, 70).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            found.append(optimizer.consolidated_parameters())
        for name, value in found[0].items():
            # Groups of qwZ and the terms of a norm follow the chunks, which are whole rows of a table.
            if how == "quantised weights":
                torch.testing.assert_close(found[1][name], value, rtol=0, atol=0.03)
            elif how == "clipping":
                torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)
            else:
                assert same_bits(found[1][name], value), name

    sim.run(2, fn, seed=0)


# Bytes ---------------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 600, 8


class Table(nn.Module):
    """Nothing but a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("touched", [[0, 0], [5, 0], [20, 7], [240, 100], [300, 300], [400, 0], [0, 599]])
def test_bytes_on_the_wire(stage: int, touched: list[int]) -> None:
    def fn(rank: int) -> None:
        for rows in (False, True):
            model = Table()
            optimizer = ZeroOptimizer(
                model, stage=stage, lr=0.01, sparse_gradients=rows, param_persistence_threshold=0, units=[nn.Embedding],
            )  # fmt: skip
            optimizer.comm.log.reset()
            tokens = torch.arange(ROWS)[: touched[rank]]
            model(tokens).square().sum().backward()
            size = optimizer.buckets[0].layout.size
            sent = {op: row.wire_bytes for op, row in optimizer.comm.log.ops.items()}
            sent["all_gather"] = sent.get("all_gather", 0) - (4 * size // 2 if stage == 3 else 0)  # of the parameters
            dense = {"reduce_scatter": 4 * size // 2, "all_gather": 4 * size // 2 if stage == 0 else 0}
            if not rows:
                assert sent == dense
                continue
            counts, row = 8 * 2, WIDTH * 4 + 8
            half = size // WIDTH // 2  # the rows of a chunk
            others = [max(touched[0] - half, 0), min(touched[1], half)]  # of the other rank's chunk
            most = max(touched) if stage == 0 else max(others)
            if 2 * most * row > sum(dense.values()):
                assert sent == dense | {"all_gather": dense["all_gather"] + counts}
            elif stage == 0:
                assert sent == {"all_gather": counts + most * row}
            else:
                assert sent == {"all_gather": counts} | ({"all_to_all": others[rank] * row} if any(touched) else {})
            optimizer.step()
            optimizer.zero_grad()
            forecast, sent = optimizer.forecast(), optimizer.comm.log.wire_bytes
            assert sent <= sum(forecast.wire_bytes.values())

    sim.run(2, fn, seed=0, transport="native")


@pytest.mark.parametrize("stage", [0, 2])
def test_a_recording_has_what_was_sent(stage: int) -> None:
    trace = sim.Trace()

    def fn(rank: int) -> None:
        model = Table()
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.01, sparse_gradients=True)
        for num_tokens in (6, 500):
            before = len(trace.of_rank(rank))
            with optimizer.sharded.record() as actions:
                model(torch.arange(num_tokens)).square().sum().backward()
            events = trace.of_rank(rank)[before:]
            assert len(actions.collectives()) == len(events)
            for said, did in zip(actions.collectives(), events, strict=True):
                assert said.op in did.op
                assert said.num_bytes == did.num_bytes * (2 if said.op == "all_gather" else 1)
            optimizer.step()
            optimizer.zero_grad()

    sim.run(2, fn, seed=0, trace=trace, transport="native")


# What may be a table, and what may not -------------------------------------------------------------------------------


def test_tied_tables_are_said_to_travel_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zoo.zero"):
        optimizer = ZeroOptimizer(Net(), lr=0.01, sparse_gradients=True)
    assert [b.spec.names for b in optimizer.buckets if b.spec.row] == [
        ["words.weight"], ["places.weight"], ["bag.weight"]
    ]  # fmt: skip
    assert "the gradient of 'classes.weight' travels whole: other modules have this table too" in caplog.text
    caplog.clear()
    ZeroOptimizer(nn.Linear(2, 2), lr=0.01, sparse_gradients=True)
    assert "sparse_gradients=True has no effect: the model has no trainable weight of nn.Embedding" in caplog.text


def test_what_is_refused() -> None:
    for options in ({"stage": 0, "hierarchical_all_reduce": True}, {"stage": 2, "mics_shard_size": 1}):
        name = next(key for key in options if key != "stage")
        with pytest.raises(ValueError, match=f"sparse_gradients=True with {name}: rows of a table travel between all"):
            ZeroOptimizer(Net(), lr=0.01, sparse_gradients=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sparse_gradients='yes'; allowed are True and False"):
        ZeroOptimizer(Net(), lr=0.01, sparse_gradients="yes")  # type: ignore[arg-type]


def test_without_training_there_are_no_gradients() -> None:
    sharded = ShardedModel(Net(), config=ZeroConfig(stage=3), trains=False, sparse_gradients=True)
    assert not any(b.spec.row for b in sharded.buckets)
