"""Ranks of which only some can use compiled kernels: settled at construction, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from tests.zero.blocks import Blocks, build, check, one_step, twin

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.kernels import loading
from zoo.kernels.building import BuildError
from zoo.shard import agreement
from zoo.shard.agreement import KernelUse


@pytest.fixture(autouse=True)
def mode_of_before() -> Iterator[None]:
    with loading.use_mode("auto"):
        yield


def rank_of_here(monkeypatch: pytest.MonkeyPatch, states: list[KernelUse]) -> None:
    """Simulated ranks share one library; each gets the state of a process of its own."""
    monkeypatch.setattr(agreement, "kernels_of", lambda device: states[torch.distributed.get_rank()])


HAS = KernelUse(usable=True)
LACKS = KernelUse(usable=False, why="there is no C++ compiler")
ASKED = KernelUse(usable=False, why="ZOO_KERNELS=reference")
FAILS = KernelUse(usable=False, why="ZOO_KERNELS=native, but g++ failed", required=True)
DEMANDS = KernelUse(usable=True, required=True)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("states", [[HAS, LACKS, HAS], [ASKED, HAS, HAS]])
def test_where_some_ranks_lack_them_no_rank_uses_them(
    stage: int, states: list[KernelUse], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank_of_here(monkeypatch, states)
    modes = [""] * 3

    def fn(rank: int) -> None:
        model = Blocks()
        _, optimizer = build(stage, model)
        modes[rank] = loading.mode()
        one_step(model, optimizer, rank)
        check(optimizer, twin(3))

    with caplog.at_level(logging.WARNING, "zoo.zero"):
        sim.run(3, fn, group_timeout_s=5.0)
    assert modes == ["reference"] * 3
    lacking = next(i for i, s in enumerate(states) if not s.usable)
    assert [r.getMessage() for r in caplog.records if "compiled kernels" in r.getMessage()] == [
        f"all ranks run the references in plain torch, which are slower, because some cannot use compiled kernels: "
        f"rank {lacking}: {states[lacking].why}"
    ]


@pytest.mark.parametrize("states", [[HAS, FAILS], [FAILS, LACKS], [FAILS, FAILS], [DEMANDS, LACKS]])
def test_where_some_rank_demands_them_all_ranks_are_refused(
    states: list[KernelUse], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_of_here(monkeypatch, states)

    def fn(rank: int) -> None:
        told = "; ".join(f"rank {i}: {s.why}" for i, s in enumerate(states) if not s.usable)
        with pytest.raises(BuildError) as caught:
            build(2, Blocks())
        where = ", ".join(str(i) for i, s in enumerate(states) if s.required)
        assert str(caught.value).startswith(f"ZOO_KERNELS=native on rank{'s' * (len(where) > 1)} {where}, and some")
        assert str(caught.value).endswith(told)

    sim.run(2, fn, group_timeout_s=5.0)
    assert loading.mode() == "auto"


@pytest.mark.parametrize("states", [[HAS, HAS], [LACKS, LACKS], [ASKED, LACKS], [DEMANDS, HAS]])
def test_where_all_ranks_are_alike_nothing_changes(
    states: list[KernelUse], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank_of_here(monkeypatch, states)

    def fn(rank: int) -> None:
        model = Blocks()
        _, optimizer = build(1, model)
        one_step(model, optimizer, rank)

    sim.run(2, fn, group_timeout_s=5.0)
    assert loading.mode() == "auto"
    assert "compiled kernels" not in caplog.text


def test_other_arguments_that_differ_are_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of_here(monkeypatch, [HAS, LACKS])

    def fn(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError, match=r"lr: 0\.1 on rank 0, 0\.2 on rank 1"):
            build(2, Blocks(), lr=0.1 + 0.1 * rank)

    sim.run(2, fn, group_timeout_s=5.0)
    assert loading.mode() == "auto"


def test_the_state_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with loading.use_mode("reference"):
        assert agreement.kernels_of(cpu) == ASKED
    monkeypatch.setattr(loading, "_library", None)
    monkeypatch.setattr(loading, "_why_not", "there is no C++ compiler")
    assert agreement.kernels_of(cpu) == LACKS
    with loading.use_mode("native"):
        assert agreement.kernels_of(cpu) == KernelUse(
            usable=False, why="ZOO_KERNELS=native, but there is no C++ compiler", required=True
        )
