"""Train a language model with a plain loop of Accelerate and its DeepSpeed plug-in.

torchrun --nproc-per-node=2 examples/clients/accelerate_loop.py --model llama --stage 3
"""

from __future__ import annotations

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from common import (
    ACCUMULATION,
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
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

# Gathered whole at stage 3: which experts a rank uses depends on its data.
BLOCKS_OF_EXPERTS = {"qwen3_moe": "Qwen3MoeSparseMoeBlock"}


def main() -> None:
    args = arguments(__doc__)
    make_state()
    config = ds_config(args.stage, args.offload) | {
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": args.clipping,
    }
    config["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    plugin = DeepSpeedPlugin(hf_ds_config=config, transformer_moe_cls_names=BLOCKS_OF_EXPERTS.get(args.model))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    set_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model])
    optimizer = DummyOptim(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    # The total is one of all processes: Accelerate divides it by their number.
    scheduler = DummyScheduler(
        optimizer, total_num_steps=args.steps * accelerator.num_processes, warmup_num_steps=WARMUP
    )
    loader = DataLoader(text(args.steps), batch_size=MICRO_BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    record, done = Record(), 0
    if args.resume:
        done = int((args.folder / "newest").read_text())
        accelerator.load_state(str(args.folder / f"step{done}"))
        loader = accelerator.skip_first_batches(loader, done * ACCUMULATION)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.clipping)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        record.loss(loss)
        if not accelerator.sync_gradients:
            continue
        record.step(norm)
        done += 1
        if args.save and done % args.save == 0:
            accelerator.save_state(str(args.folder / f"step{done}"))
            if accelerator.is_main_process:
                (args.folder / "newest").write_text(str(done))
        if done == args.stop:
            break
    if args.export:
        state = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            args.export, is_main_process=accelerator.is_main_process, state_dict=state
        )
        record.probe(model)
    record.write(args.out)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
