"""Linear layers and what autograd keeps of their weights: nothing at stage 3, copies under autocast, unless swapped."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.nn import MemoryEfficientLinear, memory_efficient_linear
from zoo.zero import Stage3Optimizer, ZeroOptimizer

WIDTH, LAYERS = 16, 4


def kept_bytes(model: nn.Module, autocast: bool) -> int:
    """Bytes of distinct storages with a weight's shape, parameters too, that autograd holds after forward."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(3, WIDTH, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(x)
    weights = [tensor for tensor in saved if tuple(tensor.shape) == (WIDTH, WIDTH)]
    assert len(weights) == LAYERS
    with torch._C.DisableTorchFunctionSubclass():  # a partitioned parameter refuses to be looked into
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in weights}
    out.float().sum().backward()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("autocast", "swap", "expected"),
    [
        (False, False, 0),
        (False, True, 0),
        (True, False, LAYERS * WIDTH * WIDTH * 2),
        (True, True, 0),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_what_autograd_keeps_of_the_weights_at_stage_3(world: int, autocast: bool, swap: bool, expected: int) -> None:
    def fn(rank: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        Stage3Optimizer(
            model, lr=0.1, param_persistence_threshold=WIDTH, reduce_bucket_size=1, max_live_parameters=0,
            prefetch_bucket_size=0,
        )  # fmt: skip
        if swap:
            assert memory_efficient_linear(model).num_layers == LAYERS
        return kept_bytes(model, autocast)

    assert sim.run(world, fn) == [expected] * world


@examples(times=3)
@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    frozen=st.sampled_from(["nothing", "weight", "input"]),
    autocast=st.sampled_from([None, torch.bfloat16, torch.float16]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    contiguous=st.booleans(),
)
def test_it_computes_the_bits_of_the_plain_layer(
    leading: list[int], sizes: tuple[int, int], bias: bool, frozen: str, autocast: torch.dtype | None,
    dtype: torch.dtype, contiguous: bool,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=bias).to(torch.float32 if autocast else dtype)
    plain.weight.requires_grad_(frozen != "weight")
    swapped = copy.deepcopy(plain)
    memory_efficient_linear(swapped)
    assert type(swapped) is MemoryEfficientLinear
    base = torch.randn(*leading, sizes[0]).to(dtype)
    if autocast:
        assume(dtype != torch.float64)  # autocast leaves fp64 inputs alone, and then they do not fit the weight
    if not contiguous and len(leading) > 1:
        base = base.transpose(0, 1).contiguous().transpose(0, 1)
    seen = []
    for layer in (plain, swapped):
        x = base.clone().requires_grad_(frozen != "input")
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            y = layer(x)
        if y.requires_grad:
            y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
        seen.append([y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad])
    for a, b in zip(*seen, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_it_can_be_undone_and_leaves_other_classes_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)), Own(3, 3))
    with memory_efficient_linear(model) as swap:
        assert [type(m) for m in (model[0], model[1][0], model[2])] == [MemoryEfficientLinear] * 2 + [Own]
        assert swap.num_layers == 2
        assert isinstance(copy.deepcopy(model)[0], MemoryEfficientLinear)
        assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())
    assert type(model[0]) is type(model[1][0]) is nn.Linear
    swap.undo()


@pytest.mark.parametrize("stage", range(4))
def test_training_under_autocast_is_the_same(stage: int) -> None:
    def fn(rank: int, swap: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.01, param_persistence_threshold=0, reduce_bucket_size=1)
        if swap:
            memory_efficient_linear(model)
        for step in range(3):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    plain, swapped = (sim.run(2, lambda rank, s=s: fn(rank, s))[0] for s in (False, True))
    assert all(torch.equal(swapped[name], value) for name, value in plain.items())
