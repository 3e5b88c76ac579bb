"""Scalars of a step from numbers in memory: the bits of those from numbers of the host, in every rule and kernel."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.update import (
    ALLOWED,
    Flag,
    Rule,
    Scalars,
    Settings,
    adagrad,
    adam,
    lamb,
    lamb_apply_,
    lamb_direction_,
    lion,
    num_states,
    sgd,
    update_,
    update_scalars_,
)  # fmt: skip
from zoo.kernels.update.algebra import power

from .cases import same_bits
from .test_update import assert_same, make

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
BETAS = st.floats(0, 1, exclude_max=True)
RATES = st.floats(1e-8, 10)
DECAYS = st.sampled_from([0.0, 0.01, 0.1, 1.0])
SETTINGS = st.one_of(
    st.builds(
        adam, lr=RATES, beta1=BETAS, beta2=BETAS, eps=RATES, weight_decay=DECAYS, decoupled=st.booleans(),
        amsgrad=st.booleans(), bias_correction=st.booleans(),
    ),
    st.builds(sgd, lr=RATES, momentum=BETAS, dampening=BETAS, weight_decay=DECAYS),
    st.builds(sgd, lr=RATES, momentum=st.just(0.9), nesterov=st.just(True)),
    st.builds(lion, lr=RATES, beta1=BETAS, beta2=BETAS, weight_decay=DECAYS),
    st.builds(adagrad, lr=RATES, lr_decay=DECAYS, eps=RATES, weight_decay=DECAYS),
    st.builds(
        lamb, lr=RATES, beta1=BETAS, beta2=BETAS, eps=RATES, weight_decay=DECAYS, bias_correction=st.booleans(),
        eps_inside_sqrt=st.booleans(),
    ),
)  # fmt: skip
NUMBERS = st.one_of(st.none(), st.tuples(st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.float64])))


def number(drawn: tuple[float, torch.dtype] | None) -> torch.Tensor | None:
    return None if drawn is None else torch.tensor(drawn[0], dtype=drawn[1])


@pytest.mark.parametrize("mode", ["native", "reference"])
@examples(times=5)
@given(
    settings=SETTINGS, taken=st.one_of(st.integers(0, 20), st.integers(0, 2**20)), many=st.integers(1, 5), lr=NUMBERS,
    scale=NUMBERS, loss_scale=NUMBERS, factor=st.floats(-10, 10),
    found_inf=st.sampled_from([None, 0.0, 1.0, 3.0, math.nan, math.inf]), wide=st.booleans(),
)  # fmt: skip
def test_they_have_the_bits_of_those_of_the_host(
    mode: str, settings: Settings, taken: int, many: int, lr: Any, scale: Any, loss_scale: Any, factor: float,
    found_inf: float | None, wide: bool,
) -> None:  # fmt: skip
    steps = torch.full((many,), float(taken))
    given = {"lr": number(lr), "device_grad_scale": number(scale), "loss_scale": number(loss_scale)}
    flag = None if found_inf is None else torch.tensor(found_inf, dtype=torch.float64 if wide else torch.float32)
    with loading.use_mode(mode):
        found = update_scalars_(settings, steps, grad_scale=factor, found_inf=flag, **given)
    sigma = factor * (1.0 if scale is None else float(given["device_grad_scale"]))
    sigma = sigma / (1.0 if loss_scale is None else float(given["loss_scale"]))
    expected = settings.at(taken + 1, lr=None if lr is None else float(given["lr"]), grad_scale=sigma)
    skips = found_inf is not None and found_inf != 0
    assert found.tolist() == [*expected.values(), float(skips)]
    assert steps.tolist() == [taken + (not skips)] * many


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.999, 0.9999, 0.5])
def test_powers_by_squaring_are_as_good_as_those_of_the_library(beta: float) -> None:
    """An error of 2⌈log₂ n⌉ roundings: far below the fp32 that 1 - β^n is rounded to."""
    for n in [*range(200), 1000, 12345, 10**6, 2**24]:
        assert power(beta, n) == pytest.approx(beta**n, rel=2 * max(1, n.bit_length()) * max(1, n) * 2**-53, abs=5e-324)
        if n:
            ours, theirs = (torch.tensor(1.0 - x, dtype=torch.float64).float() for x in (power(beta, n), beta**n))
            assert abs(float(ours) - float(theirs)) <= 2**-24 * float(theirs)


VARIANTS = [(rule, flags) for rule, all_flags in ALLOWED.items() for flags in all_flags]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize(("rule", "flags"), VARIANTS, ids=lambda x: getattr(x, "name", None) or str(int(x)))
@given(skips=st.booleans(), master=st.booleans(), seed=st.integers(0, 100), isa=st.integers(0, 2))
def test_an_update_with_them_has_the_same_bits_or_changes_none(
    mode: str, rule: Rule, flags: Flag, skips: bool, master: bool, seed: int, isa: int
) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    start = make([5, 0, 300], num_states(rule, flags), dtype, dtype, torch.float32, master=master, seed=seed)
    settings = Settings(
        rule=rule, flags=flags, lr=0.1, coupled=0.02, decoupled=0.03, beta1=0.9, beta2=0.99, eps=1e-8, corrected=True
    )
    expected, got = copy.deepcopy(start), copy.deepcopy(start)
    names = loading.isas()
    with loading.use_isa(names[isa % len(names)]), loading.use_mode(mode):
        made = update_scalars_(settings, torch.full((3,), 4.0), found_inf=torch.tensor(float(skips)))
        norms = [step(rule, flags, lists, c) for lists, c in ((expected, settings.at(5)), (got, made))]
    assert_same(got, start if skips else expected, (rule, flags))
    if norms[0] is not None:
        assert same_bits(norms[1], torch.zeros_like(norms[0]) if skips else norms[0])


def step(rule: Rule, flags: Flag, lists: Any, c: Scalars | torch.Tensor) -> torch.Tensor | None:
    if rule is not Rule.LAMB:
        update_(rule, flags, lists.params, lists.grads, lists.states, lists.masters, scalars=c)
        return None
    norms = lamb_direction_(flags, lists.params, lists.grads, *lists.states, lists.masters, scalars=c)
    lamb_apply_(flags, lists.params, *lists.states, lists.masters, ratios=torch.linspace(0.5, 2, 3), scalars=c)
    return norms


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": torch.zeros(0)}, "steps has no elements; it has one for each parameter"),
        ({"steps": torch.zeros(2, dtype=torch.int64)}, "steps is torch.int64"),
        ({"steps": torch.zeros(4)[::2]}, "steps is .*contiguous"),
        ({"lr": torch.tensor(1)}, "lr is torch.int64"),
        ({"lr": torch.ones(2)}, "lr is torch.float32 of shape .*2.*must have 1 elements"),
        ({"found_inf": torch.tensor(1.0).half()}, "found_inf is torch.float16"),
        ({"loss_scale": torch.ones((), device="meta")}, "loss_scale is .*meta"),
    ],
)
def test_mistakes_are_value_errors_with_the_numbers(
    change: dict[str, Any], message: str, mode: str, use_mode: UseMode
) -> None:
    use_mode(mode)
    arguments = {"steps": torch.zeros(1), **change}
    with pytest.raises(ValueError, match=message):
        update_scalars_(lion(lr=0.1, beta1=0.9, beta2=0.9), **arguments)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_scalars_of_another_size_are_refused(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    p = [torch.ones(3)]
    with pytest.raises(ValueError, match=r"device_scalars is torch.float64 of shape .*11.*must have 12 elements"):
        update_(Rule.SGD, Flag.NONE, p, p, [], scalars=torch.zeros(11, dtype=torch.float64))


def test_numbers_of_both_kinds_at_once_are_refused() -> None:
    p, c = [torch.ones(3)], Scalars(rate=0.1).values()
    with pytest.raises(ValueError, match="scalars has 11 numbers beside those on the device"):
        torch.ops.zoo.update_(2, 0, p, p, p, [], [], [], c, torch.zeros(12, dtype=torch.float64))
    with pytest.raises(ValueError, match="settings has 1 numbers; it takes 10"):
        torch.ops.zoo.update_scalars_(2, 0, [1.0], torch.zeros(1), None, None, None, None)


def test_opcheck() -> None:
    settings = adam(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8)
    one = torch.tensor(1.0)
    args = (0, 0, settings.values(), torch.zeros(2), one, None, one, torch.tensor(0.0))
    torch.library.opcheck(torch.ops.zoo.update_scalars_.default, args)
    a, b, c, d = ([torch.rand(5)] for _ in range(4))
    made = update_scalars_(settings, torch.zeros(1))
    torch.library.opcheck(torch.ops.zoo.update_.default, (0, 0, a, b, c, d, [], [], [], made))
