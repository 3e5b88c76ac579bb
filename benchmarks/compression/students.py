"""``python -m benchmarks.compression.students``: what distillation is worth to students of 1 and 2 bits (XTC).

Digits of scikit-learn: a teacher with four residual blocks of linear layers learns from 1200 pictures; students with
two blocks or one, from its layers, learn from as many or from 150 of them. All are asked about the other 597.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.common import machine, table, write_page
from torch import Tensor, nn

from zoo.compression import CompressionScheduler, xtc

PAGE = Path(__file__).with_name("STUDENTS.md")
INTRODUCTION = """# Students of 1 and 2 bits

`python -m benchmarks.compression.students`: accuracy in percent on 597 held-out digits of scikit-learn, mean and
standard deviation over {seeds} seeds (of the split, the teacher and the student), the same seeds in each column. The
teacher has 4 blocks in fp32 and learns from 1200 pictures: {teacher}. A student begins as some of its blocks; their
weights have few bits and inputs 8, the rest stays fp32. *distilled*: `xtc`, no labels. *labels*: cross-entropy, the
same student otherwise. *labels, from nothing*: it begins at random. {steps} steps of 64 pictures each, AdamW at 0.002,
falling to 0. Models are cleaned before they are asked.
"""


class Block(nn.Module):
    """x + a network with one hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width)"""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Digits(nn.Module):
    """A classifier of 8 x 8 pictures."""

    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, width), nn.LayerNorm(width), nn.Linear(width, 10)
        self.layer = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 64) → (B, 10)"""
        h = self.first(x)
        for block in self.layer:
            h = block(h)
        found: Tensor = self.last(self.norm(h))
        return found


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures and labels to learn from, and held-out ones."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pictures / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def fit(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, *, steps: int, lr: float,
    after: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Train it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    falls = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    dice = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        some = torch.randint(len(x), (64,), generator=dice)
        optimizer.zero_grad()
        loss(x[some], y[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falls.step()
        after()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


def student(
    teacher: Digits, blocks: int, bits: int, how: str, x: Tensor, y: Tensor, steps: int, seed: int
) -> nn.Module:
    """A trained and cleaned one."""
    torch.manual_seed(seed)
    fresh = Digits(blocks)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    made = xtc(fresh, teacher, layers="layer", bits=bits)
    if how == "labels, from nothing":
        fresh.load_state_dict(before)
    scheduler = CompressionScheduler(made)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = made(x) if how == "distilled" else F.cross_entropy(made.module(x), y)
        return found

    fit(made, loss, x, y, steps=steps, lr=2e-3, after=scheduler.step)
    return made.clean()


def main() -> None:
    """Train, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways, found, teachers = ("distilled", "labels", "labels, from nothing"), {}, []
    for seed in range(options.seeds):
        x, y, other_x, other_y = data(seed)
        torch.manual_seed(seed)
        teacher = Digits(4)
        fit(teacher, lambda x, y, t=teacher: F.cross_entropy(t(x), y), x, y, steps=600, lr=3e-3)  # type: ignore[misc]
        teachers.append(accuracy(teacher, other_x, other_y))
        for few in (1200, 150):
            for bits in (2, 1):
                for blocks in (2, 1):
                    for how in ways:
                        made = student(
                            teacher, blocks, bits, how, x[:few], y[:few], steps=options.steps, seed=100 + seed
                        )
                        found.setdefault((few, bits, blocks, how), []).append(accuracy(made, other_x, other_y))
        print(f"seed {seed}: teacher {teachers[-1]:.1f}", flush=True)
    cases = list(dict.fromkeys(key[:3] for key in found))
    rows = [[*map(str, case), *(text(found[(*case, how)]) for how in ways)] for case in cases]
    drawn = table(["pictures", "bits", "blocks", *ways], rows)
    print(drawn)
    facts = ", ".join(f"{key} {value}" for key, value in machine(["torch", "zoo-compression", "scikit-learn"]).items())
    said = INTRODUCTION.format(seeds=options.seeds, teacher=text(teachers), steps=options.steps)
    write_page(PAGE, f"{said}\n{drawn}\n\n{facts}")


def text(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


if __name__ == "__main__":
    main()
