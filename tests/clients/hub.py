"""Write what a program of a library would download: a tiny Llama with its tokenizer, data sets, a configuration.

    python tests/clients/hub.py FOLDER STAGE [hybrid]

The folder then holds ``llama``; ``answers``, ``pairs``, ``judged`` and ``questions``, data sets in the forms that TRL
asks for; ``rewards.py`` for its reinforcement learning; and ``ds_config.json``, where asked with ``hybrid_engine``.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[2] / "examples/clients/ds_config.json"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}{% if add_generation_prompt %}= {% endif %}"
)
REWARD = '''
def variety(completions, **_):
    """How many different letters a completion has."""
    return [len(set(completion[0]["content"])) / 10 for completion in completions]
'''


def model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", " ", "=", *string.ascii_letters, *string.digits]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    found.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def data(folder: Path, count: int = 64) -> None:
    """Words to be turned round, of several lengths."""
    dice = random.Random(0)
    words = ["".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 6))) for _ in range(count)]
    rows: dict[str, list[dict[str, Any]]] = {
        "answers": [{"prompt": f"{word} =", "completion": f" {word[::-1]}"} for word in words],
        "pairs": [{"prompt": f"{word} =", "chosen": f" {word[::-1]}", "rejected": f" {word}"} for word in words],
        "judged": [
            {"prompt": f"{word} =", "completion": f" {word[::-1] if n % 2 else word}", "label": bool(n % 2)}
            for n, word in enumerate(words)
        ],
        "questions": [{"prompt": [{"role": "user", "content": word}]} for word in words],
    }
    for name, members in rows.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, members)))


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    model(folder / "llama")
    data(folder)
    (folder / "rewards.py").write_text(REWARD)
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    config["zero_optimization"] |= {
        "stage": stage, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 4096,
        "stage3_param_persistence_threshold": 64,
    }  # fmt: skip
    config["optimizer"]["params"]["torch_adam"] = True
    if "hybrid" in sys.argv[3:]:
        config["hybrid_engine"] = {"enabled": True, "max_out_tokens": 128}
    (folder / "ds_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
