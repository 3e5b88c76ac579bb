"""An engine on a mesh: data-parallel ranks train as they would without the other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, data, net, stage, start
from torch.distributed.device_mesh import init_device_mesh

from zoo import sim
from zoo.engine import initialize


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"tensor": 2, "data": -1}])
def test_ranks_beside_the_data_axis_repeat(number: int, axes: dict[str, int]) -> None:
    expected = sim.run(2, lambda rank: [float(start(stage(number)).train_batch()) for _ in range(1)])

    def job(rank: int) -> tuple[list[float], int, int]:
        engine = start({**stage(number), "mesh": {"axes": axes}})
        loss = float(engine.train_batch())
        assert engine.record is not None
        assert engine.comm.size == 2
        return [loss], engine.record.samples, engine.dataloader.rank

    results = sim.run(4, job)
    assert [losses for losses, _, _ in results] == [expected[0]] * 4
    assert {samples for _, samples, _ in results} == {8}
    ranks = [rank for _, _, rank in results]
    assert ranks == ([0, 0, 1, 1] if next(iter(axes)) == "data" else [0, 1, 0, 1])


def test_a_mesh_that_is_given_is_the_one_of_the_section() -> None:
    def job(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.set_num_threads(1)
        given = initialize(BASE, net(), training_data=data(), mesh=mesh)[0]
        assert given.mesh is mesh
        described = start({"mesh": {"axes": {"data": 2, "tensor": 2}}})
        return [float(given.train_batch()), float(described.train_batch())]

    for given, described in sim.run(4, job):
        assert given == described


def test_ranks_along_a_sequence_share_their_samples() -> None:
    def job(rank: int) -> tuple[int, int, int]:
        engine = start({"mesh": {"axes": {"data": 2, "sequence": 2}}})
        engine.train_batch()
        assert engine.record is not None
        return engine.record.samples, engine.comm.size, engine.dataloader.rank

    assert sim.run(4, job) == [(8, 4, 0), (8, 4, 0), (8, 4, 1), (8, 4, 1)]


def test_two_ways_to_say_it() -> None:
    def job(rank: int) -> None:
        def begin(config: Any = BASE, **more: Any) -> None:
            initialize(config, net(), **more)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        with pytest.raises(ValueError, match="give one of them"):
            begin(mesh=mesh, group=mesh)
        with pytest.raises(ValueError, match=r"mesh= has the axes \('data',\), and the configuration's mesh.axes"):
            begin({**BASE, "mesh": {"axes": {"node": 2}}}, mesh=mesh)
        with pytest.raises(ValueError, match="takes a DeviceMesh with names"):
            begin(mesh=init_device_mesh("cpu", (2,)))

    sim.run(2, job)
