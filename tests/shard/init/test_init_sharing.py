"""zero.Init's groups, quantised parts and swappers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.shard.init.test_init import Shelves
from torch import nn

from zoo import sim
from zoo.comm import Communicator
from zoo.io import AioConfig
from zoo.zero import GatheredParameters, Init, Stage3Optimizer, ZeroOptimizer


class Net(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.second = nn.Linear(width, 3)
        self.frozen = nn.Parameter(torch.randn(width, 5), requires_grad=False)
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        with torch.no_grad():
            self.first.weight.mul_(2.0)
            self.second.weight.mul_(2.0)[0].zero_()
        self.tied = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)) + self.frozen.sum(1))
        return out


def build(seed: int, width: int = 20) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def finished(model: nn.Module, stage: int = 3) -> dict[str, torch.Tensor]:
    optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0)
    return optimizer.consolidated_parameters()


class Backwards(Init):
    """Numbers the parts from the last rank."""

    def get_partition_rank(self) -> int:
        return self._communicator().size - 1 - super().get_partition_rank()


@given(
    nodes=st.integers(1, 3), local=st.integers(1, 3), stage=st.integers(0, 3), backwards=st.booleans(),
    quantised=st.booleans(), low=st.booleans(), width=st.sampled_from([1, 7, 40]),
)  # fmt: skip
def test_however_parts_are_kept_the_optimizer_gets_the_values_of_rank_0(
    nodes: int, local: int, stage: int, backwards: bool, quantised: bool, low: bool, width: int
) -> None:
    dtype = torch.bfloat16 if low else torch.float32

    def fn(rank: int) -> dict[str, torch.Tensor]:
        secondary = Communicator().partition(
            [range(k, k + local) for k in range(0, nodes * local, local)], name="secondary"
        )
        how: dict[str, Any] = {"zero_param_parallel_group": secondary, "zero_quantized_weights": quantised}
        with (Backwards if backwards else Init)(dtype=dtype, **how):
            model = build(rank, width)
        with GatheredParameters(model.second.weight, modifier_rank=0):
            model.second.weight.data[1].fill_(rank + 1.0)
        return finished(model, stage)

    expected = build(0, width)
    expected.second.weight.data[1] = 1.0
    for found in sim.run(nodes * local, fn):
        for name, parameter in expected.named_parameters():
            wanted = parameter.detach().to(dtype) if parameter.is_floating_point() else parameter
            assert torch.equal(found[name], wanted), name


def test_with_a_secondary_group_gathers_stay_in_it() -> None:
    def fn(rank: int) -> tuple[int, int]:
        comm = Communicator(nodes=2)
        group = comm.partition([[0, 1], [2, 3]], name="node")
        with Init(data_parallel_group=comm, zero_param_parallel_group=group):
            model = build(rank)
        before = comm.log.inter_bytes
        with GatheredParameters(list(model.parameters())):
            assert torch.equal(model.first.weight, build(0).first.weight)
        return comm.log.inter_bytes - before, before

    for during, before in sim.run(4, fn):
        assert during == 0 < before


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_travel_as_int8_and_parts_stay_exact(world: int, dtype: torch.dtype) -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        comm = Communicator()
        with Init(data_parallel_group=comm, zero_quantized_weights=True, dtype=dtype):
            model = build(rank, 600)
        exact = build(0, 600).to(dtype)
        before = comm.log.ops["all_gather"].message_bytes
        with GatheredParameters(model.first.weight):
            sent = comm.log.ops["all_gather"].message_bytes - before
            error = (model.first.weight - exact.first.weight).abs().max().item()
            assert 0 < error <= exact.first.weight.abs().max().item() * (1 / 254 + torch.finfo(dtype).eps)
        assert sent <= (1 + 4 / 256) * (exact.first.weight.numel() + 256 * world)  # padded to whole groups
        with GatheredParameters(model.first.weight, modifier_rank=world - 1):
            model.first.weight.data[0, 0] = 5.0 + rank
            with GatheredParameters(model.first.weight):
                pass
        return finished(model)

    expected = build(0, 600).to(dtype).first.weight.detach()
    expected[0, 0] = 4.0 + world
    for found in sim.run(world, fn):
        assert torch.equal(found["first.weight"], expected)


def test_what_is_not_finite_is_not_spread_by_reading() -> None:
    def fn(rank: int) -> dict[str, torch.Tensor]:
        with Init(zero_quantized_weights=True):
            model = build(rank)
            model.first.weight.data[3, 3] = torch.inf
        with GatheredParameters(model.first.weight):
            assert model.first.weight.isnan().sum() > 1
        with GatheredParameters(model.first.weight, modifier_rank=0):
            model.first.weight.data[0, 0] = 7.0
        return finished(model)

    expected = build(0).first.weight.detach()
    expected[3, 3], expected[0, 0] = torch.inf, 7.0
    for found in sim.run(2, fn):
        assert torch.equal(found["first.weight"], expected)


@pytest.mark.matrix
@pytest.mark.parametrize("device", ["device", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_frozen_is_kept_as_int8(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}

    def fn(rank: int) -> None:
        with Init(zero_quantized_nontrainable_weights=True, config=config, remote_device=device, dtype=dtype):
            model = build(rank, 64)
            model.second.requires_grad_(False)  # after it was built, as for low-rank adaptation
        exact = build(0, 64).to(dtype)
        found = finished(model)
        for name, parameter in exact.named_parameters():
            error = (found[name] - parameter).abs().max().item()
            packed = name not in ("first.weight", "first.bias", "count")
            assert (error > 0) == packed, name
            largest = parameter.abs().max().item()
            assert error <= largest * (1 / 254 + torch.finfo(dtype).eps), name

    sim.run(2, fn)


def test_frozen_parts_take_a_byte_an_element() -> None:
    nvme_files = [Shelves() for _ in range(2)]

    def fn(rank: int) -> None:
        with Init(zero_quantized_nontrainable_weights=True, param_swapper=nvme_files[rank]):
            model = build(rank, 512)
        kept = model.frozen._zoo_bucket.parameters.shard
        assert kept.pack is not None
        assert kept.numel == 512 * 5 // 2
        assert (512 * 5 // 2) * (1 + 4 / 256) in {value.nbytes for value in nvme_files[rank].kept.values()}
        whole = finished(model.half())
        assert whole["frozen"].dtype == torch.float16
        assert not nvme_files[rank].kept

    sim.run(2, fn)


def test_a_swapper_keeps_parts_and_gives_them_back(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}

    def fn(rank: int, how: str) -> dict[str, torch.Tensor]:
        nvme_files = Shelves()
        with Init(param_swapper=nvme_files if how == "own" else AioConfig(), config=config):
            model = build(rank)
            held = sum(value.numel() for value in nvme_files.kept.values())
            assert bool(held) == (how == "own")
        with GatheredParameters(model.first.bias, modifier_rank=1):
            model.first.bias.data.fill_(rank)
        found = finished(model)
        assert not nvme_files.kept
        return found

    for how in ("own", "aio"):
        for found in sim.run(2, lambda rank, how=how: fn(rank, how)):
            assert torch.equal(found["first.weight"], build(0).first.weight.detach())
            assert bool((found["first.bias"] == 1).all())


def test_a_subclass_chooses_the_group() -> None:
    class Halves(Init):
        def get_dp_process_group(self) -> Any:
            if not hasattr(self, "_half"):
                pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
                self._half = pairs[dist.get_rank() // 2]
            return self._half

    def fn(rank: int) -> tuple[int, torch.Tensor]:
        with Halves() as init:
            model = build(rank)
        with GatheredParameters(model.first.weight):
            return init.get_partition_rank(), model.first.weight.detach().clone()

    for rank, (place, weight) in enumerate(sim.run(4, fn)):
        assert place == rank % 2
        assert torch.equal(weight, build(rank // 2 * 2).first.weight.detach())


def test_groups_that_cannot_be_are_named_on_all_ranks() -> None:
    class Same(Init):
        def get_partition_rank(self) -> int:
            return 0

    def same(rank: int) -> None:
        with pytest.raises(ValueError, match=r"gave 0, 0 on the ranks 0 to 1"):
            Same()

    def outside(rank: int) -> None:
        comm = Communicator()
        pair = comm.partition([[0, 1], [2, 3]], name="pair")
        other = comm.partition([[0, 2], [1, 3]], name="other")
        with pytest.raises(ValueError, match="a part of the data-parallel group"):
            Init(data_parallel_group=pair, zero_param_parallel_group=other)

    def uneven(rank: int) -> None:
        comm = Communicator()
        part = comm.partition([[0, 1], [2]], name="uneven")
        group = part if rank < 2 else None
        with pytest.raises(ValueError, match=r"has 2, 2, 0 ranks.*one size"):
            Init(data_parallel_group=comm, zero_param_parallel_group=group)

    sim.run(2, same)
    sim.run(4, outside)
    sim.run(3, uneven)


def test_fp64_cannot_be_quantised() -> None:
    with pytest.raises(NotImplementedError, match=r"float64"), Init(zero_quantized_weights=True):
        nn.Linear(2, 2, dtype=torch.float64)


def test_quantised_models_train() -> None:
    def fn(rank: int) -> None:
        with Init(zero_quantized_weights=True, zero_quantized_nontrainable_weights=True):
            model = build(rank)
        del model.count  # no gather of integers is quantised
        optimizer = Stage3Optimizer(
            model, lr=0.1, param_persistence_threshold=0, zero_quantized_weights=True,
            zero_quantized_nontrainable_weights=True,
        )  # fmt: skip
        model(torch.randn(2, 7)).square().mean().backward()
        optimizer.step()

    sim.run(2, fn)
