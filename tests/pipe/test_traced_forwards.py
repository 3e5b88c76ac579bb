"""What forwards of all kinds compute after they were traced and cut: what they compute whole, in every bit."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.pipe import PipelineModule, split

Forward = Callable[[Any, torch.Tensor], Any]


class Three(nn.Module):
    """A forward of three layers, cut before the second and the third."""

    def __init__(self, how: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.how = nn.BatchNorm1d(4), how
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.table, self.tables = torch.arange(4.0), [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x)


class OneRank:
    """All stages on one rank."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        return (0, 0, 0)


def cut(model: nn.Module, **how: Any) -> PipelineModule:
    how = {"example": torch.ones(3, 4), "num_stages": 1, "schedule": OneRank(), **how}
    return split(model, ["b", "c"], loss_fn=lambda out, labels: out, **how)


def same(forward: Forward, *, rows: int = 3, around: Any = None, **how: Any) -> PipelineModule:
    """Outputs, gradients and buffers of two steps are those of the whole model."""
    model = Three(forward)
    whole, part = copy.deepcopy(model), cut(model, **how)
    for training in (True, True, False):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        outs = []
        for one in (whole.train(training), part.train(training)):
            torch.manual_seed(2)
            if around is None:
                outs.append(one(x))
            else:
                with around():
                    outs.append(one(x))
        assert type(outs[0]) is type(outs[1])
        expected, found = (torch.utils._pytree.tree_leaves(out) for out in outs)
        assert [leaf.requires_grad for leaf in expected] == [leaf.requires_grad for leaf in found]
        assert all(map(torch.equal, expected, found))
        for leaves in (expected, found):
            if (loss := sum(leaf.float().sum() for leaf in leaves if leaf.requires_grad)) != 0:
                loss.backward()
    for name, parameter in whole.named_parameters():
        other = part.get_parameter(name).grad
        assert (parameter.grad is None) == (other is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, other), name
    for name, value in whole.state_dict().items():
        assert torch.equal(part.state_dict()[name], value), name
    return part


# no_grad, autocast ----------------------------------------------------------------------------------------------------


def without_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = model.a(x) * model.mean
    return model.c(model.b(y) + y)


