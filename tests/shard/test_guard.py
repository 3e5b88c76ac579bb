"""Touching what is partitioned is an error that names it, never a crash and never a wrong number."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.shard.memory import CAN_REFUSE_STORAGE
from zoo.zero import (
    GatheredParameters,
    Init,
    PartitionedAccessError,
    Stage0Optimizer,
    Stage1Optimizer,
    Stage2Optimizer,
    Stage3Optimizer,
)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def partitioned(model: nn.Module) -> Stage3Optimizer:
    return Stage3Optimizer(model, lr=0.01, param_persistence_threshold=0)


TOUCHES: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda p: p.sum(),
    "matmul": lambda p: torch.ones(1, 6) @ p,
    "index": lambda p: p[0] + 1,
    "indices": lambda p: p[[0, 1]],
    "mask": lambda p: p[torch.ones(6, 4, dtype=torch.bool)],
    "transposed": lambda p: torch.ones(2, 4) @ p.T,
    "view in place": lambda p: p.data.view(-1).zero_(),
    "row written": lambda p: p.data[0].__setitem__(1, 2.0),
    "view of a view": lambda p: torch.reshape(p.t(), (4, 2, 3))[0].tolist(),
    "row by row": lambda p: torch.stack(list(p)),
    "sent": lambda p: pickle.dumps(p.view(-1)),
    "columns that lie apart": lambda p: p.t().reshape(-1),
    "item": lambda p: p[0, 0].item(),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 4), p),
    "detached in place": lambda p: p.detach().add_(1.0),
    "data": lambda p: p.data + 1,
    "data in place": lambda p: p.data.zero_(),
    "data of data": lambda p: p.data.data.sum(),
    "data in another type": lambda p: p.data.double(),
    "data copied": lambda p: p.data.clone(),
    "data pickled": lambda p: pickle.dumps(p.data),
    "data deeply copied": lambda p: copy.deepcopy(p.data),
    "data as an array": lambda p: p.data.numpy(),
    "formatted": lambda p: f"{p:.3f}",
    "values of its memory": lambda p: p.data.tolist(),
    "written to": lambda p: torch.zeros(6, 4).copy_(p.detach()),
    "cat": lambda p: torch.cat([p, p]),
    "keyword": lambda p: torch.mul(input=torch.ones(6, 4), other=p),
    "copy": lambda p: p.copy_(torch.zeros(6, 4)),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: p.tolist(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_touching_a_partitioned_parameter_raises(touch: str) -> None:
    model = small()
    partitioned(model)
    with pytest.raises((PartitionedAccessError, RuntimeError)) as caught:
        TOUCHES[touch](model[0].weight)
    text = str(caught.value)
    assert "'0.weight'" in text or "'0'" in text or "0.weight" in text


def state_dict_from(module: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()``, called by code of a module of this name."""
    names: dict[str, Any] = {"__name__": module}
    exec("def call(model): return model.state_dict()", names)
    return names["call"](model)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["optimizer", "Init"])
def test_only_transformers_gets_a_state_dict_without_values_for_its_names(how: str) -> None:
    if how == "Init":
        with Init():
            model = small()
        optimizer = None
    else:
        model = small()
        optimizer = partitioned(model)  # kept: parameters do not keep their optimizer
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = state_dict_from("transformers.modeling_utils", model)
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes
    assert all(t.is_meta and t.dtype == torch.float32 for t in found.values())
    for other in ("transformers_of_mine", "torchtune.save", "script"):
        with pytest.raises(PartitionedAccessError, match=r"0\.weight"):
            state_dict_from(other, model)
    with GatheredParameters(list(model.parameters())):
        whole = state_dict_from("transformers.modeling_utils", model)
        assert all(torch.equal(whole[name], expected) for name, expected in small().state_dict().items())
    del optimizer


@pytest.mark.skipif(not CAN_REFUSE_STORAGE, reason="this torch cannot make a storage refuse access")
def test_a_view_kept_from_forward_raises_too() -> None:
    model = small()
    kept = []
    model[0].register_forward_hook(lambda m, a, o: kept.append(m.weight.detach().t()))
    Stage3Optimizer(model, lr=0.01, param_persistence_threshold=0, max_live_parameters=0)
    model(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="partitioned"):
        kept[0].sum()


def test_metadata_stays_readable() -> None:
    model = small()
    partitioned(model)
    p = model[0].weight
    assert (p.shape, p.dtype, p.numel(), p.requires_grad, p.is_leaf) == ((6, 4), torch.float32, 24, True, True)
    assert p.device.type == "cpu"
    assert p.size(0) == 6
    assert p in {p}
    assert isinstance(p, nn.Parameter)
    assert sum(q.numel() for q in model.parameters()) == 58
    assert p.grad is None


