"""The memory estimators against the figures that the documented examples print."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.cost import MemoryNeeds
from zoo.zero import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

T5_3B = 2_851_598_336
T5_LARGE = 737_668_096
EMBEDDING = 32_128 * 1024  # the largest layer of both


class Sized(nn.Module):
    """A model of given total and largest layer, without memory: one such layer, the rest in smaller ones."""

    def __init__(self, total: int, largest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(largest // 1024, 1024, device="meta")
        self.tied = nn.Linear(1024, largest // 1024, bias=False, device="meta")
        self.tied.weight = self.embedding.weight
        rest = total - largest
        sizes = [largest // 2] * (rest // (largest // 2)) + [rest % (largest // 2)]
        self.rest = nn.ModuleList(nn.Linear(size, 1, bias=False, device="meta") for size in sizes)


def printed(rows: list[MemoryNeeds]) -> list[tuple[str, str]]:
    return [(f"{row.cpu_bytes / 2**30:.2f}", f"{row.gpu_bytes / 2**30:.2f}") for row in rows]


def test_zero2_prints_the_documented_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = estimate_zero2_model_states_mem_needs_all_cold(total_params=2851e6, num_gpus_per_node=8, num_nodes=1)
    assert printed(rows) == [("127.45", "5.31"), ("127.45", "15.93")]
    assert [row.options["offload_optimizer"] for row in rows] == ["cpu", "none"]
    text = capsys.readouterr().out
    assert "1 node, 8 GPUs per node" in text
    assert "2851M total params." in text
    assert "127.45GB |    5.31GB | offload_optimizer=cpu\n" in text
    assert "127.45GB |   15.93GB | offload_optimizer=none\n" in text
    live = estimate_zero2_model_states_mem_needs_all_live(Sized(T5_3B, EMBEDDING), num_gpus_per_node=8)
    assert printed(live) == [("127.48", "5.31"), ("127.48", "15.93")]


def test_zero3_prints_the_documented_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = estimate_zero3_model_states_mem_needs_all_cold(
        total_params=2851e6, largest_layer_params=32e6, num_gpus_per_node=8, num_nodes=1
    )
    text = capsys.readouterr().out
    live = estimate_zero3_model_states_mem_needs_all_live(Sized(T5_3B, EMBEDDING), num_gpus_per_node=8, num_nodes=1)
    gpu = [("0.12", "0.12"), ("0.12", "0.12"), ("0.78", "0.79"), ("0.78", "0.79"), ("6.09", "6.10"), ("6.09", "6.10")]
    cpu = [("71.69", "71.71"), ("127.45", "127.48"), ("63.72", "63.74"), ("127.45", "127.48"), ("1.43", "1.47")]
    cpu += [("127.45", "127.48")]
    assert printed(rows) == [(c[0], g[0]) for c, g in zip(cpu, gpu, strict=True)]
    assert printed(live) == [(c[1], g[1]) for c, g in zip(cpu, gpu, strict=True)]
    assert "2851M total params, 32M largest layer params." in text
    assert "71.69GB |    0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1\n" in text
    assert "2851M total params, 32M largest layer params." in capsys.readouterr().out


def test_the_four_gpu_example_in_whole_megabytes() -> None:
    rows = [
        estimate_zero3_model_states_mem_needs(
            T5_LARGE, EMBEDDING, num_gpus_per_node=4, offload_param=param, offload_optimizer=optimizer
        )
        for param, optimizer in (("none", "none"), ("cpu", "cpu"), ("none", "cpu"))
    ]
    assert [row.gpu_bytes >> 20 for row in rows] == [3291, 125, 477]


def test_nodes_share_what_stays_but_not_what_each_process_makes() -> None:
    one, two = (
        estimate_zero3_model_states_mem_needs_all_cold(1e9, 1e7, num_gpus_per_node=8, num_nodes=nodes)
        for nodes in (1, 2)
    )
    assert [a.cpu_bytes / b.cpu_bytes for a, b in zip(one, two, strict=True)] == [2, 1, 2, 1, 1, 1]
    few = estimate_zero3_model_states_mem_needs(1e9, 1e7, num_gpus_per_node=2, zero_init=False)
    assert few.cpu_bytes == 27e9  # what stays outweighs what two processes make
    small = estimate_zero2_model_states_mem_needs(1e9, num_gpus_per_node=2, additional_buffer_factor=1.0)
    assert (small.cpu_bytes, small.gpu_bytes) == (16e9, 2e9)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="num_nodes=0"):
        estimate_zero2_model_states_mem_needs_all_cold(1e9, num_nodes=0)
    with pytest.raises(ValueError, match="total_params=0"):
        estimate_zero2_model_states_mem_needs_all_live(nn.Tanh())
    with pytest.raises(ValueError, match="additional_buffer_factor=nan"):
        estimate_zero2_model_states_mem_needs(1e9, additional_buffer_factor=float("nan"))
    with pytest.raises(ValueError, match="offload_optimizer='nvme'"):
        estimate_zero2_model_states_mem_needs(1e9, offload_optimizer="nvme")
    with pytest.raises(ValueError, match="offload_optimizer='cpu' as well"):
        estimate_zero3_model_states_mem_needs(1e9, 1e6, offload_optimizer="none")
    with pytest.raises(ValueError, match="a part of them"):
        estimate_zero3_model_states_mem_needs(1e6, 1e9)


def test_a_partitioned_model_can_be_counted() -> None:
    from zoo.zero import Stage3Optimizer

    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    before = estimate_zero2_model_states_mem_needs_all_live(model)
    Stage3Optimizer(model, optimizer=torch.optim.SGD, lr=0.1, param_persistence_threshold=0)
    assert estimate_zero2_model_states_mem_needs_all_live(model) == before
