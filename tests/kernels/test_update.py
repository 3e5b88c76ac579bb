"""The update: every rule on every instruction set equals the reference, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.update import (  # fmt: skip
    ALLOWED,
    Flag,
    Rule,
    Scalars,
    Settings,
    UpdatePlan,
    adagrad,
    adam,
    lamb,
    lamb_apply_,
    lamb_direction_,
    lion,
    num_states,
    reference,
    sgd,
    trust_ratios,
    update_,
    update_plan,
)

from .cases import DTYPES, SIZES, placed, same_bits, values
from .oracles import num_threads

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
VARIANTS = [(rule, flags) for rule, all_flags in ALLOWED.items() if rule is not Rule.LAMB for flags in all_flags]


@dataclass
class Lists:
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    masters: list[torch.Tensor]

    def tensors(self) -> Iterator[torch.Tensor]:
        return itertools.chain(self.params, self.grads, *self.states, self.masters)


def make(
    sizes: list[int], n_states: int, dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype, *,
    master: bool, offset: int = 0, seed: int = 0, special: bool = False,
) -> Lists:  # fmt: skip
    def of(kind: int, to: torch.dtype, **more: Any) -> list[torch.Tensor]:
        return [placed(values(n, seed + 10 * i + kind, **more), to, offset) for i, n in enumerate(sizes)]

    masters = of(0, torch.float32, special=special) if master else []
    params = [placed(m, dtype, offset) for m in masters] if master else of(0, dtype, special=special)
    states = [of(2 + k, state_dtype, positive=k > 0) for k in range(n_states)]
    return Lists(params, of(1, grad_dtype, special=special), states, masters)


def scalars(seed: int, scale: float = 1.0) -> Scalars:
    x = torch.rand(11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    return Scalars(
        grad_scale=scale, coupled=x[0] / 10, decay=1 - x[1] / 100, rate=x[2] / 10, beta1=x[3], beta1_rest=1 - x[3],
        beta2=x[4], beta2_rest=1 - x[4], correction2=1 + x[5], eps=1e-8, gain=1 + x[6],
    )  # fmt: skip


def run_reference(rule: Rule, flags: Flag, lists: Lists, c: Scalars) -> None:
    for i, p in enumerate(lists.params):
        master = lists.masters[i] if lists.masters else None
        reference.update_row(rule, flags, p, lists.grads[i], [s[i] for s in lists.states], master, c)


def assert_same(a: Lists, b: Lists, what: object) -> None:
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        assert same_bits(x, y), what


@pytest.mark.parametrize(("rule", "flags"), VARIANTS, ids=lambda x: getattr(x, "name", None) or str(int(x)))
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES), grad_dtype=st.sampled_from(DTYPES),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16]), master=st.booleans(), offset=st.integers(0, 3),
    seed=st.integers(0, 1000), special=st.booleans(), scale=st.sampled_from([1.0, -1.0, 1 / 1024, 0.3]),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rule: Rule, flags: Flag, sizes: list[int], dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype,
    master: bool, offset: int, seed: int, special: bool, scale: float,
) -> None:  # fmt: skip
    start = make(
        sizes, num_states(rule, flags), dtype, grad_dtype, state_dtype, master=master, offset=offset, seed=seed,
        special=special,
    )  # fmt: skip
    c = scalars(seed, scale)
    expected = copy.deepcopy(start)
    run_reference(rule, flags, expected, c)
    for isa in loading.isas():
        got = copy.deepcopy(start)
        with loading.use_isa(isa):
            update_(rule, flags, got.params, got.grads, got.states, got.masters, scalars=c)
        assert_same(got, expected, (isa, rule, flags))


def test_a_long_tensor_and_threads_change_nothing() -> None:
    start = make(
        [2**20 + 3, 70001, 5, 0, 40000], 2, torch.float32, torch.float32, torch.float32, master=False, offset=1
    )
    c = scalars(3)
    expected = copy.deepcopy(start)
    run_reference(Rule.ADAM, Flag.NONE, expected, c)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            got = copy.deepcopy(start)
            update_(Rule.ADAM, Flag.NONE, got.params, got.grads, got.states, scalars=c)
            assert_same(got, expected, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_are_looked_at_on_threads(dtype: torch.dtype) -> None:
    count, wrong = 2600, 2500
    settings = adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)

    def made() -> tuple[list[torch.Tensor], UpdatePlan]:
        params = [placed(values(3, i), dtype, 0).requires_grad_() for i in range(count)]
        for i, p in enumerate(params):
            p.grad = placed(values(3, count + i), dtype, 0)
        masters = [p.detach().float() for p in params] if dtype is torch.bfloat16 else []
        states = [[torch.zeros(3) for _ in params] for _ in range(2)]
        return params, update_plan(params, states, masters, torch.zeros(count))

    def step(plan: UpdatePlan, threads: int) -> bool:
        with num_threads(threads):
            return plan.update(int(Rule.ADAM), int(settings.flags), settings.values(), 1)

    found = []
    for threads in (1, 3):
        params, plan = made()
        assert step(plan, threads)
        found.append(torch.stack([p.detach() for p in params]))
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.stack([p.detach() for p in made()[0]]))

    given_ = found[-1].clone()
    params[wrong].grad = torch.ones(6, dtype=dtype)[::2]
    with pytest.raises(ValueError, match=rf"grads\[{wrong}\] of shape .*must be contiguous"):
        step(plan, 3)
    params[wrong].grad = None
    assert not step(plan, 3)
    assert torch.equal(given_, torch.stack([p.detach() for p in params]))


def test_there_is_one_openmp_runtime() -> None:
    torch.rand(4, 4) @ torch.rand(4, 4)
    with open("/proc/self/maps") as file:
        runtimes = {line.split()[-1] for line in file if "libgomp" in line or "libomp" in line}
    assert len(runtimes) <= 1, runtimes


@examples(times=3)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_conversions_round_as_torch_does(bits: list[int]) -> None:
    # A step of nothing: p' = 1·p - 0·g with a master only converts it.
    signed = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32)
    check_conversion(signed.view(torch.float32))


def test_conversions_of_every_16_bit_number_and_of_its_neighbours() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        wide = every.view(dtype).float()
        ulp = wide.view(torch.int32)
        half = torch.full_like(ulp, 2**15 if dtype is torch.bfloat16 else 2**12)
        check_conversion(torch.cat([(ulp + d * half + e).view(torch.float32) for d in (-1, 0, 1) for e in (-1, 0, 1)]))


def check_conversion(master: torch.Tensor) -> None:
    c = Scalars(rate=0.0)
    for dtype, isa in itertools.product((torch.bfloat16, torch.float16), loading.isas()):
        p = torch.zeros_like(master, dtype=dtype)
        with loading.use_isa(isa):
            update_(Rule.SGD, Flag.NONE, [p], [torch.zeros_like(master)], [], [master.clone()], scalars=c)
        assert same_bits(p, (master - 0.0).to(dtype)), (dtype, isa)


@examples(times=3)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3), flags=st.sampled_from(ALLOWED[Rule.LAMB]),
    dtype=st.sampled_from(DTYPES), grad_dtype=st.sampled_from(DTYPES), master=st.booleans(), offset=st.integers(0, 2),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_lamb_equals_the_reference(
    sizes: list[int], flags: Flag, dtype: torch.dtype, grad_dtype: torch.dtype, master: bool, offset: int, seed: int
) -> None:
    """States and, for given ratios, parameters bit for bit; sums of n squares within n·2^-53 of each other.

    Squares of fp32 are exact in fp64, so both sums are of the same numbers, all positive, in different orders: each is
    within (n-1)·2^-53 of the exact one (Higham 2002, section 4.2).
    """
    start = make(sizes, 2, dtype, grad_dtype, torch.float32, master=master, offset=offset, seed=seed)
    c = scalars(seed)
    results = []
    for isa in [None, *loading.isas()]:
        got = copy.deepcopy(start)
        rows = (got.params, got.grads, *got.states)
        ratios = torch.linspace(0.5, 2, len(sizes))
        if isa is None:
            masters = got.masters or [None] * len(sizes)
            norms = torch.stack([reference.lamb_direction_row(flags, *r, c) for r in zip(*rows, masters, strict=True)])
            for row in zip(got.params, *got.states, masters, ratios, strict=True):
                reference.lamb_apply_row(flags, *row, c)
        else:
            with loading.use_isa(isa):
                norms = lamb_direction_(flags, *rows, got.masters, scalars=c)
                lamb_apply_(flags, got.params, *got.states, got.masters, ratios=ratios, scalars=c)
        results.append((got, norms))
    expected, norms = results[0]
    for got, sums in results[1:]:
        assert_same(got, expected, flags)
        assert same_bits(sums, results[1][1])
        bound = norms * torch.tensor([[2.0 * n * 2**-53] for n in sizes], dtype=torch.float64)
        assert bool(((sums - norms).abs() <= bound).all())


def test_trust_ratios() -> None:
    norms = torch.tensor([[4.0, 16.0], [0.0, 1.0], [1.0, 0.0], [100.0, 1.0], [float("inf"), 1.0]], dtype=torch.float64)
    assert trust_ratios(norms).tolist() == [0.5, 1.0, 1.0, 10.0, 1.0]
    assert trust_ratios(norms, min_coeff=0.6, max_coeff=5.0).tolist() == pytest.approx([0.6, 1.0, 1.0, 5.0, 1.0])


# What users do wrong -------------------------------------------------------------------------------------------------


def adam_lists(**change: Any) -> Callable[[], None]:
    ones = [torch.ones(4, 3), torch.ones(5)]
    lists = {"params": ones, "grads": ones, "states": [ones, ones], "masters": []}
    lists = {k: copy.deepcopy(v) for k, v in lists.items()} | change
    return lambda: update_(Rule.ADAM, Flag.NONE, **lists, scalars=Scalars(rate=0.1))


WRONG = [
    ({"params": [torch.ones(4, 3, dtype=torch.int64), torch.ones(5)]}, r"params\[0\] is .*(Long|int64)"),
    ({"grads": [torch.ones(4, 3), torch.ones(6)]}, r"grads\[1\] has shape .6.*6 elements; params\[1\] has 5"),
    ({"grads": [torch.ones(4, 3)]}, "grads has 1 tensors and params has 2"),
    ({"grads": [torch.ones(3, 4).t(), torch.ones(5)]}, r"grads\[0\] of shape .*4, 3.* has strides .*1, 4.*contiguous"),
    ({"grads": [torch.ones(4, 3), torch.ones(5).bfloat16()]}, r"grads\[1\] is .*BFloat16|grads\[1\] is torch.bfloat16"),
    ({"grads": [torch.ones(4, 3, device="meta"), torch.ones(5, device="meta")]}, r"grads\[0\] is on meta"),
    ({"grads": [torch.ones(4, 3).to_sparse(), torch.ones(5)]}, r"grads\[0\] is .*[sS]parse"),
    ({"states": [[torch.ones(4, 3), torch.ones(5)]]}, "states1? has"),
    ({"states": [[torch.ones(4, 3).half(), torch.ones(5).half()]] * 2}, r"states0\[0\] is torch.float16"),
    ({"masters": [torch.ones(4, 3).half(), torch.ones(5).half()]}, r"masters\[0\] is .*(Half|float16)"),
    ({"masters": [torch.ones(4, 3)]}, "masters has 1"),
]


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_mistakes_are_value_errors_with_the_numbers(
    change: dict[str, Any], message: str, mode: str, use_mode: UseMode
) -> None:
    use_mode(mode)
    with pytest.raises(ValueError, match=message):
        adam_lists(**change)()


def test_unknown_flags_are_refused_by_both_layers() -> None:
    with pytest.raises(ValueError, match="LION with flags 2"):
        update_(Rule.LION, Flag.AMSGRAD, [], [], [], scalars=Scalars(rate=1.0))
    one = [torch.ones(3)]
    with pytest.raises(ValueError, match="rule 2 has no flags 2"):
        torch.ops.zoo.update_(2, 2, one, one, one, [], [], [], Scalars(rate=1.0).values())
    with pytest.raises(ValueError, match="scalars has 1 numbers; it takes 11"):
        torch.ops.zoo.update_(2, 0, one, one, one, [], [], [], [1.0])


def test_a_list_without_tensors_is_refused() -> None:
    numbers, none, one = Scalars(rate=1.0).values(), [], [torch.ones(3)]
    with pytest.raises(ValueError, match="params has no tensors"):
        torch.ops.zoo.update_(2, 0, none, one, one, none, none, none, numbers)
    with pytest.raises(ValueError, match="params has no tensors"):
        torch.ops.zoo.lamb_direction_(0, none, one, one, one, none, numbers)
    with pytest.raises(ValueError, match="params has no tensors"):
        torch.ops.zoo.lamb_apply_(0, none, none, none, none, torch.ones(0), numbers)


class Wrapper(torch.Tensor):
    """As DTensor: what it is made of is elsewhere."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@pytest.mark.parametrize("which", ["params", "grads", "states"])