def described(p: torch.Tensor) -> tuple[object, ...]:
    return p.shape, p.stride(), p.storage_offset(), p.dtype, p.device, p.is_contiguous(), p.requires_grad, len(p)


READS_NO_VALUES: dict[str, Callable[[torch.Tensor], object]] = {
    "size": lambda p: (p.shape, p.size(), p.numel(), p.nelement(), p.dim(), len(p), p.stride(), p.dim_order()),
    "dtype": lambda p: (p.dtype, p.type(), p.is_floating_point(), p.is_signed(), p.is_complex(), p.element_size()),
    "device": lambda p: (p.device, p.is_cuda, p.is_meta, p.get_device(), torch.get_device(p), p.is_mkldnn, p.is_xla),
    "kind": lambda p: (p.layout, p.is_sparse, p.is_quantized, p.is_conj(), p.is_neg(), torch.is_tensor(p), p.is_leaf),
    "memory": lambda p: (p.is_pinned(), p.is_shared(), p.is_contiguous(), p.untyped_storage().nbytes(), p.nbytes),
    "types": lambda p: (torch.result_type(p, 1.0), p.is_same_size(p), torch.is_same_size(p, p), p.layout),
    "others": lambda p: [tuple(torch.zeros_like(p).shape), p.new_ones(2).tolist(), torch.ones_like(p).device],
    "itself": lambda p: (p.contiguous() is p, p.to(p.device) is p, p.float() is p, isinstance(p, torch.Tensor)),
    "formatted": lambda p: (str(p) == repr(p), f"{p}" == str(p), "requires_grad" in repr(p)),
    "meta": lambda p: [
        (q.shape, q.dtype, q.device.type) for q in (p.to("meta"), p.to("meta", torch.half), p.to(device="meta"))
    ],
    "same": lambda p: (p.is_set_to(p), p.is_set_to(torch.ones(6, 4)), p.type_as(p) is p, p.type_as(torch.ones(1)) is p),
    "names": lambda p: ("sum" in dir(p), p._is_view(), p._base),
    "shaped": lambda p: [described(q) for q in (p.t(), p.T, p.mT, p.view(-1), p.reshape(2, 12), p.flatten(), *p)],
    "parts": lambda p: [described(q) for q in (p[None, 1:], p[2], p[..., ::2], *p.chunk(3), *torch.split(p, 4))],
    "views of views": lambda p: [
        described(q) for q in (p.transpose(0, 1).unsqueeze(1), torch.permute(p, (1, 0)).T[:, 1], p[1:].view(-1)[3:])
    ],
    "like views": lambda p: [
        (torch.zeros_like(q).shape, q.new_ones(2).tolist(), q.data.shape, q.detach().stride()) for q in (p.T, p[0])
    ],
}


@pytest.mark.matrix
@pytest.mark.parametrize("reads", READS_NO_VALUES)
@pytest.mark.parametrize("what", ["parameter", "data", "detach", "torch.detach", "data.data"])
@pytest.mark.parametrize("how", ["optimizer", "Init"])
def test_what_reads_no_values_is_as_of_a_plain_parameter(reads: str, what: str, how: str) -> None:
    if how == "Init":
        with Init():
            model = small()
        optimizer = None
    else:
        model = small()
        optimizer = partitioned(model)  # kept: parameters do not keep their optimizer

    def answer(model: nn.Module) -> object:
        p: Any = model[0].weight  # type: ignore[index]
        asked: Any = {
            "parameter": lambda: p, "data": lambda: p.data, "detach": lambda: p.detach(),
            "torch.detach": lambda: torch.detach(p), "data.data": lambda: p.data.data,
        }[what]()  # fmt: skip
        return READS_NO_VALUES[reads](asked)

    assert answer(model) == answer(small())
    del optimizer


def test_what_is_made_like_a_partitioned_parameter_is_a_plain_tensor() -> None:
    model = small()
    optimizer = partitioned(model)
    p: Any = model[0].weight
    for like in (p, p.data, p.T, p[0].detach()):
        made = [
            like.new_empty(2), like.new_zeros(2), like.new_ones(2), like.new_full((2,), 3.0), like.new_tensor([1.0]),
            like.new_empty_strided((2,), (1,)), torch.zeros_like(like), torch.randn_like(like),
        ]  # fmt: skip
        assert {(type(t), t.dtype, t.device) for t in made} == {(torch.Tensor, p.dtype, p.device)}
        assert made[3].tolist() == [3.0, 3.0]
    del optimizer


