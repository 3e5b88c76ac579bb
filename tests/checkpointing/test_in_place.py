"""What is read goes where it belongs: into memory of the reader's own, without a copy on the way."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.test_boxes import cuts, write
from tests.profiles import examples
from torch import nn

from zoo.checkpointing import CheckpointError, MissingStateError, load, save
from zoo.kernels import loading
from zoo.kernels.allocated import Allocated
from zoo.layout import Box, StateSlice
from zoo.zero import ZeroOptimizer


@given(cuts(), st.data())
@examples(times=1)
def test_what_is_read_is_where_it_belongs(drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """Runs and boxes of a tensor saved in boxes, into a part of larger memory; what is around it stays."""
    shape, boxes = drawn
    whole = Box.whole(shape)
    values = torch.arange(whole.numel, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape, boxes, 2)
        with load(folder) as found:
            start = data.draw(st.integers(0, whole.numel - 1))
            length = data.draw(st.integers(1, whole.numel - start))
            memory = torch.full((length + 2,), -1.0)
            assert found.read("w", "parameter", start, length, out=(room := memory[1:-1])) is room
            assert torch.equal(memory[1:-1], values[start : start + length])
            assert memory[0] == memory[-1] == -1
            box = data.draw(st.sampled_from(boxes))
            memory = torch.full((box.numel + 2,), -1.0)
            assert found.read("w", "parameter", box, box.numel, out=(room := memory[1:-1])) is room
            assert torch.equal(memory[1:-1], found.read("w", "parameter", box, box.numel))
            assert memory[0] == memory[-1] == -1


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(7),
        torch.zeros(12)[::2],
        torch.zeros(6, requires_grad=True),
        torch.zeros(6, device="meta"),
    ],
    ids=["dtype", "length", "strides", "gradient", "device"],
)
@pytest.mark.parametrize("where", [0, Box((0, 0), (2, 3))], ids=["run", "box"])
def test_memory_that_does_not_fit_is_left_alone(tmp_path: Path, other: torch.Tensor, where: int | Box) -> None:
    """Then the elements come in memory of their own."""
    save(tmp_path, "one", [StateSlice("w", "parameter", 0, 6, (2, 3), torch.arange(1.0, 7.0))])
    with load(tmp_path) as found:
        value = found.read("w", "parameter", where, 6, out=other)
        assert value is not other
        assert value.tolist() == [1, 2, 3, 4, 5, 6]
        assert other.device.type == "meta" or not other.any()
        with pytest.raises(MissingStateError):
            found.read("w", "exp_avg", where, 6, out=other)
        with pytest.raises(CheckpointError):
            found.read("w", "parameter", 3, 6, out=torch.zeros(6))


@pytest.mark.skipif(not loading.native(), reason="allocations are counted by the native library")
def test_a_load_needs_no_memory_of_the_size_of_its_tensors(tmp_path: Path) -> None:
    """Of an optimizer with fp32 masters and two moments, each of which is one large piece."""
    torch.manual_seed(0)
    width = 1500  # 9 MB a matrix

    def trained() -> ZeroOptimizer:
        model = nn.Linear(width, width, bias=False)
        optimizer = ZeroOptimizer(model, stage=1, optimizer=torch.optim.AdamW, lr=0.1)
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        return optimizer

    first, second = trained(), trained()
    save(tmp_path, "one", first.state_slices(), first.state_scalars())
    expected = {(s.name, s.role, s.start): s.tensor.clone() for s in first.state_slices()}
    given: list[bool] = []
    with load(tmp_path) as found:

        def read(name: str, role: str, start: int, length: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
            value = found.read(name, role, start, length, out=out)
            given.append(value is out)
            return value

        found.read("weight", "parameter", 0, 1)  # files are open, and stages there
        with Allocated() as counted:
            second.load_state(read, found.scalars)
        assert all(given)
        assert len(given) >= 3
        assert counted.peak_bytes - counted.now_bytes < 2 * width * width  # half a matrix
    assert all(torch.equal(s.tensor, expected[s.name, s.role, s.start]) for s in second.state_slices())


def test_a_reader_without_the_keyword_is_still_one() -> None:
    """Which fills nothing: what it returns is copied."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=0.1)
    optimizer.load_state(lambda name, role, start, n: torch.arange(6.0)[start : start + n].double(), {})
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
