"""What a measuring process asks about itself, and what it does before it is measured."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import torch
import torch.distributed as dist


def status_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes, e.g. VmRSS or VmHWM."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def reset_peak() -> int:
    """Start a new peak of the resident set; returns its size now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def warm_up() -> None:
    """Let libraries allocate what they keep: arithmetic, backward, an optimizer step and collectives, all small."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    tensor = torch.ones(4096)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(torch.empty(4096 * dist.get_world_size()), tensor)
    dist.barrier()
