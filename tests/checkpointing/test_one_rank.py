"""Readers and converters on one rank of a job, while the others do something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from zoo import sim
from zoo.checkpointing import consolidation, load, prune
from zoo.checkpointing.foreign import import_checkpoint, open_foreign, save_dcp
from zoo.checkpointing.foreign.deepspeed_universal import write_universal
from zoo.checkpointing.listing import listing
from zoo.comm import Communicator
from zoo.zero import ZeroOptimizer

GOLDEN = Path(__file__).parent / "foreign" / "golden"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def saved(folder: Path) -> None:
    """On two ranks: three checkpoints of zoo, and one of torch's DCP."""
    from zoo.checkpointing import save

    def job(rank: int) -> None:
        one = model()
        optimizer = ZeroOptimizer(one, stage=3, optimizer=torch.optim.AdamW, lr=0.1)
        one(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        slices, scalars = list(optimizer.state_slices()), dict(optimizer.state_scalars())
        for tag in ("step1", "step2", "step3"):
            save(folder / "ours", tag, slices, scalars, {"step": 1}, Communicator())
        save_dcp(folder / "dcp", slices, scalars)

    sim.run(2, job)


def fp32(folder: Path) -> Any:
    return sorted(consolidation.get_fp32_state_dict_from_zero_checkpoint(folder / "ours"))


def lazy(folder: Path) -> Any:
    found = consolidation.get_fp32_state_dict_from_zero_checkpoint(folder / "ours", "step2", lazy_mode=True)
    return {name: list(tensor.contiguous().shape) for name, tensor in found.items()}


def into_a_model(folder: Path) -> Any:
    return consolidation.load_state_dict_from_zero_checkpoint(model(), folder / "ours").weight is not None


def converted(folder: Path) -> Any:
    return [p.name for p in consolidation.convert_zero_checkpoint_to_fp32_state_dict(folder / "ours", folder / "m.bin")]


def listed(folder: Path) -> Any:
    return [(one.tag, one.state) for one in listing(folder / "ours")]


def pruned(folder: Path) -> Any:
    return prune(folder / "ours", 2)


def imported(folder: Path) -> Any:
    found = open_foreign(folder / "dcp")
    return import_checkpoint(found, folder / "imported", "one").name, sorted(found.shapes)


def of_deepspeed(folder: Path) -> Any:
    found = open_foreign(GOLDEN / "stage3" / "step", "deepspeed")
    return import_checkpoint(found, folder / "theirs", "one").name


def universal(folder: Path) -> Any:
    write_universal(folder / "uni", "uni", load(folder / "ours", "step1", Communicator.alone()))
    return (folder / "uni" / "latest_universal").read_text(encoding="utf-8")


NAMES = ["bias", "weight"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("reader", "wanted"),
    [
        (fp32, NAMES), (lazy, {"bias": [4], "weight": [4, 3]}), (into_a_model, True), (converted, ["m.bin"]),
        (listed, [("step1", "whole"), ("step2", "whole"), ("step3", "whole")]), (pruned, ["step1"]),
        (imported, ("one", NAMES)), (of_deepspeed, "one"), (universal, "uni"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reads", [0, 1])
def test_one_rank_reads(tmp_path: Path, reads: int, reader: Callable[[Path], Any], wanted: Any) -> None:
    saved(tmp_path)

    def job(rank: int) -> Any:
        found = reader(tmp_path) if rank == reads else None
        dist.barrier()
        return found

    assert sim.run(2, job)[reads] == wanted
