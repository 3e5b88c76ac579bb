"""Which module and which pass an operator belongs to: forward, backward, recomputation, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiling.test_counts import Calls, profiled
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.activation_checkpointing import checkpoint as zoo_checkpoint
from zoo.profiling import FlopsProfiler, Profile


class Blocks(nn.Module):
    """Blocks of two linear layers, which may be checkpointed."""

    def __init__(self, number: int, how: Any = None, wide: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, wide)
        blocks = [nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide)) for _ in range(number)]
        self.blocks = nn.ModuleList(blocks)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how is None else self.how(block, x)
        return x


def reentrant(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def other(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, early_stop=False)


@given(st.integers(1, 4), st.integers(1, 5))
def test_backward_of_each_module_is_its_own(number: int, rows: int) -> None:
    found = profiled(Blocks(number), torch.randn(rows, 4), backward=True)
    for i in range(number):
        block = found.module(f"blocks.{i}")
        assert block.forward.macs == rows * 2 * 36
        assert block.backward.macs == 2 * block.forward.macs
        assert [child.backward.macs for child in block.children] == [2 * rows * 36, 0, 2 * rows * 36]
    assert found.module("first").backward.macs == rows * 4 * 6, "its input needs no gradient"
    assert found.module("blocks").forward.macs == number * rows * 2 * 36, "a list is what is in it"


@pytest.mark.parametrize("how", [reentrant, other, zoo_checkpoint])
def test_recomputation_is_apart_and_in_its_module(how: Any) -> None:
    plain = profiled(Blocks(3), torch.randn(5, 4), backward=True)
    again = profiled(Blocks(3, how), torch.randn(5, 4), backward=True)
    assert again.model.forward == plain.model.forward
    assert again.model.backward.flops == plain.model.backward.flops
    assert plain.model.recomputation.flops == 0
    for i in range(3):
        block = again.module(f"blocks.{i}")
        # torch stops where nothing more is needed: the last product's result is not.
        full = block.forward.flops
        assert block.recomputation.flops in ((full,) if how is not zoo_checkpoint else (full, full // 2))
    assert again.hardware_flops == again.model_flops + again.model.recomputation.flops > plain.hardware_flops
    assert again.model_flops == plain.model_flops


def test_a_backward_that_makes_a_graph_is_no_recomputation() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 4, requires_grad=True)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    once = profiler.profile.model
    assert (once.backward.macs, once.recomputation.macs) == (5 * (4 * 4 + 4), 0)
    first.square().sum().backward()  # a gradient penalty
    profiler.stop_profile()
    assert profiler.profile.model.recomputation.macs == 0
    assert profiler.profile.model.backward.macs > once.backward.macs


def test_what_is_neither_forward_nor_backward_is_apart() -> None:
    net = nn.Linear(4, 4)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    for _ in range(2):
        net(torch.randn(3, 4)).sum().backward()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))  # an update by Muon
    profiler.stop_profile()
    found = profiler.profile
    assert (found.model.forward.macs, found.model.backward.macs, found.outside.macs) == (2 * 48, 2 * 48, 2 * 8)
    assert found.model.calls == 2


def test_work_of_a_function_belongs_to_the_module_that_calls_it() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(x @ x.t() @ x)

    found = profiled(Attends(), torch.randn(3, 4))
    assert found.model.forward.macs == 2 * 36 + 48
    assert found.module("out").forward.macs == 48


def test_a_module_that_calls_itself_counts_once() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, times: int) -> Any:
            return self.inner(x) if times == 0 else self(self.inner(x), times - 1)

    found = profiled(Again(), torch.randn(3, 4), 2)
    assert found.model.forward.macs == found.module("inner").forward.macs == 3 * 48


def test_an_exception_leaves_the_stack_as_it_was() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            raise RuntimeError("no")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.linear = Fails(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            try:
                return self.fails(x)
            except RuntimeError:
                return self.linear(x)

    found = profiled(Tries(), torch.randn(3, 4), backward=True)
    assert found.module("fails").forward.macs == 0
    assert (found.module("linear").forward.macs, found.module("linear").backward.macs) == (48, 48)


def test_frozen_parameters_have_no_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    found: Profile = profiled(net, torch.randn(3, 4), backward=True)
    assert (found.model.forward.macs, found.model.backward.macs) == (96, 48)


def test_only_what_runs_between_start_and_stop_counts() -> None:
    net = Calls(torch.mm)
    profiler, x = FlopsProfiler(net), torch.ones(2, 2)
    net(x, x)
    profiler.start_profile()
    net(x, x)
    profiler.stop_profile()
    net(x, x)
    assert profiler.get_total_macs() == 8
    profiler.start_profile()
    assert profiler.get_total_macs() == 0, "a start begins at 0"
    net(x, x)
    profiler.reset_profile()
    net(x, x)
    net(x, x)
    profiler.end_profile()
    assert profiler.get_total_macs() == 16
