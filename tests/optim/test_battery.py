"""What every optimizer of the battery must do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import optim, registry, sim
from zoo.zero import ZeroOptimizer

from .battery import BATTERY, Entry

NAMES = list(BATTERY)
ELEMENTWISE = [name for name in NAMES if BATTERY[name].elementwise]
ALONE = [name for name in NAMES if not BATTERY[name].meets]  # the others: tests/laws/test_onebit.py
WITH_TORCH = [name for name in NAMES if BATTERY[name].torch is not None]
Params = list[nn.Parameter]


def params_for(entry: Entry, dtype: torch.dtype = torch.float32, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (3, 8), (1, 1)] if entry.cls.__name__ == "Muon" else [(7, 5), (3,), (), (0, 4), (2, 3, 2)]
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_grads(params: Params, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: Params, steps: range) -> None:
    for step in steps:
        give_grads(params, step)
        optimizer.step()
        optimizer.zero_grad()


def groups(params: Params) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


@pytest.mark.matrix
@pytest.mark.parametrize("name", WITH_TORCH)
def test_it_agrees_with_torch(name: str) -> None:
    """fp64: the same formulas with other roundings. Muon orthogonalises in bf16: a step is off by some of its 2^-8."""
    entry = BATTERY[name]
    ours, theirs = params_for(entry, torch.float64), params_for(entry, torch.float64)
    train(entry.cls(groups(ours), **entry.options), ours, range(4))
    train(entry.torch(groups(theirs), **entry.options), theirs, range(4))
    tolerance = {"rtol": 1e-11, "atol": 1e-11} if entry.smooth else {"rtol": 0, "atol": 4 * 0.01 * 10 * 2**-8}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_goes_on_as_if_never_stopped(name: str, dtype: torch.dtype) -> None:
    entry = BATTERY[name]
    params = params_for(entry, dtype)
    optimizer = entry.cls(groups(params), **entry.options)
    train(optimizer, params, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = copy.deepcopy(params)
    other = entry.cls(groups(again), **entry.options)
    train(other, copy.deepcopy(params), range(0))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert {k: v for k, v in other.param_groups[1].items() if k != "params"} == {
        k: v for k, v in optimizer.param_groups[1].items() if k != "params"
    }
    for p, q in zip(params, again, strict=True):
        for key, value in optimizer.state[p].items():
            again_of = other.state[q][key]
            assert again_of.dtype is value.dtype if isinstance(value, torch.Tensor) else again_of == value, key
    train(optimizer, params, range(2, 5))
    train(other, again, range(2, 5))
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_goes_on_by_itself(name: str) -> None:
    entry = BATTERY[name]
    params = params_for(entry)
    optimizer = entry.cls(params, **entry.options)
    train(optimizer, params, range(2))
    params2, optimizer2 = copy.deepcopy((params, optimizer))
    before = [p.clone() for p in params]
    train(optimizer2, params2, range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    train(optimizer, params, range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(params, params2, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_parameters_train_as_their_masters_would(name: str, dtype: torch.dtype) -> None:
    entry = BATTERY[name]
    low = params_for(entry, dtype)
    high = [nn.Parameter(p.detach().float()) for p in low]
    optimizer, reference = entry.cls(low, **entry.options), entry.cls(high, **entry.options)
    for step in range(3):
        give_grads(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, q in zip(low, high, strict=True):
            assert torch.equal(optimizer.state[p]["master"], q)
            assert torch.equal(p, q.to(dtype))


def _load(params: Params) -> None:
    module = nn.ParameterList(params)
    module.load_state_dict({k: torch.full_like(v, 3.0) for k, v in module.state_dict().items()})


def _clamp(params: Params) -> None:
    with torch.no_grad():
        for p in params:
            p.clamp_(-0.25, 0.25)


def _replace(params: Params) -> None:
    for p in params[1:]:
        p.data = p.data * 2


@pytest.mark.parametrize("write", [_load, _clamp, _replace])
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_what_is_written_to_a_16_bit_parameter_is_what_trains_on(
    name: str, write: Callable[[Params], None], left_out: bool
) -> None:
    """As of an optimizer that begins with what was written, and with the masters of what was not."""
    entry = BATTERY[name]
    low = params_for(entry, torch.bfloat16)
    optimizer = entry.cls(low, **entry.options)
    for step in range(3):
        give_grads(low, step)
        if left_out and step == 1:
            low[0].grad = None  # another plan
        optimizer.step()
        before = [p.detach().clone() for p in low]
        write(low)
        again = [nn.Parameter(p.detach().clone()) for p in low]
        state = copy.deepcopy(optimizer.state_dict())
        for place, (old, p) in enumerate(zip(before, again, strict=True)):
            master = state["state"][place]["master"]
            master.copy_(torch.where(old == p, master, p.detach().float()))
        other = entry.cls(again, **entry.options)
        other.load_state_dict(state)
        for params, stepping in ((low, optimizer), (again, other)):
            give_grads(params, 9 + step)
            stepping.step()
        assert all(torch.equal(a, b) for a, b in zip(low, again, strict=True))


def test_without_a_master_the_parameter_itself_is_updated() -> None:
    for name in ("AdamW", "Lamb", "Muon"):
        entry = BATTERY[name]
        params = params_for(entry, torch.bfloat16)
        optimizer = entry.cls(params, **entry.options, master_dtype=None)
        before = [p.clone() for p in params]
        train(optimizer, params, range(2))
        assert "master" not in optimizer.state[params[0]]
        assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if not BATTERY[name].meets])
def test_states_may_be_bf16(name: str) -> None:
    entry = BATTERY[name]
    full, half = params_for(entry), params_for(entry)
    train(entry.cls(full, **entry.options), full, range(3))
    optimizer = entry.cls(half, **entry.options, state_dtype=torch.bfloat16)
    train(optimizer, half, range(3))
    names = optimizer.state_names(optimizer.param_groups[0])
    assert all(optimizer.state[half[0]][n].dtype is torch.bfloat16 for n in names)
    if entry.smooth:  # states are good to 2^-8, so a step is good to a few times that
        start = params_for(entry)
        for a, b, s in zip(full, half, start, strict=True):
            if a.numel():
                assert float((a - b).detach().abs().max()) <= 0.1 * float((a - s).detach().abs().max())


@pytest.mark.parametrize("name", ALONE)
def test_gradients_may_come_and_go(name: str) -> None:
    """A parameter without gradient is left alone, and counts its own steps: as if each were trained alone."""
    entry = BATTERY[name]
    params = params_for(entry)
    optimizer = entry.cls(params, **entry.options)
    alone = copy.deepcopy(params)
    singles = [entry.cls([p], **entry.options) for p in alone]
    has = [[0, 1, 2], [0], [1, 2], [0, 1, 2], [0, 1, 2], [], [0, 1, 2]]
    for step, present in enumerate(has):
        for some in (params, alone):
            give_grads(some, step)
            for i, p in enumerate(some):
                if i not in present:
                    p.grad = None
        optimizer.step()
        for single in singles:
            single.step()
        for a, b in zip(params, alone, strict=True):
            assert torch.equal(a, b), step
    steps = [int(optimizer.state[p]["step"]) for p in params[:3]]
    assert steps == [sum(i in present for present in has) for i in range(3)]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_layouts_and_new_memory_change_nothing(name: str) -> None:
    entry = BATTERY[name]
    plain = [nn.Parameter(torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(3)))]
    last = [nn.Parameter(plain[0].detach().clone(memory_format=torch.channels_last))]
    a, b = entry.cls(plain, **entry.options), entry.cls(last, **entry.options)
    for step in range(4):
        give_grads(plain, step)
        last[0].grad = plain[0].grad.clone(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
        if step == 2:
            plain[0].data = plain[0].data.clone()
            plain[0].grad = plain[0].grad.transpose(0, 1).contiguous().transpose(0, 1)
        a.step()
        b.step()
        assert torch.equal(plain[0], last[0])


def test_replaced_states_are_noticed() -> None:
    entry = BATTERY["AdamW"]
    params = params_for(entry)
    optimizer = entry.cls(params, **entry.options)
    train(optimizer, params, range(3))
    for change in (
        lambda s: s.update(step=torch.tensor(0.0), exp_avg=torch.zeros(7, 5), exp_avg_sq=torch.zeros(7, 5)),
        lambda s: s.clear(),
    ):
        fresh = [nn.Parameter(params[0].detach().clone())]
        other = entry.cls(fresh, **entry.options)
        change(optimizer.state[params[0]])
        train(optimizer, params, range(5, 6))
        generator = torch.Generator().manual_seed(1005)
        fresh[0].grad = torch.randn(7, 5, generator=generator)
        other.step()
        assert torch.equal(params[0], fresh[0])


def test_grad_scale_is_a_factor_of_the_gradients() -> None:
    entry = BATTERY["AdamW"]
    a, b = params_for(entry), params_for(entry)
    one, two = entry.cls(a, **entry.options), entry.cls(b, **entry.options)
    give_grads(a, 0)
    for p, q in zip(a, b, strict=True):
        q.grad = p.grad * 1024
    one.step()
    two.step(grad_scale=1 / 1024)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_closures_are_evaluated_with_gradients() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = BATTERY["SGD"].cls([p], lr=0.25)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    assert float(p) == 1.0


# Under ZeRO ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def groups_of(entry: Entry, model: nn.Module) -> list[dict[str, Any]]:
    if entry.cls is not optim.Muon:
        return [{"params": list(model.parameters())}]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() != 2], "use_muon": False}]


def net_input(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def run_zero(entry: Entry, stage: int, rank: int, dtype: torch.dtype, **more: Any) -> dict[str, torch.Tensor]:
    model = Net(dtype)
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=entry.cls, params=groups_of(entry, model),
        **{"reduce_bucket_size": 40, "param_persistence_threshold": 0, **entry.options, **more},
    )  # fmt: skip
    for step in range(3):
        model(net_input(step, rank, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.consolidated_parameters()


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALONE)
def test_all_zero_stages_compute_the_same_bits(name: str, dtype: torch.dtype, world: int) -> None:
    entry = BATTERY[name]
    more = {"sub_group_size": 30, "reduce_bucket_size": 40 if world == 2 else 10**6}
    runs = [sim.run(world, lambda r, s=stage: run_zero(entry, s, r, dtype, **more)) for stage in range(4)]
    for run in runs:
        for parameters in run:
            for key, value in parameters.items():
                assert torch.equal(value, runs[0][0][key]), key


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in ALONE if BATTERY[n].smooth or BATTERY[n].cls is optim.Muon])
def test_zero_computes_what_one_process_does(name: str) -> None:
    entry = BATTERY[name]
    model = Net(torch.float64)
    optimizer = entry.cls(groups_of(entry, model), **entry.options)
    for step in range(3):
        for rank in range(2):
            (model(net_input(step, rank, torch.float64)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Muon makes its direction orthogonal in bf16, where a last bit of the gradient may become one of 2^-8.
    tolerance = 3 * entry.options["lr"] * 2**-6 if entry.cls is optim.Muon else 1e-8
    for parameters in sim.run(2, lambda rank: run_zero(entry, 3, rank, torch.float64)):
        for key, value in model.named_parameters():
            torch.testing.assert_close(parameters[key], value.detach(), rtol=1e-8, atol=tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum", "Lion"])
def test_masters_inside_the_optimizer_are_those_that_zero_would_keep(name: str) -> None:
    entry = BATTERY[name]

    class Foreign(entry.cls):  # type: ignore[misc]
        keeps_masters = False

    for world in (1, 2):
        inside = sim.run(world, lambda r: run_zero(entry, 2, r, torch.bfloat16, clip_norm=0.05))
        outside = sim.run(
            world, lambda r: run_zero(Entry(Foreign, entry.options), 2, r, torch.bfloat16, clip_norm=0.05)
        )
        for key, value in inside[0].items():
            assert torch.equal(value, outside[0][key]), key


def test_muon_under_zero_says_which_parameters_it_cannot_take() -> None:
    with pytest.raises(ValueError, match=r"shape \(7,\).*use_muon"):
        ZeroOptimizer(Net(torch.float32), stage=2, optimizer=optim.Muon, lr=0.1)


# Mistakes ------------------------------------------------------------------------------------------------------------


def refusals() -> list[tuple[str, dict[str, Any], str]]:
    return [
        ("AdamW", {"lr": -1.0}, "lr=-1.0; it must be a number >= 0"),
        ("AdamW", {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ("AdamW", {"differentiable": True}, "differentiable=True"),
        ("AdamW", {"master_dtype": torch.float64}, "master_dtype=torch.float64"),
        ("AdamW", {"state_dtype": torch.float16}, "state_dtype=torch.float16"),
        ("SGD", {"nesterov": True}, "nesterov=True with momentum=0"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0, max_coeff=1.0"),
        ("Muon", {"ns_steps": 0}, "ns_steps=0"),
        ("Muon", {"adjust_lr_fn": "x"}, "adjust_lr_fn='x'"),
    ]


@pytest.mark.parametrize(("name", "options", "message"), refusals())
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    entry = BATTERY[name]
    with pytest.raises(ValueError, match=message):
        entry.cls(params_for(entry), **options)


def with_sparse(p: nn.Parameter) -> None:
    p.grad = torch.ones(7, 5).to_sparse()


def complex_one(p: nn.Parameter) -> None:
    p.data = torch.ones(7, 5, dtype=torch.complex64)
    p.grad = torch.ones(7, 5, dtype=torch.complex64)


def with_gaps(p: nn.Parameter) -> None:
    p.data = torch.ones(14, 5)[::2]
    p.grad = torch.ones(7, 5)


@pytest.mark.parametrize(
    ("spoil", "message"), [(with_sparse, "sparse"), (complex_one, "[cC]omplex"), (with_gaps, "with gaps or overlaps")]
)
def test_tensors_that_cannot_be_updated_are_refused(spoil: Callable[[nn.Parameter], None], message: str) -> None:
    p = nn.Parameter(torch.ones(7, 5))
    spoil(p)
    with pytest.raises(ValueError, match=message):
        BATTERY["AdamW"].cls([p]).step()


def test_muon_takes_matrices_only() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\); it takes matrices only"):
        BATTERY["Muon"].cls([nn.Parameter(torch.ones(3))])


def test_every_optimizer_is_registered_and_in_the_battery() -> None:
    import zoo.optim

    classes = {n for n in zoo.optim.__all__ if n != "ElementwiseOptimizer"}
    assert {entry.cls.__name__ for entry in BATTERY.values()} == classes
    for name in classes:
        built = registry.build("optimizer", name, {}, params=[nn.Parameter(torch.ones(2, 2))])
        assert isinstance(built, getattr(zoo.optim, name))
