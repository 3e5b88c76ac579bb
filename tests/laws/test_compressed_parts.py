"""Laws 2 and 3 for weights that are split along a tensor axis: what is quantised, masked or pruned is the whole weight,
bit for bit as one process does it, however it is cut, and a run goes on with another number of parts.

Training is in fp64, for the reason that test_compression gives."""

from __future__ import annotations

import copy
import pickle
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from tests.compression.models import inputs, weights
from tests.laws.test_compressed_stages import sections, snip
from tests.laws.test_families import Enter, Leave
from tests.laws.test_pruning import masks
from tests.profiles import deep_example, examples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.comm import Communicator
from zoo.compression import CompressionScheduler, init_compression, redundancy_clean, transforms_of
from zoo.compression.pruning.units import UnitMask
from zoo.compression.ranks import Ranks
from zoo.compression.techniques.activation_quantization import StaticInputQuantizer
from zoo.engine import Engine, initialize
from zoo.layout import Box, Boxes, declare_split
from zoo.pipe import LayerSpec, PipelineModule

WIDTH, HIDDEN, WORDS, STEPS, BATCH = 8, 12, 8, 4, 4


def cut(parameter: nn.Parameter, dim: int, *mine: slice) -> nn.Parameter:
    """The part of a whole weight that a rank keeps, side by side."""
    shape = tuple(parameter.shape)
    kept = [parameter.detach()[(slice(None),) * dim + (some,)] for some in mine]
    part = nn.Parameter(torch.cat(kept, dim))
    boxes = [
        Box(tuple(some.start if d == dim else 0 for d in range(len(shape))), tuple(value.shape))
        for some, value in zip(mine, kept, strict=True)
    ]
    declare_split(part, ["tensor"], shape=shape, boxes=Boxes.side_by_side(boxes, dim))
    return part


class Columns(nn.Linear):
    """Each rank has some of the outputs."""

    def keep(self, *mine: slice, comm: Communicator) -> None:
        self.comm = comm
        self.weight, self.bias = cut(self.weight, 0, *mine), cut(self.bias, 0, *mine)

    def forward(self, x: Tensor) -> Tensor:
        comm = getattr(self, "comm", None)
        return F.linear(x if comm is None else Enter.apply(x, comm), self.weight, self.bias)


class Rows(nn.Linear):
    """Each rank has some of the inputs."""

    def keep(self, *mine: slice, comm: Communicator) -> None:
        self.comm = comm
        self.weight = cut(self.weight, 1, *mine)

    def forward(self, x: Tensor) -> Tensor:
        comm, out = getattr(self, "comm", None), F.linear(x, self.weight)
        found: Tensor = (out if comm is None else Leave.apply(out, comm)) + self.bias
        return found


class Table(nn.Embedding):
    """Each rank has some of the features of every word."""

    def keep(self, mine: slice, *, comm: Communicator) -> None:
        self.comm, self.mine = comm, mine
        self.weight = cut(self.weight, 1, mine)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if not hasattr(self, "comm"):
            return found
        pads = (self.mine.start, WIDTH - self.mine.stop)
        whole: Tensor = Leave.apply(F.pad(found, pads), self.comm)
        return whole


