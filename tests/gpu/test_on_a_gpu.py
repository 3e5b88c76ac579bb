"""Every operation on a GPU against its reference: the checks of ``python -m benchmarks.gpu``; skipped where none is."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu import checks

from zoo.kernels import gating, loading
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


def test_indices_and_rows_out_of_range_touch_nothing_else_and_show() -> None:
    """Nothing waits for the GPU to refuse them: what comes of them is in the docstrings."""
    logits, dw = torch.randn(3, 4, device="cuda"), torch.ones(3, 2, device="cuda")
    indices = torch.tensor([[0, 1], [2, 4], [-(2**40), 3]], device="cuda")
    dv = gating.top_k_gate_backward(dw, logits, indices, renormalise=True)
    assert dv.isnan().all(1).tolist() == [False, True, True]
    at = gating.positions_in_expert(indices, 4)
    assert at.positions.tolist() == [[0, 0], [0, -1], [-1, 0]]
    assert at.demand.tolist() == [1, 1, 1, 1]
    crowded = torch.tensor([[0, 1], [0, 4], [-(2**40), 0]], device="cuda")
    key = torch.tensor([[1.0, 9.0], [3.0, 9.0], [9.0, 2.0]], device="cuda")
    at = gating.positions_in_expert(crowded, 4, capacity=2, priority=key)
    assert at.positions.tolist() == [[-1, 0], [0, -1], [-1, 1]]
    assert (at.counts.tolist(), at.demand.tolist()) == ([2, 1, 0, 0], [3, 1, 0, 0])
    x = torch.arange(1.0, 4.0, device="cuda")[:, None]
    rows = torch.tensor([[0, 2], [2, 2**40], [3, -1]], device="cuda")
    y = gating.permute(x, rows, num_rows=4)
    assert y.tolist() == [[1.0], [0.0], [1.0], [3.0]]
    back = gating.unpermute(y, rows)
    assert back[[0, 2], 0].tolist() == [2.0, 3.0]
    assert back[1].isnan().all()
    dy, weights = gating.unpermute_backward(x, y, rows, torch.ones(3, 2, device="cuda"))
    assert dy.tolist() == [[1.0], [0.0], [1.0], [3.0]]
    assert weights.tolist() == [[1.0, 1.0], [0.0, 0.0], [9.0, 0.0]]
