"""Drawn programs of what careless users do to a DeepSpeedEngine, beside plain torch in one process (law 8)."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim

RATE, MOMENTUM = 0.1, 0.5


class Net(nn.Module):
    """Three layers; raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.fails:
            raise KeyError("a mistake of the program")
        out: torch.Tensor = self.last(torch.tanh(self.middle(x)))
        return out


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


class Plain:
    """What one process computes that sees the data of all ranks."""

    def __init__(self, world: int, accumulation: int) -> None:
        self.world, self.accumulation, self.model, self.flag = world, accumulation, Net(), None
        self.micro, self.in_step = 0, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)

    def train(self, step: int) -> None:
        for rank in range(self.world):
            (loss_of(self.model, data(rank, step)) / (self.world * self.accumulation)).backward()
        last = self.in_step == self.accumulation - 1 if self.flag is None else self.flag
        self.micro += 1
        self.in_step += 1
        if last:
            self.in_step = 0
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


def start(stage: int, accumulation: int) -> Any:
    model = Net()
    document = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]


# Uses: what each does to the engine, and what it does to the twin -----------------------------------------------------


def train(engine: Any, rank: int, step: int) -> None:
    engine.backward(loss_of(engine, data(rank, step)))
    engine.step()


def evaluate(engine: Any, rank: int, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        engine(data(rank, step))
    engine.train()


def forward_only(engine: Any, rank: int, step: int) -> None:
    engine(data(rank, step))


def fail(engine: Any, rank: int, step: int) -> None:
    engine.module.fails = True
    try:
        engine(data(rank, step))
    except KeyError:
        pass
    finally:
        engine.module.fails = False


def drop(engine: Any, rank: int, step: int) -> None:
    engine.zero_grad()


def drop_each(engine: Any, rank: int, step: int) -> None:
    for p in engine.module.parameters():
        p.grad = None


def gather_and_write(engine: Any, rank: int, step: int) -> None:
    own = list(engine.module.middle.parameters())
    with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0 or not deepspeed.comm.is_initialized() or not hasattr(own[0], "ds_id"):
            for p in own:
                p.data.mul_(0.5)


def set_masters(engine: Any, rank: int, step: int) -> None:
    for p in engine.module.last.parameters():
        deepspeed.utils.safe_set_full_fp32_param(p, 0.75 * deepspeed.utils.safe_get_full_fp32_param(p))


def slower(engine: Any, rank: int, step: int) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


def copy_module(engine: Any, rank: int, step: int) -> None:
    if engine.zero_optimization_stage() == 3:
        with pytest.raises(RuntimeError, match="outside of its unit"):
            copy.deepcopy(engine.module)
    else:
        copy.deepcopy(engine.module)(data(rank, step))


def scale(factor: float, part: str) -> Callable[[Plain, int], None]:
    def act(plain: Plain, step: int) -> None:
        with torch.no_grad():
            for p in getattr(plain.model, part).parameters():
                p.mul_(factor)

    return act


def slower_twin(plain: Plain, step: int) -> None:
    plain.optimizer.param_groups[0]["lr"] *= 0.5


def nothing(plain: Plain, step: int) -> None:
    """It leaves no trace."""


def boundary(flag: bool) -> tuple[Any, Any]:
    def act(plain: Plain, step: int) -> None:
        plain.flag = flag  # type: ignore[assignment]

    return lambda engine, rank, step: engine.set_gradient_accumulation_boundary(flag), act


USES: dict[str, tuple[Callable[[Any, int, int], None], Callable[[Plain, int], None]]] = {
    "train": (train, lambda plain, step: plain.train(step)),
    "evaluate": (evaluate, nothing),
    "forward only": (forward_only, nothing),
    "fail": (fail, nothing),
    "zero_grad": (drop, lambda plain, step: plain.optimizer.zero_grad()),
    "grad = None": (drop_each, lambda plain, step: plain.optimizer.zero_grad()),
    "gather and write": (gather_and_write, scale(0.5, "middle")),
    "set masters": (set_masters, scale(0.75, "last")),
    "slower": (slower, slower_twin),
    "copy": (copy_module, nothing),
    "every micro-batch is the last": boundary(True),
    "no micro-batch is the last": boundary(False),
}


def save_and_go_back(engine: Any, rank: int, step: int, folder: str, *, within: bool) -> None:
    """What comes between a save and its load is undone; a save within a step leaves its gradients here."""
    if within:
        engine.save_checkpoint(folder, tag=f"at{step}")
        return
    engine.save_checkpoint(folder, tag=f"at{step}")
    for more in (0, 1):
        train(engine, rank, step + more)
    engine.zero_grad()
    assert engine.load_checkpoint(folder)[0] is not None


def saved(plain: Plain) -> bool:
    """Whether a save is within a step; otherwise a step that is empty begins anew."""
    if any(p.grad is not None for p in plain.model.parameters()):
        return True
    plain.in_step = 0
    return False


PROGRAM = st.lists(st.sampled_from(["train", "train", *USES, "save"]), min_size=1, max_size=10)


@given(
    world=st.integers(1, 2), stage=st.integers(0, 3), accumulation=st.integers(1, 4), program=PROGRAM,
    seed=st.integers(0, 9),
)  # fmt: skip
def test_whatever_a_program_does_is_what_plain_torch_does(
    world: int, stage: int, accumulation: int, program: list[str], seed: int
) -> None:
    plain = Plain(world, accumulation)
    expected, within = [], {}
    for step, use in enumerate(program):
        if use == "save":
            within[step] = saved(plain)
        else:
            USES[use][1](plain, step)
        expected.append((plain.parameters(), plain.micro))

    def job(rank: int) -> None:
        torch.set_num_threads(1)
        engine = start(stage, accumulation)
        for p in engine.module.parameters():
            p.mine = "a program's"
        for step, use in enumerate(program):
            if use != "save":
                USES[use][0](engine, rank, step)
            else:
                save_and_go_back(engine, rank, step, folder, within=within[step])
            values = {
                n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()
            }
            for name, value in expected[step][0].items():
                torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, s=step, n=name: (
                    f"after {program[: s + 1]}, {n}: {m}"
                ))  # fmt: skip
            assert engine.micro_steps == expected[step][1]
        assert all(p.mine == "a program's" for p in engine.module.parameters())

    with tempfile.TemporaryDirectory() as folder:
        sim.run(world, job, seed=seed)
