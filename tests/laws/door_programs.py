"""What careless users do while they train, by any door; what may be refused; programs of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo import sim

from .doors import FORMS, WIDTH, Job, Plain, data, loss_of, start


@dataclass(frozen=True)
class Use:
    name: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}{self.arguments}"

    def run(self, side: Any) -> None:
        USES[self.name](side, *self.arguments)


# Micro-batches -----------------------------------------------------------------------------------------------------


def extra_of(side: Any, extra: str, caught: list[Tensor]) -> Any:
    """What a program adds to its loss."""
    weight = side.model.first.weight
    if extra == "weight":
        return 0.1 * weight.square().sum()
    if extra == "kept":
        return side.model.kept
    if extra == "hook":
        return caught[-1].sin().mean()
    return 0.0


def micro(side: Any, number: int, form: str, extra: str, plainly: bool, log: str) -> None:
    """A forward, a loss that is more than the model's output, a backward, and a step."""
    caught: list[Tensor] = []
    handle = side.model.first.register_forward_hook(lambda module, given, out: caught.append(torch.tanh(out)))
    try:
        for rank in side.ranks:
            x = data(rank, number).requires_grad_(extra == "gradient")
            if extra == "whole weight":
                with side.whole():
                    loss = loss_of(side(x, form), form) + 0.1 * side.model.first.weight.square().sum()
                    side.backward(loss, plainly)
                continue
            loss = loss_of(side(x, form), form) + extra_of(side, extra, caught)
            if extra == "gradient":
                (found,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + found.square().sum()
            if log == "before":
                loss.detach().mul_(3.0)
            side.backward(loss, plainly)
            written(side, loss, log)
    finally:
        handle.remove()
    side.step()


def written(side: Any, loss: Tensor, log: str) -> None:
    """For a log, after the backward: into the loss itself."""
    if log == "after":
        loss.detach().mul_(5.0)
    if log == "reduced" and not isinstance(side, Plain) and dist.is_initialized():
        dist.all_reduce(loss.detach())


def two(side: Any, numbers: tuple[int, int], forms: tuple[str, str], together: bool, plainly: bool) -> None:
    """Two forwards before their backwards."""
    for rank in side.ranks:
        losses = [loss_of(side(data(rank, n), form), form) for n, form in zip(numbers, forms, strict=True)]
        if together:
            side.backward(losses[0] + losses[1], plainly)
        else:
            side.backward(losses[1], plainly)
            side.backward(losses[0], plainly)
    side.step()


def evaluate(side: Any, number: int, form: str) -> None:
    side.model.eval()
    with torch.no_grad():
        for rank in side.ranks:
            side(data(rank, number), form)
    side.model.train()


def forward_only(side: Any, number: int, form: str) -> None:
    for rank in side.ranks:
        side(data(rank, number), form)


def drop(side: Any) -> None:
    side.zero_grad()


# What changes the model ----------------------------------------------------------------------------------------------


def tie(side: Any, to: int, of: int) -> None:
    blocks = side.model.blocks
    if max(to, of) < len(blocks) and all(isinstance(blocks[i], nn.Linear) for i in (to, of)):
        blocks[to].weight = blocks[of].weight


def swap(side: Any, one: int, other: int) -> None:
    blocks = side.model.blocks
    if max(one, other) < len(blocks):
        blocks[one], blocks[other] = blocks[other], blocks[one]


def prune(side: Any, which: int) -> None:
    if which < len(side.model.blocks):
        del side.model.blocks[which]


def rename(side: Any, name: str) -> None:
    model = side.model
    if name != model.last_name:
        head = getattr(model, model.last_name)
        delattr(model, model.last_name)
        setattr(model, name, head)
        model.last_name = name


def wrap(side: Any, which: int) -> None:
    if which < len(side.model.blocks):
        side.model.blocks[which] = nn.Sequential(side.model.blocks[which])


def new_layer(side: Any, number: int) -> None:
    """Plain torch would never train it, and say nothing; the step that would be made without it tells."""
    blocks = list(side.model.blocks)
    if not blocks or any(getattr(b, "weight", 0) is getattr(blocks[0], "weight", None) for b in blocks[1:]):
        return  # what others have of it would come before the layer is reached, which is refused in the midst of a step
    if isinstance(side, Plain):
        side.in_step = side.accumulation - 1
        side.zero_grad()
        return
    before = side.model.blocks[0]
    side.model.blocks[0] = nn.Linear(WIDTH, WIDTH).double()
    try:
        last = False
        while not last:
            last = side.boundary()
            side.backward(loss_of(side(data(side.ranks[0], number), "pair"), "pair"), False)
            side.step()
    except ValueError as error:
        if "came into the model after" not in str(error):
            raise
    else:
        raise AssertionError("a layer that is in no optimizer was trained without a word")
    finally:
        side.model.blocks[0] = before
    side.zero_grad()


# What changes how it trains ------------------------------------------------------------------------------------------


def rate(side: Any, factor: float, ranks: tuple[int, ...] | None) -> None:
    """None: on all ranks. Some have other rates than the others: the next step must tell."""
    if isinstance(side, Plain):
        for rank in range(side.job.world) if ranks is None else ranks:
            side.rates[rank] *= factor
        side.uneven = len(set(side.rates)) > 1
        if not side.uneven:
            side.groups[0]["lr"] = side.rates[0]
        return
    if ranks is None or side.ranks[0] in ranks:
        for group in side.groups:
            group["lr"] *= factor


def accumulate(side: Any, accumulation: int) -> None:
    """From now on so many micro-batches make a step."""
    if isinstance(side, Plain):
        side.accumulation = accumulation
    else:
        side.engine.set_train_batch_size(3 * side.job.world * accumulation)


USES: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        micro, two, evaluate, forward_only, drop, tie, swap, prune, rename, wrap, new_layer, rate, accumulate,
    )
}  # fmt: skip


