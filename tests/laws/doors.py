"""A model whose forward does what is hard, and the doors through which it is trained: zero, engine, façade; and plain
torch in one process, which sees the data of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors.torch
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo.deepspeed as deepspeed
from zoo.engine import initialize
from zoo.zero import ZeroOptimizer

RATE = 2.0**-4
WIDTH = 6
FORMS = ("logits", "pair", "loss", "named", "closure")


@dataclass(frozen=True)
class Job:
    door: str
    stage: int
    world: int
    accumulation: int
    clip_norm: float
    threshold: int
    bucket_size: int
    overlap: bool
    seed: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    return Job(
        door=draw(st.sampled_from(["zero", "engine", "engine", "facade", "facade"])),
        stage=draw(st.integers(0, 3)),
        world=draw(st.integers(1, 3)),
        accumulation=draw(st.integers(1, 4)),
        clip_norm=draw(st.sampled_from([0.0, 0.0, 0.5])),
        threshold=draw(st.sampled_from([0, 0, 10, 10**6])),
        bucket_size=draw(st.sampled_from([1, 50, 10**6])),
        overlap=draw(st.booleans()),
        seed=draw(st.integers(0, 50)),
    )


class Named(NamedTuple):
    loss: Tensor
    parts: dict[str, list[Tensor]]


class Net(nn.Module):
    """Outputs that are made from one another, a hidden state that is kept, and layers that may change their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.last_name = "head"
        self.kept: Tensor | None = None
        self.double()

    def forward(self, x: Tensor, form: str = "logits") -> Any:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        self.kept = h.square().mean()
        out = getattr(self, self.last_name)(h)
        if form == "pair":
            return h, out
        if form == "loss":
            return {"loss": out.square().mean(), "logits": out}
        if form == "named":
            return Named(out.square().mean(), {"hidden": [h, out.sin()]})
        return (lambda: out) if form == "closure" else out


def loss_of(found: Any, form: str) -> Tensor:
    """Of every form the outputs are used, those that others are made from too."""
    if form == "pair":
        return found[1].square().mean() + 0.5 * found[0].abs().mean()  # type: ignore[no-any-return]
    if form == "loss":
        return found["loss"] + 0.1 * found["logits"].exp().mean()  # type: ignore[no-any-return]
    if form == "named":
        return found.loss + 0.3 * found.parts["hidden"][0].cos().mean() + found.parts["hidden"][1].mean()  # type: ignore[no-any-return]
    return (found() if form == "closure" else found).square().mean()  # type: ignore[no-any-return]


def data(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


class Door(Protocol):
    """What a program does to either side. ``ranks``: whose data it sees."""

    ranks: list[int]
    model: Net
    groups: list[dict[str, Any]]

    def __call__(self, x: Tensor, form: str) -> Any: ...
    def backward(self, loss: Tensor, plainly: bool) -> None: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def parameters(self) -> dict[str, Tensor]: ...
    def loss(self) -> float | None: ...


class Zero:
    """A ZeRO optimizer alone: the program divides its losses."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.ranks, self.model, self.in_step = job, [rank], Net(), 0
        self.optimizer = ZeroOptimizer(
            self.model, stage=job.stage, optimizer=torch.optim.SGD, lr=RATE, clip_norm=job.clip_norm,
            param_persistence_threshold=job.threshold, reduce_bucket_size=job.bucket_size,
            overlap_comm=job.overlap,
        )  # fmt: skip
        self.groups = self.optimizer.param_groups

    def __call__(self, x: Tensor, form: str) -> Any:
        return self.model(x, form)

    def backward(self, loss: Tensor, plainly: bool) -> None:
        (loss / self.job.accumulation).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        if self.in_step + 1 == self.job.accumulation:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.in_step = (self.in_step + 1) % self.job.accumulation

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return self.optimizer.consolidated_parameters()

    def loss(self) -> float | None:
        return None

    def whole(self) -> Any:
        return self.optimizer.gathered()

    def boundary(self) -> bool:
        return self.in_step + 1 == self.job.accumulation

    def close(self) -> None:
        self.optimizer.close()


def document(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clip_norm, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {
            "stage": job.stage, "stage3_param_persistence_threshold": job.threshold,
            "reduce_bucket_size": job.bucket_size, "overlap_comm": job.overlap,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


class Trained:
    """An engine, or the façade's."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.ranks, self.model = job, [rank], Net()
        if job.door == "engine":
            self.engine: Any = initialize(document(job), self.model)[0]
        else:
            made = deepspeed.initialize(
                model=self.model, model_parameters=self.model.parameters(), config=document(job)
            )
            self.engine = made[0]
        self.groups = self.engine.optimizer.param_groups

    def __call__(self, x: Tensor, form: str) -> Any:
        return self.engine(x, form)

    def backward(self, loss: Tensor, plainly: bool) -> None:
        loss.backward() if plainly else self.engine.backward(loss)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._inner.optimizer.consolidated_parameters()
        return found

    def loss(self) -> float | None:
        record = self._inner.record
        return None if record is None else record.loss

    @property
    def _inner(self) -> Any:
        return self.engine if self.job.door == "engine" else self.engine.engine

    def whole(self) -> Any:
        return self._inner.sharded.gathered()

    def boundary(self) -> bool:
        found: bool = self.engine.is_gradient_accumulation_boundary()
        return found

    def close(self) -> None:
        self.engine.destroy()

    # What a file or a state_dict says ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.engine.module_state_dict()
        return found

    def saved(self, folder: Path) -> dict[str, Tensor]:
        if not self.engine.save_16bit_model(str(folder), "model.safetensors"):
            raise AssertionError("save_16bit_model() saved nothing")
        return safetensors.torch.load_file(folder / "model.safetensors")

    def there_and_back(self, folder: Path, others: Callable[[], None]) -> None:
        """Saved, trained on by ``others``, and loaded again."""
        self.engine.save_checkpoint(str(folder), tag="here")
        others()
        self.engine.load_checkpoint(str(folder), tag="here")


@dataclass
class Plain:
    """Plain torch: its optimizer has what it was given, wherever in the model that is now."""

    job: Job
    model: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        self.ranks, self.accumulation, self.in_step = list(range(self.job.world)), self.job.accumulation, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.groups: list[dict[str, Any]] = self.optimizer.param_groups
        self._losses: list[float] = []
        self._latest: float | None = None
        self.rates = [RATE] * self.job.world  # of each rank
        self.uneven = False  # some ranks have rates of their own: the next step of theirs must tell

    def __call__(self, x: Tensor, form: str) -> Any:
        return self.model(x, form)

    def backward(self, loss: Tensor, plainly: bool) -> None:
        self._losses.append(float("nan") if plainly else float(loss.detach()))
        (loss / (len(self.ranks) * self.accumulation)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.in_step += 1
        if self.in_step < self.accumulation:
            return
        if self.job.clip_norm:
            nn.utils.clip_grad_norm_(self.groups[0]["params"], self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._latest = sum(self._losses) / len(self._losses) if self._losses else None
        self.in_step, self._losses = 0, []

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._losses = [] if self.job.door == "engine" else [float("nan")]
        if self.job.door == "engine":
            self.in_step = 0  # its micro-batches do not count; the façade's do, and what they had for losses

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def loss(self) -> float | None:
        return self._latest

    def forget_loss(self) -> None:
        self._latest = None

    def whole(self) -> Any:
        return contextlib.nullcontext()


def start(job: Job, rank: int) -> Any:
    return Zero(job, rank) if job.door == "zero" else Trained(job, rank)
