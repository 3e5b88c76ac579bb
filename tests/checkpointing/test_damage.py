"""Any damage to any file of a checkpoint: reading it names that file, or gives the values that were saved."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.test_checkpoints import SHAPES, pieces, value
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import Checkpoint, load, save
from zoo.checkpointing.zero_to_fp32 import Checkpoint as ScriptCheckpoint
from zoo.comm import Communicator
from zoo.layout import StateSlice

SECTOR = 512
RANKS = 3
META = {"note": [1, "two"], "client": {"loss": 0.5}}
Values = dict[tuple[str, str], torch.Tensor]


def write(root: Path, tag: str, scale: float) -> None:
    """A checkpoint of three ranks whose files have equal sizes and other contents, and more than one block."""

    def job(rank: int) -> None:
        wide = StateSlice("wide", "parameter", rank * 400_000, 400_000, (RANKS * 400_000,), _wide(rank, scale))
        own = {"rng": torch.full((600,), rank, dtype=torch.uint8)}
        save(
            root,
            tag,
            [*pieces(rank, RANKS, scale), wide],
            {"step": 7, "rate": 0.25},
            META,
            Communicator(),
            rank_state=own,
        )

    sim.run(RANKS, job)


def _wide(rank: int, scale: float) -> torch.Tensor:
    return (torch.arange(400_000, dtype=torch.float32) + rank) * scale


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints; latest is "one"."""
    root = tmp_path_factory.mktemp("made")
    write(root, "other", 2.0)
    write(root, "one", 1.0)
    return root


def values_of(found: Checkpoint | ScriptCheckpoint) -> Values:
    return {
        (name, role): found.read(name, role, 0, torch.Size(shape).numel())
        for name, shape in found.shapes.items() for role in found.roles[name]
    }  # fmt: skip


def check(found: Checkpoint | ScriptCheckpoint, scale: float) -> None:
    """All of it is what was saved."""
    values = values_of(found)
    assert values.keys() == {(name, role) for name in SHAPES for role in ("parameter", "exp_avg")} | {
        ("wide", "parameter")
    }
    for (name, role), tensor in values.items():
        whole = torch.cat([_wide(r, scale) for r in range(RANKS)]) if name == "wide" else value(name, role) * scale
        assert torch.equal(tensor, whole), (name, role)


def check_all(found: Checkpoint, scale: float) -> None:
    check(found, scale)
    assert found.scalars == {"step": 7, "rate": 0.25}
    assert found.meta == META
    assert found.world_size == RANKS
    for rank in range(RANKS):
        assert found.rank_state(rank)["rng"].tolist() == [rank] * 600
    for _ in found.verify():
        pass


# -- ways to damage a file --------------------------------------------------------------------------------------------


def _place(size: int, data: st.DataObject) -> int:
    """Anywhere, and often near the ends."""
    near = st.integers(0, min(size, 5000) - 1)
    return data.draw(st.integers(0, size - 1) | near | near.map(lambda n: size - 1 - n))


def flip(path: Path, data: st.DataObject) -> None:
    """One bit."""
    raw = bytearray(path.read_bytes())
    raw[_place(len(raw), data)] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)


def lose_sectors(path: Path, data: st.DataObject) -> None:
    """Some sectors of the disk have never arrived: zeros, or what was there before."""
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        begin = _place(len(raw), data) // SECTOR * SECTOR
        size = len(raw[begin : begin + SECTOR])
        raw[begin : begin + size] = data.draw(st.sampled_from([b"\0", b"\xa5"])) * size
    path.write_bytes(raw)


def cut(path: Path, data: st.DataObject) -> None:
    """A prefix of it."""
    os.truncate(path, _place(path.stat().st_size, data))


def fill_up(path: Path, data: st.DataObject) -> None:
    """A prefix of it, and zeros up to its size."""
    size = path.stat().st_size
    os.truncate(path, _place(size, data))
    os.truncate(path, size)


def lengthen(path: Path, data: st.DataObject) -> None:
    with path.open("ab") as file:
        file.write(data.draw(st.sampled_from([b"\0", b"x", b"\0" * SECTOR, b"\n"])))


def remove(path: Path, data: st.DataObject) -> None:
    path.unlink()


def exchange_ranks(path: Path, data: st.DataObject) -> None:
    """This file and that of another rank of the same checkpoint; of other files, what follows."""
    others = sorted(path.parent.glob("*.safetensors"))
    if path not in others:
        return exchange_checkpoints(path, data)
    other = data.draw(st.sampled_from([one for one in others if one != path]))
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    return None


def exchange_checkpoints(path: Path, data: st.DataObject) -> None:
    """That of the other checkpoint is in its place."""
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".safetensors" else path.suffix
    (other,) = path.parent.with_name("other").glob(f"*{suffix}")
    shutil.copyfile(other, path)


