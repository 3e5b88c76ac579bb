"""Live state through torch.distributed.checkpoint: saved and loaded at any world size and stage, by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from tests import processes
from tests.zero.blocks import STAGES
from tests.zero.state.test_torch_state import OPTIMIZERS, make, same, slices, step, whole
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import live, load_dcp
from zoo.layout import declare_split
from zoo.zero import ZeroOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


FED_BACK = {"zero_quantized_gradients": True, "quantized_gradients_feedback": True}


def save(folder: Any, rank: int, stage: int, kind: str, steps: int, **options: Any) -> Any:
    """All elements that were saved, by role and name, and the numbers."""
    model, optimizer = make(stage, kind, **options)
    model.register_buffer("seen", torch.tensor([float(steps), 7.0]))
    for number in range(steps):
        step(model, optimizer, rank, number)
    optimizer.param_groups[1]["lr"] = 0.0625
    dcp.save(live(optimizer), checkpoint_id=folder)
    return whole(optimizer, rank), optimizer.state_scalars()


def check_loaded(rank: int, model: Any, optimizer: ZeroOptimizer, saved: list[Any], stage: int, kind: str) -> None:
    """Bit by bit what was saved, and training goes on as after a load of zoo's own."""
    expected = saved[0][0]
    found = whole(optimizer, rank)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert optimizer.param_groups[1]["lr"] == 0.0625
    other_model, other = make(stage, kind, seed=2)
    other.param_groups[1]["lr"] = 0.0625
    scalars = {k: v for _, theirs in saved for k, v in theirs.items()}
    other.load_state(lambda name, role, start, n: expected[role, name][start : start + n], scalars)
    for number in range(3, 5):
        step(model, optimizer, rank, number)
        step(other_model, other, rank, number)
    same(optimizer, other)