# What may be refused -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    uses: tuple[str, ...]
    sentence: str
    when: Callable[[Job, Use, str], bool] = lambda job, use, before: True


PLAINLY = {"micro": 3, "two": 3}
ALIKE = r"what all ranks need alike for a step differs"


def _plainly(job: Job, use: Use, before: str) -> bool:
    return bool(use.arguments[PLAINLY[use.name]])


def _reads_a_weight(job: Job, use: Use, before: str) -> bool:
    return job.stage == 3 and use.arguments[2] == "weight"


def _second(job: Job, use: Use, before: str) -> bool:
    """Parameters that are gathered for a forward alone have no second derivative."""
    return use.arguments[2] == "gradient" and job.stage == 3


def _tied(job: Job, use: Use, before: str) -> bool:
    return "tie(" in before and (job.overlap or job.stage > 1)


_TAKE_OUT = ("prune", "swap", "wrap")


def _moved(job: Job, use: Use, before: str) -> bool:
    """A weight is only in another layer than that it came with, whose own one has a third one's, or is gone: its
    gradient arrives before its own layer is reached."""
    gone = use.name in _TAKE_OUT or any(f"{name}(" in before for name in _TAKE_OUT)
    return before.count("tie(") > 1 or ("tie(" in before and gone)


REFUSALS = [
    Refusal(("micro", "two"), r"loss\.backward\(\) under an engine with gradient_accumulation_steps=3", _plainly),
    Refusal(("micro",), r"outside of its unit's forward", _reads_a_weight),
    # Backward comes to the first of two layers that share a weight when the second has had it reduced.
    Refusal(("micro", "two", "new_layer"), r"arrived after it had been reduced", _tied),
    Refusal(
        ("micro", "two", "new_layer"), r"given this parameter after construction|after it had been reduced", _moved
    ),
    Refusal(("micro",), r"create_graph=True", _second),
    Refusal(("accumulate",), r"in the middle of a step"),
]


def check_refusal(use: Use, job: Job, before: str, error: BaseException) -> None:
    """Raise unless the table has it."""
    for refusal in REFUSALS:
        if use.name in refusal.uses and refusal.when(job, use, before) and re.search(refusal.sentence, str(error)):
            return
    raise AssertionError(f"{use} was refused with {type(error).__name__}: {error}") from error


# Programs ----------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, job: Job, max_size: int = 10) -> list[Use]:
    number, form, block = st.integers(0, 9), st.sampled_from(FORMS), st.integers(0, 2)
    extra = st.sampled_from(["none", "none", "weight", "whole weight", "kept", "hook", "gradient"])
    log = st.sampled_from(["none", "none", "before", "after", "reduced"])
    some = st.none() | st.sets(st.integers(0, job.world - 1)).map(lambda s: tuple(sorted(s)))
    others: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
        "two": st.tuples(st.tuples(number, number), st.tuples(form, form), st.booleans(), st.booleans()),
        "evaluate": st.tuples(number, form),
        "forward_only": st.tuples(number, form),
        "drop": st.just(()),
        "tie": st.tuples(block, block),
        "swap": st.tuples(block, block),
        "prune": st.tuples(block),
        "rename": st.tuples(st.sampled_from(["tail", "top", "head"])),
        "wrap": st.tuples(block),
        "new_layer": st.tuples(number),
        "rate": st.tuples(st.sampled_from([0.5, 2.0]), some if job.door != "zero" else st.none()),
        **({"accumulate": st.tuples(st.integers(1, 4))} if job.door != "zero" else {}),
        **({name: st.just(()) for name in ("weights", "state", "checkpoint")} if job.door != "zero" else {}),
    }
    uses = []
    for _ in range(draw(st.integers(1, max_size))):
        if draw(st.booleans()):
            uses.append(Use("micro", draw(st.tuples(number, form, extra, st.booleans(), log))))
        else:
            name = draw(st.sampled_from(sorted(others)))
            uses.append(Use(name, draw(others[name])))
    return uses