@pytest.mark.parametrize("kind", ["wrapper", "emptied"])
def test_a_tensor_without_memory_is_refused(which: str, kind: str) -> None:
    one = {name: torch.ones(3) for name in ("params", "grads", "states")}
    if kind == "wrapper":
        one[which] = Wrapper(torch.ones(3))
    else:
        one[which].untyped_storage().resize_(0)
    param = one["params"].requires_grad_() if kind == "emptied" or which != "params" else one["params"]
    param.grad = one["grads"]
    plan = update_plan([param], [[one["states"]]], [], torch.zeros(1))
    with pytest.raises(ValueError, match=rf"{which}0?\[0\] of shape \[3\] has no memory.*to_local"):
        plan.update(int(Rule.LION), 0, lion(lr=0.1, beta1=0.9, beta2=0.99).values(), 1)


# What torch asks of an operator --------------------------------------------------------------------------------------


def test_opcheck() -> None:
    a, b, c, d = ([torch.rand(5), torch.rand(3, 2)] for _ in range(4))
    numbers = Scalars(rate=0.1, beta1=0.9, beta1_rest=0.1, beta2=0.9, beta2_rest=0.1, eps=1e-8).values()
    torch.library.opcheck(torch.ops.zoo.update_.default, (0, 0, a, b, c, d, [], [], numbers))
    torch.library.opcheck(torch.ops.zoo.lamb_direction_.default, (0, a, b, c, d, [], numbers))
    torch.library.opcheck(torch.ops.zoo.lamb_apply_.default, (0, a, c, d, [], torch.ones(2), numbers))


