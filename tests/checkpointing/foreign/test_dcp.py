"""torch.distributed.checkpoint: what it wrote is read here, and the other way, on one rank and on several."""

from __future__ import annotations

import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from tests import processes
from tests.checkpointing.foreign import mutants
from tests.checkpointing.foreign.golden_model import BEFORE, LR, Net, batches, groups, loss_of
from tests.checkpointing.foreign.test_deepspeed import losses, opened
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import load_dcp, save_dcp
from zoo.layout import Box, StateSlice
from zoo.zero import ZeroOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int = BEFORE) -> tuple[Net, torch.optim.Optimizer]:
    """In plain torch, on both ranks' data."""
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Net, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    found = []
    for number in numbers:
        optimizer.zero_grad()
        pairs = [batches(rank)[number] for rank in range(2)]
        loss = loss_of(model, (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_what_dcp_saved_is_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    state, optimizer_state = get_state_dict(model, optimizer)
    client = {"model": state, "optimizer": optimizer_state, "steps": 3, "note": ["a", (1, 2)]}
    dcp.save(client, checkpoint_id=tmp_path, no_dist=True)
    found = load_dcp(tmp_path)
    for name, value in state.items():
        if name != "again.weight":
            assert torch.equal(found.tensor(name), value)
    for name, entries in optimizer_state["state"].items():
        assert torch.equal(found.tensor(name, "exp_avg"), entries["exp_avg"])
        assert torch.equal(found.tensor(name, "exp_avg_sq"), entries["exp_avg_sq"])
        assert found.scalars[f"step/{name}"] == 3
    assert found.meta["values"]["steps"] == 3
    assert found.meta["values"]["optimizer.param_groups.0.lr"] == LR
    # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a call of getattr.
    names = {unknown.name for _, unknown in found.unknown if "Path" not in unknown.name}
    assert names <= ({"builtins.getattr"} if (3, 11) <= sys.version_info < (3, 11, 4) else set())

    def job(rank: int) -> list[float]:
        mine = Net()
        zoo = ZeroOptimizer(mine, stage=2, params=groups(mine), optimizer=torch.optim.AdamW, lr=LR, clip_norm=1.0)
        zoo.load_state(found.read, found.scalars)
        out = []
        for number in range(BEFORE, 8):
            loss = loss_of(mine, batches(rank)[number])
            zoo.backward(loss)
            zoo.step()
            zoo.zero_grad()
            out.append(float(loss.detach()))
        return out

    expected = train(model, optimizer, range(BEFORE, 8))
    ours = torch.tensor(sim.run(2, job)).mean(0).tolist()
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_flat_state_dict_is_its_parameters(tmp_path: Path) -> None:
    dcp.save({"a.weight": torch.ones(2, 3), "b": torch.tensor(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    found = load_dcp(tmp_path)
    assert found.shapes == {"a.weight": (2, 3), "b": ()}
    assert found.tensor("b") == 4


def buffer(name: str, tensor: torch.Tensor) -> StateSlice:
    return StateSlice(name, "buffer", 0, tensor.numel(), tuple(tensor.shape), tensor.reshape(-1))


def written(folder: Path, world: int, stage: int) -> None:
    """Zoo's state after the steps before, on simulated ranks."""

    def job(rank: int) -> None:
        model = Net()
        zoo = ZeroOptimizer(model, stage=stage, params=groups(model), optimizer=torch.optim.AdamW, lr=LR, clip_norm=1.0)
        for number in range(BEFORE):
            pairs = [batches(r)[number] for r in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            zoo.backward(loss_of(model, (x, y)))
            zoo.step()
            zoo.zero_grad()
        slices: list[Any] = zoo.state_slices()
        slices += [buffer("shift", model.shift)] if rank == 0 else []
        save_dcp(folder, slices, {**zoo.state_scalars(), "zero/scale": 8.0}, zoo.comm)

    sim.run(world, job)


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 2), (2, 3)])
def test_dcp_loads_what_zoo_wrote_and_trains_on(world: int, stage: int, tmp_path: Path) -> None:
    written(tmp_path, world, stage)
    expected_model, expected_optimizer = trained()
    model, optimizer = trained(1)  # so that all states are there to be filled
    state, optimizer_state = get_state_dict(model, optimizer)
    state.pop("again.weight")  # tied: it is there once
    client = {"model": state, "optimizer": {"state": optimizer_state["state"]}}
    dcp.load(client, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict={**state, "again.weight": state["middle.weight"]},
        optim_state_dict={"state": client["optimizer"]["state"], "param_groups": optimizer_state["param_groups"]},
    )  # fmt: skip
    for name, value in expected_model.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    ours, theirs = (
        train(m, o, range(BEFORE, 8)) for m, o in ((model, optimizer), (expected_model, expected_optimizer))
    )
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_what_zoo_wrote_comes_back_at_another_world_size(tmp_path: Path) -> None:
    written(tmp_path, 3, 3)
    found = load_dcp(tmp_path)
    assert found.scalars["zero/scale"] == 8
    assert found.tensor("shift", "buffer").tolist() == [0.0, 0.125, 0.25, 0.375, 0.5]
    assert set(found.roles["first.weight"]) == {"parameter", "exp_avg", "exp_avg_sq"}
    whole = found.tensor("middle.weight", "exp_avg")
    assert torch.equal(found.read("middle.weight", "exp_avg", 11, 30), whole.reshape(-1)[11:41])
    assert torch.equal(found.read_box("middle.weight", "exp_avg", Box((1, 2), (3, 4))), whole[1:4, 2:6])
    found.meta["deepspeed"] = {"param_groups": [{"lr": LR, "weight_decay": d} for d in (0.1, 0.0)]}
    ours, theirs = losses(found, 1, 2), losses(opened("stage1"), 1, 2)
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def shards(rank: int, folder: str) -> None:
    """On two real ranks: rows of one tensor, columns of another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(14.0).view(2, 7), mesh, [Shard(1)])
    dcp.save({"model": {"rows": rows, "columns": columns}}, checkpoint_id=folder)


@pytest.mark.slow
def test_boxes_of_several_ranks_are_read(tmp_path: Path) -> None:
    processes.run_ranks(2, shards, str(tmp_path))
    found = load_dcp(tmp_path)
    assert torch.equal(found.tensor("rows"), torch.arange(15.0).view(5, 3))
    assert torch.equal(found.tensor("columns"), torch.arange(14.0).view(2, 7))
    assert found.read("columns", "parameter", 3, 8).tolist() == [3, 4, 5, 6, 7, 8, 9, 10]


def small(folder: Path) -> Any:
    """A checkpoint, and its metadata as torch has it."""
    dcp.save({"model": {"w": torch.arange(6.0).view(2, 3)}, "n": 5}, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "a/b", "..", "", "\0"])
def test_metadata_leads_to_no_file_outside(name: str, tmp_path: Path) -> None:
    metadata = small(tmp_path / "c")
    metadata.storage_data = {k: replace(v, relative_path=name) for k, v in metadata.storage_data.items()}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copy(tmp_path / "c" / "__0_0.distcp", tmp_path / "secret.distcp")
    with pytest.raises(CheckpointError, match="no file of its folder"):
        load_dcp(tmp_path / "c")


def test_boxes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    metadata = small(tmp_path)
    entry = metadata.state_dict_metadata["model.w"]
    box, size = entry.chunks[0], entry.size
    for chunks, said, match in (
        ([box, box], size, "overlap, or leave"),
        ([], size, "overlap, or leave"),
        ([box], torch.Size((2, 4)), "overlap, or leave"),
        ([box], torch.Size((1, 3)), "does not fit it"),
        ([replace(box, sizes=torch.Size((2**31, 2**31)))], torch.Size((2**31, 2**31)), "is said to be in"),
        ([replace(box, offsets=torch.Size((1, 0)))], size, "and not where"),
    ):
        entry.chunks, entry.size = chunks, said
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=match):
            load_dcp(tmp_path)


def test_other_bytes_than_the_metadata_says_are_noticed(tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    at = raw.index(torch.arange(6.0).numpy().tobytes())
    raw[at + 9] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="CRC-32"):
        load_dcp(tmp_path).tensor("w")


def test_a_save_that_fails_leaves_no_metadata(tmp_path: Path) -> None:
    small(tmp_path)

    def job(rank: int) -> None:
        part = buffer("w", torch.ones(2, 3))  # both ranks give all of it
        save_dcp(tmp_path, [part], {}, None)

    with pytest.raises(sim.RankError, match="given twice"):
        sim.run(2, job)
    assert not (tmp_path / ".metadata").exists()


class Scaled(torch.nn.Module):
    """A parameter without dims, and a module with the name of what an optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.state = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.state(x) * self.scale).square().sum()
        return found


def scaled(optimizer: str = "AdamW") -> ZeroOptimizer:
    torch.manual_seed(0)
    model = Scaled()
    zoo = ZeroOptimizer(model, stage=2, optimizer=optimizer, lr=0.1)
    for _ in range(2):
        zoo.backward(model(torch.ones(1, 2)))
        zoo.step()
        zoo.zero_grad()
    return zoo


def test_states_of_a_parameter_without_dims_come_back(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        zoo = scaled()
        save_dcp(tmp_path, zoo.state_slices(), zoo.state_scalars(), zoo.comm)
        found = load_dcp(tmp_path, zoo.comm)
        assert set(found.roles["scale"]) == {"parameter", "exp_avg", "exp_avg_sq"}
        assert found.scalars == dict.fromkeys(("step/scale", "step/state.weight", "step/state.bias"), 2)
        other = ZeroOptimizer(Scaled(), stage=3, optimizer="AdamW", lr=0.1)
        other.load_state(found.read, found.scalars)
        before = {(s.name, s.role): s.tensor.clone() for s in zoo.state_slices() if s.name == "scale" and s.length}
        after = {(s.name, s.role): s.tensor.clone() for s in other.state_slices() if s.name == "scale" and s.length}
        assert before == after

    sim.run(2, job)


def test_numbers_of_a_parameter_without_dims_stay_numbers(tmp_path: Path) -> None:
    model = Scaled()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"optimizer": optimizer_state, "model": state}, checkpoint_id=tmp_path, no_dist=True)
    found = load_dcp(tmp_path)
    assert set(found.roles["scale"]) == {"parameter", "exp_avg", "exp_avg_sq"}
    assert {key.partition("/")[0] for key in found.scalars if key.endswith("/scale")} == {"step", "mu_product"}


def test_a_module_called_state_is_none_of_the_optimizer(tmp_path: Path) -> None:
    zoo = scaled()
    save_dcp(tmp_path, zoo.state_slices(), zoo.state_scalars(), zoo.comm)
    paths = pickle.loads((tmp_path / ".metadata").read_bytes()).planner_data  # of which torch makes nested dicts
    assert paths["model.state.weight"] == ("model", "state.weight")
    assert paths["optimizer.state.state.weight.exp_avg"] == ("optimizer", "state", "state.weight", "exp_avg")


class Payload:
    """Pickled as a call."""

    def __reduce__(self) -> Any:
        return (shutil.copy, ("/etc/hostname", "canary"))


def test_metadata_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = small(tmp_path / "c")
    metadata.planner_data = Payload()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    found = load_dcp(tmp_path / "c")
    assert torch.equal(found.tensor("w"), torch.arange(6.0).view(2, 3))
    assert "shutil.copy" in [unknown.name for _, unknown in found.unknown]
    assert not (tmp_path / "canary").exists()


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_mutants_are_refused_or_read(name: str, tmp_path: Path) -> None:
    small(tmp_path)
    file = tmp_path / name
    raw, size = file.read_bytes(), sum(f.stat().st_size for f in tmp_path.iterdir())

    def read() -> None:
        found = load_dcp(tmp_path)
        for key, roles in found.roles.items():
            for role in roles:
                found.tensor(key, role)

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        file.write_bytes(mutants.mutant(raw, changes))
        mutants.harmless(read, size)

    check()
