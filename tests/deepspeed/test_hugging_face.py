"""What accelerate is told on machines without a GPU, and what a program says that was written for one with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo.deepspeed as deepspeed
from zoo import sim


def asked(rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """What a PartialState that is being made holds after it has asked whether the ranks are joined."""
    state = dict(state)
    sys.modules["accelerate.state"] = SimpleNamespace(  # type: ignore[assignment]
        PartialState=SimpleNamespace(_shared_state=state)
    )
    assert deepspeed.comm.is_initialized()
    return state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"backend": None, "distributed_type": "NO"}, True),  # it looks for a backend, and knows none
        ({}, False),  # there is none, or it has not begun
        ({"backend": None, "num_processes": 1}, False),  # it is made already: what it has said stays true
        ({"backend": "nccl"}, False),
    ],
)
def test_a_state_that_is_being_made_without_a_backend_is_told_it(
    before: dict[str, Any], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace())
    [found] = sim.run(1, lambda rank: asked(rank, before))
    if after:
        assert found["backend"] == torch.distributed.Backend(found["backend"])
        assert {**found, "backend": None} == before
    else:
        assert found == before


def test_nccl_without_cuda_is_gloo_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joined: list[Any] = []
    monkeypatch.setattr("zoo.comm.init_distributed", lambda backend, *_: joined.append(backend))
    monkeypatch.setattr("zoo.deepspeed.adapters.root.entry.join_alone", lambda: None)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        for backend in ("nccl", None, "gloo"):
            deepspeed.init_distributed(backend)
    assert joined == ["nccl", None, "gloo", "gloo", None, "gloo"]
    assert [record.getMessage() for record in caplog.records] == [
        "init_distributed('nccl'): there is no CUDA device here; the ranks join over gloo instead."
    ]


@pytest.mark.slow
def test_ranks_of_a_program_that_asks_for_nccl_join(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import deepspeed, sys, torch\n"
        "deepspeed.init_distributed('nccl')\n"
        "deepspeed.init_distributed('nccl')\n"
        "x = torch.ones(1)\n"
        "deepspeed.comm.all_reduce(x)\n"
        "sys.stdout.write(f'{torch.distributed.get_backend()} {int(x)}\\n')\n"
    )
    command = [sys.executable, "-m", "zoo.cli", "run", "--as-deepspeed", "--ranks", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] gloo 2", "[rank 1] gloo 2"], done.stderr[-2000:]
    assert done.stderr.count("there is no CUDA device here") == 2  # one line a rank


PROGRAM = """
import sys
import zoo.deepspeed
zoo.deepspeed.install_as_deepspeed()
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import broadcast, broadcast_object_list, gather_object, pad_across_processes
from torch.utils.data import DataLoader, TensorDataset

config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": "auto"}
config["zero_optimization"] = {"stage": int(sys.argv[1]), "stage3_gather_16bit_weights_on_model_save": True}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
one = loss.detach()
assert accelerator.gather(one).item() == accelerator.reduce(one).item() == broadcast(one).item() == one.item()
assert accelerator.gather_for_metrics(torch.arange(2)).tolist() == [0, 1]
assert (broadcast_object_list([1]), gather_object([1])) == ([1], [1])
assert pad_across_processes(torch.ones(2)).tolist() == [1, 1]
accelerator.wait_for_everyone()
torch.distributed.barrier()
assert accelerator.get_state_dict(model)["weight"].shape == (1, 4)
print("ENDED", accelerator.num_processes, accelerator.distributed_type.value)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_process_without_a_launcher_trains_and_gathers_under_accelerate(stage: int) -> None:
    pytest.importorskip("accelerate", reason="of the extra clients")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE", "RANK", "WORLD_SIZE"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(stage)], env=kept, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ENDED 1 DEEPSPEED" in done.stdout