def test_autograd_notices_that_a_tensor_was_changed() -> None:
    p = torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    y = (w * p).sum()
    update_(Rule.SGD, Flag.NONE, [p], [torch.ones(3)], [], scalars=Scalars(rate=1.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# The scalars: against torch's optimizers -----------------------------------------------------------------------------


def test_scalars_are_those_of_torch_optimizers() -> None:
    """Three steps in fp64 agree with torch.optim to 1e-12: the same formulas, other roundings."""
    decay = {"lr": 0.03, "weight_decay": 0.1}
    cases: list[tuple[Any, dict[str, Any], Settings]] = []
    for amsgrad in (False, True):
        more = {**decay, "amsgrad": amsgrad}
        both = {**more, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        torchs = {**more, "betas": (0.9, 0.99)}
        cases.append((torch.optim.AdamW, torchs, adam(**both)))
        cases.append((torch.optim.Adam, torchs, adam(**both, decoupled=False)))
    for more in ({}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "nesterov": True}):
        cases.append((torch.optim.SGD, {**decay, **more}, sgd(**decay, **more)))
    more = {**decay, "lr_decay": 0.1, "eps": 1e-8}
    cases.append((torch.optim.Adagrad, more, adagrad(**more)))
    for cls, options, settings in cases:
        rule, flags = settings.rule, settings.flags
        theirs = torch.nn.Parameter(values(50, 1).double())
        ours = theirs.detach().clone()
        optimizer = cls([theirs], **options)
        states = [[torch.zeros_like(ours)] for _ in range(num_states(rule, flags))]
        for t in (1, 2, 3):
            theirs.grad = values(50, 10 + t).double()
            optimizer.step()
            update_(rule, flags, [ours], [theirs.grad], states, scalars=settings.at(t))
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12, msg=f"{cls} {options} step {t}")


def test_lion_is_the_paper() -> None:
    c = lion(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.5).at(1)
    p, m, g = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -0.1]), torch.tensor([-1.0, 5.0])
    update_(Rule.LION, Flag.NONE, [p], [g], [[m]], scalars=c)
    # u = 0.9·0.5 - 0.1 > 0; 0.9·(-0.1) + 0.5 > 0
    torch.testing.assert_close(p, torch.tensor([1.0 * 0.95 - 0.1, -2.0 * 0.95 - 0.1]))
    torch.testing.assert_close(m, torch.tensor([0.99 * 0.5 - 0.01, -0.099 + 0.05]))


def test_lamb_is_the_paper() -> None:
    settings = lamb(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.01)
    flags, c = settings.flags, settings.at(1)
    p, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])
    m, v = torch.zeros(2), torch.zeros(2)
    norms = lamb_direction_(flags, [p], [g], [m], [v], scalars=c)
    d = torch.tensor([1.0, -1.0]) + 0.01 * p  # the corrected moments of a first step are g and g²
    torch.testing.assert_close(norms, torch.tensor([[25.0, float((d * d).sum())]]).double(), rtol=1e-5, atol=0)
    ratio = trust_ratios(norms)
    expected = p - 0.1 * float(ratio) * d
    lamb_apply_(flags, [p], [m], [v], ratios=ratio, scalars=c)
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=0)
