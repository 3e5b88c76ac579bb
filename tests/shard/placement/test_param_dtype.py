"""What param_dtype means beside the law of training with it: values, inputs, states, ends, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo.optim
from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import (
    GatheredParameters,
    Init,
    Precision,
    ShardedModel,
    Stage3Optimizer,
    ZeroConfig,
    ZeroOptimizer,
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

BF16 = torch.bfloat16
BOTH: list[Any] = [torch.optim.AdamW, zoo.optim.AdamW]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model[2].requires_grad_(False)
    return model


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def build(
    model: nn.Module, stage: int, *, param: Any = BF16, cast_inputs: bool = True, **options: Any
) -> ZeroOptimizer:
    given = {"lr": 0.01, "param_persistence_threshold": 5, "reduce_bucket_size": 40, **options}
    return ZeroOptimizer(model, stage=stage, precision=Precision(param=param, cast_inputs=cast_inputs), **given)


def train(model: nn.Module, optimizer: ZeroOptimizer, rank: int, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.backward(model(data(rank, step)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype is other[name].dtype, name
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn, "bf16"])
def test_what_models_do_not_compute_in_is_refused(dtype: Any) -> None:
    model, before = small(), values(small())
    with pytest.raises(ValueError, match=r"Precision\(param=.*; allowed are torch.bfloat16, torch.float16"):
        build(model, 3, param=dtype)
    same(values(model), before)


def test_fp64_parameters_are_refused_where_masters_would_round_them() -> None:
    model = small()
    model[0].double()
    with pytest.raises(ValueError, match=r"parameters of torch.float64 \('0.weight', '0.bias'\).*model.float\(\)"):
        build(model, 2)
    build(model.double(), 2, param=torch.float64).close()


def test_ranks_must_agree_on_it() -> None:
    with pytest.raises(sim.RankError) as caught:
        sim.run(2, lambda rank: build(small(), 2, param=[BF16, torch.float16][rank]) and None)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cls", BOTH)
def test_it_holds_one_master_and_no_second_copy(stage: int, cls: Any) -> None:
    def fn(rank: int) -> None:
        model, before = small(), values(small())
        optimizer = build(model, stage, optimizer=cls)
        kept = sum(b.layout.size // (2 if stage else 1) for b in optimizer.buckets if b.spec.trainable)
        assert optimizer.memory()["optimizer"] == 4 * kept  # masters, and no moments yet
        assert optimizer.memory()["parameters"] == optimizer.forecast().parameters_bytes
        for bucket in optimizer.buckets:
            assert ("original" not in bucket.roles) == bucket.spec.trainable
        for name, p in model.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(p), before[name])
        train(model, optimizer, rank, 1)
        optimizer.zero_grad()
        assert optimizer.memory()["optimizer"] == optimizer.forecast().optimizer_bytes

    sim.run(2, fn)


class Asks(nn.Module):
    """Shows what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        self.seen = (x, rest, more)
        out: torch.Tensor = self.layer(x)
        return out


def test_inputs_are_cast_wherever_they_are() -> None:
    model = Asks()
    optimizer = build(model, 3)
    x, ids, mask = data(0).requires_grad_(), torch.arange(3), torch.ones(2, dtype=torch.bool)
    out = model(x, [data(1), {"ids": ids}], mask=mask, wide=(data(2).double(), "text"))
    seen, (rest,), more = model.seen
    assert out.dtype is seen.dtype is rest[0].dtype is more["wide"][0].dtype is BF16
    assert rest[1]["ids"] is ids
    assert more["mask"] is mask
    assert more["wide"][1] == "text"
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    given = [data(0).to(BF16)]
    model(given[0], given)
    assert model.seen[1][0] is given  # nothing to cast: the very objects
    optimizer.close()
    model(x)
    assert model.seen[0] is x


def test_inputs_are_left_alone_where_that_is_asked_for() -> None:
    model = Asks()
    build(model, 1, cast_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):
        model(data(0))
    assert model(data(0).to(BF16)).dtype is BF16
    plain = Asks()
    build(plain, 1, param=None)
    assert plain(data(0)).dtype is torch.float32