def exchange_blocks(path: Path, data: st.DataObject) -> None:
    """Two sectors of it are in each other's place."""
    raw = bytearray(path.read_bytes())
    a, b = (_place(max(len(raw) - SECTOR, 1), data) // SECTOR * SECTOR for _ in range(2))
    raw[a : a + SECTOR], raw[b : b + SECTOR] = raw[b : b + SECTOR], raw[a : a + SECTOR]
    path.write_bytes(raw)


WAYS: list[Callable[[Path, Any], None]] = [
    flip, flip, flip, lose_sectors, cut, fill_up, lengthen, remove, exchange_ranks, exchange_checkpoints,
    exchange_blocks,
]  # fmt: skip


@pytest.mark.dear
@examples(times=8)
@given(data=st.data())
def test_any_damage_to_any_file_is_named_or_changes_nothing(made: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        shutil.copytree(made, root)
        files = sorted(path.name for path in (root / "one").iterdir())
        assert len(files) == RANKS + 2
        victim = root / "one" / data.draw(st.sampled_from(files))
        before = {name: (root / "one" / name).read_bytes() for name in files}
        data.draw(st.sampled_from(WAYS))(victim, data)
        changed = [n for n in files if not (root / "one" / n).exists() or (root / "one" / n).read_bytes() != before[n]]
        # A manifest of the other checkpoint names files that are not here.
        named = [*changed, *(path.name for path in (root / "other").iterdir() if changed == ["manifest.json"])]
        for read in (_with_zoo, _with_the_script):
            said = refusal(lambda read=read: read(root))  # type: ignore[misc]
            assert said is None or any(name.removesuffix(".json") in said for name in named), (changed, said)
            assert said is None or len(said.splitlines()) == 1


def refusal(work: Callable[[], object]) -> str | None:
    """What it raises; None where it does not."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return None


def _with_zoo(root: Path) -> None:
    with load(root, "one") as found:
        check_all(found, 1.0)


def _with_the_script(root: Path) -> None:
    found = ScriptCheckpoint(root, "one")
    check(found, 1.0)
    assert found.scalars == {"step": 7, "rate": 0.25}


@given(data=st.data())
def test_ranks_that_load_damage_raise_the_same_or_have_the_same_values(made: Path, data: st.DataObject) -> None:
    """Without a tag: the newest that is whole, on all ranks the same one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        shutil.copytree(made, root)
        victim = data.draw(st.sampled_from([*sorted((root / "one").iterdir()), root / "latest"]))
        way = data.draw(
            st.sampled_from([way for way in WAYS if victim.name != "latest" or "exchange" not in way.__name__])
        )
        way(victim, data)

        def job(rank: int) -> str:
            with load(root, comm=Communicator()) as found:
                scale = {"one": 1.0, "other": 2.0}[found.tag]
                said = refusal(lambda: check_all(found, scale))
                assert said is None or found.tag == "one"
                return f"{found.tag} {said}"

        assert len(set(sim.run(2, job))) == 1


def check_numbers(found: Checkpoint) -> None:
    assert (found.scalars, found.meta) == ({"step": 1000}, {"rate": 0.125})


@pytest.mark.dear
def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    """A digit of a number is another digit after one bit: the number would be read as if it had been saved."""
    save(tmp_path, "one", [], {"step": 1000}, {"rate": 0.125})
    file = tmp_path / "one" / "manifest.json"
    good, harmless = file.read_bytes(), 0
    for place in range(8 * len(good)):
        raw = bytearray(good)
        raw[place // 8] ^= 1 << place % 8
        file.write_bytes(raw)
        said = refusal(lambda: check_numbers(load(tmp_path, "one")))
        assert said is None or "manifest" in said or "index" in said
        harmless += said is None
    assert harmless <= 8 * 10  # the name of the checksum itself


def test_a_manifest_without_a_checksum_is_read(tmp_path: Path) -> None:
    """As those before it had it."""
    save(tmp_path, "one", [], {"step": 3})
    file = tmp_path / "one" / "manifest.json"
    document = json.loads(file.read_text())
    del document["sha256"]
    file.write_text(json.dumps(document))
    assert load(tmp_path).scalars == {"step": 3}
    assert ScriptCheckpoint(tmp_path).scalars == {"step": 3}


def test_a_damaged_number_does_not_make_an_old_checkpoint_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 4):
        save(tmp_path, f"t{step}", [], {"step": step}, latest=False)
    file = tmp_path / "t1" / "manifest.json"
    file.write_text(file.read_text().replace('"number": 1', '"number": 9'))
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).scalars == {"step": 3}
