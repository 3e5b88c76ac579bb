"""One rank of two that train the same model with zoo's engine and with DeepSpeed's: both curves, as JSON.

Run as a program by ``test_peer.py``: ``python peer.py RANK PORT STAGE``. Needs the package ``deepspeed``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

RANKS, STEPS, ACCUMULATION, MICRO = 2, 20, 2, 4


def config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": RANKS * ACCUMULATION * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": STEPS + 5, "warmup_max_lr": 0.02},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def main(rank: int, port: str, stage: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}",  # its compiler's ninja
    }  # fmt: skip
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    import deepspeed

    from zoo.engine import initialize

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    dice = torch.Generator().manual_seed(100 + rank)
    batches = [torch.randn(MICRO, 6, generator=dice) for _ in range(STEPS * ACCUMULATION)]

    def curve(engine: Any) -> list[float]:
        found = []
        for x in batches:
            loss = (engine(x) - x.sum(1, keepdim=True).sin()).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        return found

    peer = copy.deepcopy(model)
    ours = curve(initialize(config(stage), model)[0])
    theirs = curve(
        deepspeed.initialize(
            model=peer,
            model_parameters=peer.parameters(),
            config={**config(stage), "zero_force_ds_cpu_optimizer": False},
            dist_init_required=False,
        )[0]
    )
    print(json.dumps({"ours": ours, "theirs": theirs}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
