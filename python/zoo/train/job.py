"""The job itself: from a configuration to a trained, validated, compared and saved model."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from zoo.checkpointing import has_checkpoints, prune
from zoo.comm import Communicator, init_distributed, local_device
from zoo.comm.failures import together
from zoo.config import Config
from zoo.engine import Engine, initialize
from zoo.engine.batches import evaluating
from zoo.engine.building import build_mesh
from zoo.engine.checkpoint.saving import save_model
from zoo.parts import StepRecord
from zoo.registry import DEFAULT, Registry
from zoo.train import origins, output, report
from zoo.train.console import Watcher
from zoo.train.diagnosis import Recorder, find
from zoo.train.history import History
from zoo.train.machine import peak_bytes, resident_bytes, set_threads
from zoo.train.output import Output
from zoo.train.report import Result
from zoo.train.steps import Judge, NotFiniteError, Pace
from zoo.train.stopping import Signals
from zoo.train.task import Task
from zoo.train.timeline import Timeline
from zoo.train.warm_start import warm_start

CHECKPOINTS = "checkpoints"
T = TypeVar("T")


class DataEndError(ValueError):
    """There are no more batches; what was trained is saved."""

    everywhere = True


class StoppedError(Exception):
    """The run was asked to end; it has saved, and can be resumed."""


def train(config: Config, *, resume: bool = False, registry: Registry = DEFAULT) -> Result:
    """Run the job that a configuration describes. A collective of all ranks that a launcher started.

    Writes into ``train.out``: ``log.jsonl``, ``log.csv``, ``loss.png``, ``result.json``, ``sample.txt``,
    ``config.json``, ``checkpoints/`` and ``model/``. SIGTERM and SIGINT let the step end, save, and end the run.

    Args:
        config: from :func:`zoo.train.read_config`.
        resume: go on from the latest checkpoint in ``train.out``, exactly as if the run had not stopped; says so and
            begins anew when there is none.

    Raises:
        ValueError: what the user can fix.
        NotFiniteError: see there; the sentence names the first unit whose output is not finite.
        DataEndError: there was data for fewer steps; it has saved.
        StoppedError: a signal has ended the run.
    """
    job = Job(config, registry)
    return job.run(output.choose(job.section, resume=resume, comm=job.world))


class Job:
    """A task and an engine.

    Args:
        quiet: say nothing, on rank 0 either. monitors: build those of the configuration.
    """

    def __init__(self, config: Config, registry: Registry, *, quiet: bool = False, monitors: bool = True) -> None:
        self.began = time.perf_counter()
        self.config, self.section = config, config.train
        if self.section is None:
            raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
        if config.optimizer is None:
            raise ValueError('the configuration has no optimizer section; add one, such as {"type": "AdamW"}.')
        self.rank, self.size = init_distributed(timeout=timedelta(seconds=config.comm.timeout_s))
        self.world = Communicator()
        self.threads = set_threads(self.section.threads)
        self.watcher = Watcher(silent=quiet or self.rank != 0, total=self.section.steps, every=config.steps_per_print)
        choice = self.section.task
        self.task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
        self._introduce()
        model = self.task.model()
        self.num_parameters = sum(p.numel() for p in model.parameters())
        if self.section.warm_start is not None:
            for text in warm_start(model, self.section.warm_start, self.world):
                self.watcher.line(text)
        training_data = self.task.training_data()
        model, self.stages = in_stages(model, config, training_data, self.size, registry)
        micro_batches = config.gradient_accumulation_steps
        if self.stages > 1:
            self.watcher.line(
                f"{self.stages} stages, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} a step"
                + ("; several would overlap (gradient_accumulation_steps)" if micro_batches == 1 else "")
            )
        model.to(local_device())
        self.judge = Judge(scaled=config.fp16.enabled)
        self.engine: Engine = initialize(
            config, model, training_data=training_data, loader=dict(self.section.loader), registry=registry,
            monitors=monitors, parts={"zoo.train": self.judge},
        )[0]  # fmt: skip
        seed_generators(config.seed * 100_003 + stream_of(self.rank, self.engine.mesh))
        self.validation = self.task.validation_data()
        self.watcher.line(
            f"{self.num_parameters:,} parameters; {self.section.steps} steps of {config.train_batch_size} samples of "
            f"{self.task.units_per_sample} {self.task.unit}s"
        )
        self.out: Path | None = None
        self.saved_at = -1
        self.validated: tuple[int, float] | None = None  # the step of the latest validation, and what it gave
        # The inputs of a stage are activations: to keep those of a whole step would be what a schedule avoids.
        self.recorder = self.judge.recorder = Recorder(self.engine) if self.stages == 1 else None

    def _introduce(self) -> None:
        plural = "s" if self.threads > 1 else ""
        self.watcher.line(
            f"{self.size} rank{'s' if self.size > 1 else ''} with {self.threads} thread{plural} each, ZeRO stage "
            f"{self.config.zero_optimization.stage}, torch {torch.__version__}, Python {platform.python_version()}"
        )
        if self.rank == 0:
            for text in self.task.describe():
                self.watcher.line(text)

    def run(self, place: Output) -> Result:
        """Train, and leave everything in ``place``."""
        self.out = place.path
        resumed = self.load(self.out) if place.resumes else None
        history = self._on_rank_0("opening the log", lambda: self._begin(place.path, resumed)) or History(None)
        with Signals(self.engine.request_stop) as signals:  # to the end: what is left is saved, and soon done
            try:
                self.watcher.begin(self.engine.global_steps)
                train_s, tokens = self._loop(history, signals)
                self._save()
            finally:
                self.watcher.end()
                history.close()
                self.engine.feed.close()
            return self._finish(history, train_s, tokens)

    def _on_rank_0(self, what: str, work: Callable[[], T]) -> T | None:
        """Run something on rank 0; what it raises is raised on all ranks. A collective."""
        found: list[T] = []
        together(self.world, what, lambda: found.append(work()) if self.rank == 0 else None, plain=ValueError)
        return found[0] if found else None

    def _begin(self, out: Path, resumed: int | None) -> History:
        """The log, and what was asked for, on rank 0."""
        before = output.facts_of(out).get("ranks") or [] if resumed else []
        ranks = [part for part in before if part[0] < (resumed or 0)]
        if not ranks or ranks[-1][1] != self.size:
            ranks.append([resumed or 0, self.size])
        values = self.config.to_dict()
        values["train"] |= {"threads": self.threads, "out": str(out)}
        facts = {
            "launch": output.launch(), "world_size": self.size, "ranks": ranks, "torch": torch.__version__,
            "python": platform.python_version(),
        }  # fmt: skip
        history = History(out, resumed)
        for name, content in (("config.json", values), (output.FACTS, facts)):
            (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        origins.write(
            out, self.config, forecast=self.engine.forecast(), threads=self.threads, world_size=self.size
        )  # fmt: skip
        return history

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """One step; its record, which is waited for.

        Raises:
            NotFiniteError: nothing of it may be saved.
        """
        self._launch()
        return self._read()

    def _launch(self) -> None:
        """One step. What it came to is known where its optimizer has waited, else before the next update."""
        with self._explaining():
            self.engine.train_batch()

    def _read(self) -> StepRecord:
        with self._explaining():
            record = self.engine.record
        if record is None:
            raise AssertionError(f"rank {self.rank}: a step has ended without a record.")
        return record

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """A step that is not finite is looked into, whenever that comes to be known."""
        try:
            yield
        except NotFiniteError:
            if self.judge.bad is None:
                raise
            raise NotFiniteError(self._not_finite(self.judge.bad)) from None

    def _not_finite(self, record: StepRecord) -> str:
        what = f"the loss is {record.loss} and the gradient's norm {record.grad_norm} at step {record.step}"
        changed = "" if record.skipped else " The update was made before that was known."
        why = find(self.recorder, self.engine, record.step) if self.recorder is not None else ""
        return (
            f"{what}; the run has stopped, and nothing of the step was saved.{changed} {why} Look at that unit and "
            f"batch (zoo replay runs a step again), lower the learning rate, or clip gradients (gradient_clipping)."
        )

    def _loop(self, history: History, signals: Signals) -> tuple[float, int]:
        engine, section, pace = self.engine, self.section, Pace(self.task.units_per_sample)
        timeline = Timeline(engine, self.world, last=section.steps)
        while engine.global_steps < section.steps:
            start = time.perf_counter()
            try:
                with timeline.around(engine.global_steps + 1):
                    self._launch()
            except StopIteration:
                raise self._out_of_data(history, pace) from None
            pace.launched(time.perf_counter() - start)
            step = engine.global_steps
            last = step == section.steps
            every = self.config.steps_per_print, section.validate_every, section.checkpoint_every
            if last or any(self._due(step, n) for n in every):
                self._read()
            timeline.write(self.out)
            stops = self._tell(history, pace)
            if stops and not last:
                self._read()
                self._tell(history, pace)  # the step that was under way
                self._save()
                self.watcher.line(
                    f"stopped after step {step} of {section.steps} "
                    f"({signals.received.name if signals.received else 'a signal on another rank'}); the checkpoint is "
                    f"written, --resume goes on."
                )
                raise StoppedError
            if self._due(step, section.checkpoint_every):
                self._save(waits=False)
        return pace.train_s, pace.tokens

    def _tell(self, history: History, pace: Pace) -> bool:
        """What steps came to that are known by now, to the log and whoever watches; whether some rank wants to stop."""
        stops, section = False, self.section
        for done in self.judge.take():
            record = self.line_of(done) | {
                "tokens_per_s": pace.known(done), "elapsed_s": time.perf_counter() - self.began,
                "step_s": done.step_s, "wire_bytes": done.wire_bytes,
            }  # fmt: skip
            last = done.step == section.steps
            if self._due(done.step, self.config.steps_per_print) or last:
                record["rss_bytes"] = self._of_ranks(resident_bytes())
                record["state_bytes"] = self._of_ranks(self.engine.optimizer.memory()["total"])
            if self._due(done.step, section.validate_every) or last:
                self.validated = done.step, validate(self.engine, self.validation)
                record["validation_loss"] = self.validated[1]
            history.add(record)
            self.watcher.step(record)
            if "validation_loss" in record:
                self.watcher.line(
                    f"step {done.step:>5}/{section.steps}  validation loss {record['validation_loss']:.4f}"
                )
            stops = stops or done.stop
        return stops

    def _out_of_data(self, history: History, pace: Pace) -> DataEndError:
        """The checkpoint is written: what was trained is kept."""
        self.engine.zero_grad()  # of a step that got some of its micro-batches
        with self._explaining():
            self.engine.records.read_outcome()
        self._tell(history, pace)  # the last whole one
        self._save()
        step = self.engine.global_steps
        return DataEndError(
            f"the data has ended for good after step {step} of {self.section.steps}; the checkpoint is written. Raise "
            f"what limits it (data_efficiency.data_sampling.num_epochs) and go on with --resume, or set train.steps to "
            f"{step}."
        )

    @staticmethod
    def line_of(done: StepRecord) -> dict[str, Any]:
        """What the log keeps of a record, and what a replay is compared with."""
        return {
            "step": done.step, "loss": done.loss, "lr": done.lr[0], "grad_norm": done.grad_norm,
            "skipped": done.skipped, **done.metrics,
        }  # fmt: skip

    @staticmethod
    def _due(step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _of_ranks(self, value: int) -> list[int]:
        everyone = torch.empty(self.world.size, dtype=torch.int64, device=self.engine.device)
        self.world.all_gather(everyone, everyone.new_tensor([value])).wait()
        return [int(v) for v in everyone]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, *, waits: bool = True) -> None:
        """Write a checkpoint, if there is none of this step. ``waits``: until it is there, and older ones are removed;
        otherwise training goes on meanwhile, and there is one more than is kept."""
        step, out = self.engine.global_steps, self.out
        if out is None:
            return
        if step != self.saved_at:
            with self._explaining():
                self.engine.wait_for_checkpoint()  # of the one before
                self._prune(out)
                self.engine.save_checkpoint(out / CHECKPOINTS, tag_of(step))
            self.saved_at = step
        if waits:
            with self._explaining():
                self.engine.wait_for_checkpoint()
                self._prune(out)

    def _prune(self, out: Path) -> None:
        keep = self.section.keep_checkpoints
        if keep is not None and self.saved_at >= 0:
            self._on_rank_0("removing old checkpoints", lambda: prune(out / CHECKPOINTS, keep))

    def load(self, out: Path, tag: str | None = None) -> int | None:
        """Go on from a checkpoint of a run, the latest if no tag is given; its step, None where there is none."""
        if tag is None and not has_checkpoints(out / CHECKPOINTS):
            self.watcher.line(f"there is no checkpoint in {out / CHECKPOINTS} to resume from: beginning at step 0")
            return None
        path, _ = self.engine.load_checkpoint(out / CHECKPOINTS, tag)
        self.saved_at = self.engine.global_steps
        self.watcher.line(f"resumed from {path}")
        return self.engine.global_steps

    # -- the end ----------------------------------------------------------------------------------------------------

    def _finish(self, history: History, train_s: float, tokens: int) -> Result:
        now = self.engine.global_steps
        known = self.validated is not None and self.validated[0] == now
        loss = self.validated[1] if self.validated is not None and known else validate(self.engine, self.validation)
        sample = self._sample()
        model_lines = self._leave_model()
        peaks = self._of_ranks(peak_bytes())
        memory, record, said = self.engine.optimizer.memory(), self.engine.record, self.engine.forecast()
        states = self._of_ranks(memory["total"])
        baseline = self._on_rank_0("the task's baseline", self.task.baseline)
        result = Result(
            validation_loss=loss, bits=loss / math.log(2), unit=self.task.unit,
            baseline=baseline[0] if baseline else None, baseline_loss=baseline[1] if baseline else None,
            beats_baseline=loss < baseline[1] if baseline else None,
            steps=self.engine.global_steps, tokens=tokens, train_s=train_s,
            tokens_per_s=tokens / train_s if train_s else 0.0, total_s=time.perf_counter() - self.began,
            world_size=self.size, stage=self.config.zero_optimization.stage, num_parameters=self.num_parameters,
            peak_resident_bytes=peaks, state_bytes=states, python=platform.python_version(), torch=torch.__version__,
            total_tokens=self.engine.global_tokens or self.engine.global_samples * self.task.units_per_sample,
            out=str(self.out), model=str(Path("model", "model.safetensors")) if self.section.save_model else None,
            kept_bytes=self._of_ranks(memory["parameters"] + memory["optimizer"]),
            forecast_kept_bytes=self._of_ranks(said.parameters_bytes + said.optimizer_bytes),
            wire_bytes=self._of_ranks(record.wire_bytes if record is not None else 0),
            forecast_wire_bytes=self._of_ranks(sum(said.wire_bytes.values())),
        )  # fmt: skip
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        title = f"{self.section.task.type}: {self.num_parameters:,} parameters, ZeRO stage {result.stage}, {ranks}"
        self._on_rank_0("writing the result", lambda: report.write(
            result, history, self.watcher, title=title, sample=sample, model_lines=model_lines
        ))  # fmt: skip
        return result

    def _sample(self) -> str:
        if self.stages > 1:
            self.watcher.line("no sample: it takes the whole model on a rank. Load what is in model/ for one.")
            return ""
        with evaluating(self.engine.module):
            return self.task.sample(self.engine.module)

    def _leave_model(self) -> list[str]:
        """The weights, for whoever uses the model without zoo, and what to say of them."""
        if not self.section.save_model or self.out is None:
            return []
        folder = self.out / "model"
        save_model(self.engine.module, self.engine.sharded, folder, "model.safetensors", always=True)
        export = getattr(self.task, "export", None)
        what = f"exporting the model to {str(folder)!r}"
        how: str | None = self._on_rank_0(what, lambda: export(folder)) if export is not None else None
        how = how or f'model.load_state_dict(safetensors.torch.load_file("{folder / "model.safetensors"}"))'
        return [f"the model is in {folder}; load it with: {how}"]


def in_stages(
    model: nn.Module, config: Config, data: Dataset[Any], world_size: int, registry: Registry
) -> tuple[nn.Module, int]:
    """The model as a pipeline, where the mesh has an axis "pipe"; and how many ranks that has.

    Raises:
        ValueError: stages are asked for and there is no such axis, or the model cannot be cut.
    """
    section, sizes = config.pipeline, config.mesh.sizes(world_size) if config.mesh.axes else {}
    stages = sizes.get("pipe", 1)
    if isinstance(section.stages, int) and section.stages != stages:
        raise ValueError(
            f"pipeline.stages = {section.stages}, and the mesh has {stages}: zoo train cuts the model along its axis "
            f'"pipe". Say --pipe {section.stages}, or mesh.axes.pipe.'
        )
    if stages == 1:
        return model, 1
    from zoo.pipe import ProcessTopology, split

    choice = section.schedule
    more = {} if choice is None else {"schedule": registry.build("pipe_schedule", choice.type, choice.params)}
    micro = min(config.train_micro_batch_size_per_gpu, len(data))  # type: ignore[arg-type]
    example = default_collate([data[i] for i in range(micro)])
    topology = ProcessTopology(axes=list(sizes), dims=list(sizes.values()))
    tensor = sizes.get("tensor", 1) > 1
    if tensor:
        in_parts(model, config)
    if isinstance(example, list):
        example = tuple(example)
    found = split(model, example=example, topology=topology, **more)
    if tensor:
        from zoo.tensor.part import carried_out

        carried_out(found)
    return found, stages


def stream_of(rank: int, mesh: Any) -> int:
    """Which random numbers a rank draws: its own, but along the axis "tensor", where ranks draw the same mask."""
    names = list(mesh.mesh_dim_names or ()) if mesh is not None else []
    if "tensor" not in names:
        return rank
    number = 0
    for name, place, size in zip(names, mesh.get_coordinate(), mesh.mesh.shape, strict=True):
        number = number if name == "tensor" else number * size + place
    return number


def seed_generators(seed: int) -> None:
    """Those of torch, Python and NumPy."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed % 2**63)
    np.random.seed(seed % 2**32)


