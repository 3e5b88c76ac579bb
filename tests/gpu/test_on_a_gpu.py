"""Every operation on a GPU against its reference: the checks of ``python -m benchmarks.gpu``; skipped where none is."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu import checks

from zoo.kernels import loading
from zoo.kernels.norm import sum_squares
from zoo.kernels.update import Flag, Rule, Scalars, update_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.name)
def test_every_operation_equals_its_reference(check: checks.Check) -> None:
    assert checks.run(check, "cuda") > 0


def test_work_goes_to_the_current_stream() -> None:
    """Between two events of a side stream that waits for a long kernel, the sum sees what that kernel wrote."""
    assert loading.native_cuda(), loading.why_not_cuda()
    stream = torch.cuda.Stream()
    x = torch.zeros(2**20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
        found = sum_squares([x])
    stream.synchronize()
    assert found.tolist() == [2.0**20]


def test_tensors_of_two_devices_are_refused() -> None:
    ones = torch.ones(3)
    for param, grad in ((ones.cuda(), ones), (ones, ones.cuda())):
        with pytest.raises(ValueError, match=r"(params|grads)\[0\] is on (cpu|cuda:0)"):
            update_(Rule.SGD, Flag.NONE, [param], [grad], [], scalars=Scalars(rate=1.0))
