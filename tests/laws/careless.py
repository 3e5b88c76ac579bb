"""Programs of a careless user, the table of what may be refused, and the two sides that run them.

A program is a list of uses. Each rank runs it on a model under a ZeRO optimizer, and rank 0 beside it on a *twin*: the
same model in plain torch, which sees the data of all ranks. A use either computes, and then it does so on the twin too,
or is refused with a sentence of the table, and then the twin goes without it. At the end both must have the same
parameters, and after two more correct steps again.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from zoo.zero import GatheredParameters, ZeroOptimizer

from .careless_models import WEIGHTS, Setting, data, values_of


class OnPurpose(Exception):
    """What the programs raise."""


def explode(*_: Any) -> None:
    raise OnPurpose


@dataclass
class Side:
    """One of the two that run a program: a model, an optimizer, and the losses at hand."""

    model: nn.Module
    optimizer: Any
    ranks: list[int]
    dtype: torch.dtype
    losses: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # by name: one for each rank
    kept: list[Any] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return not isinstance(self.optimizer, ZeroOptimizer)

    def backward(self, losses: list[torch.Tensor], **options: Any) -> None:
        for loss in losses:
            loss = loss / len(self.ranks) if self.plain else loss
            loss.backward(**options)


Action = Callable[[Side], None]


@dataclass(frozen=True)
class Use:
    """One line of a program. ``__str__`` is what a failing program prints."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}{self.arguments}"

    def run(self, side: Side) -> None:
        ACTIONS[self.name](side, *self.arguments)


# The uses --------------------------------------------------------------------------------------------------------


def forward(side: Side, name: str, number: int, silent: tuple[int, ...], piecewise: bool) -> None:
    run = side.model.piecewise if piecewise else side.model
    losses = []
    for rank in side.ranks:
        x = data(rank, number, side.dtype)
        out = run(x) if piecewise else run(x, rank in silent)
        losses.append(out.double().square().mean())
    side.losses[name] = losses


def keep_output(side: Side, number: int, ranks: tuple[int, ...]) -> None:
    for rank in side.ranks:
        out = side.model(data(rank, number, side.dtype))
        if rank in ranks:
            side.kept.append(out)


def drop_outputs(side: Side) -> None:
    side.kept.clear()


def evaluate(side: Side, number: int) -> None:
    side.model.eval()
    with torch.no_grad():
        for rank in side.ranks:
            side.model(data(rank, number, side.dtype))
    side.model.train()


def backward(side: Side, names: tuple[str, ...], retain: bool, sync: bool) -> None:
    found = [side.losses[name] for name in names]
    for name in () if retain else names:
        del side.losses[name]
    summed = [torch.stack(parts).sum() for parts in zip(*found, strict=True)]
    if sync or side.plain:
        side.backward(summed, retain_graph=retain)
        return
    with side.optimizer.no_sync():
        side.backward(summed, retain_graph=retain)


def backward_of_some(side: Side, names: tuple[str, str], ranks: tuple[int, ...]) -> None:
    """Only some ranks lead the second forward to their loss."""
    first, second = side.losses.pop(names[0]), side.losses.pop(names[1])
    pairs = zip(side.ranks, first, second, strict=True)
    side.backward([a + b if rank in ranks else a for rank, a, b in pairs])


def drive(side: Side, events: tuple[int, ...], reduced: tuple[int, ...], max_bytes: int | None) -> None:
    """A schedule: the first of a number is the forward of that micro-batch, the second its backward."""
    losses: dict[int, torch.Tensor] = {}
    window = contextlib.nullcontext() if side.plain else side.optimizer.sharded.window(max_bytes=max_bytes)
    with window as driven:
        for micro in events:
            if micro not in losses:
                with driven.forward(micro) if driven else contextlib.nullcontext():
                    outputs = [side.model(data(rank, micro, side.dtype)).double() for rank in side.ranks]
                losses[micro] = torch.stack([out.square().mean() for out in outputs]).sum()
                continue
            with driven.backward(micro, reduce=micro in reduced) if driven else contextlib.nullcontext():
                side.backward([losses[micro]])


def penalty(side: Side, name: str, weight: str) -> None:
    losses = side.losses.pop(name)
    side.backward([loss + side.model.get_parameter(weight).double().square().sum() for loss in losses])


def penalty_alone(side: Side, weight: str) -> None:
    side.backward([side.model.get_parameter(weight).double().square().sum() for _ in side.ranks])


def gradient_of_input(side: Side, number: int) -> None:
    for rank in side.ranks:
        x = data(rank, number, side.dtype).requires_grad_()
        (found,) = torch.autograd.grad(side.model(x).double().square().mean(), x)
        side.saved.setdefault("gradients", []).append(found)


def gradient_before_backward(side: Side, name: str, weight: str) -> None:
    for loss in side.losses[name]:
        torch.autograd.grad(loss, side.model.get_parameter(weight), retain_graph=True)


