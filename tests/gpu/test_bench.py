"""zoo bench and zoo doctor on a GPU; skipped where none is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo.cli.bench.computing import call_cost, copies, memory_bandwidth, products
from zoo.cli.bench.filling import Wanted, fill
from zoo.cli.doctor import torch_side
from zoo.cli.doctor.report import State
from zoo.cost import Hardware

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
GPU = torch.device("cuda", 0)


def test_products_memory_calls_and_copies() -> None:
    shapes = [(16, 1024, 1024), (4096, 4096, 4096)]
    found = dict(products(GPU, torch.bfloat16, 2.0, shapes=shapes))
    assert list(found) == shapes
    rates = [2.0 * m * n * k / timing.median_s for (m, n, k), timing in found.items()]
    assert rates[1] > 10 * rates[0], "a large product is nearer to the peak than one of 16 rows"
    assert found[16, 1024, 1024].median_s < 2e-4, "the host's part is hidden"
    assert memory_bandwidth(GPU, 0.2)[0] > 1e11
    assert 1e-7 < call_cost(GPU, 0.2).median_s < 1e-3
    lines = copies(GPU, 1.0)
    assert set(lines) == {"to_device", "to_host"}
    assert all(line.bytes_per_s > 1e9 for line in lines.values())


def test_a_hardware_file_of_one_gpu(tmp_path: Path) -> None:
    found = fill(Wanted(name="gpu", device="cuda:0", dtypes=("bf16",), seconds=4.0, ranks=1))
    assert Hardware.from_dict(found.to_dict()) == found
    assert set(found.channels) == {"to_device", "to_host"}
    assert found.inside.bytes_per_s == found.channels["to_host"].bytes_per_s
    assert "as to_host" in " ".join(found.sources)


def test_the_doctor_sees_it_and_nccl_works() -> None:
    assert any(f.name == "cuda:0" and f.state is State.OK for f in torch_side.devices())
    (nccl,) = [f for f in torch_side.communication() if f.name == "nccl"]
    assert nccl.state is State.OK, nccl.value
