"""Fine-tune a language model on prompts and answers with TRL's SFTTrainer and a DeepSpeed configuration.

torchrun --nproc-per-node=2 examples/clients/sft.py --model llama --stage 3
"""

from __future__ import annotations

import string

from common import ACCUMULATION, CONFIGS, MICRO_BATCH, arguments, make_state
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import RecordingTrainer, train, training_arguments
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


class RecordingSFT(RecordingTrainer, SFTTrainer):
    """SFTTrainer that notes the loss of each micro-batch."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", " ", "="])}
    words |= {letter: len(words) + index for index, letter in enumerate(string.ascii_lowercase + string.digits)}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def conversations(count: int) -> Dataset:
    """Turn a word round; no two prompts alike, and of several lengths."""
    letters = string.ascii_lowercase
    words = [letters[i % 26] + letters[(3 * i + i // 26) % 26] + letters[(7 * i) % 26] * (i % 4) for i in range(count)]
    return Dataset.from_dict(
        {"prompt": [f"{word} =" for word in words], "completion": [f" {word[::-1]}" for word in words]}
    )


def main() -> None:
    args = arguments(__doc__)
    make_state()
    training = SFTConfig(
        **training_arguments(args), max_length=32, bf16=False, gradient_checkpointing=False, dataset_num_proc=None
    )
    set_seed(7)
    trainer = RecordingSFT(
        model=AutoModelForCausalLM.from_config(CONFIGS[args.model]),
        args=training,
        train_dataset=conversations(args.steps * MICRO_BATCH * ACCUMULATION * training.world_size),
        processing_class=tokenizer(),
    )
    train(trainer, args)


if __name__ == "__main__":
    main()
