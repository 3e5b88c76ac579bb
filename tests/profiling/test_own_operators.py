"""Operators of zoo: each has a formula or moves bytes only, and says what its reference in plain torch says."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiling.test_counts import Calls, profiled
from torch import nn

from zoo.kernels import loading
from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.packed_linear import pack_weight, packed_linear
from zoo.kernels.thin_linear import thin_linears
from zoo.moe import GroupedExperts, MixtureOfExperts, MoE, TopKGate
from zoo.moe.experts.grouped_linear import grouped_linear
from zoo.profiling import FlopsProfiler
from zoo.profiling.formulas.table import Kind, kind_of
from zoo.profiling.formulas.zoo_operators import OWN, OWN_MOVES

native = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


OF_TESTS = ("zoo_emulated", "zoo_emulator", "zoo_profiling_test")


def own_operators() -> Iterator[str]:
    """Names of all operators that packages of zoo have told torch of."""
    import zoo

    for found in pkgutil.walk_packages(zoo.__path__, "zoo."):
        if found.name.startswith(("zoo.kernels.", "zoo.moe.", "zoo.compile.ops", "zoo.compression.")):
            importlib.import_module(found.name)
    for name in torch._C._dispatch_get_all_op_names():
        space = name.split("::")[0]
        if space.startswith("zoo") and space not in OF_TESTS:
            yield name


@native
def test_every_operator_of_zoo_has_a_formula_or_moves_bytes() -> None:
    names = {name.split(".")[0] for name in own_operators()}
    assert len(names) > 50
    for name in names:
        space, short = name.split("::")
        found = kind_of(getattr(getattr(torch.ops, space), short).default)
        assert found not in (Kind.UNKNOWN, Kind.MADE_OF_OTHERS), f"{name} has no formula"
    assert not OWN.keys() & OWN_MOVES
    assert not (OWN.keys() | OWN_MOVES) - names, "formulas of operators that there are not any more"


def both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Of the kernel, and of its reference."""
    made = []
    for mode in ("native", "reference"):
        with loading.use_mode(mode), torch.no_grad():
            found = profiled(Calls(function), *args, **kwargs)
        assert any(name.startswith("zoo::") for name in found.operators) == (mode == "native")
        made.append(found.model.forward)
    return made[0], made[1]


@native
@given(st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_linear_layers_of_few_tokens(rows: int, parts: int, biased: bool) -> None:
    x, weights = torch.randn(rows, 32), [torch.randn(8 * i, 32) for i in range(1, parts + 1)]
    kernel, _ = both(thin_linears, x, weights, [torch.randn(len(w)) for w in weights] if biased else [])
    assert kernel.macs == rows * 32 * sum(map(len, weights))


@native
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights(bits: int) -> None:
    weight = pack_weight(torch.randn(48, 32), bits=bits, group_size=16)
    kernel, reference = both(packed_linear, torch.randn(3, 5, 32), weight, torch.randn(48))
    assert kernel.macs == reference.macs == 15 * 32 * 48
    x = torch.randn(5, 32, requires_grad=True)
    found = profiled(Calls(lambda x: packed_linear(x, weight)), x, backward=True).model
    assert found.backward.macs == found.forward.macs == 5 * 32 * 48, "codes have no gradient"


@native
@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_a_cache(masked: bool) -> None:
    q, keys, values = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    mask = torch.ones(2, 3, 9, dtype=torch.bool) if masked else None
    kernel, _ = both(cached_attention, q, keys, values, mask, scale=0.25)
    assert kernel.macs == 2 * 4 * 3 * 9 * 16 * 2
    assert kernel.masked_macs == (0 if masked else 2 * 4 * (2 + 1) * 16 * 2), "queries are the last tokens"


@native
@pytest.mark.parametrize("bits", [0, 8])
def test_a_decoder_layer(bits: int) -> None:
    from tests.kernels.test_decoder_layer import DIM, GROUPS, HEADS, WIDE, WIDTH, arguments, run

    before, after = arguments(2, 3, torch.float32, bits, True, True, 4)
    kernel, _ = both(lambda: run(before, after))
    linear = 6 * (WIDTH * (HEADS + 2 * GROUPS) * DIM + HEADS * DIM * WIDTH + WIDTH * 2 * WIDE + WIDE * WIDTH)
    assert kernel.macs == linear + 2 * HEADS * 3 * 3 * DIM * 2


def mixture(*, gated: bool, bias: bool, activation: Any = "silu") -> MixtureOfExperts:
    experts = GroupedExperts(8, 16, 24, activation=activation, gated=gated, bias=bias)
    return MixtureOfExperts(TopKGate(16, 8, k=2), experts)


class Output(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        found = self.layer(x)
        return found.output if hasattr(found, "output") else found[0]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", torch.tanh])
def test_a_mixture_of_experts_counts_what_is_active(gated: bool, activation: Any) -> None:
    """Two ways through the experts: of the CPU with both products in one operator, and one operator a product."""
    x = torch.randn(5, 16, requires_grad=True)
    found = profiled(Output(mixture(gated=gated, bias=True, activation=activation)), x, backward=True).model
    of_experts = 5 * 2 * (3 if gated else 2) * 16 * 24
    assert found.forward.macs == 5 * 16 * 8 + of_experts
    assert found.backward.macs == 2 * found.forward.macs
    assert found.recomputation.macs == 0
    numel = 8 * 16 + 8 * ((3 if gated else 2) * 16 * 24 + (2 if gated else 1) * 24 + 16)
    assert found.parameters.numel == numel
    assert found.parameters.active == 8 * 16 + (numel - 8 * 16) // 4, "two of eight"


def test_the_documented_layer_drops_what_exceeds_a_capacity() -> None:
    expert = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
    layer = MoE(16, expert, num_experts=4, k=1, capacity_factor=1.0, eval_capacity_factor=1.0, min_capacity=1).eval()
    with torch.no_grad():
        layer_input = torch.randn(1, 12, 16)
        counted = torch.as_tensor(layer(layer_input)[2])
        found = profiled(Output(layer), layer_input).model
    taken = int(counted.clamp(max=3).sum())
    assert found.forward.macs == 12 * 16 * 4 + taken * 2 * 16 * 24
    assert found.parameters.active < found.parameters.numel


def test_on_meta_all_rows_are_taken_for_used() -> None:
    x, w, counts = torch.randn(10, 4), torch.randn(3, 4, 6), torch.tensor([1, 2, 4])
    assert profiled(Calls(grouped_linear), x, w, counts).model.forward.macs == 7 * 4 * 6
    on_meta = [t.to("meta") for t in (x, w, counts)]
    assert profiled(Calls(grouped_linear), *on_meta).model.forward.macs == 10 * 4 * 6


def test_an_operator_of_ones_own_gets_a_formula() -> None:
    from zoo.cost import Work
    from zoo.profiling import Call, register_formula

    @torch.library.custom_op("zoo_profiling_test::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x @ x @ x

    net, x = Calls(cube), torch.randn(3, 3)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    net(x)
    profiler.end_profile()
    assert profiler.not_counted == {"zoo_profiling_test::cube": 1}

    def formula(call: Call) -> Work:
        n = call.shape("x")[0]
        return Work(macs=2 * n**3)

    register_formula("zoo_profiling_test::cube", formula)
    assert profiled(net, x).model.forward.macs == 54
    with pytest.raises(ValueError, match="namespace::operator"):
        register_formula("cube", formula)