@dataclass(frozen=True)
class Case:
    """``ends``: where the parts end, as shares of 4; (2, 4) are halves. ``fused``: hidden units are cut so in each half
    of them, and a part has those of both, side by side."""

    data: int = 1
    ends: tuple[int, ...] = (2, 4)
    stage: int = 0
    fused: bool = False

    @property
    def world(self) -> int:
        return self.data * len(self.ends)

    def part(self, rank: int, size: int) -> slice:
        start, stop = ((0, *self.ends)[rank + i] * size // 4 for i in (0, 1))
        return slice(start, stop)

    def parts(self, rank: int, size: int) -> list[slice]:
        """Of hidden units."""
        if not self.fused:
            return [self.part(rank, size)]
        mine = self.part(rank, size // 2)
        return [mine, slice(mine.start + size // 2, mine.stop + size // 2)]


class Net(nn.Module):
    def __init__(self, case: Case, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.up, self.down = Table(WORDS, WIDTH), Columns(WIDTH, HIDDEN), Rows(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.comm: Communicator | None = None
        self.mesh = None
        if case.world > 1:
            mesh = init_device_mesh("cpu", (case.data, len(case.ends)), mesh_dim_names=("data", "tensor"))
            self.__dict__["mesh"] = mesh
            comm = Communicator.of_axes(mesh, ["tensor"])
            self.table.keep(case.part(comm.rank, WIDTH), comm=comm)
            for layer in (self.up, self.down):
                layer.keep(*case.parts(comm.rank, HIDDEN), comm=comm)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.down(torch.tanh(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def engine_of(case: Case, section: dict[str, Any], *, seed: int = 0) -> Engine:
    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (BATCH * STEPS, 3), generator=dice)
    net = Net(case, seed).double()
    mesh = net.mesh
    config = {
        "train_batch_size": BATCH, "seed": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "compression_training": section,
    }  # fmt: skip
    return initialize(config, net, training_data=TensorDataset(x, (x + 1) % WORDS), mesh=mesh)[0]


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def outcome(engine: Engine, steps: int) -> Outcome:
    """Losses, whole parameters and what transforms remember, whole."""
    losses = [float(engine.train_batch()) for _ in range(steps)]
    found = masks(engine)
    for transform in transforms_of(engine.module):
        if transform.key in found and not isinstance(transform, UnitMask):
            found[transform.key] = transform.place.gather(found[transform.key])
        elif isinstance(transform, StaticInputQuantizer) and transform.range is not None:
            found[transform.key] = transform.range
    return losses, engine.optimizer.consolidated_parameters(), found


def run(case: Case, section: dict[str, Any]) -> list[Outcome]:
    return sim.run(case.world, lambda rank: outcome(engine_of(case, section), STEPS))


def compare(found: list[Outcome], wanted: Outcome) -> None:
    for losses, values, made in found:
        torch.testing.assert_close(losses, wanted[0], rtol=1e-9, atol=0)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-8, atol=1e-11, msg=name)
        assert made.keys() == wanted[2].keys()
        for name, value in made.items():
            torch.testing.assert_close(value, wanted[2][name], rtol=1e-6, atol=1e-7, msg=name)


ENDS = st.sampled_from([(2, 4), (1, 4), (1, 3, 4), (0, 4)])
CASES = st.builds(Case, data=st.sampled_from([1, 2]), ends=ENDS, stage=st.integers(0, 3), fused=st.booleans())


@st.composite
def of_parts(draw: st.DrawFn) -> dict[str, Any]:
    """Of compression_training: masks and quantisers of the split layers."""
    found = draw(sections())
    pattern = draw(st.sampled_from(["up|down", "down", "*"]))
    for section in found.values():
        for group in section["different_groups"].values():
            group["modules"] = [pattern]
    if "weight_quantization" in found:
        found["weight_quantization"]["shared_parameters"]["quantize_groups"] = draw(st.sampled_from([1, 2, 4, 8, 16]))
    if draw(st.booleans()):
        del found["sparse_pruning"]
    if not found or draw(st.booleans()):
        method, offset = draw(st.sampled_from(["l1", "topk"])), draw(st.integers(0, 2))
        found["row_pruning"] = {
            "shared_parameters": {"enabled": True, "method": method, "schedule_offset": offset},
            "different_groups": {
                "g": {
                    "modules": ["up", "down"], "params": {"dense_ratio": 0.5}, "related_modules": [["down"], ["head"]],
                }
            },
        }  # fmt: skip
    elif draw(st.booleans()):
        found["head_pruning"] = heads(draw(st.sampled_from(["l1", "topk"])))
    return found


def heads(method: str) -> dict[str, Any]:
    """Of the layer whose inputs are split."""
    groups = {"g": {"modules": ["down"], "params": {"dense_ratio": 0.5}}}
    return {"shared_parameters": {"enabled": True, "num_heads": 6, "method": method}, "different_groups": groups}


FIXED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1},
        "different_groups": {"g": {"modules": ["*"], "params": {"dense_ratio": 0.3}}},
    },
    "head_pruning": heads("l1"),
    "activation_quantization": inputs("*", bits=9, range_calibration="static"),
    "weight_quantization": weights("*", start=7, target=5, rounding="stochastic", quantize_groups=8),
}
LEARNED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk"},
        "different_groups": {"g": {"modules": ["*"], "params": {"dense_ratio": 0.3}}},
    },
    "head_pruning": heads("topk"),
    "activation_quantization": inputs("*", bits=9, quantization_type="asymmetric"),
    "weight_quantization": weights("*", start=3, target=1),
}


@pytest.mark.dear
@examples(times=0.5, quick=0.34)
@given(case=CASES, section=of_parts())
@deep_example(case=Case(), section=FIXED)
@example(case=Case(data=2, ends=(1, 3, 4), stage=3), section=FIXED)
@example(case=Case(data=2, ends=(1, 4), stage=2, fused=True), section=LEARNED)
@example(case=Case(ends=(1, 4)), section=snip(block_pattern="4x1"))
@example(case=Case(data=2, ends=(1, 3, 4)), section=snip("up|down", block_pattern="2:4"))
def test_parts_train_as_one_process_trains_the_whole(case: Case, section: dict[str, Any]) -> None:
    compare(run(case, section), run(Case(ends=(4,)), section)[0])


@pytest.mark.slow
@examples(times=0.5, quick=0.34)
@given(before=CASES, after=CASES, section=of_parts(), stop=st.integers(1, 3))
@example(before=Case(fused=True), after=Case(ends=(1, 3, 4), stage=2, fused=True), section=FIXED, stop=2)
@example(before=Case(data=2), after=Case(ends=(4,)), section=LEARNED, stop=2)
@example(before=Case(ends=(4,)), after=Case(), section=snip(), stop=2)
def test_a_run_goes_on_with_other_parts(before: Case, after: Case, section: dict[str, Any], stop: int) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def saves(rank: int) -> None:
            engine = engine_of(before, section)
            outcome(engine, stop)
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()

        def resumes(rank: int) -> Outcome:
            engine = engine_of(after, section, seed=5)
            engine.load_checkpoint(folder)
            return outcome(engine, STEPS - stop)

        sim.run(before.world, saves)
        found = sim.run(after.world, resumes)
    losses, *rest = run(Case(ends=(4,)), section)[0]
    compare(found, (losses[stop:], *rest))


def transformed(case: Case, section: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """T of each weight and of an input of the last layer, whole, in a loop of one's own."""
    torch.set_num_threads(1)
    net = Net(case, seed=2).to(dtype)
    init_compression(net, {"compression_training": section})
    ranks = None if net.mesh is None else Ranks.of_mesh(net.mesh, ["data"])
    CompressionScheduler(net, ranks).set_step(3)
    net = copy.deepcopy(net)
    dice, found = torch.Generator().manual_seed(3), {}
    x = torch.randn(5, HIDDEN, generator=dice).to(dtype)
    mine = case.part(net.down.comm.rank, HIDDEN) if case.world > 1 else slice(None)
    for transform in transforms_of(net):
        if transform.site.where == "weight":
            value = net.get_parameter(transform.site.name)
            found[transform.site.name] = transform.place.gather(transform(value).detach())
        elif transform.site.module == "down":
            part = transform(x[:, mine])
            whole = torch.zeros_like(x)
            whole[:, mine] = part
            if case.world > 1:
                net.down.comm.all_reduce(whole.view(-1)).wait()
            found["input"] = whole
    return found


@pytest.mark.dear
@examples(times=4)
@given(
    ends=ENDS, bits=st.sampled_from([1, 2, 3, 4, 8]), asymmetric=st.booleans(), stochastic=st.booleans(),
    groups=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
@example(ends=(2, 4), bits=8, asymmetric=False, stochastic=False, groups=1, dtype=torch.float32)
@example(ends=(1, 4), bits=1, asymmetric=False, stochastic=False, groups=12, dtype=torch.float32)
@example(ends=(0, 4), bits=4, asymmetric=True, stochastic=True, groups=24, dtype=torch.bfloat16)
def test_groups_and_tokens_are_those_of_the_whole_bit_for_bit(
    ends: tuple[int, ...], bits: int, asymmetric: bool, stochastic: bool, groups: int, dtype: torch.dtype
) -> None:
    kind = {"quantization_type": "asymmetric" if asymmetric and bits > 2 else "symmetric"}
    rounding = "stochastic" if stochastic and bits > 2 else "nearest"
    section = {
        "weight_quantization": weights(
            "table|up|down", start=bits, target=bits, rounding=rounding, quantize_groups=groups, **kind
        ),
        "activation_quantization": inputs("down", bits=max(bits, 3), **kind),
    }  # fmt: skip
    (wanted,) = sim.run(1, lambda rank: transformed(Case(ends=(4,)), section, dtype))
    case = Case(ends=ends)
    for found in sim.run(case.world, lambda rank: transformed(case, section, dtype)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


class Block(nn.Module):
    """Of a pipeline whose stages have a tensor axis."""

    def __init__(self, number: int, comm: Communicator | None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = Columns(WIDTH, HIDDEN), Rows(HIDDEN, WIDTH)
        for layer in (self.up, self.down) if comm is not None else ():
            layer.keep(Case(ends=(1, 4)).part(comm.rank, HIDDEN), comm=comm)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def piped(pipe: int, section: dict[str, Any]) -> Outcome:
    torch.set_num_threads(1)
    mesh = comm = None
    if pipe > 1:
        mesh = init_device_mesh("cpu", (pipe, 1, 2), mesh_dim_names=("pipe", "data", "tensor"))
        comm = Communicator.of_axes(mesh, ["tensor"])
    where: dict[str, Any] = {"num_stages": 1} if mesh is None else {"mesh": mesh}
    model = PipelineModule([LayerSpec(Block, n, comm) for n in range(4)], loss_fn=F.mse_loss, **where).double()
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "seed": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "compression_training": section,
    }  # fmt: skip
    engine = initialize(config, model, mesh=mesh)[0]
    losses, dice = [], torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batches = [torch.randn(2, WIDTH, generator=dice, dtype=torch.float64) for _ in range(2)]
        losses.append(float(engine.train_batch(iter([(x, x.roll(1, 0)) for x in batches]))))
    return losses, *outcome(engine, 0)[1:]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "section",
    [
        {**FIXED, "head_pruning": heads("topk")},
        snip(block_pattern="1x1"),
        snip(r"3\.up", block_pattern="4x1"),  # the first stage has none of them
    ],
    ids=["all", "together", "one stage"],
)
def test_parts_in_stages_train_as_one_process_trains_the_whole(section: dict[str, Any]) -> None:
    losses, values, made = sim.run(1, lambda rank: piped(1, section))[0]
    names: set[str] = set()
    for found in sim.run(4, lambda rank: piped(2, section)):
        here = found[2].keys()
        compare([found], (losses, values, {name: made[name] for name in here}))
        names |= here
    assert names == made.keys()


def test_what_is_infinite_in_one_part_is_told_on_all_ranks() -> None:
    section = {"weight_quantization": weights("up", start=8, target=8, quantize_groups=1)}

    def job(rank: int) -> None:
        net = Net(Case())
        init_compression(net, {"compression_training": section})
        CompressionScheduler(net, Ranks.of_mesh(net.mesh, ["data"]))
        with torch.no_grad():
            net.up.weight[0, 0] = torch.nan if rank == 1 else 1.0
        x = torch.zeros(1, 2, dtype=torch.long)
        with pytest.raises(ValueError, match=r"up\.weight has elements that are infinite or NaN"):
            net(x, x)

    sim.run(2, job)


def test_a_part_whose_other_ranks_nobody_has_named_is_refused() -> None:
    def job(rank: int) -> None:
        net = Net(Case())
        init_compression(net, {"compression_training": {"weight_quantization": weights("up", start=8, target=8)}})
        x = torch.zeros(1, 2, dtype=torch.long)
        with pytest.raises(ValueError, match=r"CompressionScheduler\(model, Ranks.of_mesh"):
            net(x, x)
        CompressionScheduler(net, Ranks.of_mesh(net.mesh, ["data"]))
        net(x, x).backward()
        with pytest.raises(ValueError, match=r"CompressionScheduler\(model, Ranks.of_mesh"):
            pickle.loads(pickle.dumps({"place": transforms_of(net)[0]}))["place"](net.up.weight)

    sim.run(2, job)


def test_a_cleaned_model_has_masked_parts_and_keeps_its_units(caplog: pytest.LogCaptureFixture) -> None:
    related = {"modules": ["up"], "params": {"dense_ratio": 0.5}, "related_modules": [["down"]]}
    section = {"row_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"g": related}}}
    document = {"compression_training": section}

    def job(case: Case) -> tuple[Tensor, Tensor]:
        net = Net(case)
        init_compression(net, document)
        CompressionScheduler(net, None if net.mesh is None else Ranks.of_mesh(net.mesh, ["data"]))
        x = torch.arange(4).reshape(1, 4)
        before = net(x, x).detach()
        place = transforms_of(net)[0].place
        redundancy_clean(net, document)
        assert net.up.out_features == HIDDEN
        torch.testing.assert_close(net(x, x), before)
        return before, place.gather(net.up.weight.detach())

    (alone, _), *_ = sim.run(1, lambda rank: job(Case(ends=(4,))))
    for loss, whole in sim.run(2, lambda rank: job(Case())):
        torch.testing.assert_close(loss, alone)
        assert int((whole == 0).all(1).sum()) == HIDDEN // 2
    assert "is split along the mesh axes tensor; bring the whole model to one process" in caplog.text