class Runner:
    """One rank of a program, beside its twin."""

    def __init__(self, job: Job, program: list[Use], rank: int, folder: Path) -> None:
        self.job, self.program, self.rank, self.folder = job, program, rank, folder
        self.door: Any = start(job, rank)
        self.twin = Plain(job)
        self.refused: list[bool] = []

    def run(self) -> list[bool]:
        for place, use in enumerate(self.program):
            self.at = "; ".join(map(str, self.program[: place + 1]))
            if use.name in ("weights", "state", "checkpoint"):
                getattr(self, use.name)(place)
            else:
                self.refused.append(not self.both(use))
            self.compare()
        self.at = f"the end of {'; '.join(map(str, self.program))}"
        self.drop()
        for number in range(90, 90 + 2 * self.twin.accumulation):
            self.both(Use("micro", (number, "pair", "none", False, "none")))
        self.compare()
        self.door.close()
        return self.refused

    def both(self, use: Use) -> bool:
        """Whether it was carried out, by both sides."""
        try:
            use.run(self.door)
        except Exception as error:
            if re.search(ALIKE, str(error)) and self.twin.uneven:
                self._again()
                use.run(self.twin)
                return True
            check_refusal(use, self.job, self.at, error)
            if use.name in PLAINLY:
                self.drop()
            return False
        if use.name in PLAINLY and self.twin.in_step + 1 >= self.twin.accumulation and self.twin.uneven:
            raise AssertionError(f"ranks stepped at rates of their own after {self.at}")
        use.run(self.twin)
        return True

    def _again(self) -> None:
        """The sentence says: give all ranks the same, and call step() again."""
        self._rates_are_even()
        self.door.step()

    def _rates_are_even(self) -> None:
        for group in self.door.groups:
            group["lr"] = self.twin.groups[0]["lr"]
        self.twin.rates, self.twin.uneven = [self.twin.groups[0]["lr"]] * self.job.world, False

    def drop(self) -> None:
        for side in (self.door, self.twin):
            side.zero_grad()

    # What the model is called in files -------------------------------------------------------------------------------

    def state(self, place: int) -> None:
        self.equal(self.door.state(), self.twin.model.state_dict(), "module_state_dict()")

    def weights(self, place: int) -> None:
        found = self.door.saved(self.folder / f"weights{place}")
        state = self.twin.model.state_dict()
        by_memory: dict[int, list[str]] = {}
        for name, value in state.items():
            by_memory.setdefault(value.data_ptr(), []).append(name)
        for names in by_memory.values():
            if sum(name in found for name in names) != 1:
                raise AssertionError(f"of {names} the file has {sorted(found)}, after {self.at}")
        self.equal(found, {name: state[name] for name in found if name in state}, "save_16bit_model()")

    def checkpoint(self, place: int) -> None:
        if self.twin.in_step:
            return  # the middle of a step has tests of its own

        def others() -> None:
            for number in range(self.twin.accumulation):
                use = Use("micro", (70 + number, "loss", "none", False, "none"))
                try:
                    use.run(self.door)
                except Exception as error:
                    check_refusal(use, self.job, self.at, error)
                    self.door.zero_grad()
                    return

        self.drop()
        self._rates_are_even()
        self.door.there_and_back(self.folder / f"checkpoint{place}", others)
        self.twin.forget_loss()  # the record is that of a step of the others

    def equal(self, found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
        if sorted(found) != sorted(expected):
            raise AssertionError(f"{what} has {sorted(found)}, plain torch {sorted(expected)}, after {self.at}")
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name].to(value.dtype), value.detach(), rtol=1e-9, atol=1e-9,
                msg=lambda m, n=name: f"{what}, {n} after {self.at}: {m}",
            )  # fmt: skip

    def compare(self) -> None:
        self.equal(self.door.parameters(), self.twin.parameters(), "consolidated_parameters()")
        expected, found = self.twin.loss(), self.door.loss()
        if self.job.door != "zero" and expected is not None and expected == expected and found is not None:
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"loss after {self.at}: {m}"
            )


def run_program(job: Job, program: list[Use], folder: Path) -> Counter[str]:
    """Run it on all ranks, each beside its twin; how many uses there were, and how many of them refused."""
    refused = sim.run(job.world, lambda rank: Runner(job, program, rank, folder).run(), seed=job.seed)
    if any(of != refused[0] for of in refused):
        raise AssertionError(f"refused on some ranks only: {refused}")
    return Counter(programs=1, uses=len(program), refused=sum(refused[0]))
