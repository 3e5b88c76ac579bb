"""The kernels for CUDA, run on the CPU by an emulator of threads: every check of benchmarks.gpu.

So their indices, their order of roundings and their barriers are tested without a GPU; their speed is not. That a
missing barrier is noticed was tried on 2026-11-23 with norm.cu alone: without either of its two the norms differ, in
both orders.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from benchmarks.gpu import checks
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import emulator
from tests.profiles import examples

from zoo.kernels import loading

pytestmark = [
    pytest.mark.slow,  # it compiles for a minute or two
    pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}"),
]


@pytest.mark.parametrize("order", [emulator.RISING, emulator.FALLING], ids=["rising", "falling"])
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.name)
def test_every_kernel_for_cuda_has_the_bits_of_its_reference(check: checks.Check, order: int) -> None:
    with emulator.emulated(order):
        assert checks.run(check, "cpu", large=False) > 0


def test_inside_the_block_the_emulated_kernels_run_and_afterwards_those_of_the_cpu() -> None:
    from zoo.kernels.norm import ops

    native = ops._sum._kernel
    with emulator.emulated():
        assert ops._sum._kernel is torch.ops.zoo_emulated.sum_squares.default
    assert ops._sum._kernel is native


NUMBERS = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(2**32 - 300, 2**32 - 1))


@examples(times=20)
@given(a=NUMBERS, b=NUMBERS.filter(lambda n: n > 0))
def test_dividing_by_multiplying_is_exact(a: int, b: int) -> None:
    library = emulator.load()
    library.zoo_quotient.restype = library.zoo_rest.restype = ctypes.c_uint32
    for x in {a, a // b * b, max(a // b * b - 1, 0)}:
        found = [
            function(ctypes.c_uint32(x), ctypes.c_uint32(b)) for function in (library.zoo_quotient, library.zoo_rest)
        ]
        assert found == list(divmod(x, b))


def test_launches_become_calls() -> None:
    text = "k<A, f<B>><<<dim3(x, (y)), T, 0, s>>>(a, g(b));\nplain<<<1, 2, 0, s>>>();"
    assert emulator.translated(text) == (
        "zoo_emulator::launch(dim3(x, (y)), T, 0, s, [&] { k<A, f<B>>(a, g(b)); });\n"
        "zoo_emulator::launch(1, 2, 0, s, [&] { plain(); });"
    )