@given(
    worlds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stages=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dtypes=st.permutations([None, BF16, torch.float16]),
    classes=st.tuples(st.sampled_from(BOTH), st.sampled_from(BOTH)),
    num_steps=st.sampled_from([0, 2]),
)
def test_states_move_between_dtypes_stages_and_worlds(
    worlds: tuple[int, int], stages: tuple[int, int], dtypes: list[Any], classes: tuple[Any, Any], num_steps: int
) -> None:
    def collect(optimizer: ZeroOptimizer) -> Any:
        slices = [(s.name, s.role, s.start, s.tensor.clone()) for s in optimizer.state_slices()]
        return slices, {k: float(v) for k, v in optimizer.state_scalars().items()}

    def whole(parts: Any) -> tuple[dict[Any, torch.Tensor], dict[str, float]]:
        found: dict[Any, dict[int, torch.Tensor]] = {}
        for slices, _ in parts:
            for name, role, start, tensor in slices:
                found.setdefault((name, role), {})[start] = tensor
        joined = {key: torch.cat([of[i] for i in sorted(of)]) for key, of in found.items()}
        return joined, {k: v for _, scalars in parts for k, v in scalars.items()}

    def save(rank: int) -> Any:
        model = small()
        optimizer = build(model, stages[0], param=dtypes[0], optimizer=classes[0])
        train(model, optimizer, rank, num_steps)
        return collect(optimizer)

    state, scalars = whole(sim.run(worlds[0], save))

    def load(rank: int) -> Any:
        model = small()
        optimizer = build(model, stages[1], param=dtypes[1], optimizer=classes[1])
        optimizer.load_state(lambda name, role, start, n: state[name, role][start : start + n], scalars)
        for name, value in optimizer.consolidated_parameters().items():
            expected = state[name, "parameter"]
            assert torch.equal(value.flatten(), expected if dtypes[1] is None else expected.to(dtypes[1]))
        again = optimizer.state_dict()
        optimizer.load_state_dict(again)
        found = collect(optimizer)
        optimizer.close()
        return *found, values(model)

    loaded = sim.run(worlds[1], load)
    then, numbers = whole([part[:2] for part in loaded])
    assert numbers == scalars
    assert then.keys() == state.keys()
    for key, value in state.items():
        assert then[key].dtype is value.dtype is torch.float32
        assert torch.equal(then[key], value), key
    for *_, closed in loaded:
        same({n: v.flatten() for n, v in closed.items()}, {n: v for (n, r), v in state.items() if r == "parameter"})


@pytest.mark.parametrize("stage", range(4))
def test_new_values_reach_masters_and_what_frozen_parameters_came_with(stage: int) -> None:
    def fn(rank: int) -> None:
        model, expected = small(), values(small())
        optimizer = build(model, stage)
        fine = torch.full((6, 6), 1.001)
        safe_set_full_fp32_param(model[2].weight, fine)
        expected["2.weight"] = fine
        coarse = torch.full((6,), 0.3)
        with pytest.raises(ValueError, match=r"'2.bias' is torch.bfloat16.*was given torch.float32"):
            model[2].bias.data = coarse
        model[2].bias.data = coarse.to(BF16)
        expected["2.bias"] = coarse.to(BF16).float()
        with GatheredParameters([model[0].weight, model[2].weight], modifier_rank=1):
            if rank == 1:
                model[0].weight.data[0] = 2.5
        expected["0.weight"][0] = 2.5  # the other rows, and all of 2.weight, stay exact
        for name, p in model.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(p), expected[name]), name
        if stage < 3:  # in place, where it is whole; in the last moment too
            with torch.no_grad():
                model[2].weight[1] = 7.0
            expected["2.weight"][1] = 7.0
            optimizer.state_dict()
            with torch.no_grad():
                model[4].weight[1] = 7.0
            expected["4.weight"][1] = 7.0
        optimizer.close()
        same(values(model), expected)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_each_rank_sets_its_elements_of_a_frozen_parameter(stage: int, dtype: torch.dtype | None) -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = build(model, stage, param=dtype)
        own = safe_get_local_fp32_param(model[2].weight)
        safe_set_local_fp32_param(model[2].weight, torch.full_like(own, 1.001))
        expected = torch.full((6, 6), 1.001)
        assert torch.equal(safe_get_full_fp32_param(model[2].weight), expected)
        assert torch.equal(optimizer.consolidated_parameters()["2.weight"], expected.to(dtype or torch.float32))
        optimizer.close()
        assert torch.equal(model[2].weight, expected)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cls", BOTH)
def test_a_checkpoint_of_the_model_in_fp32_loads_into_it(stage: int, cls: Any) -> None:
    """Rounded, as in any 16-bit model; what it rounds to already keeps its master."""
    state = {k: v + (0.3 if k.startswith("4") else 0.0) for k, v in small().state_dict().items()}

    def fn(rank: int) -> None:
        model = small()
        optimizer = build(model, stage, optimizer=cls)
        if stage < 3:
            model.load_state_dict(state)
        else:
            with GatheredParameters(model.parameters(), modifier_rank=0):
                model.load_state_dict(state)
        optimizer.state_dict()
        optimizer.close()
        same(values(model), {k: v.to(BF16).float() if k.startswith("4") else v for k, v in state.items()})

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_models_that_are_partitioned_while_they_are_built(stage: int, tier: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"device": tier, "nvme_path": tmp_path}

    def run(rank: int, partitioned: bool) -> Any:
        config = ZeroConfig(stage=3, offload_param=where)
        if partitioned:
            with Init(config=config):
                model = small()
        else:
            model = small()
        options = {"offload_optimizer": where} if stage else {}
        optimizer = build(model, stage, optimizer=zoo.optim.AdamW, **options)
        files = optimizer.memory().get("nvme", 0)
        assert files == optimizer.forecast().nvme_files_bytes
        train(model, optimizer, rank, 2)
        optimizer.close()
        return values(model)

    for built, plain in zip(sim.run(2, lambda r: run(r, True)), sim.run(2, lambda r: run(r, False)), strict=True):
        same(built, plain)
        assert torch.equal(built["2.weight"], small()[2].weight)


