"""The job itself: from a configuration to a trained, validated, compared and saved model."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from zoo.checkpointing import latest_tag
from zoo.comm import init_distributed
from zoo.config import Config
from zoo.engine import Engine, initialize
from zoo.registry import DEFAULT, Registry
from zoo.train.console import Watcher
from zoo.train.history import History
from zoo.train.machine import peak_bytes, resident_bytes, set_threads
from zoo.train.picture import draw
from zoo.train.task import Task


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

    def verdict(self) -> str:
        """One line: the loss beside the baseline's."""
        text = f"validation loss {self.validation_loss:.4f} nats = {self.bits:.4f} bits per {self.unit}"
        if self.baseline is None or self.baseline_loss is None:
            return text
        gap = self.baseline_loss - self.validation_loss
        word = f"beats it by {gap:.4f} nats" if self.beats_baseline else f"does not beat it ({-gap:.4f} nats above)"
        other = f"{self.baseline} {self.baseline_loss:.4f} nats = {self.baseline_loss / math.log(2):.4f} bits"
        return f"{text}; {other}: the model {word}"


def train(config: Config, *, resume: bool = False, registry: Registry = DEFAULT) -> Result:
    """Run the job that a configuration describes. A collective of all ranks that a launcher started.

    Writes into ``train.out``: ``log.jsonl``, ``log.csv``, ``loss.png``, ``result.json``, ``sample.txt``,
    ``config.json`` and ``checkpoints/``.

    Args:
        config: from :func:`zoo.train.read_config`.
        resume: go on from the latest checkpoint in ``train.out``, exactly as if the run had not stopped; says so and
            begins anew when there is none.

    Raises:
        ValueError: what the user can fix.
    """
    return _Job(config, registry).run(resume)


