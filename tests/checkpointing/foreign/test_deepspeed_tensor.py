"""Checkpoints that AutoTP wrote: whole tensors from the parts of all ranks, and training that goes on at any degree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.foreign.golden_model import BEFORE, LR, PARTS, Cut, batches, loss_of
from tests.checkpointing.foreign.test_deepspeed import GOLDEN, opened
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import load_deepspeed
from zoo.checkpointing.foreign.deepspeed_tensor import join
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.tensor import plan_of_partition_config, split
from zoo.zero import ZeroOptimizer


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "stage", "degree"), [
    ("tensor_stage0", 1, 1), ("tensor_stage1", 0, 2), ("tensor_stage1", 3, 3), ("tensor_stage3", 2, 2),
])  # fmt: skip
def test_training_goes_on_with_the_losses_of_deepspeed(name: str, stage: int, degree: int) -> None:
    theirs = json.loads((GOLDEN / name / "losses.json").read_text())[0]

    def fn(rank: int) -> list[float]:
        found, model = opened(name), Cut()
        mesh = init_device_mesh("cpu", (1, degree), mesh_dim_names=("data", "tensor"))
        split(model, plan_of_partition_config(model, PARTS["partition_config"], degree), mesh)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.AdamW, lr=LR, clip_norm=1.0, mesh=mesh, data_axes=["data"]
        )
        optimizer.load_state(found.read, found.scalars)
        mine = []
        for batch in batches(0)[BEFORE:]:
            loss = loss_of(model, batch)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mine.append(float(loss.detach()))
        return mine

    for mine in sim.run(degree, fn):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


Shards = dict[str, list[torch.Tensor]]


def write(folder: Path, shards: Shards, info: dict[str, Any], data: int = 2) -> Path:
    """Stage 3, as DeepSpeed writes it: each tensor rank's parameters, one after the other, over ``data`` ranks."""
    folder.mkdir(parents=True)
    for rank in range(len(next(iter(shards.values())))):
        parts = {name: of_ranks[rank] for name, of_ranks in shards.items()}
        each = [torch.nn.functional.pad(p.flatten(), (0, -p.numel() % data)).chunk(data) for p in parts.values()]
        for place in range(data):
            flat = torch.cat([chunks[place] for chunks in each])
            state = {"state": {0: {"exp_avg": flat * 10}}, "param_groups": [{"params": [0]}]}
            if place:  # as it was at times
                state = {"state": [{"exp_avg": flat * 10}], "param_groups": [{}]}
            zero = {"zero_stage": 3, "fp32_flat_groups": [flat], "optimizer_state_dict": state}
            stem = f"zero_pp_rank_{place}_mp_rank_{rank:02d}"
            model = {
                "param_shapes": [{name: p.shape for name, p in parts.items()}], "universal_checkpoint_info": info,
                "mp_world_size": len(shards[next(iter(shards))]), "module": {},
            }  # fmt: skip
            torch.save(model, folder / f"{stem}_model_states.pt")
            torch.save({"optimizer_state_dict": zero}, folder / f"{stem}_optim_states.pt")
    return folder


def matrix(rows: int, columns: int = 4) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def blocks(whole: torch.Tensor, widths: list[list[int]], dim: int = 0) -> list[torch.Tensor]:
    """What each rank has of blocks that are dealt each for itself."""
    dealt = [block.split(w, dim) for block, w in zip(whole.split([sum(w) for w in widths], dim), widths, strict=True)]
    return [torch.cat([parts[rank] for parts in dealt], dim) for rank in range(len(widths[0]))]


def entry(name: str, shape: list[Any], dim: int) -> dict[str, Any]:
    return {"patterns": [rf"^{name}$"], "shape": shape, "partition_dim": dim}


UNEVEN = [[4, 2], [2, 1], [2, 1]]


@pytest.mark.parametrize(("whole", "parts", "info"), [
    (matrix(7), list(matrix(7).split([4, 3])), {}),
    (matrix(3, 7), list(matrix(3, 7).split([4, 3], 1)), {"parameter_with_row_parallelism_patterns": [r"^w$"]}),
    (matrix(2), [matrix(2)] * 2, {"tp_replicated_parameter_patterns": ["^w$"]}),
    (matrix(12), blocks(matrix(12), UNEVEN),
     {"parameter_with_sub_params": [entry("w", [(6, 3, 3), -1], 0)], "sub_param_shard_widths": {"^w$": UNEVEN}}),
    (matrix(12), blocks(matrix(12), [[3, 3], [3, 3]]), {"parameter_with_2_sub_params_cat_dim_0": ["^w$"]}),
    (matrix(3, 8), blocks(matrix(3, 8), [[2, 2], [2, 2]], 1),
     {"parameter_with_sub_params": [entry("w", [-1, (4, 4)], 1)]}),
    (matrix(12), [torch.cat([matrix(12)[:4], matrix(12)[6:10]]), torch.cat([matrix(12)[4:6], matrix(12)[10:]])],
     {"parameter_with_sub_params": [entry("w", [2, (3,), 2, -1], 1)], "sub_param_shard_widths": {"^w$": [[2, 1]]}}),
])  # fmt: skip
def test_parts_of_ranks_are_put_together(
    tmp_path: Path, whole: torch.Tensor, parts: list[torch.Tensor], info: dict[str, Any]
) -> None:  # fmt: skip
    write(tmp_path / "step", {"w": parts, "b": [torch.ones(3)] * 2}, {
        "tp_replicated_parameter_patterns": ["^b$"], **info,
        **({"tp_replicated_parameter_patterns": ["^b$", "^w$"]} if "tp_replicated_parameter_patterns" in info else {}),
    })  # fmt: skip
    found = load_deepspeed(tmp_path, "step")
    assert torch.equal(found.tensor("w"), whole)
    assert torch.equal(found.tensor("w", "exp_avg"), whole * 10)
    assert found.shapes["b"] == (3,)
    assert found.world_size == 4