def exception(side: Side, number: int, where: str) -> None:
    block: Any = side.model.blocks[0]  # type: ignore[index]
    if where == "travelling":  # of rows to other ranks
        handle = side.model.experts.moe.shared.register_forward_pre_hook(explode)  # type: ignore[union-attr]
    elif where == "forward":
        handle = block.inner.register_forward_pre_hook(explode)
    elif where == "backward":
        handle = block.inner.register_full_backward_hook(explode)
    else:
        handle = block.inner.register_forward_hook(lambda m, a, out: out.register_hook(explode) and None)
    if side.plain:
        handle.remove()
        return  # what it leaves of the gradients is undefined, and dropped
    try:
        side.backward([side.model(data(rank, number, side.dtype)).double().square().mean() for rank in side.ranks])
    except OnPurpose:
        pass
    else:
        raise AssertionError("the exception of a hook vanished")
    finally:
        handle.remove()


def not_a_number(side: Side, number: int, ranks: tuple[int, ...]) -> None:
    """A batch that makes the norm NaN: under clipping the step is skipped."""
    if side.plain:
        side.optimizer.zero_grad()
        return
    factors = [float("nan") if rank in ranks else 1.0 for rank in side.ranks]
    side.optimizer.zero_grad()
    losses = [side.model(data(rank, number, side.dtype)).double().square().mean() for rank in side.ranks]
    side.backward([loss * factor for loss, factor in zip(losses, factors, strict=True)])
    before = side.optimizer.num_skipped
    side.optimizer.step()
    assert side.optimizer.num_skipped == before + 1
    side.optimizer.zero_grad()


def zero_grad(side: Side, of_model: bool, to_none: bool) -> None:
    if of_model:
        side.model.zero_grad(set_to_none=to_none)
    else:
        side.optimizer.zero_grad()


def step(side: Side) -> None:
    side.optimizer.step()


def write(side: Side, weight: str, number: int, way: str) -> None:
    value = values_of(weight, side.model, number)
    parameter = side.model.get_parameter(weight)
    if way == "data":
        parameter.data = value
    elif way == "through_data":
        parameter.data.copy_(value)
    elif way == "in_place":
        with torch.no_grad():
            parameter.copy_(value)
    else:
        side.model.load_state_dict({**side.model.state_dict(), weight: value})


def edit_gathered(side: Side, weight: str, number: int, fails: bool) -> None:
    parameter = side.model.get_parameter(weight)
    value = values_of(weight, side.model, number)
    writes = side.plain or number % 2 or side.ranks == [0]  # the others have what rank 0 writes, whether they do or not
    try:
        with GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if fails and not side.plain:
                parameter.copy_(value)
                raise OnPurpose
            if not fails and writes:
                parameter.copy_(value)
    except OnPurpose:
        pass


def convert(side: Side, way: str) -> None:
    {
        "same": lambda: side.model.to(side.dtype),
        "cpu": lambda: side.model.cpu(),
        "half": lambda: side.model.half(),
    }[way]()


def copy_model(side: Side) -> None:
    again = copy.deepcopy(side.model)
    again(data(0, 1, side.dtype)).double().square().mean().backward()
    assert all(type(p) is nn.Parameter for p in again.parameters())


def read_gradients(side: Side) -> None:
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape


def foreign_state(side: Side) -> None:
    if side.plain:
        return
    state = side.optimizer.state_dict()
    state["slices"] = {f"{key}7": value for key, value in state["slices"].items()}
    side.optimizer.load_state_dict(state)


def own_state(side: Side) -> None:
    """Save and load again: nothing happens."""
    side.optimizer.load_state_dict(side.optimizer.state_dict())


def away_and_back(side: Side) -> None:
    if not side.plain:
        side.optimizer.offload_states()
        side.optimizer.reload_states()


def construct_again(side: Side) -> None:
    if not side.plain:
        ZeroOptimizer(side.model, stage=3, optimizer=torch.optim.SGD, lr=0.1)


ACTIONS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        forward, keep_output, drop_outputs, evaluate, backward, backward_of_some, drive, penalty, penalty_alone,
        gradient_of_input, gradient_before_backward, exception, not_a_number, zero_grad, step, write, edit_gathered,
        convert, copy_model, read_gradients, foreign_state, own_state, away_and_back, construct_again,
    )
}  # fmt: skip


# What may be refused ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Uses that may be refused, when, and the sentence."""

    uses: tuple[str, ...]
    sentence: str
    when: Callable[[Setting], bool] = lambda setting: True


