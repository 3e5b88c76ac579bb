"""What mutation testing found that no test would have noticed: edges of checks, and what is left after a failure."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpointing.test_checkpoints import SHAPES, pieces, write

from zoo.checkpointing import CheckpointError, TensorFile, load, prune, save
from zoo.checkpointing.background import BackgroundSaver
from zoo.comm import Communicator
from zoo.layout import StateSlice, Stored


def test_a_hole_in_the_middle_is_named_by_its_elements(tmp_path: Path) -> None:
    parts = [StateSlice("a", "parameter", start, 4, (3, 5), torch.zeros(4)) for start in (0, 7)]
    with pytest.raises(CheckpointError, match="elements 4 to 6 of parameter 'a' are missing: no rank holds them"):
        save(tmp_path, "one", parts)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (-1, 2), (0, -1), (3, -1), (15, 1), (0, 16)])
def test_no_element_outside_of_a_tensor_is_read(tmp_path: Path, start: int, length: int) -> None:
    write(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"lies outside of parameter 'a', which has 15 elements"):
        load(tmp_path).read("a", "parameter", start, length)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, 5), torch.zeros(14), torch.zeros(15, dtype=torch.float64), torch.zeros(16)]
)
def test_a_slice_that_is_not_what_it_says_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    source = Stored(lambda start, length: tensor, torch.float32)
    with pytest.raises(CheckpointError, match=r"says 15 elements of torch.float32 and comes with a tensor of shape"):
        save(tmp_path, "one", [StateSlice("a", "parameter", 0, 15, (3, 5), source)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["", "rank", "a|b"])
def test_a_role_that_cannot_be_is_refused(tmp_path: Path, role: str) -> None:
    with pytest.raises(CheckpointError, match=r"a role is not empty, not 'rank', without '\|'"):
        save(tmp_path, "one", [StateSlice("a", role, 0, 1, (1,), torch.zeros(1))])


def test_roles_before_and_after_the_one_that_is_kept_for_ranks_are_fine(tmp_path: Path) -> None:
    for tag, role in (("one", "moment"), ("two", "zeta")):
        save(tmp_path, tag, [StateSlice("a", role, 0, 1, (1,), torch.ones(1))], rank_state={"own": torch.zeros(1)})
        assert load(tmp_path, tag).tensor("a", role).tolist() == [1.0]
        assert load(tmp_path, tag).rank_state(0)["own"].tolist() == [0.0]


def test_every_tensor_begins_at_a_multiple_of_its_elements_size(tmp_path: Path) -> None:
    """Readers that map the file want it so, as safetensors itself writes it."""
    kinds = [torch.uint8, torch.float64, torch.bfloat16, torch.float32]
    mixed = [StateSlice(f"t{k}", "parameter", 0, 3, (3,), torch.zeros(3, dtype=kind)) for k, kind in enumerate(kinds)]
    save(tmp_path, "one", mixed)
    with TensorFile(tmp_path / "f.safetensors", {p.name: (p.tensor.dtype, (3,)) for p in mixed}, {}) as file:
        for part in mixed:
            file.put(part.name, part.tensor)
        file.commit()
    for path in (next((tmp_path / "one").glob("*.safetensors")), tmp_path / "f.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        assert (size + 8) % (4096 if path.parent != tmp_path else 8) == 0
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        widths = {"U8": 1, "F64": 8, "BF16": 2, "F32": 4}
        found = [v for k, v in header.items() if k != "__metadata__"]
        assert len(found) == len(kinds)
        for entry in found:
            assert entry["data_offsets"][0] % widths[entry["dtype"]] == 0


def test_a_file_whose_beginning_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            (tmp_path / "closed").touch()

    def opened(path: Path, mode: str) -> Full:
        Path(path).touch()
        return Full()

    monkeypatch.setattr("zoo.checkpointing.format.tensors.open", opened, raising=False)
    with pytest.raises(OSError, match="No space left"):
        TensorFile(tmp_path / "f.safetensors", {"a": (torch.float32, (1,))}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]


def test_what_a_killed_save_has_left_goes_after_a_day(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path, f"t{number}", pieces(0, 1))
    rest = tmp_path / "killed"
    rest.mkdir()
    (rest / "0123456789abcdef.00007.safetensors").touch()
    assert prune(tmp_path, 1) == ["t0", "t1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "latest", "t2"]
    os.utime(rest / "0123456789abcdef.00007.safetensors", (1e9, 1e9))
    assert prune(tmp_path, 1) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t2"]


def test_a_checkpoint_can_be_read_without_its_checksums(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = next((tmp_path / "one").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC-32C"):
        list(load(tmp_path).verify())
    assert [load(tmp_path, verify=False).tensor(name).shape for name in SHAPES] == list(SHAPES.values())


def test_what_is_no_slice_is_refused(tmp_path: Path) -> None:
    class Alike:
        name, role, start, length, shape, tensor = "a", "parameter", 0, 1, (1,), torch.zeros(1)

    for what in (Alike(), torch.zeros(1), None):
        with pytest.raises(CheckpointError, match=r"given to be saved; the slices of a checkpoint are zoo\.layout\."):
            save(tmp_path, "one", [what])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"meta": [1, 2]}, "meta is a list; it is a dict of plain values"),
        ({"rank_state": {"own": None}}, r"rank_state\['own'\] is a NoneType; it has to be a tensor"),
        ({"scalars": {3: 1.0}}, "scalars has the key 3 on rank 0; its keys are names"),
        ({"slices": [StateSlice("a", "parameter", 0, 1, (1,), None)]}, "source of parameter 'a' is a NoneType"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_of_whoever_saves_are_named(
    tmp_path: Path, given: dict[str, Any], said: str, background: bool
) -> None:
    def attempt() -> None:
        if not background:
            save(tmp_path, "one", **{"slices": [], **given})
        with contextlib.closing(BackgroundSaver(Communicator.alone())) as saver:
            saver.save(tmp_path, "one", **{"slices": [], **given})
            saver.wait()

    with pytest.raises(CheckpointError, match=said):
        attempt()
    assert list(tmp_path.iterdir()) == []
