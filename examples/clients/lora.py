"""Train a LoRA adapter of PEFT with transformers.Trainer and a DeepSpeed configuration.

torchrun --nproc-per-node=2 examples/clients/lora.py --model llama --stage 3
"""

from __future__ import annotations

import torch
from common import arguments, hub, make_state, text
from peft import LoraConfig, get_peft_model
from trainer import RecordingTrainer, train, training_arguments
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj"], "qwen3_moe": ["q_proj", "v_proj"]}


def main() -> None:
    args = arguments(__doc__)
    base = hub(args)  # before there is a group of processes, in which transformers writes on one rank only
    make_state()
    training = TrainingArguments(**training_arguments(args))
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(
        model,
        LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS[args.model], task_type="CAUSAL_LM"),
    )
    train(RecordingTrainer(model=model, args=training, train_dataset=text(args.steps)), args)


if __name__ == "__main__":
    main()