BACKWARDS = ("backward", "backward_of_some", "drive", "penalty", "penalty_alone", "gradient_before_backward")
PARTITIONED = r"outside of its unit's forward and backward|is partitioned|while it is partitioned"
REFUSALS = [
    Refusal(
        (*BACKWARDS, "step", "exception", "not_a_number", "gradient_of_input"), r"latest backward ended with an exc"
    ),
    Refusal((*BACKWARDS,), r"older than the latest step"),
    # Plain torch refuses these too: a value that backward needs was written to.
    Refusal((*BACKWARDS,), r"modified by an inplace operation|backward through the graph a second time"),
    # A gradient with no output of a module on its way.
    Refusal(("penalty_alone", "penalty", *BACKWARDS, "step"), r"did not come through the output of its module"),
    Refusal(("penalty_alone", "penalty"), r"arrived after it had been reduced"),
    Refusal(("penalty", "penalty_alone", "copy_model", "write"), PARTITIONED, lambda s: s.stage == 3),
    Refusal(("convert",), r"[Cc]onvert (the|a) model before the optimizer is constructed"),
    Refusal(("foreign_state",), r"the state_dict is of another model, or of buckets laid out otherwise"),
    Refusal(("construct_again",), r"is a ZeroParameter; the ZeRO optimizers work on plain"),
    Refusal(("away_and_back",), r"offload_states\(device='cpu'\) at stage [012]", lambda s: s.stage != 3),
]


def check_refusal(use: Use, setting: Setting, error: BaseException) -> None:
    """Raise unless the table has it."""
    text = str(error)
    for refusal in REFUSALS:
        if use.name in refusal.uses and refusal.when(setting) and re.search(refusal.sentence, text):
            return
    raise AssertionError(f"{use} was refused with {type(error).__name__}: {text}") from error


# Programs ----------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, setting: Setting, max_size: int = 9) -> list[Use]:
    """Uses in any order. Losses have names; a backward takes one that is there."""
    uses: list[Use] = []
    names: list[str] = []
    some = st.sets(st.integers(0, setting.world - 1)).map(lambda s: tuple(sorted(s)))
    number, weight = st.integers(0, 9), st.sampled_from(WEIGHTS)
    wheres = ["forward", "backward", "hook", *(["travelling"] if setting.ep_size else [])]
    hows = ["one", "one", "all", "some", "penalty", "before"]
    if setting.ep_size > 1:
        hows.remove("some")  # gradients of experts travel between all ranks or between none

    def add(name: str, *arguments: Any) -> None:
        uses.append(Use(name, arguments))

    others: dict[str, Callable[[], tuple[Any, ...]]] = {
        "keep_output": lambda: (draw(number), draw(some)),
        "drop_outputs": tuple,
        "evaluate": lambda: (draw(number),),
        "drive": lambda: (
            draw(st.permutations([1, 1, 2, 2, 3, 3]).map(tuple)),
            draw(st.sets(st.integers(1, 3)).map(tuple)),
            draw(st.sampled_from([None, 0, 600, 10**6])),
        ),
        "penalty_alone": lambda: (draw(weight),),
        "gradient_of_input": lambda: (draw(number),),
        "exception": lambda: (draw(number), draw(st.sampled_from(wheres))),
        "zero_grad": lambda: (draw(st.booleans()), draw(st.booleans())),
        "write": lambda: (
            draw(weight),
            draw(number),
            draw(st.sampled_from(["data", "through_data", "in_place", "load"])),
        ),
        "edit_gathered": lambda: (draw(weight), draw(number), draw(st.booleans())),
        "convert": lambda: (draw(st.sampled_from(["same", "cpu", "half"])),),
        "copy_model": tuple,
        "read_gradients": tuple,
        "foreign_state": tuple,
        "own_state": tuple,
        "away_and_back": tuple,
        "construct_again": tuple,
    }
    if setting.clip_norm:
        others["not_a_number"] = lambda: (draw(number), draw(some.filter(len)))
    for index in range(draw(st.integers(1, max_size))):
        kinds = ["forward", "forward", "backward", "backward", "step", "step", "other", "other", "drive"]
        kind = draw(st.sampled_from(kinds))
        if kind == "forward" or (kind == "backward" and not names):
            name = f"loss {index}"
            names.append(name)
            add("forward", name, draw(number), draw(some), draw(st.booleans()))
        elif kind == "backward":
            how = draw(st.sampled_from(hows))
            chosen = draw(st.sampled_from(names))
            if how == "one" or (how == "some" and len(names) < 2):
                retain = draw(st.booleans())
                add("backward", (chosen,), retain, draw(st.sampled_from([True, True, False])))
                if not retain:
                    names.remove(chosen)
            elif how == "all":
                add("backward", tuple(names), False, True)
                names.clear()
            elif how == "some":
                add("backward_of_some", (names[0], names[1]), draw(some))
                del names[:2]
            elif how == "penalty":
                add("penalty", chosen, draw(weight))
                names.remove(chosen)
            else:
                add("gradient_before_backward", chosen, draw(weight))
        elif kind == "step":
            add("step")
            if draw(st.booleans()):
                add("zero_grad", draw(st.booleans()), draw(st.booleans()))
        else:
            name = kind if kind == "drive" else draw(st.sampled_from(sorted(others)))
            add(name, *others[name]())
    return uses


Counts = Counter[str]
