"""Small changes to programs, most of which make them wrong and some of which do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from zoo.pipe import Computation, Kind, Program, Step, Transfer

Steps = list[list[Step]]


def mutant(programs: Sequence[Program], rng: random.Random, changes: int) -> tuple[Program, ...]:
    """The programs after so many changes; a change that finds nothing to change is left out."""
    made: Steps = [list(program) for program in programs]
    for _ in range(changes):
        rng.choice(CHANGES)(made, rng)
    return tuple(map(tuple, made))


def _step(made: Steps, rng: random.Random, wanted: Callable[[Step], bool]) -> tuple[int, int] | None:
    found = [(r, i) for r, program in enumerate(made) for i, step in enumerate(program) if wanted(step)]
    return rng.choice(found) if found else None


def _transfer(made: Steps, rng: random.Random) -> tuple[int, int, int] | None:
    at = _step(made, rng, lambda step: bool(step.transfers))
    return None if at is None else (*at, rng.randrange(len(made[at[0]][at[1]].transfers)))


def _without(made: Steps, r: int, i: int, k: int) -> Transfer:
    step = made[r][i]
    made[r][i] = replace(step, transfers=step.transfers[:k] + step.transfers[k + 1 :])
    return step.transfers[k]


def _insert(made: Steps, r: int, i: int, t: Transfer, rng: random.Random) -> None:
    step = made[r][i]
    k = rng.randint(0, len(step.transfers))
    made[r][i] = replace(step, transfers=(*step.transfers[:k], t, *step.transfers[k:]))


def _near(made: Steps, r: int, i: int, rng: random.Random) -> int:
    return min(max(0, i + rng.choice((-3, -2, -1, 1, 2, 3))), len(made[r]) - 1)


def swap_steps(made: Steps, rng: random.Random) -> None:
    if (at := _step(made, rng, lambda _: True)) is not None:
        r, i = at
        j = _near(made, r, i, rng)
        made[r][i], made[r][j] = made[r][j], made[r][i]


def swap_computations(made: Steps, rng: random.Random) -> None:
    if (at := _step(made, rng, lambda step: step.computation is not None)) is not None:
        r, i = at
        j = _near(made, r, i, rng)
        a, b = made[r][i], made[r][j]
        made[r][i], made[r][j] = replace(a, computation=b.computation), replace(b, computation=a.computation)


def move_transfer(made: Steps, rng: random.Random) -> None:
    if (at := _transfer(made, rng)) is not None:
        r, i, k = at
        _insert(made, r, _near(made, r, i, rng), _without(made, r, i, k), rng)


def move_both_sides(made: Steps, rng: random.Random) -> None:
    if (at := _transfer(made, rng)) is None:
        return
    r, i, k = at
    t = _without(made, r, i, k)
    _insert(made, r, min(i + 1, len(made[r]) - 1), t, rng)
    for j, step in enumerate(made[t.peer]):
        for n, other in enumerate(step.transfers):
            if other.message == t.message and other.sends != t.sends:
                _insert(made, t.peer, min(j + 1, len(made[t.peer]) - 1), _without(made, t.peer, j, n), rng)
                return


def drop_transfer(made: Steps, rng: random.Random) -> None:
    if (at := _transfer(made, rng)) is not None:
        _without(made, *at)


def duplicate_transfer(made: Steps, rng: random.Random) -> None:
    if (at := _transfer(made, rng)) is not None:
        r, i, k = at
        _insert(made, r, rng.choice((i, _near(made, r, i, rng))), made[r][i].transfers[k], rng)


def duplicate_both_sides(made: Steps, rng: random.Random) -> None:
    if (at := _transfer(made, rng)) is not None:
        r, i, k = at
        t = made[r][i].transfers[k]
        for rank in (r, t.peer):
            for j, step in enumerate(made[rank]):
                if any(other.message == t.message for other in step.transfers):
                    mine = next(other for other in step.transfers if other.message == t.message)
                    _insert(made, rank, j, mine, rng)
                    break


def _change(made: Steps, rng: random.Random, changed: Callable[[Transfer], Transfer]) -> None:
    if (at := _transfer(made, rng)) is not None:
        r, i, k = at
        transfers = list(made[r][i].transfers)
        transfers[k] = changed(transfers[k])
        made[r][i] = replace(made[r][i], transfers=tuple(transfers))


def retarget(made: Steps, rng: random.Random) -> None:
    _change(made, rng, lambda t: replace(t, peer=rng.randrange(len(made))))


def turn(made: Steps, rng: random.Random) -> None:
    _change(made, rng, lambda t: replace(t, sends=not t.sends))


def relabel_transfer(made: Steps, rng: random.Random) -> None:
    _change(made, rng, lambda t: replace(t, micro_batch=max(0, t.micro_batch + rng.choice((-1, 1)))))


def restage_transfer(made: Steps, rng: random.Random) -> None:
    _change(made, rng, lambda t: replace(t, stage=max(0, t.stage + rng.choice((-1, 1)))))


def relabel_computation(made: Steps, rng: random.Random) -> None:
    if (at := _step(made, rng, lambda step: step.computation is not None)) is not None:
        r, i = at
        c = made[r][i].computation
        assert c is not None
        other = rng.choice(
            (
                replace(c, micro_batch=max(0, c.micro_batch + rng.choice((-1, 1)))),
                replace(c, stage=max(0, c.stage + rng.choice((-1, 1)))),
                replace(c, kind=rng.choice(list(Kind))),
            )
        )
        made[r][i] = replace(made[r][i], computation=other)


def drop_computation(made: Steps, rng: random.Random) -> None:
    if (at := _step(made, rng, lambda step: step.computation is not None)) is not None:
        made[at[0]][at[1]] = replace(made[at[0]][at[1]], computation=None)


def split_backward(made: Steps, rng: random.Random) -> None:
    """B becomes I, and its W comes some steps later: right, wherever that is."""
    at = _step(made, rng, lambda step: step.computation is not None and step.computation.kind is Kind.BACKWARD)
    if at is not None:
        r, i = at
        c = made[r][i].computation
        assert c is not None
        made[r][i] = replace(made[r][i], computation=Computation(Kind.INPUT, c.stage, c.micro_batch))
        weight = Step(Computation(Kind.WEIGHT, c.stage, c.micro_batch), (), made[r][i].slot)
        made[r].insert(rng.randint(max(0, i - 1), min(i + 4, len(made[r]))), weight)


def shuffle_batch(made: Steps, rng: random.Random) -> None:
    if (at := _step(made, rng, lambda step: len(step.transfers) > 1)) is not None:
        r, i = at
        made[r][i] = replace(made[r][i], transfers=tuple(rng.sample(made[r][i].transfers, len(made[r][i].transfers))))


def split_batch(made: Steps, rng: random.Random) -> None:
    """A batch in two, the second part in a step of its own."""
    if (at := _step(made, rng, lambda step: len(step.transfers) > 1)) is not None:
        r, i = at
        step = made[r][i]
        k = rng.randrange(1, len(step.transfers))
        made[r][i] = replace(step, transfers=step.transfers[:k])
        made[r].insert(i + 1, Step(None, step.transfers[k:], step.slot))


def part_from_computation(made: Steps, rng: random.Random) -> None:
    """The transfers of a step before its computation, or after it in a step of their own."""
    if (at := _step(made, rng, lambda step: step.computation is not None and bool(step.transfers))) is not None:
        r, i = at
        step = made[r][i]
        made[r][i : i + 1] = rng.sample([replace(step, transfers=()), replace(step, computation=None)], 2)


CHANGES = [
    swap_steps, swap_computations, move_transfer, move_both_sides, drop_transfer, duplicate_transfer,
    duplicate_both_sides, retarget, turn, relabel_transfer, restage_transfer, relabel_computation, drop_computation,
    split_backward, shuffle_batch, split_batch, part_from_computation,
]  # fmt: skip