class _Job:
    def __init__(self, config: Config, registry: Registry) -> None:
        self.began = time.perf_counter()
        self.config, self.section = config, config.train
        if self.section is None:
            raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
        if config.optimizer is None:
            raise ValueError('the configuration has no optimizer section; add one, such as {"type": "AdamW"}.')
        self.out = Path(self.section.out)
        self.rank, self.size = init_distributed(timeout_s=config.comm.timeout_s)
        threads = set_threads(self.section.threads)
        self.watcher = Watcher(silent=self.rank != 0, total=self.section.steps, every=config.steps_per_print)
        choice = self.section.task
        self.task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
        self.watcher.line(
            f"{self.size} rank{'s' if self.size > 1 else ''} with {threads} thread{'s' if threads > 1 else ''} each, "
            f"ZeRO stage "
            f"{config.zero_optimization.stage}, torch {torch.__version__}, Python {platform.python_version()}"
        )
        if self.rank == 0:
            for text in self.task.describe():
                self.watcher.line(text)
        model = self.task.model()
        self.num_parameters = sum(p.numel() for p in model.parameters())
        torch.manual_seed(config.seed * 100_003 + self.rank)
        self.engine: Engine = initialize(config, model, training_data=self.task.training_data(), registry=registry)[0]
        self.validation = self.task.validation_data()
        self.watcher.line(
            f"{self.num_parameters:,} parameters; {self.section.steps} steps of {config.train_batch_size} samples of "
            f"{self.task.units_per_sample} {self.task.unit}s"
        )
        self.saved_at = -1

    def run(self, resume: bool) -> Result:
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
        resumed = self._resume() if resume else None
        history = History(self.out if self.rank == 0 else None, resumed)
        if self.rank == 0:
            (self.out / "config.json").write_text(json.dumps(self.config.to_dict(), indent=1) + "\n", encoding="utf-8")
        try:
            self.watcher.begin(self.engine.global_steps)
            train_s, tokens = self._loop(history)
            self._save()
        finally:
            self.watcher.end()
            history.close()
        return self._finish(history, train_s, tokens)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self, history: History) -> tuple[float, int]:
        engine, section = self.engine, self.section
        tokens_a_step = self.config.train_batch_size * self.task.units_per_sample
        train_s, recent_s, first = 0.0, 0.0, engine.global_steps
        while engine.global_steps < section.steps:
            lr = engine.get_lr()[0]
            start = time.perf_counter()
            loss = float(engine.train_batch())
            step_s = time.perf_counter() - start
            train_s += step_s
            recent_s = step_s if not recent_s else 0.9 * recent_s + 0.1 * step_s
            step = engine.global_steps
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} at step {step}; lower the learning rate, clip gradients (gradient_clipping) "
                    f"or, under "
                    "fp16, look at the loss scale."
                )
            record: dict[str, Any] = {
                "step": step, "loss": loss, "lr": lr, "grad_norm": engine.optimizer.grad_norm,
                "skipped": bool(engine.optimizer.skipped), "tokens_per_s": tokens_a_step / recent_s,
                "elapsed_s": time.perf_counter() - self.began,
            }  # fmt: skip
            last = step == section.steps
            if self._due(step, self.config.steps_per_print) or last:
                record["rss_bytes"] = self._of_ranks(resident_bytes())
                record["state_bytes"] = self._of_ranks(engine.optimizer.memory()["total"])
            if self._due(step, section.validate_every) or last:
                record["validation_loss"] = validate(engine, self.validation)
            history.add(record)
            self.watcher.step(record)
            if "validation_loss" in record:
                self.watcher.line(f"step {step:>5}/{section.steps}  validation loss {record['validation_loss']:.4f}")
            if self._due(step, section.checkpoint_every):
                self._save()
        return train_s, (engine.global_steps - first) * tokens_a_step

    @staticmethod
    def _due(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _of_ranks(self, value: int) -> list[int]:
        everyone = torch.empty(self.size, dtype=torch.int64, device=self.engine.device)
        self.engine.comm.all_gather(everyone, everyone.new_tensor([value])).wait()
        return [int(v) for v in everyone]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        step = self.engine.global_steps
        if step != self.saved_at:
            self.engine.save_checkpoint(self.out / "checkpoints", f"step_{step:08d}")
            self.saved_at = step

    def _resume(self) -> int | None:
        if latest_tag(self.out / "checkpoints") is None:
            self.watcher.line(
                f"there is no checkpoint in {self.out / 'checkpoints'} to resume from: beginning at step 0"
            )
            return None
        path, _ = self.engine.load_checkpoint(self.out / "checkpoints")
        self.saved_at = self.engine.global_steps
        self.watcher.line(f"resumed from {path}")
        return self.engine.global_steps

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, history: History, train_s: float, tokens: int) -> Result:
        _, losses = history.series("validation_loss")
        loss = losses[-1] if losses else validate(self.engine, self.validation)
        sample = self._sample()
        peaks = self._of_ranks(peak_bytes())
        states = self._of_ranks(self.engine.optimizer.memory()["total"])
        baseline = self.task.baseline() if self.rank == 0 else None
        result = Result(
            validation_loss=loss, bits=loss / math.log(2), unit=self.task.unit,
            baseline=baseline[0] if baseline else None, baseline_loss=baseline[1] if baseline else None,
            beats_baseline=loss < baseline[1] if baseline else None,
            steps=self.engine.global_steps, tokens=tokens, train_s=train_s,
            tokens_per_s=tokens / train_s if train_s else 0.0, total_s=time.perf_counter() - self.began,
            world_size=self.size, stage=self.config.zero_optimization.stage, num_parameters=self.num_parameters,
            peak_resident_bytes=peaks, state_bytes=states, python=platform.python_version(), torch=torch.__version__,
        )  # fmt: skip
        if self.rank == 0:
            self._report(history, result, sample, baseline)
        return result

    def _sample(self) -> str:
        module = self.engine.module
        module.eval()
        text = self.task.sample(module)
        module.train()
        return text

    def _report(self, history: History, result: Result, sample: str, baseline: tuple[str, float] | None) -> None:
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        title = f"{self.section.task.type}: {self.num_parameters:,} parameters, ZeRO stage {result.stage}, {ranks}"
        draw(history, self.out / "loss.png", unit=result.unit, baseline=baseline, title=title)
        (self.out / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        if sample:
            (self.out / "sample.txt").write_text(sample, encoding="utf-8")
            self.watcher.line("a sample of the model's own text:")
            self.watcher.line("\n".join("  | " + line for line in sample.splitlines()))
        memory = ", ".join(
            f"rank {rank}: {peak / 2**20:.0f} MiB resident at most, {state / 2**20:.1f} MiB of model states"
            for rank, (peak, state) in enumerate(zip(result.peak_resident_bytes, result.state_bytes, strict=True))
        )
        self.watcher.line(f"memory: {memory}")
        self.watcher.line(
            f"{result.tokens:,} tokens in {result.train_s:.1f} s: {result.tokens_per_s:,.0f} tokens/s; "
            f"{result.total_s:.1f} s "
            "in all"
        )
        self.watcher.line(f"log, picture and checkpoints are in {self.out}")
        self.watcher.line(result.verdict())


def validate(engine: Engine, dataset: Dataset[Any]) -> float:
    """Mean loss over a whole data set, the same on all ranks. A collective.

    Batches of the size of a micro-batch are dealt to the ranks in turn. A rank whose turn comes after the last batch
    runs the first once more and does not count it, because at stage 3 a forward needs all ranks.
    """
    count, size = len(dataset), engine.config.train_micro_batch_size_per_gpu  # type: ignore[arg-type]
    num_batches = -(-count // size)
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for turn in range(-(-num_batches // engine.comm.size)):
        number = turn * engine.comm.size + engine.comm.rank
        real = number < num_batches
        first = number * size if real else 0
        samples = [dataset[i] for i in range(first, min(first + size, count))]
        loss = engine.eval_batch(default_collate(samples))
        if real:
            totals += totals.new_tensor([float(loss) * len(samples), len(samples)])
    engine.comm.all_reduce(totals).wait()
    return float(totals[0] / totals[1])
