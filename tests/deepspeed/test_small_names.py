"""Names that ask or compute something small and need no engine: ranks, layers, operations, what a compiler traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.compression.helper import convert_conv1d_to_linear
from zoo.deepspeed.ops.op_builder import NotImplementedBuilder, OpBuilder, PinMemoryBuilder, QuantizerBuilder
from zoo.deepspeed.runtime import compiler
from zoo.deepspeed.utils import groups

import zoo.deepspeed as deepspeed


@pytest.mark.parametrize(
    ("sizes", "sharing", "holding"),
    [  # as DeepSpeed 0.19.8 gives them: world, tensor parallel, expert parallel, stages, data before expert
        ((8, 1, 4), [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            (16, 2, 4, 2),
            [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            [[0], [2], [4], [6], [1], [3], [5], [7], [8], [10], [12], [14], [9], [11], [13], [15]],
        ),
        (
            (16, 2, 4, 1, True),
            [[0, 4, 8, 12], [2, 6, 10, 14], [1, 5, 9, 13], [3, 7, 11, 15]],
            [[0, 2], [4, 6], [8, 10], [12, 14], [1, 3], [5, 7], [9, 11], [13, 15]],
        ),
        ((8, 2, 2, 2, True), [[0, 2], [1, 3], [4, 6], [5, 7]], [[0], [2], [1], [3], [4], [6], [5], [7]]),
    ],
)
def test_which_ranks_share_experts_and_which_hold_the_same(
    sizes: tuple[Any, ...], sharing: list[list[int]], holding: list[list[int]]
) -> None:
    assert groups._get_expert_parallel_ranks(*sizes) == (sharing, holding)


@pytest.mark.parametrize("sizes", [(16, 2, 5), (10, 4, 1), (10, 1, 1, 3), (4, 0, 1)])
def test_sizes_that_do_not_divide_the_ranks_are_named(sizes: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=r"\d+ ranks are not divisible by \w+_size_=\d; give a divisor"):
        groups._get_expert_parallel_ranks(*sizes)


class Transposed(nn.Module):
    """As transformers' Conv1D."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns)), nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_layers_with_transposed_weights_become_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Transposed(4, 3), nn.Sequential(nn.Tanh(), Transposed(3, 5)))
    model[0].weight.requires_grad_(False)
    x = torch.randn(2, 4)
    wanted, bias = model(x), model[0].bias
    assert convert_conv1d_to_linear(model, Transposed) is model
    assert [type(m) for m in model.modules() if not list(m.children())] == [nn.Linear, nn.Tanh, nn.Linear]
    torch.testing.assert_close(model(x), wanted)
    assert model[0].bias is bias
    assert not model[0].weight.requires_grad
    assert model[1][1].weight.requires_grad
    wrapped = nn.Module()
    wrapped.module = nn.Sequential(Transposed(4, 3))  # an engine
    assert isinstance(convert_conv1d_to_linear(wrapped, Transposed).module[0], nn.Linear)


def test_operations_that_zoo_does_not_have_say_so() -> None:
    for builder in (QuantizerBuilder, PinMemoryBuilder, deepspeed.ops.gds.GDSBuilder):
        assert issubclass(builder, NotImplementedBuilder)
        assert issubclass(builder, OpBuilder)
        assert builder().is_compatible() is False
        assert deepspeed.ops.__compatible_ops__[builder.NAME] is False
        with pytest.raises(NotImplementedError, match=f"{builder.__name__}: zoo does not have this operation"):
            builder().load()
    assert not deepspeed.ops.triton_ops.is_triton_available()


def test_what_a_compiler_traces() -> None:
    assert compiler.is_compile_supported()
    assert not compiler.is_compiling()

    @compiler.enable
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + compiler.is_compiling()

    @compiler.enable("2.1")
    def since(x: torch.Tensor) -> torch.Tensor:
        return x + compiler.is_compiling()

    @compiler.enable("999.0")
    def too_new(x: torch.Tensor) -> torch.Tensor:
        return x + compiler.is_compiling()

    @compiler.disable
    def never(x: torch.Tensor) -> torch.Tensor:
        return x + compiler.is_compiling()

    def ran(function: Any) -> bool:
        torch._dynamo.reset()
        return bool(torch.compile(lambda x: function(x) * 1, backend="eager")(torch.zeros(1)).item())

    assert [ran(function) for function in (plain, since, too_new, never)] == [True, True, False, False]


def test_backward_is_compiled_where_it_is_asked_for() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append(len(list(graph.graph.nodes)))
        return graph.forward

    weight = torch.ones(3, requires_grad=True)
    for enabled in (False, True):
        torch._dynamo.reset()
        with compiler.compiled_autograd(enabled, {"backend": backend}):
            (weight * 2).sum().backward()
        assert bool(ran) is enabled
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 3
