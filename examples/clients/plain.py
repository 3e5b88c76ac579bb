"""Train a language model with deepspeed.initialize and a loop of forward, backward and step.

torchrun --nproc-per-node=2 examples/clients/plain.py --model llama --stage 3
"""

from __future__ import annotations

import deepspeed
import torch
from common import CONFIGS, Record, arguments, filled_config, text
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoModelForCausalLM, set_seed
from transformers.integrations import HfDeepSpeedConfig


def main() -> None:
    args = arguments(__doc__)
    deepspeed.init_distributed()
    config = filled_config(args)
    set_seed(7)
    # While this lives, transformers builds models with their parameters in parts at stage 3.
    keep = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_config(CONFIGS[args.model])
    # What a program does to weights that may be in parts: rank 0 changes the whole tensor, all ranks get it.
    embedding = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters(embedding, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            with torch.no_grad():
                embedding[0].zero_()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=text(args.steps)
    )

    record = Record()
    if args.resume:
        folder, state = engine.load_checkpoint(str(args.folder))
        if folder is None:
            raise SystemExit(f"no checkpoint in {args.folder}")
        print("goes on after step", state["step"], flush=True)
    done = engine.global_steps
    for index, batch in enumerate(loader):
        if index < done * engine.gradient_accumulation_steps():
            continue
        loss = engine(**batch).loss
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        record.loss(loss)
        if not at_boundary:
            continue
        record.step(engine.get_global_grad_norm())
        if args.save and engine.global_steps % args.save == 0:
            engine.save_checkpoint(str(args.folder), client_state={"step": engine.global_steps})
        if engine.global_steps == args.stop:
            break
    if args.export:
        engine.save_16bit_model(str(args.export), "pytorch_model.bin")
        engine.save_checkpoint(str(args.folder), tag="last")
        if deepspeed.comm.get_rank() == 0:
            model.config.save_pretrained(args.export)
            if args.stage > 0:
                weights = get_fp32_state_dict_from_zero_checkpoint(str(args.folder), tag="last")
                model.config.save_pretrained(args.export / "consolidated")
                torch.save(weights, args.export / "consolidated" / "pytorch_model.bin")
        deepspeed.comm.barrier()
        record.probe(engine)
    record.write(args.out)
    deepspeed.comm.barrier()
    del keep


if __name__ == "__main__":
    main()
