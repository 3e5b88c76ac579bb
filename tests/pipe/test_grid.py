"""The grid on simulated ranks: its coordinates, and that its groups reduce over whom they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zoo import sim
from zoo.pipe import PipeDataParallelTopology, PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology


def members(group: Any) -> list[int]:
    """Who is in a group, by communicating: everybody gives the power of two of its rank."""
    total = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return [rank for rank in range(dist.get_world_size()) if int(total) >> rank & 1]


@pytest.mark.parametrize("semantics", ["gloo", "nccl"])
def test_groups_of_three_axes(semantics: Any) -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)

    def run(rank: int) -> None:
        grid, coord = PipelineParallelGrid(topology), topology.get_coord(rank)
        assert grid.topology() is topology
        assert grid.get_global_rank() == rank
        assert grid.get_stage_id() == grid.get_pipe_parallel_rank() == coord.pipe
        assert grid.get_data_parallel_id() == grid.get_data_parallel_rank() == coord.data
        assert grid.get_slice_parallel_rank() == coord.model
        assert (grid.is_first_stage, grid.is_last_stage) == (coord.pipe == 0, coord.pipe == 1)
        assert grid.get_pipe_parallel_world_size() == grid.get_data_parallel_world_size() == 2
        assert (grid.get_slice_parallel_world_size(), grid.get_model_parallel_world_size()) == (2, 4)
        assert members(grid.get_pipe_parallel_group()) == topology.filter_match(data=coord.data, model=coord.model)
        assert members(grid.get_data_parallel_group()) == topology.filter_match(pipe=coord.pipe, model=coord.model)
        assert members(grid.get_slice_parallel_group()) == topology.filter_match(pipe=coord.pipe, data=coord.data)
        replica = topology.filter_match(data=coord.data)
        assert members(grid.get_model_parallel_group()) == replica
        assert grid.get_model_parallel_rank() == replica.index(rank)
        for stage in range(2):
            assert grid.stage_to_global(stage) == topology.get_rank(pipe=stage, data=coord.data, model=coord.model)
            assert grid.stage_to_global(stage, data=1) == topology.get_rank(pipe=stage, data=1, model=coord.model)

    sim.run(8, run, semantics=semantics)


def test_axes_that_are_not_there_have_one_rank() -> None:
    def run(rank: int) -> None:
        grid = PipelineParallelGrid(ProcessTopology(["data"], [2]))
        assert (grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage) == (0, True, True)
        assert (grid.pipe_parallel_size, grid.slice_parallel_size, grid.model_parallel_size) == (1, 1, 1)
        assert (grid.data_parallel_size, members(grid.get_data_parallel_group())) == (2, [0, 1])
        assert members(grid.get_pipe_parallel_group()) == members(grid.get_model_parallel_group()) == [rank]
        assert grid.stage_to_global(0) == rank
        with pytest.raises(ValueError, match="without an axis 'pipe'"):
            grid.stage_to_global(1)

    sim.run(2, run)


def test_a_grid_of_some_ranks_names_global_ones_and_asks_no_others() -> None:
    def run(rank: int) -> None:
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        topology = PipeDataParallelTopology(*((2, 1) if rank % 2 else (1, 2)))
        for _ in range(1 + rank % 2):  # the odd half makes two
            found = PipelineParallelGrid(topology, process_group=halves[rank % 2])
        assert found.get_global_rank() == rank
        if rank % 2:
            assert found.get_stage_id() == rank // 2
            assert [found.stage_to_global(stage) for stage in range(2)] == [1, 3]
            assert members(found.get_pipe_parallel_group()) == [1, 3]
        else:
            assert found.get_data_parallel_rank() == rank // 2
            assert members(found.get_data_parallel_group()) == [0, 2]

    sim.run(4, run)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (2, 3))])
def test_without_a_topology_prime_factors_go_to_pipe_and_data_in_turn(ranks: int, sizes: tuple[int, int]) -> None:
    found = sim.run(ranks, lambda _: tuple(PipelineParallelGrid().topology().mesh_axes.values()))
    assert found == [sizes] * ranks


def test_mistakes_are_told() -> None:
    def run(_: int) -> None:
        with pytest.raises(ValueError, match=r"pipe=2, data=2.* 4 ranks, and a process group of 2"):
            PipelineParallelGrid(PipeDataParallelTopology(2, 2))

    sim.run(2, run)
    with pytest.raises(ValueError, match="init_distributed"):
        PipelineParallelGrid()