@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)), first=st.sampled_from(STAGES), second=st.sampled_from(STAGES),
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)), steps=st.integers(0, 2), begun=st.booleans(),
    scaled=st.booleans(),
)  # fmt: skip
def test_what_is_saved_is_loaded_at_any_world_size_and_stage(
    tmp_path_factory: pytest.TempPathFactory, kind: str, first: int, second: int, worlds: tuple[int, int], steps: int,
    begun: bool, scaled: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("live")
    options = {"loss_scale": "dynamic"} if scaled else {}
    saved = sim.run(worlds[0], lambda rank: save(folder, rank, first, kind, steps, **options))

    def load(rank: int) -> None:
        model, optimizer = make(second, kind, seed=1, **options)
        model.register_buffer("seen", torch.zeros(2))
        if begun:
            step(model, optimizer, rank, 9)
        dcp.load(live(optimizer), checkpoint_id=folder)
        assert model.seen.tolist() == [steps, 7.0]
        if scaled:
            assert optimizer.state_scalars()["zero/scale"] == saved[0][1]["zero/scale"]
            return
        if steps or kind not in ("momentum",):
            check_loaded(rank, model, optimizer, saved, second, kind)

    sim.run(worlds[1], load)


@pytest.mark.parametrize(("world", "stage", "kind"), [(3, 3, "masters"), (2, 1, "AdamW")])
def test_zoo_and_torch_alone_read_it(tmp_path: Path, world: int, stage: int, kind: str) -> None:
    scale = 4.0 if kind == "AdamW" else None
    saved = sim.run(world, lambda rank: save(tmp_path, rank, stage, kind, 2, loss_scale=scale))
    expected, numbers = saved[0]
    found = load_dcp(tmp_path)
    for (role, name), value in expected.items():
        assert torch.equal(found.tensor(name, role).reshape(-1), value)
    assert {k: v for k, v in found.scalars.items() if k in numbers} == numbers
    assert found.meta["values"]["optimizer.param_groups.1.lr"] == 0.0625

    # Plain torch, in one process.
    plain = make(0, "AdamW")[0].__class__()
    plain.register_buffer("seen", torch.zeros(2))
    groups = [{"params": list(m.parameters())} for m in (plain.blocks, plain.first, plain.last)]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    state, states = get_state_dict(plain, optimizer)
    client = {"model": state, "optimizer": states}
    dcp.load(client, checkpoint_id=tmp_path, no_dist=True)
    for (role, name), value in expected.items():
        mine = state[name] if role == "parameter" else client["optimizer"]["state"][name][role]
        assert torch.equal(mine.reshape(-1), value)
    assert client["optimizer"]["param_groups"][1]["lr"] == 0.0625
    assert plain.seen.tolist() == [2, 7]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_writes_its_own_elements_and_nothing_is_gathered(tmp_path: Path, stage: int) -> None:
    def job(rank: int) -> int:
        model, optimizer = make(stage, "AdamW")
        step(model, optimizer, rank, 0)
        before = optimizer.comm.log.wire_bytes
        state = live(optimizer)
        written = sum(
            box.numel for part in state.values() for tensor in _shards(part.state_dict()) for box, _, _ in tensor.owned
        )
        assert written == sum(s.length for s in optimizer.held_slices(owned=True))
        assert optimizer.comm.log.wire_bytes == before
        dcp.save(state, checkpoint_id=tmp_path)
        return written

    written = sim.run(3, job)
    elements = 3 * sum(p.numel() for p in make(0, "AdamW")[0].parameters())
    assert sum(written) == elements
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    files = {place.relative_path for place in metadata.storage_data.values()}
    assert len(files) == 3


def _shards(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for item in value.values() for found in _shards(item)]
    return [value] if hasattr(value, "owned") else []


def test_one_of_the_two_is_loaded_alone_and_under_another_key(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model, optimizer = make(2, "AdamW")
        step(model, optimizer, rank, 0)
        both = live(optimizer)
        dcp.save({"net": both["model"], "opt": both["optimizer"], "epoch": 3}, checkpoint_id=tmp_path)
        expected = whole(optimizer, rank)
        for key, part in (("net", "model"), ("opt", "optimizer")):
            again, other = make(3, "AdamW", seed=1)
            step(again, other, rank, 5)
            before = whole(other, rank)
            dcp.load({key: live(other)[part]}, checkpoint_id=tmp_path)
            for (role, name), value in whole(other, rank).items():
                from_there = (role == "parameter") is (part == "model")
                assert torch.equal(value, (expected if from_there else before)[role, name])
            step(again, other, rank, 6)
        found = load_dcp(tmp_path, optimizer.comm, model="net", optimizer="opt")
        assert torch.equal(found.tensor("last.weight", "exp_avg").reshape(-1), expected["exp_avg", "last.weight"])

    sim.run(2, job)


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model, optimizer = make(3, "AdamW")
        step(model, optimizer, rank, 0)
        dcp.save(live(optimizer), checkpoint_id=tmp_path / "whole")
        dcp.save({"model": live(optimizer)["model"]}, checkpoint_id=tmp_path / "model")
        again, other = make(1, "AdamW", seed=1)
        step(again, other, rank, 5)
        before = slices(other)
        with pytest.raises(BaseException, match="Missing key"):
            dcp.load(live(other), checkpoint_id=tmp_path / "model")
        partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
        with pytest.raises(CheckpointError, match=r"exp_avg of '.*' was not read"):
            dcp.load({"optimizer": live(other)["optimizer"]}, checkpoint_id=tmp_path / "model", planner=partial)
        assert all(torch.equal(value, before[key]) for key, value in slices(other).items())
        third = again.__class__()
        groups = [{"params": list(m.parameters())} for m in (third.blocks, third.last, third.first)]
        reordered = ZeroOptimizer(third, stage=1, params=groups, optimizer=torch.optim.AdamW)
        with pytest.raises(CheckpointError, match=r"other parameters in param_groups\[1\] than this optimizer"):
            dcp.load({"optimizer": live(reordered)["optimizer"]}, checkpoint_id=tmp_path / "whole")
        assert not reordered.inner.state
        step(again, other, rank, 6)

    sim.run(2, job)


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        _, optimizer = make(3, "AdamW", ranks_per_node=1, **FED_BACK)
        with pytest.raises(NotImplementedError, match=r"quantized_gradients_feedback=True.*save_dcp"):
            live(optimizer)
        _, optimizer = make(3, "AdamW")
        part = _shards(live(optimizer)["model"].state_dict())[0]
        with pytest.raises(NotImplementedError, match=r"elements of this rank only.*get_state_dict"):
            part + 1

    sim.run(2, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_and_the_optimizer_themselves_are_saved(tmp_path: Path, stage: int) -> None:
    """Without live(): as rows of DTensors, gathered bucket by bucket."""

    def job(rank: int) -> None:
        model, optimizer = make(stage, "AdamW")
        step(model, optimizer, rank, 0)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        found = load_dcp(tmp_path, optimizer.comm)
        expected = whole(optimizer, rank)
        for (role, name), value in expected.items():
            assert torch.equal(found.tensor(name, role).reshape(-1), value)
        again, other = make((stage + 2) % 4, "AdamW", seed=1)
        dcp.load({"model": again, "optimizer": other}, checkpoint_id=tmp_path)
        assert all(torch.equal(value, expected[key]) for key, value in whole(other, rank).items())

    sim.run(2, job)


def columns(rank: int, stage: int, value: torch.Tensor) -> tuple[torch.nn.Linear, ZeroOptimizer]:
    """Half of the columns of a matrix, on a mesh of two data-parallel and two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    first = 3 * mesh.get_local_rank("tensor")
    model = torch.nn.Linear(3, 4, bias=False)
    model.weight = torch.nn.Parameter(value[:, first : first + 3].clone())
    declare_split(model.weight, ["tensor"], shape=(4, 6), offsets=(0, first))
    options: Any = {"mesh": mesh, "data_axes": ("data",), "optimizer": torch.optim.AdamW, "lr": 0.1}
    return model, ZeroOptimizer(model, stage=stage, param_persistence_threshold=0, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_parts_along_other_axes_are_boxes_of_the_whole(tmp_path: Path, stage: int) -> None:
    def train(model: Any, optimizer: ZeroOptimizer, rank: int, number: int) -> None:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank))
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def job(rank: int) -> torch.Tensor:
        model, optimizer = columns(rank, stage, torch.arange(24.0).view(4, 6) / 10)
        train(model, optimizer, rank, 0)
        dcp.save(live(optimizer), checkpoint_id=tmp_path)
        expected = dict(optimizer.sharded.whole_model())["weight"].clone()
        again, other = columns(rank, (stage + 1) % 4, torch.zeros(4, 6))
        dcp.load(live(other), checkpoint_id=tmp_path)
        for number in (1, 2):
            train(model, optimizer, rank, number)
            train(again, other, rank, number)
        left, right = (dict(o.sharded.whole_model())["weight"].clone() for o in (optimizer, other))
        assert torch.equal(left, right)
        return expected

    expected = sim.run(4, job)[0]
    found = load_dcp(tmp_path)
    assert torch.equal(found.tensor("weight"), expected)
    assert found.tensor("weight", "exp_avg").shape == (4, 6)


def on_processes(rank: int, folder: str) -> None:
    save(folder, rank, 3, "AdamW", 2)


def loaded_on_processes(rank: int, folder: str) -> None:
    import torch.distributed as dist

    model, optimizer = make(2, "AdamW", seed=1)
    model.register_buffer("seen", torch.zeros(2))
    dcp.load(live(optimizer), checkpoint_id=folder)
    step(model, optimizer, rank, 3)
    again, other = make(3, "AdamW", seed=2)
    again.register_buffer("seen", torch.zeros(2))
    state, states = get_state_dict(model, optimizer)
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(again, other, model_state_dict=state, optim_state_dict=states)
    step(model, optimizer, rank, 4)
    step(again, other, rank, 4)
    mine, theirs = whole(optimizer, rank), whole(other, rank)
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
    assert dist.get_world_size() == 2


@pytest.mark.slow
def test_on_processes(tmp_path: Path) -> None:
    processes.run_ranks(3, on_processes, str(tmp_path))
    processes.run_ranks(2, loaded_on_processes, str(tmp_path))
