"""One rank of a training run with each optimizer: ``python -m benchmarks.onebit.converge``; rank 0 prints JSON.

Two jobs: the digits of scikit-learn, and the byte model of ``examples/bytes`` (the main job), shortened.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.onebit.contenders import ADAMW, CLASSES, LAMB, Schedule, build, kind_of
from benchmarks.onebit.worker import cpu_s
from torch import nn

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run.

    Attributes:
        model: of a seed.
        batch: x and y of (seed, step), over all ranks.
        loss: of a model, x and y.
        held_out: x and y.
        lr: of Adam, and of LAMB.
    """

    model: Callable[[int], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    held_out: tuple[Tensor, Tensor]
    lr: dict[str, float]
    options: dict[str, Any]


def digits() -> Job:
    """8×8 pixels to ten classes by a perceptron; every fifth image is held out; 128 images a step."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    out = torch.arange(len(x)) % 5 == 0
    held_out, x, y = (x[out], y[out]), x[~out], y[~out]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(x), (128,), generator=torch.Generator().manual_seed(1_000_003 * seed + step))
        return x[chosen], y[chosen]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        # Labels are smoothed: without that the loss goes to zero, and its ratios say nothing.
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    lr = {ADAMW: 1e-3, LAMB: 5e-3}
    return Job(
        model=model, batch=batch, loss=loss, held_out=held_out, lr=lr, options={"weight_decay": 0.01, "clip_norm": 1.0}
    )


def main_job() -> Job:
    """``examples/bytes/config.json``: 3 blocks of width 128, 32 windows of 128 bytes a step, and its options."""
    from zoo.examples.byte_lm.model import ByteGPT, ModelConfig
    from zoo.examples.byte_lm.task import ByteTask

    task = ByteTask(ByteTask.Config(layers=3, width=128, heads=4, context=128), seed=0)
    data, validation = task.training_data(), task.validation_data()

    def pairs(dataset: Any, indices: Any) -> tuple[Tensor, Tensor]:
        x, y = zip(*(dataset[int(i)] for i in indices), strict=True)
        return torch.stack(x), torch.stack(y)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return pairs(data, torch.randint(len(data), (32,), generator=generator))  # type: ignore[arg-type]

    return Job(
        model=lambda seed: ByteGPT(ModelConfig(layers=3, width=128, heads=4, context=128), seed=seed),
        batch=batch, loss=lambda model, x, y: model(x, y),
        held_out=pairs(validation, range(128)), lr={ADAMW: 5e-3, LAMB: 1e-2},
        options={"weight_decay": 0.1, "clip_norm": 1.0, "betas": (0.9, 0.95)},
    )  # fmt: skip


JOBS = {"digits": digits, "bytes": main_job}


def rate(step: int, steps: int) -> float:
    """Of the learning rate in step ``step`` (from 1): linear over a tenth, then a cosine to 0.05."""
    warm = steps // 10
    if step <= warm:
        return step / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(job: Job, name: str, seed: int, steps: int, schedule: Schedule, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, and of each step what it sent, what it was, and its CPU time."""
    model = job.model(seed)
    lr = job.lr[LAMB if "Lamb" in name else ADAMW]
    optimizer = build(name, model, schedule, **{**job.options, "lr": lr, **options})
    rank, size = dist.get_rank(), dist.get_world_size()
    losses, sent, kinds, seconds = [], [], [], []
    for step in range(1, steps + 1):
        x, y = (part.chunk(size)[rank] for part in job.batch(seed, step))
        began = cpu_s()
        optimizer.comm.log.reset()
        kinds.append(kind_of(optimizer))
        for group in optimizer.param_groups:
            group["lr"] = lr * rate(step, steps)
        loss = job.loss(model, x, y)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(cpu_s() - began)
        losses.append(loss.detach())
        sent.append(optimizer.comm.log.wire_bytes)
    means = torch.stack(losses)
    dist.all_reduce(means)
    whole = copy_of_the_mean(job, model, seed)
    with torch.no_grad():
        held_out = float(job.loss(whole, *job.held_out))
    optimizer.close()
    # The last twentieth: the loss of a step is that of its batch.
    last = float(means[-max(steps // 20, 1) :].mean() / size)
    return {"name": name, "seed": seed, "held_out": held_out, "last": last, "losses": [float(v) / size for v in means],
            "sent": sent, "kinds": kinds, "cpu_s": seconds}  # fmt: skip


def copy_of_the_mean(job: Job, model: nn.Module, seed: int) -> nn.Module:
    """A model with the mean of the ranks' parameters: after local steps they differ."""
    whole = job.model(seed)
    with torch.no_grad():
        for mine, p in zip(whole.parameters(), model.parameters(), strict=True):
            value = copy.deepcopy(p.detach())
            dist.all_reduce(value)
            mine.copy_(value / dist.get_world_size())
    return whole.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=sorted(JOBS), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", default=list(CLASSES))
    parser.add_argument("--warm-up", type=float, default=0.2, help="share of the run, until v is frozen")
    parser.add_argument("--options", type=json.loads, default={}, help="of all optimizers, in JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = JOBS[args.job]()
    # The distance of 0/1 Adam's steps doubles in as large a share of the run as in its paper.
    schedule = Schedule(freeze_step=round(args.warm_up * args.steps), local_step_scaler=round(0.28 * args.steps))
    found = []
    for seed in args.seeds:
        for name in args.only:
            found.append(train(job, name, seed, args.steps, schedule, args.options))
            if dist.get_rank() == 0:
                print(f"{args.job} {name} {seed}: {found[-1]['held_out']:.4f}", file=sys.stderr)
    if dist.get_rank() == 0:
        json.dump(found, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
