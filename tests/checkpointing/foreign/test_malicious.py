"""Files that want to run code, take memory, or read other files: refused, or read without doing any of that."""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import os
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.checkpointing.foreign import mutants

from zoo.checkpointing import CheckpointError
from zoo.checkpointing.foreign import load_deepspeed, load_torch, plain
from zoo.checkpointing.foreign.records import Record
from zoo.checkpointing.foreign.regions import Region, StoredTensor
from zoo.checkpointing.foreign.unpickling import Unpickled, unpickle

GOLDEN = Path(__file__).parent / "golden"
FILES = [
    "stage0/step/mp_rank_00_model_states.pt",
    "stage1/step/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "stage2_fp16/step/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "stage3/step/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "stage3_bf16/step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "experts/step/mp_rank_00_model_states.pt",
    "stage2/universal/zero/first.weight/exp_avg.pt",
    "stage3/universal/zero/optimizer_state.pt",
]


class Payload:
    """Pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Only what can be called may be pickled as a function."""


class Stateful:
    """Pickled as an object whose state is a payload."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return (OrderedDict, (), self.state)


def payloads(canary: Path) -> list[Any]:
    command = f"touch {canary}"
    return [
        Payload(os.system, command),
        Payload(builtins.eval, f"open({str(canary)!r}, 'w')"),
        Payload(builtins.exec, f"open({str(canary)!r}, 'w')"),
        Payload(subprocess.check_output, ["touch", str(canary)]),
        Payload(builtins.open, str(canary), "w"),
        Payload(importlib.import_module, "antigravity"),
        Payload(builtins.getattr, dict, "update"),
        Payload(torch.load, str(canary)),
        Payload(Payload(builtins.getattr, io.BytesIO, "write"), command),
    ]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("place", ["value", "nested", "key", "state", "shape", "root"])
def test_a_payload_is_never_called_wherever_it_is(number: int, place: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = payloads(canary)[number]
    if place == "key":
        bad = (bad, 1)
    value: Any = {
        "value": {"module": bad, "x": torch.ones(3)},
        "nested": {"a": [{"b": (1, [bad])}], "x": torch.ones(3)},
        "key": {bad: 1, "x": torch.ones(3)},
        "state": {"o": Stateful(bad), "x": torch.ones(3)},
        "shape": {"param_shapes": [OrderedDict(a=bad)], "x": torch.ones(3)},
        "root": bad,
    }[place]
    file = tmp_path / "file.pt"
    torch.save(value, file)
    found = mutants.harmless(lambda: load_torch(file), file.stat().st_size)
    if not isinstance(found, CheckpointError):
        assert found.unknown, "the payload's function is not listed"
        assert place == "root" or torch.equal(found.value["x"].tensor(), torch.ones(3))
        assert "canary" not in repr(plain(found.value, "it")) if place != "root" else isinstance(found.value, Record)
    assert not canary.exists()


def test_a_payload_as_the_class_of_a_storage_is_refused(tmp_path: Path) -> None:
    file, canary = tmp_path / "file.pt", tmp_path / "canary"
    torch.save({"x": torch.ones(3)}, file)
    command = f"touch {canary}".encode()
    call = b"cposix\nsystem\n" + b"X" + struct.pack("<I", len(command)) + command + b"\x85R"
    evil = mutants.repacked(file, lambda raw: raw.replace(b"ctorch\nFloatStorage\n", call))
    file.write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"no storage of a dtype"):
        load_torch(file)
    assert not canary.exists()


def test_unknown_classes_are_listed_and_inert(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"path": Path("/x"), "args": Payload(shutil.rmtree, "/nothing"), "x": torch.ones(2)}, file)
    found = load_torch(file)
    listed = [unknown.name for unknown in found.unknown]
    assert any("Path" in name for name in listed)
    assert "shutil.rmtree" in listed
    assert isinstance(found.value["args"], Record)
    assert not found.value["args"].known
    assert found.value["args"].args == ("/nothing",)
    assert set(plain(found.value, "it")) == {"x"}


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"\x80\x02X\xff\xff\xff\x7f.", "says 2147483647 bytes"),  # a string longer than the file
        (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", "says"),
        (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "says"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "frame"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "integer of 2147483647"),
        (b"\x80\x02h\x05.", "never kept"),
        (b"\x80\x02N", "middle of a pickle"),
        (b"\x80\x02NN.", "2 values"),
        (b"\x80\x02(NN.", "values instead of one"),
        (b"\x80\x02\x87.", "tuple of more values"),
        (b"\x80\x02}]Ns.", "list as a key"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x93.", "no name|damaged"),
        (b"\x80\x02I12\n.", "instruction 0x49"),
        (b"\x80\x02\x82\x01.", "instruction 0x82"),  # an extension code
        (b"(i__main__\nX\n.", "instruction"),
        (b"\x80\x02NR.", "damaged|calls"),
        (b"\x80\x02N)R.", "calls a NoneType"),
        (b"\x80\x02N)\x81.", "calls a NoneType"),
        (b"\x80\x02NQ.", "outside of it"),
        (b"\x80\x07N.", "protocol 7"),
    ],
)
def test_a_pickle_that_does_not_fit_together_is_one_sentence(raw: bytes, match: str) -> None:
    found = mutants.harmless(lambda: unpickle(raw, "it"), len(raw))
    assert isinstance(found, CheckpointError)
    with pytest.raises(CheckpointError, match=match):
        raise found


def test_deep_nesting_neither_overflows_nor_is_hashed() -> None:
    with pytest.raises(CheckpointError, match=r"nested more than 1000 deep"):
        unpickle(b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".", "it")
    with pytest.raises(CheckpointError, match=r"nested too deeply"):
        plain(unpickle(b"\x80\x02)" + b"N0\x85" * 50_000 + b".", "it").value, "it")
    with pytest.raises(CheckpointError, match=r"tuple as a key"):
        unpickle(b"\x80\x02})" + b"N0\x85" * 50_000 + b"Ns.", "it")
    itself = b"\x80\x02]q\x00h\x00a."
    with pytest.raises(CheckpointError, match=r"contains itself"):
        plain(unpickle(itself, "it").value, "it")


def test_doubling_takes_no_memory_and_no_time() -> None:
    # t = (t, t), 60 times: 2^60 values, to be hashed or printed one by one.
    double = b"\x80\x02)" + b"2\x86" * 60
    assert isinstance(unpickle(double + b".", "it").value, tuple)
    with pytest.raises(CheckpointError, match=r"more values than a file says|nested too deeply"):
        plain(unpickle(double + b".", "it").value, "it")
    with pytest.raises(CheckpointError, match=r"tuple as a key"):
        unpickle(b"\x80\x02}" + double[2:] + b"Ns.", "it")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "piece",
    [b"]", b"}", b"\x8f", b")", b"(", b"\x85", b"(t", b"(d", b"(l", b"(\x91", b"2", b"2\x86", b"]\x94", b"\x94",
     b"N\x94", b"K\x01", b"J\x00\x01\x01\x00", b"X\x02\x00\x00\x00ab", b"cx\ny\n", b"cx\ny\n)R", b"h\x00)R",
     b"h\x00)\x81", b"G12345678",
     b"\x8a\x01\x01", b"ctorch\nfloat32\n", b"U\x00", b"r\x01\x02\x03\x04", b"ccollections\nOrderedDict\n)R"],
)  # fmt: skip
def test_no_instruction_takes_much_more_memory_than_it_is_long(piece: bytes) -> None:
    raw = b"\x80\x04cos\nsystem\nq\x00" + piece * (300_000 // len(piece))
    mutants.harmless(lambda: unpickle(raw + b".", "it"), len(raw))


def test_names_of_many_globals_take_little_memory() -> None:
    raw = b"\x80\x02" + b"".join(b"c%x\ny\n0" % number for number in range(20_000)) + b"N."
    assert isinstance(mutants.harmless(lambda: unpickle(raw, "it"), len(raw)), Unpickled)


def test_copies_of_one_tuple_are_limited_by_the_size_of_the_pickle() -> None:
    many = (
        b"\x80\x02(" + b"N" * 2000 + b"tq\x000" + b"]" + b"cbuiltins\nset\nq\x010" + b"h\x01h\x00\x85Ra" * 2000 + b"."
    )
    found = mutants.harmless(lambda: unpickle(many, "it"), len(many))
    assert isinstance(found, CheckpointError)
    assert "copies" in str(found)


def tensor_pickle(shape: list[int], stride: list[int], offset: int, numel: int) -> bytes:
    """What torch.save writes for a tensor, with any numbers."""
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpu" + _int(numel) + b"tQ" + _int(offset) + b"(" + b"".join(map(_int, shape)) + b"t("
        + b"".join(map(_int, stride)) + b"t\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


def _int(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + raw


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "numel"),
    [
        ([2**40], [1], 0, 3),
        ([2**40], [0], 0, 3),  # expanded: one element, said 2^40 times
        ([2**31, 2**31, 2**31], [0, 0, 0], 0, 3),
        ([3], [1], 1, 3),
        ([3], [2**62], 0, 3),
        ([2], [-1], 1, 3),
        ([-1], [1], 0, 3),
        ([3], [1], -1, 3),
        ([3], [1], 0, 2**60),
        ([3], [1, 1], 0, 3),
        ([1] * 65, [1] * 65, 0, 3),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(
    shape: list[int], stride: list[int], offset: int, numel: int, tmp_path: Path
) -> None:
    file = tmp_path / "file.pt"
    torch.save(torch.ones(3), file)
    assert load_torch(file).value.tensor().tolist() == [1, 1, 1]
    file.write_bytes(mutants.repacked(file, lambda _: tensor_pickle(shape, stride, offset, numel)))
    found = mutants.harmless(lambda: load_torch(file), file.stat().st_size)
    assert isinstance(found, CheckpointError)


# -- archives ---------------------------------------------------------------------------------------------------------


def archive(entries: list[tuple[str, bytes]], path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as out:
        for name, raw in entries:
            out.writestr(name, raw)
    return path


GOOD = [("a/data.pkl", b"\x80\x02N."), ("a/version", b"3\n")]


def test_a_bomb_is_refused_before_it_grows(tmp_path: Path) -> None:
    bomb = archive([*GOOD, ("a/data/0", bytes(50 << 20))], tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED)
    found = mutants.harmless(lambda: load_torch(bomb), bomb.stat().st_size)
    assert "compressed" in str(found)


@pytest.mark.parametrize("name", ["../data.pkl", "/a/data.pkl", "a/../../x", "a//x", "x", "a\\..\\x", "a/./x", "b/x"])
def test_an_entry_with_another_name_than_torch_makes_is_refused(name: str, tmp_path: Path) -> None:
    assert load_torch(archive(GOOD, tmp_path / "good.pt")).value is None
    with pytest.raises(CheckpointError, match=r"name that torch.save does not make|folders"):
        load_torch(archive([*GOOD, (name, b"")], tmp_path / "bad.pt"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not make"):
        load_torch(archive([*GOOD, GOOD[0]], tmp_path / "bad.pt"))


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    # One local header, two entries of the directory that begin there.
    good = archive([("a/data.pkl", b"\x80\x02N.")], tmp_path / "good.pt").read_bytes()
    at, end = good.index(b"PK\x01\x02"), good.index(b"PK\x05\x06")
    central = good[at:end]
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 2, 2, 2 * len(central), at, 0)
    (tmp_path / "bad.pt").write_bytes(good[:at] + 2 * central + tail)
    with pytest.raises(CheckpointError, match=r"does not make|overlap"):
        load_torch(tmp_path / "bad.pt")


def test_links_pipes_and_folders_are_no_files_of_a_checkpoint(tmp_path: Path) -> None:
    real = archive(GOOD, tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name, match in (
        ("link", "is a link"),
        ("pipe", "no regular file"),
        ("folder", "regular|opened"),
        ("none", "opened"),
    ):
        with pytest.raises(CheckpointError, match=match):
            load_torch(tmp_path / f"{name}.pt")
    shutil.copytree(GOLDEN / "stage1", tmp_path / "run")
    model = tmp_path / "run" / "step" / "mp_rank_00_model_states.pt"
    shutil.move(model, tmp_path / "elsewhere.pt")
    model.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"is a link"):
        load_deepspeed(tmp_path / "run", "step")


def test_every_flipped_bit_of_a_tensor_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"x": torch.ones(100)}, file)
    raw = bytearray(file.read_bytes())
    at = raw.index(torch.ones(100).numpy().tobytes())
    raw[at + 17] ^= 4
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"CRC-32"):
        load_torch(file)
    assert load_torch(file, verify=False).value["x"].tensor().sum() != 100


# -- open files -------------------------------------------------------------------------------------------------------


def test_many_files_are_not_open_at_a_time_and_stay_the_same(tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, regions = descriptors(), []
    for number in range(200):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
        regions.append(Region.open(tmp_path / str(number)))
    for number in (*range(200), 7, 199):
        assert regions[number].part(3, 4, "it").bytes() == bytes([number]) * 4
    assert descriptors() <= before + 70
    (tmp_path / "7").write_bytes(b"something else")  # the first of 200 is open no more
    for number in range(100, 200):
        regions[number].bytes()
    with pytest.raises(CheckpointError, match="was changed"):
        regions[7].bytes()
    regions.clear()
    assert descriptors() <= before + 1


# -- mutants ----------------------------------------------------------------------------------------------------------


def read_all(file: Path) -> dict[str, Any]:
    """Everything in a file: its tensors, each read, and the rest as it prints."""
    found = load_torch(file)
    tensors: dict[str, Any] = {}
    seen, left = set(), [found.value]
    while left:
        value = left.pop()
        if isinstance(value, StoredTensor):
            tensors[str(len(tensors))] = value.tensor()
        elif isinstance(value, (dict, list, tuple, Record)) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Record):
                left += [*value.args, value.state, *value.items, *(part for pair in value.pairs for part in pair)]
            else:
                left += value.values() if isinstance(value, dict) else value
    return tensors


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("name", FILES)
def test_a_mutant_of_a_file_is_refused_or_read_as_the_file_was(name: str) -> None:
    original = GOLDEN / name
    raw, expected = original.read_bytes(), read_all(original)

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file.pt"
            file.write_bytes(mutants.mutant(raw, changes))
            found = mutants.harmless(lambda: read_all(file), file.stat().st_size)
            if not isinstance(found, CheckpointError):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[key], value) for key, value in expected.items())

    check()


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("name", FILES)
def test_a_mutant_of_a_pickle_does_nothing_but_make_values(name: str) -> None:
    original = GOLDEN / name

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file.pt"
            file.write_bytes(mutants.repacked(original, lambda raw: mutants.mutant(raw, changes)))
            mutants.harmless(lambda: read_all(file), file.stat().st_size)
            mutants.harmless(lambda: plain(load_torch(file).value, "it"), file.stat().st_size)

    check()


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize(
    "name", ["stage0", "stage1", "stage2_fp16", "stage3", "pipeline", "experts", "stage3/universal"]
)
def test_a_checkpoint_with_a_mutant_is_refused_or_read(name: str) -> None:
    name, _, tag = name.partition("/")
    step = GOLDEN / name / (tag or "step")
    files = [str(file.relative_to(step)) for file in sorted(step.rglob("*.pt"))]

    @mutants.per_file()
    @given(mutants.edits, mutants.st.sampled_from(files))
    def check(changes: list[tuple[str, int, bytes]], chosen: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "step"
            shutil.copytree(step, copy, copy_function=os.link)
            (copy / chosen).unlink()
            (copy / chosen).write_bytes(mutants.repacked(step / chosen, lambda raw: mutants.mutant(raw, changes)))
            size = sum(file.stat().st_size for file in copy.rglob("*.pt"))

            def read() -> None:
                found = load_deepspeed(folder, "step", optimizer_states=name != "stage0")
                for key, roles in found.roles.items():
                    for role in roles:
                        found.tensor(key, role)

            mutants.harmless(read, size)

    check()


@pytest.mark.hypothesis  # the property is inside
def test_the_older_format_is_read_and_its_mutants_do_nothing(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    value = {"a": base[2:8], "b": base.view(3, 4).t(), "half": torch.ones(3).bfloat16(), "n": {"step": torch.tensor(3)}}
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    raw, file = out.getvalue(), tmp_path / "old.pt"
    file.write_bytes(raw)
    found = load_torch(file).value
    assert all(torch.equal(found[key].tensor(), value[key]) for key in ("a", "b", "half"))

    @mutants.per_file()
    @given(mutants.edits)
    def check(changes: list[tuple[str, int, bytes]]) -> None:
        file.write_bytes(mutants.mutant(raw, changes))
        mutants.harmless(lambda: read_all(file), len(raw))

    check()
