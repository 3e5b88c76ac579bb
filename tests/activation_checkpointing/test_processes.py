"""Real processes: the group of a gloo job, and what a killed process leaves on the disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tests.processes import run, run_ranks
from torch import nn

from zoo.activation_checkpointing import checkpoint, configure, current, model_parallel_cuda_manual_seed


class Mpu:
    def get_tensor_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_tensor_model_parallel_group(self) -> object:
        return torch.distributed.group.WORLD


def gradients(rank: int, folder: str) -> tuple[list[float], list[float], list[int]]:
    """With checkpoints and without; what waited after each forward."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(3)]
    found, waited = [], []
    for section in (None, {}, {"nvme_path": folder}):
        document = None if section is None else {"activation_checkpointing": section}
        configure(Mpu(), document, partition_activations=True)
        model_parallel_cuda_manual_seed(7)
        x = torch.randn(5, 64).requires_grad_()
        y = x
        for layer in layers:
            y = layer(y) if section is None else checkpoint(layer, y)
        waited.append(current().saved_bytes)
        y.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad.flatten().tolist())
    assert found[1] == found[2]
    return found[0], found[1], waited


def test_ranks_of_a_gloo_job_share_what_is_saved(tmp_path: Path) -> None:
    for rank, (expected, found, waited) in run_ranks(2, gradients, str(tmp_path)).items():
        assert found == expected, rank
        assert waited == [0, 3 * 5 * 64 * 4 // 2, 3 * 5 * 64 * 4 // 2]
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, torch
from zoo.activation_checkpointing import ActivationCheckpointing
from zoo.activation_checkpointing.storages import Nvme
storage = Nvme(sys.argv[1])
y = torch.randn(100_000, requires_grad=True)
for _ in range(4):
    y = ActivationCheckpointing(storage=storage)(torch.sin, y)
assert storage.file_bytes > 1_600_000
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run(KILLED, folder).returncode == -9
        assert list(Path(folder).iterdir()) == []
