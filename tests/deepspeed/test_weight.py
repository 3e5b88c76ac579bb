"""What a program pays for that asks for little: counted modules of zoo, in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, torch
import zoo.deepspeed
zoo.deepspeed.install_as_deepspeed()
import deepspeed
deepspeed.initialize(model=torch.nn.Linear(4, 4), config={
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": %d},
})
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "zoo")))
"""


def modules_at(stage: int) -> list[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM % stage], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_a_small_configuration_imports_the_packages_of_its_own_sections() -> None:
    found = modules_at(2)
    assert len(found) <= 200, found
    packages = {".".join(name.split(".")[:2]) for name in found}
    assert not packages & {
        "zoo.pipe",
        "zoo.moe",
        "zoo.tensor",
        "zoo.compression",
        "zoo.data_efficiency",
        "zoo.train",
        "zoo.sim",
    }
    unneeded = ("zoo.checkpointing.", "zoo.comm.shared", "zoo.kernels.building.cuda", "zoo.monitor.tensorboard")
    assert not [name for name in found if name.startswith(unneeded)]