@pytest.mark.parametrize("stage", [0, 3])
def test_forward_alone_runs_in_that_dtype(stage: int) -> None:
    def fn(rank: int) -> None:
        model, plain = small(), small().to(BF16)
        config = ZeroConfig(stage=stage, param_persistence_threshold=0)
        sharded = ShardedModel(model, config=config, trains=False, precision=Precision(param=BF16))
        with torch.no_grad():
            assert torch.equal(model(data(rank)), plain(data(rank).to(BF16)))
        assert all("original" not in b.roles for b in sharded.buckets)
        sharded.close()
        same(values(model), values(plain))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", range(4))
def test_without_an_optimizer_nothing_is_lost_either(stage: int) -> None:
    def fn(rank: int) -> None:
        model = small()
        config = ZeroConfig(stage=stage, param_persistence_threshold=0)
        sharded = ShardedModel(model, config=config, precision=Precision(param=BF16))
        model(data(rank)).sum().backward()
        sharded.close()
        same(values(model), values(small()))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", range(4))
def test_a_construction_that_fails_gives_back_what_was_there(stage: int) -> None:
    class Refuses(torch.optim.AdamW):
        def __init__(self, params: Any, **options: Any) -> None:
            if sum(p.numel() for g in params if isinstance(g, dict) for p in g["params"]) > 30:
                raise RuntimeError("too many")
            super().__init__(params, **options)

    def fn(rank: int) -> None:
        model = small()
        with pytest.raises(RuntimeError, match="too many"):
            build(model, stage, optimizer=Refuses)
        same(values(model), values(small()))

    sim.run(2, fn)


@pytest.mark.parametrize(
    ("came", "dtype"), [(torch.float16, BF16), (BF16, torch.float16), (BF16, torch.float32), (BF16, BF16)]
)
def test_any_dtype_becomes_any_other(came: torch.dtype, dtype: torch.dtype) -> None:
    def fn(rank: int) -> None:
        model = small().to(came)
        model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
        model[4].float()
        before = values(model)
        optimizer = build(model, 3, param=dtype)
        assert model.count.dtype is torch.int64
        assert {p.dtype for n, p in model.named_parameters() if n != "count"} == {dtype}
        for name, p in model.named_parameters():
            if name != "count":
                assert torch.equal(safe_get_full_fp32_param(p), before[name].float())
        optimizer.close()
        same(values(model), before)

    sim.run(2, fn)


def test_copies_and_pickles_are_ordinary_models_of_that_dtype() -> None:
    def fn(rank: int) -> None:
        model, plain = small(), small().to(BF16)
        optimizer = build(model, 3)
        with optimizer.gathered():
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            same(values(other), values(plain))
            assert torch.equal(other(data(0).to(BF16)), plain(data(0).to(BF16)))

    sim.run(2, fn)


def test_a_frozen_layer_as_int8_is_what_int8_stands_for() -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = build(model, 3, zero_quantized_nontrainable_weights=True, param_persistence_threshold=0)
        assert all("original" not in b.roles for b in optimizer.buckets)
        stands_for = safe_get_full_fp32_param(model[2].weight)
        optimizer.close()
        assert model[2].weight.dtype is torch.float32
        torch.testing.assert_close(model[2].weight.detach(), stands_for, atol=0.01, rtol=0)
        assert torch.equal(model[0].weight, small()[0].weight)

    sim.run(2, fn)


def test_states_go_away_and_come_back() -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = Stage3Optimizer(model, lr=0.1, param_persistence_threshold=0, precision=Precision(param=BF16))
        kept = sum(b.layout.size // 2 for b in optimizer.buckets)
        assert optimizer.offload_states(["hp_params"]) == 4 * kept
        optimizer.reload_states()
        train(model, optimizer, rank, 1)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", range(4))
def test_fp16_with_a_loss_scale_skips_and_goes_on(stage: int) -> None:
    def fn(rank: int) -> None:
        model = small()
        optimizer = build(model, stage, param=torch.float16, loss_scale="dynamic", clip_norm=1.0)
        optimizer.backward(model(data(rank)).float().square().mean() * 1e9)
        optimizer.step()
        assert optimizer.skipped
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(p), values(small())[name])

    sim.run(2, fn)
