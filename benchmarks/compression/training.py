"""What ``init_compression`` makes of a trained model: few bits and zeros, with training after it and without."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.compression.jobs import Job
from torch import nn

from zoo.compression import CompressionScheduler, init_compression, redundancy_clean
from zoo.compression.post_training.recipe import chosen

KEPT_BITS = 16
"""Of a value that is not zero, where values have no fewer bits; which ones are kept takes one bit an element."""


@dataclass(frozen=True)
class Sections:
    """What is asked of all linear layers.

    Attributes:
        bits: of weights, in symmetric groups; 0: as they are.
        zeros: the share of zeros; pattern: N:M, instead of single weights.
        method: of pruning.
        trained: for ``steps`` further steps.
    """

    bits: int = 0
    zeros: float = 0.0
    pattern: str = ""
    method: str = "l1"
    trained: bool = False

    def config(self, model: nn.Module, job: Job, steps: int) -> dict[str, Any]:
        """The section ``compression_training``."""
        found: dict[str, Any] = {}
        names = {f"^{re.escape(name)}$": m for m, name in chosen(model, job.leave_out).items()}
        if self.bits:
            found["weight_quantization"] = {
                "shared_parameters": {"enabled": True, "quantize_weight_in_forward": True},
                "different_groups": {
                    name: {"params": {"start_bits": self.bits, "target_bits": self.bits,
                                      "group_size": min(job.group_size, module.in_features)},
                           "modules": [name]}
                    for name, module in names.items()
                },
            }  # fmt: skip
        if self.zeros:
            shared: dict[str, Any] = {"enabled": True, "method": self.method}
            if self.pattern:
                shared["block_pattern"] = self.pattern
            params = {} if self.pattern else {"dense_ratio": 1 - self.zeros}
            if self.method == "snip_momentum":
                # All of it after two thirds, so that what stays can settle.
                shared.update(schedule_offset_end=steps * 2 // 3, schedule_offset_stride=steps // 15, **params)
                shared.setdefault("block_pattern", "1x1")
                params = {}
            found["sparse_pruning"] = {
                "shared_parameters": shared, "different_groups": {"all": {"params": params, "modules": list(names)}},
            }  # fmt: skip
        return {"compression_training": found}

    def bits_a_weight(self, job: Job) -> float:
        """With scales, and one bit an element that says whether it is kept."""
        code = {1: 1.0, 2: math.log2(3)}.get(self.bits, self.bits) or KEPT_BITS
        return (1 - self.zeros) * code + (self.zeros > 0) + (32 / job.group_size if self.bits else 0)


def contenders(job: Job) -> Mapping[str, Sections]:
    """By name; those that are trained only where a job can be."""
    found = {}
    for zeros, pattern in ((0.5, ""), (0.75, ""), (0.9, ""), (0.5, "2:4")):
        name = f"{pattern or f'{100 * zeros:.0f} %'} zeros"
        found[f"{name}, magnitude"] = Sections(zeros=zeros, pattern=pattern)
        found[f"{name}, magnitude, trained"] = Sections(zeros=zeros, pattern=pattern, trained=True)
        if not pattern:
            found[f"{name}, snip_momentum, trained"] = Sections(zeros=zeros, method="snip_momentum", trained=True)
    for bits, name in ((4, "int4"), (3, "int3"), (2, "ternary"), (1, "binary")):
        found[f"{name}, trained"] = Sections(bits=bits, trained=True)
    found["2:4 zeros and int4, trained"] = Sections(bits=4, zeros=0.5, pattern="2:4", trained=True)
    found["fp32, trained"] = Sections(trained=True)
    return {name: sections for name, sections in found.items() if job.loss is not None or not sections.trained}


def compressed(job: Job, sections: Sections, steps: int) -> nn.Module:
    """A cleaned model."""
    model = job.make()
    config = sections.config(model, job, steps)
    asked = any(config["compression_training"].values())
    if asked:
        model = init_compression(model, config)
    if sections.trained:
        with torch.enable_grad():
            _train(job, model, CompressionScheduler(model) if asked else None, steps)
    return redundancy_clean(model, config).eval() if asked else model


def _train(job: Job, model: nn.Module, scheduler: CompressionScheduler | None, steps: int) -> None:
    """AdamW, without decay; the rate falls along a cosine to a twentieth."""
    assert job.loss is not None
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = job.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.zero_grad()
        job.loss(model, step).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    model.eval()
