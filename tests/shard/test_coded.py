"""Frozen parameters of another class, as quantised weights have them: split and gathered as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.zero import Precision, ShardedModel, ZeroConfig, ZeroOptimizer


class Packing:
    """What codes stand for: c → scale · (c - 8), two codes a byte."""

    def __init__(self, scale: torch.Tensor, shape: tuple[int, int]) -> None:
        self.scale, self.shape = scale, shape


class Codes(nn.Parameter):
    """Two codes a byte, the bytes seen as ``storage``, and what they stand for."""

    packing: Packing

    @staticmethod
    def of(weight: torch.Tensor, storage: torch.dtype) -> Codes:
        scale = weight.abs().max(dim=1, keepdim=True).values / 7
        codes = (torch.round(weight / scale) + 8).to(torch.uint8).reshape(-1, 2)
        data = (codes[:, 0] + 16 * codes[:, 1]).view(storage).reshape(-1, 1)
        made: Codes = torch.Tensor._make_subclass(Codes, data, False)  # type: ignore[assignment]
        made.packing = Packing(scale, tuple(weight.shape))  # type: ignore[arg-type]
        return made

    def weight(self) -> torch.Tensor:
        data = self.view(torch.uint8).reshape(-1)
        codes = torch.stack([data % 16, data // 16], dim=1).reshape(self.packing.shape)
        return self.packing.scale * (codes.double() - 8)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk:
            return "what the class makes of it"
        return super().__torch_function__(func, types, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("packs anew")


class Coded(nn.Module):
    """y = W x + B A x, of which W is codes."""

    def __init__(self, inputs: int, outputs: int, storage: torch.dtype) -> None:
        super().__init__()
        self.weight = Codes.of(torch.randn(outputs, inputs, dtype=torch.float64), storage)
        self.a = nn.Parameter(torch.randn(2, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(outputs, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.chunk(self.weight, 2) == "what the class makes of it"
        self.seen = self.weight.detach().view(torch.uint8).clone()
        return x @ self.weight.weight().T.to(x.dtype) + x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype)


def make(storage: torch.dtype = torch.uint8) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.Linear(8, 8).double().requires_grad_(False)
    return nn.Sequential(Coded(4, 8, storage), nn.Tanh(), norm, Coded(8, 8, storage))


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def alone(world: int) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        for rank in range(world):
            (model(data(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def zero(model: nn.Module, stage: int, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1,
        max_live_parameters=0, **options,
    )  # fmt: skip


@given(
    world=st.integers(1, 3), stage=st.integers(0, 3), storage=st.sampled_from([torch.uint8, torch.float32]),
    offload=st.booleans(), quantised=st.booleans(), seed=st.integers(0, 20),
)  # fmt: skip
def test_they_train_and_come_back_as_they_were(
    world: int, stage: int, storage: torch.dtype, offload: bool, quantised: bool, seed: int
) -> None:
    options: dict[str, Any] = {}
    if stage == 3:
        options["offload_param"] = {"device": "cpu"} if offload else None
        options["zero_quantized_nontrainable_weights"] = quantised
    plain = {n: p.detach().clone() for n, p in make(storage).named_parameters() if type(p) is Codes}

    def job(rank: int) -> None:
        torch.manual_seed(seed + rank)
        model = make(storage)
        before = dict(model.named_parameters())
        if quantised and stage == 3:
            model[2].float()  # what else is frozen is kept as int8, and is not compared
        optimizer = zero(model, stage, **{k: v for k, v in options.items() if v})
        for step in range(2):
            x = data(rank, step)
            out = model[3](model[1](model[0](x))) if quantised else model(x)
            optimizer.backward(out.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert all(isinstance(p, Codes) for n, p in model.named_parameters() if n in plain)
        if not quantised:
            for name, value in optimizer.consolidated_parameters().items():
                if name in expected:
                    torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
        copied = [copy.deepcopy(model[0].weight)] if stage < 3 else []
        optimizer.close()
        for name, values in plain.items():
            own = model.get_parameter(name)
            assert own is before[name]
            assert type(own) is Codes
            assert torch.equal(own.detach().view(torch.uint8), values.view(torch.uint8))
        for other in copied:
            assert type(other) is Codes
            assert other.packing is not model[0].weight.packing
            assert torch.equal(other.weight(), model[0].weight.weight())

    expected = alone(world)
    sim.run(world, job)


def test_they_are_neither_converted_nor_quantised() -> None:
    def job(rank: int) -> None:
        model = make(torch.float32)
        for p in model.parameters():
            p.data = p.data if type(p) is Codes else p.data.float()
        codes = model[0].weight.detach().clone()
        sharded = ShardedModel(
            model,
            config=ZeroConfig(stage=3, zero_quantized_weights=True, param_persistence_threshold=0),
            precision=Precision(param=torch.bfloat16),
        )
        found = {b.spec.cls: b for b in sharded.buckets if "0.weight" in b.spec.names}
        assert list(found) == [Codes]
        assert found[Codes].spec.dtype is torch.float32
        model(data(rank, 0).to(torch.bfloat16))
        assert torch.equal(model[0].seen, codes.view(torch.uint8))
        for name, value in sharded.whole_parameters():
            if name == "0.weight":
                assert torch.equal(value.view(torch.uint8), codes.view(torch.uint8))

    sim.run(2, job)


def test_what_codes_stand_for_is_compared() -> None:
    def job(rank: int) -> None:
        model = make()
        model[3].weight.packing.scale = model[3].weight.packing.scale * (1 + rank)
        with pytest.raises(Exception, match="what the codes of frozen parameters stand for"):
            zero(model, 2)
        assert type(model[3].weight) is Codes

    sim.run(2, job)


def test_they_stay_where_they_are() -> None:
    def job(rank: int) -> None:
        model = make()
        optimizer = zero(model, 3)
        assert model.to("cpu") is model
        with pytest.raises(ValueError, match=r"Codes.*'meta'.*close\(\)"):
            model[0].weight.to("meta")
        with pytest.raises(RuntimeError, match="outside of its unit"):
            model[0].weight + 1
        optimizer.close()

    sim.run(2, job)


def test_those_that_train_are_refused() -> None:
    model = make(torch.float32)
    model[0].weight.requires_grad_(True)

    def job(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'0\.weight' is a Codes.*frozen ones"):
            zero(model, 1)

    sim.run(1, job)
