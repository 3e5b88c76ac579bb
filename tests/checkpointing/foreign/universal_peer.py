"""One rank of two on which the real DeepSpeed loads a universal checkpoint and goes on: its losses, as JSON.

Run by ``test_peers.py``: ``python -m tests.checkpointing.foreign.universal_peer FOLDER STAGE RANK PORT``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.checkpointing.foreign.golden_model import (
    BEFORE,
    LR,
    RANKS,
    ROWS,
    Net,
    batches,
    environment,
    groups,
    loss_of,
    one_group,
)


def main(folder: str, stage: int, rank: int, port: str) -> None:
    os.environ |= environment(rank, port)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    import deepspeed

    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()  # so that nothing can be right by itself
    options: dict[str, Any] = {
        "train_batch_size": RANKS * ROWS, "train_micro_batch_size_per_gpu": ROWS, "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 10**6},
        "checkpoint": {"load_universal": True},
    }  # fmt: skip
    given = one_group(model) if stage == 3 else groups(model)
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(given, lr=LR), config=options, dist_init_required=False
    )[0]
    engine.load_checkpoint(folder, tag="uni")
    losses = []
    for batch in batches(rank)[BEFORE:]:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