@torch.no_grad()
def first(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.b(model.a(x))


def with_gradients_again(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = first(model, x)
    with torch.no_grad(), torch.enable_grad():
        y = model.b(y)
    with torch.set_grad_enabled(False):
        y = y * 2 + model.a(y)
    return model.c(y)


def in_bfloat16(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.b(model.a(x))
        y = y + model.b(y)
        with torch.autocast("cpu", enabled=False):
            y = model.norm(y.float())
        y = model.b(y)
    return model.c(y.float())


def in_float32(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        y = model.b(model.a(x).float())
    return model.c(y)


def by_device(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = model.b(model.a(x))
    with sdpa_kernel(SDPBackend.MATH):
        kernels = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None], is_causal=True)[0]
    assert kernels == (False, True)
    return model.c(y.float())


@pytest.mark.matrix
@pytest.mark.parametrize("forward", [without_gradients, with_gradients_again, in_bfloat16, in_float32, by_device])
def test_regions_of_a_forward_are_entered_in_each_one(forward: Forward) -> None:
    same(forward)
    same(forward, around=torch.no_grad)
    same(forward, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_where_it_is_split_decides_nothing_and_nothing_is_left_behind() -> None:
    def names() -> tuple[Any, ...]:
        kinds: Any = (torch.enable_grad, torch.amp.autocast_mode.autocast, torch.autograd.Function, nn.Module)
        functions = torch.zeros, torch.utils.checkpoint.checkpoint, torch.vmap, torch.jit.ScriptFunction.__call__
        return (*[dict(vars(kind)) for kind in kinds], functions)

    before = names()
    model = Three(without_gradients)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        part = cut(model)
    x = torch.ones(2, 4)
    assert torch.equal(part(x), model(x))
    assert part(x).requires_grad
    with pytest.raises(ValueError, match="cannot be traced"):
        cut(Three(lambda model, x: model.b(model.a(x)) if x.sum() > 0 else x))
    assert names() == before


# functions that ask for tensors in C ----------------------------------------------------------------------------------


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return 5 * gradients[0], None


def test_functions_of_autograd_and_checkpointed_submodules_run_in_each_forward() -> None:
    runs: list[bool] = []

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.c(checkpoint(model.b, Triple.apply(model.a(x), 3.0), use_reentrant=False))

    part = same(forward)
    part.b.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    part.train()(torch.ones(3, 4)).sum().backward()
    assert len(runs) == 2  # once more in backward
    with torch.no_grad():
        part(torch.ones(3, 4))
    assert len(runs) == 3


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def test_scripted_functions_run_in_each_forward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are on their way out
        scripted = torch.jit.script(twice)
    same(lambda model, x: model.c(scripted(model.b(model.a(x))) + scripted(-x)))


def test_transforms_of_functions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vmap of torch\.func cannot be traced"):
        cut(Three(lambda model, x: model.c(torch.vmap(torch.sin)(model.b(model.a(x))))))


def test_another_checkpointed_function_is_traced_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.c(checkpoint(lambda y: model.b(y).sin(), model.a(x), use_reentrant=False))

    with caplog.at_level(logging.WARNING, logger="zoo.pipe"):
        same(forward)
    assert "no submodule that is called as a whole" in caplog.text


# tensors that are made in forward, and those that are changed ---------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("forward", [
    lambda model, x: model.c(model.b(model.a(x) + model.table[: x.shape[1]] * 2) + model.tables[0].exp()),
    lambda model, x: model.c(model.b(model.a(x) + torch.as_tensor([1.0, 2, 3, 4])) + torch.hann_window(4)),
    lambda model, x: model.c(model.b(model.a(x) + torch.zeros(x.shape[0], 4)) + torch.rand((x.shape[0], 1))),
    lambda model, x: model.c(model.b(model.a(x) + torch.full((len(x.shape), 1), 2.0)[0])),
    lambda model, x: OrderedDict(out=model.c(model.b(model.a(x)))),
])  # fmt: skip
def test_tensors_that_are_made_in_forward(forward: Forward) -> None:
    same(forward)
    same(forward, rows=7)


def in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = z = model.a(x)
    z += 1
    z *= 2
    count = x.shape[0]
    count += 1
    both = (y,)
    both += (model.b(y),)
    return model.c(both[1] + both[0]) * count


def counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.norm(model.b(model.a(x)))
    model.count += 1
    model.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
    model.mean = model.mean.clamp_(max=3)
    return model.c(y) + model.mean * model.count


@pytest.mark.parametrize("forward", [in_place, counting])
def test_what_is_changed_in_place_is_changed_once_a_forward(forward: Forward) -> None:
    same(forward)
    model = Three(forward)
    before = copy.deepcopy(model.state_dict())
    cut(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_buffer_that_becomes_another_tensor_is_refused() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.mean = model.mean * 2
        return model.c(model.b(model.a(x)) + model.mean)

    with pytest.raises(ValueError, match=r"`model.mean = model.mean \* 2`.*sets 'mean' of a Three to another tensor"):
        cut(Three(forward))


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="has no values when it is traced"):
        cut(Three(lambda model, x: model.c(model.b(model.a(x)) + torch.Tensor([1.0, 2, 3, 4]))))


def test_a_buffer_that_one_rank_changes_and_another_reads_is_refused() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.mean.add_(1)
        return model.c(model.b(model.a(x))) + model.mean

    def one(rank: int) -> None:
        cut(Three(forward), num_stages=3, schedule="1f1b")

    same(forward)
    with pytest.raises(sim.RankError, match="changes 'mean' on pipeline rank 0 and reads it on rank 2"):
        sim.run(3, one)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
        x = torch.tanh(self.first(x)) * scale
        return self.second(x if mask is None else x * mask)


def test_what_a_batch_gives_and_the_example_had_not_is_refused() -> None:
    x = torch.ones(2, 4)
    pipe = split(Scaled(), num_stages=1, example={"x": x, "scale": 3.0}, loss_fn=nn.functional.mse_loss)
    for same in ({}, {"scale": 3.0}, {"mask": None}):
        assert torch.equal(pipe({"x": x, **same}), pipe({"x": x}))
    for more, words in (
        ({"scale": 2.0}, r"traced with 'scale' = 3\.0, and this batch gives 2\.0; give split\(\) an example= like"),
        ({"mask": x}, r"traced with 'mask' = None, and this batch gives \(2, 4\) float32"),
        ({"other": 1}, r"traced without 'other', and this batch gives 1"),
    ):
        with pytest.raises(ValueError, match=words):
            pipe({"x": x, **more})
    for example in (x, None):
        pipe = split(Scaled(), num_stages=1, example=example, loss_fn=nn.functional.mse_loss)
        with pytest.raises(ValueError, match=r"traced with 1 inputs, and this batch has 2; give split\(\) an example="):
            pipe((x, x))
