"""What the programs of this folder share: arguments, tiny models, text, the configuration, the record of a run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

VOCABULARY, LENGTH = 64, 16
MICRO_BATCH, ACCUMULATION = 2, 2
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 1e-2, 0.01, 2


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", default="gpt2", choices=sorted(CONFIGS))
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="stage of ZeRO")
    parser.add_argument("--offload", default="none", choices=("none", "cpu"), help="where the optimizer's states are")
    parser.add_argument(
        "--clipping", type=float, default=0.5, help="norm that gradients are clipped to; 0: they are not"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of the whole training")
    parser.add_argument("--stop", type=int, help="stop after this many steps")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="where checkpoints go")
    parser.add_argument("--save", type=int, default=0, help="write a checkpoint after every so many steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the folder")
    parser.add_argument("--export", type=Path, help="write the trained weights here, as from_pretrained reads them")
    parser.add_argument("--out", type=Path, help="write losses and gradient norms of every step here, as JSON")
    return parser.parse_args()


# -- processes of Accelerate without a GPU ----------------------------------------------------------------------------

BY_HAND = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available()
"""With DeepSpeed on CPUs, Accelerate has to be told that there are several processes, or each takes itself for the only
one: ACCELERATE_USE_DEEPSPEED=true, a state made by hand, and a Trainer that takes it."""


def make_state() -> None:
    """Nothing, where Accelerate finds out by itself."""
    if BY_HAND:
        PartialState(backend="gloo")


# -- models -----------------------------------------------------------------------------------------------------------

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "llama": LlamaConfig(**_LLAMA),
    "qwen3_moe": Qwen3MoeConfig(
        **_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
}  # fmt: skip


def hub(args: argparse.Namespace) -> Path:
    """A folder with the weights of the model, as one that is downloaded; a folder for each process."""
    folder: Path = args.folder / f"base{os.environ['RANK']}"
    if not folder.exists():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(CONFIGS[args.model]).save_pretrained(folder)
    return folder


# -- data -------------------------------------------------------------------------------------------------------------


class Text(Dataset[dict[str, torch.Tensor]]):
    """``count`` sequences, no two alike: a token is the one before it plus a stride, one in eight is random."""

    def __init__(self, count: int, seed: int = 0) -> None:
        dice = torch.Generator().manual_seed(seed)
        start = torch.randint(3, VOCABULARY, (count, 1), generator=dice)
        stride = torch.randint(1, 4, (count, 1), generator=dice)
        noise = torch.randint(0, VOCABULARY, (count, LENGTH), generator=dice)
        noisy = torch.rand(count, LENGTH, generator=dice) < 0.125
        tokens = 3 + (start + stride * torch.arange(LENGTH) + noise * noisy) % (VOCABULARY - 3)
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def text(steps: int) -> Text:
    """As many sequences as all ranks see in ``steps`` steps."""
    return Text(steps * MICRO_BATCH * ACCUMULATION * int(os.environ["WORLD_SIZE"]))


# -- configuration ----------------------------------------------------------------------------------------------------


def ds_config(stage: int, offload: str) -> dict[str, Any]:
    """``ds_config.json`` for a stage, with the optimizer's states on the device or in host memory."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "ds_config.json").read_text())
    config["zero_optimization"]["stage"] = stage
    if offload == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    else:
        config["optimizer"]["params"]["torch_adam"] = True
    return config


def filled_config(args: argparse.Namespace) -> dict[str, Any]:
    """The same with numbers in the place of "auto", for programs without a Trainer."""
    config = ds_config(args.stage, args.offload)
    config |= {
        "train_batch_size": MICRO_BATCH * ACCUMULATION * int(os.environ["WORLD_SIZE"]),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": args.clipping,
    }
    config["optimizer"]["params"] |= {
        "lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    config["scheduler"]["params"] = {
        "warmup_min_lr": 0, "warmup_max_lr": LEARNING_RATE, "warmup_num_steps": WARMUP, "total_num_steps": args.steps,
    }  # fmt: skip
    # Small enough that a tiny model has several buckets and parameters in parts.
    config["zero_optimization"] |= {
        "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 4096, "stage3_param_persistence_threshold": 64,
    }  # fmt: skip
    return config


# -- the record of a run ----------------------------------------------------------------------------------------------


class Record:
    """Losses and gradient norms, one a step: the mean over micro-batches and ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.logits: list[float] = []
        self._micro: list[float] = []

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of one micro-batch on this rank."""
        self._micro.append(float(loss.detach()))

    def step(self, grad_norm: Any = None) -> None:
        """A step is done; ``grad_norm`` as the engine gives it, None where it gives none."""
        total = torch.tensor([sum(self._micro), len(self._micro)], dtype=torch.float64)
        self._micro.clear()
        dist.all_reduce(total)
        self.losses.append(float(total[0] / total[1]))
        if grad_norm is not None:
            self.grad_norms.append(float(grad_norm))

    def probe(self, model: nn.Module) -> None:
        """What the trained model says to a fixed text; on all ranks, which may have a part of the parameters each."""
        model.eval()
        with torch.no_grad():
            self.logits = model(input_ids=Text(2, seed=1).tokens).logits.flatten().tolist()

    def write(self, path: Path | None) -> None:
        if dist.get_rank() == 0 and path is None and self.losses:
            print(f"{len(self.losses)} steps: loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}")
        elif dist.get_rank() == 0 and path is not None:
            found = {"losses": self.losses, "grad_norms": self.grad_norms, "logits": self.logits}
            path.write_text(json.dumps(found, indent=1))
