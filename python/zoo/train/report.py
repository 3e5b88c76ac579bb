"""What a run came to, and what it leaves behind."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.train.history import History
from zoo.train.picture import draw

if TYPE_CHECKING:
    from zoo.train.console import Watcher


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; ``result.json``. Losses in nats per unit of the task. Lists have one entry a rank."""

    validation_loss: float
    bits: float
    unit: str
    baseline: str | None
    baseline_loss: float | None
    beats_baseline: bool | None
    steps: int
    tokens: int
    """Of this launch, in its ``train_s``; ``total_tokens``: of those before it too."""
    train_s: float
    tokens_per_s: float
    total_s: float
    world_size: int
    stage: int
    num_parameters: int
    peak_resident_bytes: list[int]
    state_bytes: list[int]
    python: str
    torch: str
    total_tokens: int = 0
    out: str = ""
    model: str | None = None
    kept_bytes: list[int] = field(default_factory=list)
    """Of parameters and optimizer states, at the end; ``forecast_kept_bytes``: as ``engine.forecast()`` says."""
    forecast_kept_bytes: list[int] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    """Sent in the last step; the forecast leaves out the numbers that a step's record adds up, and what layers send."""
    forecast_wire_bytes: list[int] = field(default_factory=list)

    def beside(self) -> list[str]:
        """Forecast beside measurement, a line a rank."""
        found = zip(
            self.kept_bytes, self.forecast_kept_bytes, self.wire_bytes, self.forecast_wire_bytes, strict=True
        )  # fmt: skip
        return [
            f"rank {rank}, measured and forecast: {kept:,} and {said:,} bytes of parameters and optimizer states, "
            f"{sent:,} and {planned:,} sent in a step"
            for rank, (kept, said, sent, planned) in enumerate(found)
        ]

    def verdict(self) -> str:
        """One line: the loss beside the baseline's."""
        text = f"validation loss {self.validation_loss:.4f} nats = {self.bits:.4f} bits per {self.unit}"
        if self.baseline is None or self.baseline_loss is None:
            return text
        gap = self.baseline_loss - self.validation_loss
        word = f"beats it by {gap:.4f} nats" if self.beats_baseline else f"does not beat it ({-gap:.4f} nats above)"
        other = f"{self.baseline} {self.baseline_loss:.4f} nats = {self.baseline_loss / math.log(2):.4f} bits"
        return f"{text}; {other}: the model {word}"


def write(
    result: Result, history: History, watcher: Watcher, *, title: str, sample: str, model_lines: list[str]
) -> None:  # fmt: skip
    """The picture, ``result.json`` and the sample, and the last lines that a run says; on rank 0."""
    out = Path(result.out)
    baseline: Any = None if result.baseline is None else (result.baseline, result.baseline_loss)
    draw(history, out / "loss.png", unit=result.unit, baseline=baseline, title=title)
    (out / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    if sample:
        (out / "sample.txt").write_text(sample, encoding="utf-8")
        watcher.line("a sample of the model's own text:")
        watcher.line("\n".join("  | " + line for line in sample.splitlines()))
    memory = ", ".join(
        f"rank {rank}: {peak / 2**20:.0f} MiB resident at most, {state / 2**20:.1f} MiB of model states"
        for rank, (peak, state) in enumerate(zip(result.peak_resident_bytes, result.state_bytes, strict=True))
    )
    watcher.line(f"memory: {memory}")
    for line in result.beside():
        watcher.line(line)
    watcher.line(
        f"{result.tokens:,} tokens in {result.train_s:.1f} s: {result.tokens_per_s:,.0f} tokens/s; "
        f"{result.total_s:.1f} s in all"
    )
    for line in model_lines:
        watcher.line(line)
    watcher.line(f"log, picture and checkpoints are in {out}")
    watcher.line(result.verdict())
