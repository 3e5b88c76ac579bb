"""Train a language model with Lightning Fabric and its DeepSpeed strategy.

torchrun --nproc-per-node=2 examples/clients/fabric.py --model llama --stage 3
"""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from common import (
    ACCUMULATION,
    CONFIGS,
    LEARNING_RATE,
    MICRO_BATCH,
    WEIGHT_DECAY,
    Record,
    arguments,
    filled_config,
    text,
)
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, Strategy
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed
from transformers.integrations import HfDeepSpeedConfig

BATCH = MICRO_BATCH * ACCUMULATION


class AnyDevice(DeepSpeedStrategy):
    """Lightning's strategy without its questions for CUDA and device numbers, which DeepSpeed does not ask."""

    def setup_environment(self) -> None:
        Strategy.setup_environment(self)
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    def _initialize_engine(
        self, model: nn.Module, optimizer: Any = None, scheduler: Any = None
    ) -> tuple[Any, Any, Any]:
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=self.config, dist_init_required=False
        )
        return engine, optimizer, scheduler


def main() -> None:
    args = arguments(__doc__)
    config = filled_config(args)
    del config["optimizer"], config["scheduler"]
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    # Fabric's optimizer.step() is a step of DeepSpeed's optimizer, which knows nothing of micro-batches.
    config |= {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1}
    fabric = Fabric(
        accelerator="auto",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=AnyDevice(config=config, process_group_backend=None if torch.cuda.is_available() else "gloo"),
    )
    fabric.launch()
    set_seed(7)
    keep = HfDeepSpeedConfig(config)  # transformers builds the model in parts at stage 3
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    model, optimizer = fabric.setup(model, optimizer)
    model.train()
    loader = fabric.setup_dataloaders(DataLoader(text(args.steps), batch_size=BATCH))

    record = Record()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(str(args.folder / "newest"), state)
    for index, batch in enumerate(loader):
        if index < state["step"]:
            continue
        loss = model(**batch).loss
        fabric.backward(loss, model=model)
        optimizer.step()
        optimizer.zero_grad()
        record.loss(loss)
        state["step"] += 1
        record.step()
        if args.save and state["step"] % args.save == 0:
            fabric.save(str(args.folder / "newest"), state)
        if state["step"] == args.stop:
            break
    record.write(args.out)
    fabric.barrier()
    del keep


if __name__ == "__main__":
    main()
