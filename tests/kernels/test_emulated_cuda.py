"""The kernels for CUDA, run on the CPU by an emulator of threads: every check of benchmarks.gpu.

So their indices, their order of roundings and their barriers are tested without a GPU; their speed is not. That missing
barriers and masks are noticed is tested by test_cuda_mutants.py.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import os

import pytest
import torch
from benchmarks.gpu import checks
from benchmarks.gpu.cases import Case
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import emulator
from tests.kernels.emulator import trials
from tests.kernels.emulator.places import BARRIER, places_in
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


@functools.cache
def cases_of(check: checks.Check) -> list[Case]:
    return list(check.cases(False))


SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("check", trials.CHECKS, ids=lambda check: check.name)
@examples(times=0.3)
@given(number=st.integers(0, 2**32 - 1), order=st.sampled_from(emulator.ORDERS), seed=SEEDS, offset=st.integers(0, 3))
def test_in_whatever_order_threads_run_results_are_the_same(
    check: checks.Check, number: int, order: int, seed: int, offset: int
) -> None:
    cases = cases_of(check)
    case = cases[number % len(cases)]
    assert trials.wrong(case, order, seed, offset=offset) == 0, case.what


@examples(times=1)
@given(order=st.sampled_from(emulator.ORDERS), seed=SEEDS, threads=st.integers(1, 200), blocks=st.integers(1, 3))
def test_threads_run_in_the_order_that_is_drawn_and_nobody_passes_a_barrier_early(
    order: int, seed: int, threads: int, blocks: int
) -> None:
    ran = trace(order, seed, blocks, threads)
    assert ran == trace(order, seed, blocks, threads)
    for block in range(blocks):
        mine = ran[3 * threads * block : 3 * threads * (block + 1)]
        number = min(mine) // threads
        before, after = mine[: 2 * threads], mine[2 * threads :]
        everyone = list(range(number * threads, (number + 1) * threads))
        assert sorted(after) == everyone
        for first in range(0, threads, 32):  # what a warp does before its own barrier comes before what it does behind
            warp = [t for t in before if first <= t - number * threads < first + 32]
            half = len(warp) // 2
            assert sorted(warp[:half]) == sorted(warp[half:]) == everyone[first : first + 32]
        rounds = before[:threads], before[threads:], after
        if order in (emulator.RISING, emulator.FALLING):
            assert all(found == everyone[:: 1 if order == emulator.RISING else -1] for found in rounds)
        if order == emulator.OF_BLOCK:
            assert rounds[0] == rounds[1] == rounds[2]
        if order == emulator.OF_INTERVAL and threads > 100:
            assert rounds[0] == rounds[1] != rounds[2]
        if order == emulator.AHEAD:
            warps = [t // 32 for t in (t - number * threads for t in before)]
            assert sum(a != b for a, b in itertools.pairwise(warps)) == (threads - 1) // 32
    assert sorted(set(ran)) == list(range(threads * blocks))


def test_in_turns_that_are_drawn_warps_are_at_different_places() -> None:
    """With one seed a warp is behind its own barrier before another begins, with another not before most have begun."""

    def warps(seed: int) -> list[int]:
        return [t // 32 for t in trace(emulator.MIXED, seed, 1, 192)[:384:32]]

    first_that_is_behind = {next(i for i, warp in enumerate(w) if warp in w[:i]) for w in map(warps, range(40))}
    assert min(first_that_is_behind) == 1
    assert max(first_that_is_behind) > 3


def trace(order: int, seed: int, blocks: int, threads: int) -> list[int]:
    """Threads in the order in which they ran; see exports.cpp."""
    ran = (ctypes.c_int32 * (3 * blocks * threads))()
    with emulator.emulated(order, seed):
        emulator.load().zoo_trace(ran, blocks, threads)
    return list(ran)


@pytest.mark.parametrize("order", emulator.ORDERS)
def test_threads_that_do_not_meet_are_an_error(order: int) -> None:
    expected = (
        "", "others are at another barrier", "others do not come to the exchange", "others do not come to the exchange",
        "others do not come to the exchange",
    )  # fmt: skip
    said = ctypes.create_string_buffer(200)
    with emulator.emulated(order, 1):
        for how, what in enumerate(expected):
            emulator.load().zoo_meet(how, said, len(said))
            assert what in said.value.decode(), how
            assert bool(what) == bool(said.value), how


@pytest.mark.skipif(os.environ.get("ZOO_KERNELS_SANITIZE") != "1", reason="`make sanitize` runs it: it is about ASan")
@pytest.mark.parametrize(
    "where", range(5), ids=["tensor", "asked for", "variable", "thread", "thread, behind a barrier"]
)
@pytest.mark.parametrize("i", [3, 4])
def test_the_sanitizers_see_what_a_kernel_writes_beside_its_memory(where: int, i: int) -> None:
    library, tensor = emulator.load(), torch.zeros(4)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        library.zoo_write(where, i, ctypes.c_void_p(tensor.data_ptr()))
        os._exit(0)
    assert (os.waitpid(child, 0)[1] == 0) == (i < 4)


def test_for_each_block_shared_memory_begins_as_nans() -> None:
    found = (ctypes.c_uint32 * 6)()
    emulator.load().zoo_unwritten(found, 3)
    assert list(found) == [2**32 - 1] * 6
    assert torch.tensor(list(found)).int().view(torch.float32).isnan().all()


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


def test_barriers_and_masks_get_numbers_and_shared_memory_is_declared() -> None:
    text = """  // __syncthreads() of a comment
  __shared__ float a[N][2]; /* __syncwarp() */ __syncthreads();
  alignas(16) __shared__ bool b;
  x = __shfl_xor_sync(f(1, g(2)), y, 1) + __ballot_sync(ALL, z); __syncwarp();"""
    expected = """  // __syncthreads() of a comment
  static float a[N][2]; zoo_emulator::declare(&a, sizeof(a)); /* __syncwarp() */ zoo_emulator::barrier(5);
  alignas(16) static bool b; zoo_emulator::declare(&b, sizeof(b));
  x = __shfl_xor_sync(zoo_emulator::masked(6, f(1, g(2))), y, 1) + __ballot_sync(zoo_emulator::masked(7, ALL), z); \
__syncwarp(zoo_emulator::masked(8, 0xFFFFFFFFu));"""
    assert emulator.translated(text, 5) == expected
    assert [(p.line, p.name) for p in places_in(text)] == [
        (2, BARRIER), (4, "__shfl_xor_sync"), (4, "__ballot_sync"), (4, "__syncwarp"),
    ]  # fmt: skip
    for unknown in ("__activemask()", "__syncthreads_or(x)", 'asm("bar.sync 0;")', "cooperative_groups::sync(g)"):
        with pytest.raises(AssertionError, match=r"name\.cu has .* does not know"):
            list(places_in(f"f({unknown});", "name.cu"))
