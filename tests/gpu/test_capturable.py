"""Steps of optimizers that know nothing on the host: nothing waits for the GPU, and a graph of one can be replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo import optim
from zoo.kernels import loading

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
KINDS = [
    (optim.AdamW, {}), (optim.SGD, {"momentum": 0.9}), (optim.Lion, {}), (optim.Adagrad, {}), (optim.Lamb, {}),
]  # fmt: skip


def made(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, list[nn.Parameter]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n, device="cuda").to(dtype)) for n in (4099, 7, 70_000)]
    for p in params:
        p.grad = torch.randn_like(p)
    return kind(params, lr=0.01, capturable=True, **options), params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_graph_of_a_step_has_the_bits_of_steps(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Replayed three times, the second time with infinities found: steps, rates and scales are read in each replay."""
    assert loading.native_cuda(), loading.why_not_cuda()
    (one, a), (other, b) = made(kind, options, dtype), made(kind, options, dtype)
    for optimizer in (one, other):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.01, device="cuda")
        optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other.step()  # makes the states
    torch.cuda.current_stream().wait_stream(side)
    one.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    for replay, (lr, scale, found) in enumerate([(0.02, 1.0, 0.0), (0.03, 2.0, 1.0), (0.05, 8.0, 0.0)]):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"].fill_(lr)
            optimizer.grad_scale.fill_(scale)
            optimizer.found_inf.fill_(found)
        one.step()
        graph.replay()
        for p, q in zip(a, b, strict=True):
            assert torch.equal(p, q), replay
            assert all(torch.equal(value, other.state[q][name]) for name, value in one.state[p].items()), replay
    assert [float(other.state[q]["step"]) for q in b] == [3.0] * len(b)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_nothing_waits(kind: Any, options: dict[str, Any]) -> None:
    optimizer, params = made(kind, options, torch.float32)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            scaler.step(optimizer)
            optimizer.step(grad_scale=torch.full((), 0.5, device="cuda", dtype=torch.float64))
            scaler._per_optimizer_states.clear()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(optimizer.state[p]["step"]) for p in params] == [5.0] * len(params)
