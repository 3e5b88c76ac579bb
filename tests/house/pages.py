"""What the claims of pages are made of: their blocks, and what a reader of each page has at hand already.

An example on a page runs as it stands. Names that it uses and that neither it nor an earlier one of the page defines (a
model, a batch) are given here, and so are folders in the place of devices (``/nvme``).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo import registry

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def pages() -> list[str]:
    """Every page that a user reads, from the root; generated campaign pages and results tell of runs that were."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(
            page
            for folder in ("zero", "start", "how-to", "concepts")
            for page in sorted((ROOT / "docs" / folder).glob("*.md"))
        ),
        *sorted((ROOT / "docs/reference").rglob("*.md")),
    ]
    for top in ("python", "cuda", "moe", "compression", "crates", "examples", "benchmarks"):
        found += sorted((ROOT / top).rglob("README.md"))
    return [str(page.relative_to(ROOT)) for page in found if "target" not in page.parts]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with this language ("" for unmarked ones)."""
    return [textwrap.dedent(body) for _, mark, body in _FENCED.findall(text(page)) if mark == language]


def shown(page: str, number: int) -> str | None:
    """What the page shows that its Python example of this number prints: the unmarked block right below it."""
    if "print(" not in blocks(page, "python")[number]:
        return None
    found = list(_FENCED.finditer(text(page)))
    at = [i for i, match in enumerate(found) if match[2] == "python"][number]
    if at + 1 < len(found) and not found[at + 1][2] and not text(page)[found[at].end() : found[at + 1].start()].strip():
        return found[at + 1][3]
    return None


def answers(page: str) -> list[tuple[str, str]]:
    """Commands (a block of ``sh``) with what the page shows that they print: the unmarked block right below them."""
    found = list(_FENCED.finditer(text(page)))
    return [
        (above[3], below[3])
        for above, below in itertools.pairwise(found)
        if above[2] == "sh" and not below[2] and not text(page)[above.end() : below.start()].strip()
    ]


def commands(page: str) -> list[str]:
    """Commands of a page: lines of unmarked blocks and what stands between backquotes. "zoo launch: ..." is none."""
    unfenced = _FENCED.sub("", text(page))
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", unfenced)]
    lines = [line.split("  ")[0].strip() for mark in ("", "bash", "sh") for body in blocks(page, mark)
             for line in body.splitlines()]  # fmt: skip
    name = re.compile(r"(\w+=\S+ )*(make|zoo(?! \w+:)|python|torchrun|pip|pre-commit)( |$)|\.ci/|scripts/\w+\.")
    return [found for found in (*spans, *lines) if name.match(found) and found not in ("zoo", "pre-commit")]


# -- what a reader has at hand ----------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Two units of 32 numbers on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4, bias=False)
        self.second = nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.linear(x), y)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.expert = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.expert(self.dense(x))
        return out


def _readme(_: str) -> dict[str, Any]:
    return {"batches": [(torch.randn(4, 256), torch.randn(4, 256)) for _ in range(2)]}


def _checkpointing(_: str) -> dict[str, Any]:
    from zoo.zero import Stage3Optimizer

    return {"opt": Stage3Optimizer(nn.Linear(4, 4), lr=0.1)}


def _foreign(_: str) -> dict[str, Any]:
    from tests.checkpointing.foreign.golden_model import Net, groups

    from zoo.zero import Stage3Optimizer

    shutil.copytree(ROOT / "tests" / "checkpointing" / "foreign" / "golden" / "stage2", "ds_run", dirs_exist_ok=True)
    return {"opt": Stage3Optimizer(model := Net(), params=groups(model), optimizer=torch.optim.AdamW, lr=0.1)}


def _config(_: str) -> dict[str, Any]:
    Path("config.json").write_text(json.dumps({"train_batch_size": 8, "model": {"width": 3}}))
    return {}


def _engine(_: str) -> dict[str, Any]:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    Path("config.json").write_text(json.dumps(config))
    samples = [(torch.ones(2) * i, torch.ones(2)) for i in range(4)]
    return {"model": WithLoss(), "samples": samples, "steps": 2, "module": WithLoss()}


def _lr_schedules(_: str) -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    return {"optimizer": optimizer, "loader": range(2000), "train": lambda batch: optimizer.step()}


def _moe(example: str) -> dict[str, Any]:
    from tests.moe.models import VOCABULARY, AsTransformers, Dense, Plain, Small

    kind = Plain if "ExpertsPreset" in example else None
    mixtral = AsTransformers(Small() if kind is None else Small(kind))
    return {
        "mixtral": mixtral, "model": mixtral, "llama": AsTransformers(Dense()), "ids": torch.arange(7) % VOCABULARY,
    }  # fmt: skip


def _nn(_: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return {
        "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",)),
        "model": nn.Sequential(nn.Linear(2, 2)),
        "trained": nn.Sequential(nn.Linear(32, 2)),
    }


def _optim(_: str) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().mul(8.0).backward()
    return {"model": model, "loss_scale": 8.0}


def _registry(_: str) -> dict[str, Any]:
    return {"model": nn.Linear(2, 2), "MyAdamW": type("MyAdamW", (torch.optim.AdamW,), {})}


def _zero(example: str) -> dict[str, Any]:
    from zoo.zero import Stage3Optimizer

    if "optimizer.sharded" in example or "get_state_dict" in example:
        model = TwoLayers()
        optimizer = Stage3Optimizer(
            model, lr=0.1, reduce_bucket_size=64, param_persistence_threshold=0, max_live_parameters=0
        )
        x = torch.randn(2, 16)
        return {"model": model, "optimizer": optimizer, "x": x, "x0": x, "x1": x + 1}
    experts = Experts()
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    model = experts if "expert" in example else nn.Linear(4, 4)
    return {"model": model, "expert": experts.expert, "batch": torch.randn(2, 4), "module": module,
            "tokens": torch.arange(4)}  # fmt: skip


def _init(_: str) -> dict[str, Any]:
    return {"MyLargeModel": TwoLayers}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2)
    )  # fmt: skip


def _my_model(_: str) -> dict[str, Any]:
    _llama().save_pretrained("my-model")  # type: ignore[operator]
    return {"tokens": torch.arange(16).repeat(16, 1)}


def _resume(_: str) -> dict[str, Any]:
    from zoo.engine import initialize

    made = _engine("")
    engine, *_others = initialize("config.json", made["model"], training_data=made["samples"])
    engine.train_batch()
    engine.save_checkpoint("runs/resumed")
    engine.wait_for_checkpoint()
    return {"engine": engine}


def _plugin(_: str) -> dict[str, Any]:
    """The package is installed: it can be imported, and its entry points are there (call it within a scope)."""
    folder = ROOT / "examples/plugin"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    lines = re.findall(r'^"(\w+)\.(\w+)" = "(\S+)"$', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    for kind, name, target in lines:
        registry.register(kind, name, target)
    return {}


def _pipeline(_: str) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    batch = torch.ones(4, 8), torch.ones(4, 1)
    return {"config": config, "model": model, "example": batch[0], "loss_of": nn.functional.mse_loss,
            "batches": iter([batch] * 2)}  # fmt: skip


def _rollouts(_: str) -> dict[str, Any]:
    from zoo.zero import Stage3Optimizer

    model = _llama()
    return {"optimizer": Stage3Optimizer(model, lr=0.01), "prompts": [torch.tensor([1, 2])], "step": 0}


def _sequences(_: str) -> dict[str, Any]:
    return {**_nn(""), **{name: torch.randn(1, 8, 4, 8) for name in "qkv"}}


def _comm(_: str) -> dict[str, Any]:
    return {"full": torch.zeros(8), "shard": torch.ones(4)}


OF_ZERO = [
    page
    for page in pages()
    if page.startswith(("python/zoo/zero/", "docs/zero/")) or page == "python/zoo/shard/README.md"
]
"""Pages about models that two ranks split."""

AT_HAND: dict[str, Callable[[str], dict[str, Any]]] = {
    "README.md": _readme,
    "moe/README.md": _moe,
    "python/zoo/checkpointing/README.md": _checkpointing,
    "python/zoo/checkpointing/foreign/README.md": _foreign,
    "python/zoo/comm/README.md": _comm,
    "python/zoo/config/README.md": _config,
    "python/zoo/engine/README.md": _engine,
    "python/zoo/lr_schedules/README.md": _lr_schedules,
    "python/zoo/nn/README.md": _nn,
    "python/zoo/optim/README.md": _optim,
    "python/zoo/registry/README.md": _registry,
    **dict.fromkeys(OF_ZERO, _zero),
    "python/zoo/shard/init/README.md": _init,
    "examples/plugin/README.md": _plugin,
    "docs/start/my-model.md": _my_model,
    "docs/how-to/resume-on-fewer-ranks.md": _resume,
    "docs/how-to/own-component.md": lambda _: {"model": nn.Linear(2, 2)},
    "docs/how-to/own-schedule-gate-compressor.md": lambda _: {"model": nn.Linear(2, 2)},
    "docs/how-to/pipeline.md": _pipeline,
    "docs/how-to/tensor-inference.md": lambda _: {"model": _llama().eval(), "prompts": [torch.tensor([1, 2])]},
    "docs/how-to/rollouts.md": _rollouts,
    "docs/how-to/long-sequences.md": _sequences,
}
"""For each page the names that a reader has before an example; called on each rank, in an empty folder."""

APART = {"README.md", "moe/README.md", *OF_ZERO}
"""Pages whose examples stand each for itself, with the imports of those before; elsewhere one goes on from another."""

RANKS = {
    "README.md": 2,
    "moe/README.md": 2,
    "python/zoo/comm/README.md": 2,
    "python/zoo/nn/README.md": 2,
    **dict.fromkeys(OF_ZERO, 2),
    "python/zoo/shard/init/README.md": 2,
    "python/zoo/tensor/README.md": 2,
    "docs/how-to/pipeline.md": 2,
    "docs/how-to/tensor-inference.md": 2,
    "docs/how-to/long-sequences.md": 2,
}
"""Simulated ranks; one elsewhere. Eight for an example with a mesh of eight."""

SLOW = {"python/zoo/train/README.md"}
"""Pages whose examples take more than a second or two."""
