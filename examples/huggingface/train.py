"""A Hugging Face model of your own under ZeRO stage 3.

zoo launch --ranks 2 examples/huggingface/train.py                      a small Llama with new weights
zoo launch --ranks 4 examples/huggingface/train.py --model FOLDER --text FILE    a model of your own, on four GPUs
zoo launch --ranks 1 examples/huggingface/train.py --resume --steps 20  go on, here on one rank
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from zoo.comm import init_distributed, local_device
from zoo.engine import initialize

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip


class Text(torch.utils.data.Dataset):
    """A file as sequences of tokens: those of the model's tokenizer; bytes for the small model, which has none."""

    def __init__(self, path: Path, model: str | None, length: int) -> None:
        if model is None:
            tokens = list(path.read_bytes())
        else:
            tokens = AutoTokenizer.from_pretrained(model)(path.read_text(encoding="utf-8"))["input_ids"]
        self.rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="what from_pretrained takes: a folder with its tokenizer, or a name on the Hub")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--config", default=str(Path(__file__).with_name("config.json")))
    parser.add_argument("--out", default="runs/huggingface")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    init_distributed()
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_pretrained if args.model else AutoModelForCausalLM.from_config
    model = make(args.model or SMALL).to(local_device())
    engine, _, loader, _ = initialize(args.config, model, training_data=Text(args.text, args.model, args.length))
    if args.resume:
        engine.load_checkpoint(args.out)
    while engine.global_steps < args.steps:
        for batch in loader:  # each rank gets its own sequences; 16 of all ranks are a step
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if engine.global_steps == args.steps:
                break
    engine.save_checkpoint(args.out)
    engine.wait_for_checkpoint()
    engine.save_16bit_model(f"{args.out}/model")
    if torch.distributed.get_rank() == 0:
        model.config.save_pretrained(f"{args.out}/model")
        print(f"step {engine.global_steps}: loss {engine.record.loss:.3f}; the model is in {args.out}/model")


if __name__ == "__main__":
    main()
