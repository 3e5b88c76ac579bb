"""What a simulated rank computes takes as long as on a device: FLOPs and bytes as integers that are derived by hand.

On a device of 1 FLOP/s whose memory takes no time, seconds are FLOPs; on one of 1 byte/s whose products take none, they
are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.cost import Device, product_s, read_hardware
from zoo.cost.events import Compute
from zoo.profiling import costing

COUNTS = Device(name="counts", flops_per_s={"bf16": 1.0}, memory_bytes=1, bytes_per_s=1e300)
WEIGHS = Device(name="weighs", flops_per_s={"bf16": 1e300}, memory_bytes=1, bytes_per_s=1.0)


def seconds(device: Device, fn: Callable[[], object]) -> float:
    programs = sim.Programs()

    def run(rank: int) -> None:
        with costing(device) as not_counted:
            fn()
        assert not not_counted

    sim.run(1, run, programs=programs)
    return sum(item.seconds for item in programs.programs()[0] if isinstance(item, Compute))


def test_products_take_what_a_device_takes_for_their_sizes() -> None:
    device = read_hardware("a100-80").device
    a, b = torch.ones(64, 96, requires_grad=True), torch.ones(96, 32)
    taken = seconds(device, lambda: (a @ b).backward(torch.ones(64, 32)))
    products = product_s(device, 64, 32, 96, itemsize=4) + product_s(device, 64, 96, 32, itemsize=4)
    assert taken == pytest.approx(products, rel=0.3)
    assert taken >= products
    with costing(device):  # outside of a run nothing is told
        a @ b


def test_products_of_every_kind() -> None:
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
    assert seconds(COUNTS, lambda: torch.ops.aten.mm.default(self=a, mat2=b)) == 2 * 3 * 5 * 7
    assert seconds(COUNTS, lambda: torch.addmm(c, a, b)) == 2 * 3 * 5 * 7
    assert seconds(COUNTS, lambda: torch.addmm(mat2=b, mat1=a, input=c)) == 2 * 3 * 5 * 7
    assert seconds(COUNTS, lambda: c.clone().addmm_(a, b)) == 2 * 3 * 5 * 7
    assert seconds(COUNTS, lambda: torch.bmm(torch.ones(4, 3, 5), torch.ones(4, 5, 7))) == 4 * 2 * 3 * 5 * 7
    assert seconds(COUNTS, lambda: torch.baddbmm(torch.ones(4, 3, 7), torch.ones(4, 3, 5), torch.ones(4, 5, 7))) == 840
    assert seconds(COUNTS, lambda: torch.mv(a, torch.ones(5))) == 2 * 3 * 5
    assert seconds(COUNTS, lambda: torch.dot(torch.ones(9), torch.ones(9))) == 18


@pytest.mark.parametrize("queries", [4, 6])
def test_attention_and_its_gradients_take_the_keys_that_there_are(queries: int) -> None:
    """B·H·Q·K·2·D multiply-accumulates forward, twice as many for gradients, and the scores again: B·H·Q·K·D."""
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, 6, 6))
    attend = nn.functional.scaled_dot_product_attention
    forward = 2 * (2 * queries * 6 * 2 * 8)
    assert seconds(COUNTS, lambda: attend(q, k, v)) == forward
    assert seconds(COUNTS, lambda: attend(q, k, v).sum().backward()) == 3 * forward + forward // 2
    assert seconds(COUNTS, lambda: attend(query=q, key=k, value=v)) == forward


@pytest.mark.parametrize("wants", [False, True])
def test_convolutions(wants: bool) -> None:
    """2 images of 3 channels, 8 by 8, to 5 channels with 3 by 3: 2 · (2·64) · 5 · 27 FLOPs, for each gradient too."""
    layer, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8, requires_grad=wants)
    forward = 2 * 2 * 64 * 5 * 27
    assert seconds(COUNTS, lambda: layer(x)) == forward
    assert seconds(COUNTS, lambda: layer(x).sum().backward()) == forward * (3 if wants else 2)
    turned = nn.ConvTranspose1d(4, 6, 3, groups=2)
    y = torch.randn(2, 4, 7)
    assert seconds(COUNTS, lambda: turned(y)) == 2 * 2 * 7 * (4 * 6 // 2 * 3)
    assert seconds(COUNTS, lambda: turned(y).sum().backward()) == 2 * 2 * 2 * 7 * 36


def test_recurrent_layers() -> None:
    """4 steps of 3 sequences; four gates of 7 units from 5 inputs and 7 states: 2 · 12 · 28 · 12 FLOPs."""
    layer = nn.LSTM(5, 7)
    x = torch.randn(4, 3, 5, requires_grad=True)
    forward = 2 * 12 * 28 * 12
    assert seconds(COUNTS, lambda: layer(x)) == forward
    with torch.no_grad():
        assert seconds(COUNTS, lambda: layer(x)) == forward
    assert seconds(COUNTS, lambda: layer(x)[0].sum().backward()) == 3 * forward
    gates = nn.GRU(5, 7)
    assert seconds(COUNTS, lambda: gates(x)) == 2 * 12 * 21 * 12


def test_bytes_of_lists_and_keywords() -> None:
    parts = [torch.ones(4) for _ in range(3)]
    assert seconds(WEIGHS, lambda: torch.cat(parts)) == 48 + 48
    assert seconds(WEIGHS, lambda: torch.stack(tensors=parts)) == 48 + 48
    assert seconds(WEIGHS, lambda: torch.add(parts[0], other=parts[1])) == 32 + 16
    assert seconds(WEIGHS, lambda: torch._foreach_add_(parts, parts)) == 2 * 48 + 48
    assert seconds(WEIGHS, lambda: parts[0].view(2, 2).t()) == 0
    assert seconds(WEIGHS, lambda: torch.empty(10)) == 0


def test_each_operator_is_begun_by_the_host() -> None:
    device = replace(WEIGHS, bytes_per_s=1e300, launch_s=1.0)
    x = torch.ones(4)
    assert seconds(device, lambda: (x + 1).exp().view(2, 2)) == pytest.approx(2.0)


def test_what_has_no_formula_is_said() -> None:
    x = torch.ones(4)

    def run(rank: int) -> dict[str, int]:
        with costing(WEIGHS) as not_counted:
            torch.ops.zoo_test_costing.twice(x)
        return dict(not_counted)

    library = torch.library.Library("zoo_test_costing", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x.repeat(2), "CPU")
    programs = sim.Programs()
    assert sim.run(1, run, programs=programs) == [{"zoo_test_costing::twice": 1}]
    assert sum(item.seconds for item in programs.programs()[0] if isinstance(item, Compute)) == 16 + 32