def test_a_partitioned_parameter_is_shown_without_values_and_has_no_address() -> None:
    model = small()
    optimizer = partitioned(model)
    p = model[0].weight
    assert repr(p) == (
        "Parameter containing:\ntensor(..., size=(6, 4), dtype=torch.float32, device='cpu', requires_grad=True), of "
        "which this rank holds a shard"
    )
    assert f"{p.data}".startswith("tensor(..., size=(6, 4), dtype=torch.float32, device='cpu'), of which")
    assert p.data_ptr() == p.data.data_ptr() == p.untyped_storage().data_ptr() == 0
    assert "(0): Linear" in repr(model)
    with pytest.raises(NotImplementedError):
        p.untyped_storage().tolist()
    with optimizer.gathered():
        assert p.data_ptr() == p.data.data_ptr() != 0
        assert "[-0.0037,  0.2682" in repr(p)


def test_gathered_makes_everything_readable() -> None:
    model = small()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = partitioned(model)
    with optimizer.gathered():
        for name, p in model.named_parameters():
            assert torch.equal(p.detach(), expected[name])
        again = copy.deepcopy(model[0].weight)
    assert type(again) is nn.Parameter
    with pytest.raises(PartitionedAccessError):
        model[0].weight.sum()
    assert {n: v.tolist() for n, v in optimizer.consolidated_parameters().items()} == {
        n: v.tolist() for n, v in expected.items()
    }


def test_close_gives_an_ordinary_model_back() -> None:
    model = small()
    optimizer = partitioned(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    expected = optimizer.consolidated_parameters()
    optimizer.close()
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        assert torch.equal(p, expected[name])
        assert p.grad is None
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("cls", [Stage1Optimizer, Stage2Optimizer, Stage3Optimizer])
def test_a_reduced_gradient_is_not_shown_as_if_it_were_whole(cls: type) -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = cls(model, lr=0.01)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(PartitionedAccessError, match=r"0\.weight.*clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()
        assert model[0].weight.grad is None

    sim.run(2, fn)


def test_stage_0_shows_the_mean_gradient() -> None:
    def fn(rank: int) -> torch.Tensor:
        model = small()
        Stage0Optimizer(model, lr=0.01)
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad.clone()

    expected = []
    for rank in range(3):
        model = small()
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        expected.append(model[0].weight.grad)
    for got in sim.run(3, fn):
        torch.testing.assert_close(got, torch.stack(expected).mean(0))


def test_grad_can_be_dropped_by_assigning_none() -> None:
    model = small()
    optimizer = Stage0Optimizer(model, lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    model[0].weight.grad = None
    assert model[0].weight.grad is not None
    assert float(model[0].weight.grad.abs().sum()) == 0.0
    assert float(model[2].weight.grad.abs().sum()) > 0.0
    optimizer.zero_grad()
    model.zero_grad()


def test_gradients_survive_model_zero_grad_of_the_next_step() -> None:
    # torch's own loop calls model.zero_grad(); autograd must go on accumulating into the flat buffer.
    model, plain = small(), small()
    optimizer = Stage0Optimizer(model, optimizer=torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.full((2, 4), float(step))
        for m, o in ((model, optimizer), (plain, reference)):
            m.zero_grad()
            m(x).square().sum().backward()
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_thawing_a_frozen_parameter_raises_by_name() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    Stage2Optimizer(model, lr=0.01)
    with pytest.raises(ValueError, match=r"'0\.weight' was frozen"):
        model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0\.weight' was frozen"):
        model.requires_grad_(True)
    model[2].weight.requires_grad = False  # freezing for a while is fine
    model[2].weight.requires_grad = True


def test_a_frozen_parameter_takes_no_gradient() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    optimizer = Stage0Optimizer(model, lr=0.01)
    model[0].weight.grad = None
    with pytest.raises(ValueError, match=r"'0\.weight' was frozen .* takes no gradient"):
        model[0].weight.grad = torch.ones(6, 4)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model[0].weight.grad is None


def test_create_graph_is_refused() -> None:
    model = small()
    Stage2Optimizer(model, lr=0.01)
    with pytest.raises(NotImplementedError, match="create_graph"):
        model(torch.ones(1, 4)).sum().backward(create_graph=True)


@pytest.mark.parametrize("cls", [Stage0Optimizer, Stage1Optimizer, Stage2Optimizer])
def test_a_gradient_after_the_reduction_is_an_error_and_overlap_off_mends_it(cls: type) -> None:
    def fn(rank: int, overlap: bool) -> float:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        options = {"units": [nn.Linear], "reduce_bucket_size": 1, "overlap_comm": overlap}
        optimizer = cls(model, optimizer=torch.optim.SGD, lr=1.0, **options)
        early = model[3].weight.square().sum()  # used before its unit's forward
        (model(torch.ones(1, 4)).sum() + early).backward()
        optimizer.step()
        return 1.0

    with pytest.raises(sim.RankError, match="arrived after it had been reduced"):
        sim.run(2, lambda rank: fn(rank, True))
    assert sim.run(2, lambda rank: fn(rank, False)) == [1.0, 1.0]
