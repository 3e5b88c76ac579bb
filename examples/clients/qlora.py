"""Train a LoRA adapter over frozen weights of 4 bits (QLoRA), with transformers.Trainer and a DeepSpeed configuration.

torchrun --nproc-per-node=2 examples/clients/qlora.py --model llama --stage 2
"""

from __future__ import annotations

import torch
from common import arguments, hub, make_state, text
from lora import TARGETS
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from trainer import RecordingTrainer, train, training_arguments
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments, set_seed


def main() -> None:
    args = arguments(__doc__)
    base = hub(args)  # before there is a group of processes, in which transformers writes on one rank only
    make_state()
    training = TrainingArguments(**training_arguments(args))
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.float32 if args.stage == 3 else torch.uint8,
        ),
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(
        model,
        LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS[args.model], task_type="CAUSAL_LM"),
    )
    train(RecordingTrainer(model=model, args=training, train_dataset=text(args.steps)), args)


if __name__ == "__main__":
    main()
