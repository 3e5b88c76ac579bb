"""Train with sequences that two ranks share: Accelerate over DeepSpeed's sequence parallelism.

torchrun --nproc-per-node=2 examples/clients/long_sequences.py --model llama --stage 3
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, DummyScheduler, set_seed
from common import ACCUMULATION, CONFIGS, LENGTH, MICRO_BATCH, Record, arguments, filled_config, make_state, text
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

SHARING = 2
"""Ranks that share a sequence."""


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**batch, "position_ids": torch.arange(LENGTH).repeat(len(samples), 1)}


def mean_loss(engine: Any, batch: dict[str, torch.Tensor], group: Any) -> torch.Tensor:
    """Over the tokens of all ranks that share the sequences."""
    labels = batch.pop("shift_labels").contiguous()
    model = engine.module
    logits = engine(**batch).logits
    loss = model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=model.config.vocab_size)
    losses = all_gather(loss, group=group)
    counts = all_gather((labels != -100).sum().float(), group=group)
    return sum(one * count for one, count in zip(losses, counts, strict=True)) / sum(counts)


def main() -> None:
    args = arguments(__doc__)
    make_state()
    config = filled_config(args)
    config |= {"train_batch_size": MICRO_BATCH * ACCUMULATION, "sequence_parallel_size": SHARING}
    sharing = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=SHARING, sp_handler=sharing),
    )
    set_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model], attn_implementation="sdpa")
    optimizer = DummyOptim(model.parameters())
    loader = DataLoader(text(args.steps), batch_size=MICRO_BATCH, collate_fn=collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, DummyScheduler(optimizer))
    from deepspeed.utils import groups

    record, steps = Record(), 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = mean_loss(model, batch, groups._get_sequence_parallel_group())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        record.loss(loss)
        if accelerator.sync_gradients:
            record.step(model.get_global_grad_norm())
            steps += 1
        if steps == args.steps:
            break
    record.write(args.out)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
