"""``python -m benchmarks.checkpointing.crashes``: which crashes of the machine cost a checkpoint?

A process saves a checkpoint, and then a second one: as another tag, or in the place of the first. The system calls of
the second save are recorded by strace, and each prefix of them is replayed on the disk of the tests
(``tests/checkpointing/model_disk.py``): power is lost there, and what was not forced is lost, bytes and entries of
directories, in four ways. Each contender then loads what is left, as its users do:

* *old*, *new*: the values of the first or of the second checkpoint, all of them;
* *refused*: what there is to continue from does not load;
* *half*: it loads, and is neither.

What was there before the second save counts as forced. Calls that go past system calls (io_uring, mapped memory) would
not be seen; at these sizes there are none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, table
from benchmarks.launch import environment
from tests.checkpointing.model_disk import ENTRIES, ModelDisk, ModelSink, Node

from zoo.layout import StateSlice

TAGS = ("two", "one")
KILLED = "killed"
"""The machine goes on, the process does not: nothing is lost."""
CALLS = (
    "openat,open,creat,write,writev,pwrite64,pwritev,lseek,ftruncate,fsync,fdatasync,syncfs,sync,rename,renameat,"
    "renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,sendfile,copy_file_range"
)


# -- contenders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """``save`` writes the state number 1 or 2 as a tag; ``load`` gives the values that a user would continue from."""

    save: Callable[[Path, str, int], None]
    load: Callable[[Path], list[torch.Tensor]]
    values: Callable[[int], list[torch.Tensor]]


def _state(number: int) -> dict[str, torch.Tensor]:
    return {f"layer{k}": torch.arange(1000 + k, dtype=torch.float32) * number for k in range(4)}


def _values(number: int) -> list[torch.Tensor]:
    return list(_state(number).values())


def _slice(name: str, tensor: torch.Tensor) -> StateSlice:
    return StateSlice(name, "parameter", 0, tensor.numel(), (tensor.numel(),), tensor)


def _zoo() -> Contender:
    from zoo.checkpointing import load, save

    def read(root: Path) -> list[torch.Tensor]:
        with load(root) as found:
            return [found.tensor(name) for name in _state(1)]

    return Contender(
        lambda root, tag, number: (save(root, tag, [_slice(*item) for item in _state(number).items()]), None)[1],
        read, _values,
    )  # fmt: skip


def _dcp() -> Contender:
    import torch.distributed.checkpoint as dcp

    def write(root: Path, tag: str, number: int) -> None:
        dcp.save(_state(number), checkpoint_id=root / tag, no_dist=True)

    def read(root: Path) -> list[torch.Tensor]:
        # It has no file that names the latest; a folder with metadata is what counts as a checkpoint.
        found = [tag for tag in TAGS if (root / tag / ".metadata").exists()]
        state = {name: torch.zeros_like(tensor) for name, tensor in _state(1).items()}
        dcp.load(state, checkpoint_id=root / (found[0] if found else TAGS[0]), no_dist=True)
        return list(state.values())

    return Contender(write, read, _values)


def _deepspeed() -> Contender:
    import torch.distributed as dist
    from benchmarks.zero.contenders import deepspeed_engine, import_deepspeed
    from torch import nn

    store = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    engine = deepspeed_engine(import_deepspeed(), model, 1)
    steps = [0]

    def held() -> list[torch.Tensor]:
        """What is trained, and what the optimizer has of it."""
        moments = [s["exp_avg"] for s in engine.optimizer.optimizer.state.values() if "exp_avg" in s]
        return [p.detach().clone() for p in engine.module.parameters()] + [m.detach().clone() for m in moments]

    def train(number: int) -> None:
        while steps[0] < number:
            engine.backward(engine(torch.ones(1, 24)).square().mean())
            engine.step()
            steps[0] += 1

    def write(root: Path, tag: str, number: int) -> None:
        train(number)
        engine.save_checkpoint(str(root), tag)

    def read(root: Path) -> list[torch.Tensor]:
        path, _ = engine.load_checkpoint(str(root))
        if path is None:
            raise ValueError("nothing was loaded")
        return held()

    known: dict[int, list[torch.Tensor]] = {}

    def values(number: int) -> list[torch.Tensor]:
        if number not in known:
            train(number)
            known[number] = held()
        return known[number]

    return Contender(write, read, values)


CONTENDERS: dict[str, Callable[[], Contender]] = {"zoo": _zoo, "DCP": _dcp, "DeepSpeed": _deepspeed}


# -- recording --------------------------------------------------------------------------------------------------------

Event = tuple[Any, ...]
"""("mkdir" | "create" | "sync" | "remove", path), ("write", path, offset, bytes), ("rename", path, target),
("truncate", path, size)."""


def record(name: str, tag: str, root: Path, python: str = sys.executable) -> tuple[list[Event], list[Event]]:
    """What a save does to the files in ``root``: of the first checkpoint, and of the second.

    Raises:
        RuntimeError: the process failed; with what it said.
    """
    log = root.with_name("strace")
    # Names in full, all bytes in hexadecimal, the path of every descriptor.
    command = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-o", str(log)]
    command += [python, "-m", "benchmarks.checkpointing.crashes", "--save", name, "--tag", tag, "--root", str(root)]
    done = subprocess.run(command, cwd=ROOT, env=environment(0, 1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    phases: dict[str, list[Event]] = {"before": [], "between": [], "after": []}
    phase = "before"
    for event in events_of(log.read_text(), str(root)):
        if event[0] == "mark":
            phase = event[1]
        else:
            phases[phase].append(event)
    return phases["before"], phases["between"]


def _lines(log: str) -> Iterator[str]:
    """Calls, each in one line, in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>")
        elif call.startswith("<... "):
            yield begun.pop(pid, "") + call.partition(" resumed>")[2]
        else:
            yield call