def in_parts(model: nn.Module, config: Config) -> None:
    """Cut the model over the axis "tensor", as its section says, before it is traced into stages: stages do not know
    whose layers they have."""
    from zoo.tensor.part import TensorParallelPart

    mesh = build_mesh(config, None, local_device())
    TensorParallelPart(config.tensor_parallel).prepare(model, mesh)


def tag_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step_{step:08d}"


def validate(engine: Engine, dataset: Dataset[Any]) -> float:
    """Mean loss over a whole data set, the same on all ranks. A collective.

    Batches of the size of a micro-batch are dealt in turn to the ranks, or to those that see a sample together. A rank
    whose turn comes after the last batch runs the first once more and does not count it, because at stage 3 a forward
    needs all ranks. Losses stay on the device until the end.
    """
    count, size = len(dataset), engine.config.train_micro_batch_size_per_gpu  # type: ignore[arg-type]
    if count == 0:
        raise ValueError("the task's validation data is empty; there is no loss to tell.")
    num_batches = -(-count // size)
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for turn in range(-(-num_batches // engine.batch_ranks)):
        number = turn * engine.batch_ranks + engine.batch_rank
        real = number < num_batches
        first = number * size if real else 0
        samples = [dataset[i] for i in range(first, min(first + size, count))]
        loss = engine.loss_of(default_collate(samples))
        if real:
            totals[0] += loss.detach().reshape(()) * len(samples)
            totals[1] += len(samples)
    engine.comm.all_reduce(totals).wait()
    return float(totals[0] / totals[1])
