"""One rank that loads its part: the memory that this takes, and the bytes that are read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.launch import answer


def _resident(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:"))
    return 1024 * int(line.split()[1])


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _load(spec: dict[str, Any], folder: str, mesh: Any) -> dict[str, Any]:
    from transformers import AutoConfig, LlamaForCausalLM

    from zoo.checkpointing.foreign import load_safetensors
    from zoo.tensor import load, parameters_on_meta, plan_of, split

    with parameters_on_meta():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    split(model, plan_of(model), mesh, training=spec["training"])
    sizes = [parameter.nbytes for parameter in model.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, read, begun = _resident("VmRSS"), _bytes_read(), time.process_time()
    load(model, load_safetensors(folder))
    return {
        "boxes": sum(sizes), "largest": max(sizes), "peak": _resident("VmHWM") - before, "read": _bytes_read() - read,
        "cpu_s": time.process_time() - begun,
    }  # fmt: skip


def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Figures of the second folder; the first brings in what is imported and kept once."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (spec["degree"],), mesh_dim_names=("tensor",))
    for folder in spec["folders"]:
        found = _load(spec, folder, mesh)
    return found


if __name__ == "__main__":
    answer(measure)