def _text(raw: str) -> str:
    """A name, which strace gives in hexadecimal."""
    return bytes.fromhex(raw.replace("\\x", "")).decode() if "\\x" in raw else raw


def events_of(log: str, root: str) -> Iterator[Event]:
    """The calls that change what is in ``root``, and marks.

    Raises:
        ValueError: a call whose effect is not known here.
    """
    at: dict[str, int] = {}
    for call in _lines(log):
        name, _, rest = call.partition("(")
        result = rest.rpartition(" = ")[2]
        if not re.match(r"\d", result):
            continue
        number = int(re.match(r"\d+", result)[0])  # type: ignore[index]
        strings = [_text(raw) for raw in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', rest)] if "write" not in name else []
        if name in ("mkdir", "mkdirat") and strings[-1].startswith(f"{root}."):
            yield "mark", strings[-1].removeprefix(f"{root}.")
            continue
        descriptor = re.match(r"(\d+)<([^>]*)>", rest)
        path = _text(descriptor[2]) if descriptor else ""
        if name in ("openat", "open", "creat"):
            opened = _text(re.search(r"<([^>]*)>", result)[1])  # type: ignore[index]
            at[str(number)] = 0
            if opened.startswith(root) and (name == "creat" or re.search(r"O_TRUNC|O_EXCL", rest)):
                yield "create", opened
        elif name == "lseek" and descriptor:
            at[descriptor[1]] = number
        elif name in ("write", "writev", "pwrite64", "pwritev", "sendfile", "copy_file_range") and descriptor:
            data = bytes.fromhex("".join(re.findall(r'"((?:\\x[0-9a-f]{2})*)"', rest)).replace("\\x", ""))[:number]
            offset = at.get(descriptor[1], 0)
            if name.startswith("p"):
                offset = int(rest.rpartition(") = ")[0].rpartition(", ")[2])
            else:
                at[descriptor[1]] = offset + number
            if path.startswith(root) and number:
                yield "write", path, offset, data.ljust(number, b"\0")
        elif name == "ftruncate" and path.startswith(root):
            yield "truncate", path, int(rest.rpartition(") = ")[0].rpartition(", ")[2])
        elif name in ("fsync", "fdatasync", "syncfs") and path.startswith(root):
            yield "sync", path
        elif name.startswith("rename") and any(one.startswith(root) for one in strings):
            yield "rename", *strings[:2]
        elif name.startswith("mkdir") and strings[0].startswith(root):
            yield "mkdir", strings[0]
        elif name in ("unlink", "unlinkat", "rmdir") and strings and strings[0].startswith("/"):
            if strings[0].startswith(root):
                yield "remove", strings[0]
        elif name in ("unlink", "unlinkat", "rmdir") and root in rest:
            raise ValueError(f"a name that is relative to a descriptor: {call}")


# -- replaying --------------------------------------------------------------------------------------------------------


class Replay:
    """A disk on which recorded calls are done again."""

    def __init__(self, root: str) -> None:
        self.disk, self._sinks, self._root = ModelDisk(), {}, Path(root)
        for path in [*reversed(self._root.parents)][1:]:
            self.disk.make_directory(path)
        self.disk.make_directory(self._root)

    _sinks: dict[str, ModelSink]

    def do(self, event: Event) -> None:
        """One call."""
        kind, path, *rest = event
        if kind == "mkdir":
            self.disk.make_directory(Path(path))
        elif kind == "create":
            self._sinks[path] = self.disk.create(Path(path), 0)
        elif kind == "write":
            self._sinks[path].write(torch.frombuffer(bytearray(rest[1]), dtype=torch.uint8), rest[0])
        elif kind == "truncate":
            node = self.disk._at(Path(path))
            del node.data[rest[0] :]
            node.data.extend(b"\0" * (rest[0] - len(node.data)))
        elif kind == "sync" and self.disk.is_directory(Path(path)):
            self.disk.sync_directory(Path(path))
        elif kind == "sync":
            self._sinks[path].sync()
        elif kind == "rename":
            self.disk.rename(Path(path), Path(rest[0]))
            if path in self._sinks:
                self._sinks[rest[0]] = self._sinks.pop(path)
        else:
            self.disk.remove(Path(path))

    def force(self) -> None:
        """All that is there is forced."""

        def force(node: Node) -> None:
            node.forced, node.kept, node.last = bytes(node.data), dict(node.now), dict(node.now)
            for child in node.now.values():
                force(child)

        force(self.disk.top)

    def left(self, way: str) -> dict[str, bytes]:
        """The files that are found afterwards, by their place in the root."""
        after = self.disk.after_a_crash("now", lambda: True) if way == KILLED else self.disk.after_a_crash(way)
        root = str(self._root)
        return {str(p.relative_to(root)): bytes(n.data) for p, n in after.files() if str(p).startswith(root + "/")}


WAYS = (*ENTRIES, KILLED)


def crash(first: list[Event], second: list[Event], root: str) -> Iterator[tuple[int, str, dict[str, bytes]]]:
    """(calls of the second save that were done, what the disk did, the files that are left), for each prefix."""
    replay = Replay(root)
    for event in first:
        replay.do(event)
    replay.force()
    for done in range(len(second) + 1):
        if done:
            replay.do(second[done - 1])
        for way in WAYS:
            yield done, way, replay.left(way)


def judge(name: str, states: list[dict[str, bytes]], scratch: Path, python: str = sys.executable) -> list[str]:
    """What the contender makes of each: old, new, refused, half."""
    folders: dict[str, int] = {}
    places = []
    for state in states:
        digest = hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()
        if digest not in folders:
            for path, content in state.items():
                file = scratch / digest / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            (scratch / digest).mkdir(exist_ok=True)
            folders[digest] = len(folders)
        places.append(folders[digest])
    listed = scratch / "folders.json"
    listed.write_text(json.dumps([str(scratch / digest) for digest in folders]))
    command = [python, "-m", "benchmarks.checkpointing.crashes", "--judge", name, "--root", str(listed)]
    done = subprocess.run(command, cwd=ROOT, env=environment(0, 1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found = json.loads(listed.with_suffix(".out").read_text())
    return [found[place] for place in places]


def _judge(name: str, listed: Path) -> None:
    contender = CONTENDERS[name]()
    known = {"old": contender.values(1), "new": contender.values(2)}
    found = []
    for folder in json.loads(listed.read_text()):
        try:
            values = contender.load(Path(folder))
        except BaseException as error:  # which DCP's error is
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            found.append("refused")
            continue
        same = (k for k, v in known.items() if len(v) == len(values) and all(map(torch.equal, v, values)))
        found.append(next(same, "half"))
    listed.with_suffix(".out").write_text(json.dumps(found))


@dataclass(frozen=True)
class Outcome:
    """Of all crash points: how many leave what; whether what save() returned may be lost."""

    calls: int
    points: int
    counts: dict[str, dict[str, int]]
    lost_when_returned: bool

    def bad(self, kind: str, ways: tuple[str, ...] = WAYS) -> int:
        """Crash points at which some of these ways leaves that."""
        return max(self.counts[way].get(kind, 0) for way in ways)


def examine(name: str, tag: str, folder: Path) -> Outcome:
    """Record, replay, judge."""
    root = folder / "root"
    root.mkdir()
    first, second = record(name, tag, root)
    found = list(crash(first, second, str(root)))
    said = judge(name, [state for *_, state in found], folder / "left")
    counts: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    for (_, way, _), outcome in zip(found, said, strict=True):
        counts[way][outcome] += 1
    last = [outcome for (done, way, _), outcome in zip(found, said, strict=True) if done == len(second)]
    return Outcome(len(second), len(second) + 1, {k: dict(v) for k, v in counts.items()}, set(last) != {"new"})


def main(argv: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpointing.crashes")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    for inner in ("--save", "--tag", "--judge"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.judge:
        _judge(args.judge, args.root)
    elif args.save:
        contender = CONTENDERS[args.save]()
        contender.save(args.root, "one", 1)
        Path(f"{args.root}.between").mkdir()
        contender.save(args.root, args.tag, 2)
        Path(f"{args.root}.after").mkdir()
    else:
        report(args.contenders)


def report(names: list[str]) -> None:
    """A row for each contender and case."""
    rows = []
    for name in names:
        for tag in TAGS:
            folder = Path(tempfile.mkdtemp())
            try:
                found = examine(name, tag, folder)
            except RuntimeError as error:
                print(f"{name} is left out: {str(error).strip().splitlines()[-1]}")
                break
            finally:
                shutil.rmtree(folder)
            case = "another tag" if tag == "two" else "the same tag"
            rows.append([
                name, case, str(found.points), str(found.bad("refused", ENTRIES)), str(found.bad("half", ENTRIES)),
                str(found.bad("refused", (KILLED,))), str(found.bad("half", (KILLED,))),
                "yes" if found.lost_when_returned else "no",
            ])  # fmt: skip
    head = ["", "saved as", "crash points", "power: refused", "power: half", "kill: refused", "kill: half",
            "lost after it returned"]  # fmt: skip
    print(table(head, rows))


if __name__ == "__main__":
    main()
