"""Optimizers whose step knows nothing on the host: the bits of one that does, and nothing where the device says so."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import optim

from .battery import BATTERY, Entry
from .test_battery import give_grads, groups, params_for

NAMES = [name for name in BATTERY if BATTERY[name].cls is not optim.Muon and not BATTERY[name].meets]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pair(entry: Entry, dtype: torch.dtype) -> tuple[Any, Any, list[nn.Parameter], list[nn.Parameter]]:
    """One that counts on the host, and one that is capturable; with their parameters."""
    a, b = params_for(entry, dtype), params_for(entry, dtype)
    return entry.cls(groups(a), **entry.options), entry.cls(groups(b), **entry.options, capturable=True), a, b


def same(a: list[nn.Parameter], b: list[nn.Parameter], one: Any, other: Any) -> None:
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q)
        assert one.state[p].keys() == other.state[q].keys()
        for name, value in one.state[p].items():
            assert torch.equal(value, other.state[q][name]), name


@pytest.mark.parametrize("name", NAMES)
@given(
    dtype=st.sampled_from(DTYPES), rates=st.lists(st.floats(1e-4, 1e-1), min_size=1, max_size=4),
    scale=st.sampled_from([1.0, 1024.0, 3.0]), factor=st.sampled_from([1.0, 0.3]), skipped=st.sets(st.integers(0, 3)),
    there=st.booleans(),
)  # fmt: skip
def test_it_has_the_bits_of_steps_that_were_taken_with_numbers(
    name: str, dtype: torch.dtype, rates: list[float], scale: float, factor: float, skipped: set[int], there: bool
) -> None:
    """``found_inf`` skips a step: nothing changes and nothing counts. Rates, scales and factors as tensors."""
    one, other, a, b = pair(BATTERY[name], dtype)
    for step, lr in enumerate(rates):
        one.param_groups[0]["lr"] = lr
        other.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64) if there else lr
        give_grads(a, step)
        give_grads(b, step)
        other.found_inf = torch.tensor(float(step in skipped))
        other.grad_scale = torch.tensor(scale, dtype=torch.float64)
        before = copy.deepcopy(([p.detach() for p in b], other.state_dict()["state"]))
        other.step(grad_scale=torch.tensor(factor, dtype=torch.float64) if there else factor)
        del other.found_inf, other.grad_scale
        if step in skipped:
            assert all(map(torch.equal, b, before[0]))
            for key, state in before[1].items():
                assert all(torch.equal(value, other.state_dict()["state"][key][k]) for k, value in state.items())
        else:
            one.step(grad_scale=factor / scale)
    if any(step not in skipped for step in range(len(rates))):
        same(a, b, one, other)


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum", "Lion", "Adagrad"])
def test_a_grad_scaler_hands_its_numbers_over(name: str) -> None:
    """The same parameters as where the scaler unscales and skips on the host: scales are powers of two."""
    entry, results = BATTERY[name], []
    for capturable in (False, True):
        params = params_for(entry)
        optimizer = entry.cls(params, **entry.options, capturable=capturable)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        assert optimizer._step_supports_amp_scaling is capturable
        for step in range(6):
            optimizer.zero_grad()
            dice = torch.Generator().manual_seed(step)
            loss = sum((p * torch.randn(p.shape, generator=dice)).sum() for p in params)
            scaler.scale(loss * math.inf if step == 3 else loss).backward()
            if step == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert not hasattr(optimizer, "found_inf")
        counts = [int(optimizer.state[p]["step"]) for p in params]
        results.append(([p.detach().clone() for p in params], scaler.get_scale(), counts))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1:] == results[1][1:]
    assert results[0][2] == [5] * len(results[0][2])


def test_a_failed_step_does_not_count() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([p], capturable=True)
    p.grad = torch.ones(3)
    optimizer.step()
    p.grad_dtype = None
    p.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"grads\[0\] is"):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1.0
    p.grad = torch.ones(3)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2.0


def test_what_is_saved_goes_on_either_way() -> None:
    entry = BATTERY["AdamW"]
    one, other, a, b = pair(entry, torch.float32)
    for step in range(2):
        for optimizer, params in ((one, a), (other, b)):
            give_grads(params, step)
            optimizer.step()
    saved = copy.deepcopy((one.state_dict(), other.state_dict()))
    one.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    assert one.param_groups[0]["capturable"]
    assert not other.param_groups[0]["capturable"]
    for optimizer, params in ((one, a), (other, b)):
        give_grads(params, 2)
        optimizer.step()
    same(a, b, one, other)


def test_what_the_scaler_sets_is_refused_where_the_host_counts() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = optim.AdamW([p])
    optimizer.found_inf = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"found_inf is set, and a parameter group is not capturable.*capturable=True"):
        optimizer.step()


def test_the_option_may_change_between_steps() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = optim.AdamW([p]), optim.AdamW([q])
    for capturable, found in ((False, None), (True, 1.0), (True, 0.0), (False, None)):
        other.param_groups[0]["capturable"] = capturable
        other.found_inf = None if found is None else torch.tensor(found)
        for optimizer, param in ((one, p), (other, q)):
            param.grad = torch.ones(3)
            if optimizer is other or not found:
                optimizer.step()
        same([p], [q], one, other)
    assert float(other.state[q]["step"]) == 3.0


def test_a_rate_on_another_device_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = optim.AdamW([p], capturable=True)
    optimizer.param_groups[0]["lr"] = torch.ones((), device="meta")
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        optimizer.step()
