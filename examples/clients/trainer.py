"""Train a language model with transformers.Trainer and a DeepSpeed configuration.

torchrun --nproc-per-node=2 examples/clients/trainer.py --model llama --stage 3
"""

from __future__ import annotations

from typing import Any

import torch
from common import (
    ACCUMULATION,
    BY_HAND,
    CONFIGS,
    LEARNING_RATE,
    MICRO_BATCH,
    WARMUP,
    WEIGHT_DECAY,
    Record,
    arguments,
    ds_config,
    make_state,
    text,
)
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class RecordingTrainer(Trainer):
    """Notes the loss of each micro-batch."""

    record: Record

    def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*inputs, **named)
        self.record.loss(loss * self.args.gradient_accumulation_steps)
        return loss


class Steps(TrainerCallback):
    """Notes the gradient norm of each step; stops where the program is told to."""

    def __init__(self, record: Record, stop: int | None) -> None:
        self.record = record
        self.stop = stop

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.record.step(logs.get("grad_norm"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.stop


def training_arguments(args: Any) -> dict[str, Any]:
    """What every program with a Trainer says to it."""
    return {
        "output_dir": str(args.folder),
        "deepspeed": ds_config(args.stage, args.offload),
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": args.steps,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "warmup_steps": WARMUP,
        "max_grad_norm": args.clipping,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if args.save else "no",
        "save_steps": args.save or 500,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        "accelerator_config": {"use_configured_state": BY_HAND},
    }


def train(trainer: Trainer, args: Any) -> None:
    record = Record()
    trainer.record = record
    trainer.add_callback(Steps(record, args.stop))
    trainer.train(resume_from_checkpoint=args.resume or None)
    if args.export:
        trainer.save_model(str(args.export))
        record.probe(trainer.model)
    record.write(args.out)


def main() -> None:
    args = arguments(__doc__)
    make_state()
    training = TrainingArguments(**training_arguments(args))
    set_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model])
    train(RecordingTrainer(model=model, args=training, train_dataset=text(args.steps)), args)


if __name__ == "__main__":
    main()