@pytest.mark.matrix
@pytest.mark.parametrize(("info", "told"), [
    ({"autotp_unsupported_parameter_patterns": {"^w$": "interleaved"}}, "'w' .* DeepSpeed itself does not say"),
    ({"parameter_to_average_patterns": ["^w$"]}, "'w' .* of which DeepSpeed takes the mean"),
    ({"parameter_with_sub_params": [entry("w", [2, -1], 0)]}, "'w'; it takes the sizes of blocks"),
    ({"parameter_with_sub_params": [entry("w", [(5, 2), -1], 0)]}, r"'w' has blocks of \[5, 2\] over 2 ranks"),
    ({"parameter_with_sub_params": [entry("w", [(4, 4), -1], 0)]}, "makes 8 of a dim of 7"),
    ({"parameter_with_sub_params": [entry("w", [(4, 3), -1], 0)],
      "sub_param_shard_widths": {"^w$": [[3, 1], [2, 1]]}}, "to a rank that has the shape"),
    ({"tp_replicated_parameter_patterns": ["^w$"]}, "of several shapes"),
    ({"tp_replicated_parameter_patterns": ["(a+)+$"]}, "no name with a few wildcards"),
    ({"tp_replicated_parameter_patterns": [".*.*.*.*x"]}, "no name with a few wildcards"),
    ([1], "is a list, not a dict"),
    ({"tp_replicated_parameter_patterns": [r"\d" * 40 + "("]}, "no name with a few wildcards"),
    ({"parameter_with_row_parallelism_patterns": "^w$"}, "parameter_with_row_parallelism_patterns .* a list of names"),
    ({"parameter_with_row_parallelism_patterns": [3]}, "parameter_with_row_parallelism_patterns .* a list of names"),
    ({"parameter_with_sub_params": {"patterns": ["^w$"]}}, "parameter_with_sub_params .* a list of dicts"),
    ({"parameter_with_sub_params": 5}, "parameter_with_sub_params .* a list of dicts"),
    ({"parameter_with_sub_params": [entry("w", [4 * 10**9, (2, 2), -1], 1)]}, "makes 16000000000 of a dim of 7"),
    ({"parameter_with_sub_params": [entry("w", [(2,) * 10**5, -1], 0)]}, "makes 200000 of a dim of 7"),
    *(({"parameter_with_sub_params": [entry("w", [(4, 3), -1], 0)], "sub_param_shard_widths": {"^w$": widths}},
       "sub_param_shard_widths says .* of 'w'")
      for widths in (None, [3, 4], [["a", 2], [2, 1]], [[2.9, 1.1], [2, 1]], [[math.inf, 2], [2, 1]],
                     [[6, -2], [-2, 5]])),
])  # fmt: skip
def test_what_does_not_fit_together_is_told(tmp_path: Path, info: Any, told: str) -> None:
    write(tmp_path / "step", {"w": list(matrix(7).split([4, 3]))}, info)
    with pytest.raises(CheckpointError, match=told):
        load_deepspeed(tmp_path, "step")


@pytest.mark.parametrize("shapes", [[(4, 6), ()], [(), (4, 6)], [(4, 6), (24,)], [(24,), (4, 6)], [(4, 6), (4, 5)]])
def test_parts_of_other_shapes_are_told(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    write(tmp_path / "step", {"w": [torch.ones(shape) for shape in shapes]}, {"x": 1})
    with pytest.raises(CheckpointError, match=r"'w', and of several shapes|'w' overlap"):
        load_deepspeed(tmp_path, "step")


def test_ranks_with_other_roles_are_told(tmp_path: Path) -> None:
    ranks = [ForeignCheckpoint("step", tmp_path) for _ in range(2)]
    for rank, role in zip(ranks, ("parameter", "master"), strict=True):
        rank.add_whole("w", role, Held(matrix(3)))
    with pytest.raises(CheckpointError, match="'w' as parameter, and as master"):
        join(ForeignCheckpoint("step", tmp_path), ranks, {})


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype, self.numel, self.shape = tensor, tensor.dtype, tensor.numel(), tuple(tensor.shape)

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        return self.tensor.reshape(-1)[start : None if length is None else start + length]


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "step", {"w": list(matrix(6).split(2))}, {"x": 1})
    for file in folder.glob("*mp_rank_01*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"written by 3 tensor-parallel ranks; it has files of \[0, 2\]"):
        load_deepspeed(tmp_path, "step")
