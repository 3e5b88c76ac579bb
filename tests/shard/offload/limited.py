"""``python limited.py FOLDER LIMIT_MIB WIDTH LAYERS STEPS [DTYPE]``: trains from NVMe under a limit, prints JSON.

``LIMIT_MIB`` is what the process may allocate beyond what it has after a small run has loaded every library; 0 is no
limit, and no offloading. The kernel enforces it (RLIMIT_DATA: all private writable memory).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.optim import AdamW
from zoo.zero import Init, Precision, Stage3Optimizer


def status_bytes(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Block(nn.Module):
    """x + W·x / 4: the signal lives through hundreds of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.25 * self.layer(x)


def run(width: int, layers: int, options: dict[str, Any], steps: int) -> tuple[list[float], int]:
    with Init(config={"zero_optimization": {"stage": 3, "offload_param": options["offload_param"]}}):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
    optimizer = Stage3Optimizer(model, optimizer=AdamW, lr=1e-3, sub_group_size=2**20, **options)
    losses = []
    for step in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 2 * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    forecast = optimizer.forecast()
    states = sum(forecast.tiers.values())
    return losses, states


def main() -> None:
    folder, limit = sys.argv[1], int(sys.argv[2]) * 2**20
    width, layers = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    # One arena of malloc (M_ARENA_MAX = 1): those of other threads reserve 64 MiB each of what is limited.
    ctypes.CDLL(None).mallopt(-8, 1)
    nvme = {"device": "nvme", "nvme_path": folder}
    offloaded: dict[str, Any] = {
        "offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": nvme, "offload_host_bytes": 64 * 2**20,
        "max_live_parameters": 0,
    }  # fmt: skip
    here: dict[str, Any] = {"offload_param": {"device": "none"}}
    for options in (offloaded, here):
        options["precision"] = Precision(param=getattr(torch, sys.argv[6]) if len(sys.argv) > 6 else None)
    run(64, 2, offloaded, 2)
    gc.collect()  # what that used is free again before anything is counted
    before = status_bytes("VmData")
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, resource.RLIM_INFINITY))
    rss = status_bytes("VmRSS")
    losses, states = run(width, layers, offloaded if limit else here, int(sys.argv[5]))
    found = {
        "losses": losses,
        "states_bytes": states,
        "limit_bytes": before + limit,
        "rss_growth_bytes": status_bytes("VmHWM") - rss,
    }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
