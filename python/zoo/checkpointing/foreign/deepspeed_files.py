"""Which files a checkpoint of DeepSpeed has, by the names that its engine gives them.

====================================================== ================================================================
``latest``                                             in the directory: the tag
``<tag>/mp_rank_<MP>_model_states.pt``                 the model of stages 0 to 2, of each tensor or pipeline rank
``<tag>/zero_pp_rank_<DP>_mp_rank_<MP>_model_states.pt``  stage 3: of each data-parallel rank
``<tag>/[bf16_]zero_pp_rank_<DP>_mp_rank_<MP>_optim_states.pt``  masters and optimizer state of a data-parallel rank
``<tag>/layer_<NN>[-model_<MP>]-model_states.pt``      pipeline: a layer
``<tag>/layer_<L>_expert_<E>_mp_rank_<MP>_model_states.pt``  an expert of the L-th layer of experts
``<tag>/zero/<parameter>/{fp32,exp_avg,…,step}.pt``    universal: a parameter in one role
====================================================== ================================================================
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.regions import Region
from zoo.checkpointing.foreign.torch_files import load_torch
from zoo.checkpointing.foreign.unpickling import Unknown

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")


@dataclass
class Folder:
    """The opened files of one checkpoint; keys are (data-parallel rank, model-parallel rank) and so on."""

    path: Path
    verify: bool
    share: tuple[int, int] = (0, 1)
    """Of all files this rank compares those with checksums that are number i, i + n, i + 2n, …: (i, n)."""
    models: dict[tuple[int, int], dict[Any, Any]] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], dict[Any, Any]] = field(default_factory=dict)
    layers: dict[tuple[int, int], dict[Any, Any]] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], dict[Any, Any]] = field(default_factory=dict)
    expert_optimizers: dict[tuple[int, int], dict[Any, Any]] = field(default_factory=dict)
    universal: bool = False
    unknown: list[tuple[str, Unknown]] = field(default_factory=list)
    loaded: int = 0
    part: bool = False
    """Files of one tensor-parallel rank, as if it were alone."""

    def of_rank(self, rank: int) -> Folder:
        """The files of one tensor-parallel rank."""
        found = Folder(self.path, self.verify, self.share, unknown=[], part=True)
        found.models = {(data, 0): model for (data, part), model in self.models.items() if part == rank}
        found.optimizers = {(data, 0): state for (data, part), state in self.optimizers.items() if part == rank}
        return found

    def load(self, path: Path) -> Any:
        """The value of a file of it; globals that nobody knows are kept in ``unknown``."""
        mine = self.loaded % self.share[1] == self.share[0]
        self.loaded += 1
        found = load_torch(path, verify=self.verify and mine)
        self.unknown += [(str(path.relative_to(self.path)), unknown) for unknown in found.unknown]
        return found.value

    def load_dict(self, path: Path) -> dict[Any, Any]:
        """The same, for files that hold a dict."""
        value = self.load(path)
        if not isinstance(value, dict):
            raise CheckpointError(f"{str(path)!r} holds a {type(value).__name__}, not a dict of states")
        return value


def find_folder(directory: str | os.PathLike[str], tag: str | None, *, universal: bool) -> tuple[str, Path]:
    """(tag, folder) of a checkpoint: ``tag``, or what ``latest`` or ``latest_universal`` names; which of the two comes
    first, ``universal`` says.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(directory)
    names = ("latest_universal", "latest") if universal else ("latest", "latest_universal")
    if tag is None:
        for name in names:
            if (root / name).is_file():
                raw = Region.open(root / name)
                if raw.size > 1024:
                    raise CheckpointError(f"{str(root / name)!r} has {raw.size} bytes; it is the name of a folder")
                tag = raw.bytes().decode("utf-8", "replace").strip()
                break
        else:
            raise CheckpointError(f"{str(root)!r} has no file 'latest'; give the tag of a checkpoint in it")
    if not tag or "/" in tag or "\\" in tag or "\0" in tag or tag in (".", ".."):
        raise CheckpointError(f"the tag {tag[:80]!r} cannot be a folder in {str(root)!r}")
    path = root / tag
    if not path.is_dir() or path.is_symlink():
        raise CheckpointError(f"there is no folder {tag!r} in {str(root)!r}")
    return tag, path


def is_folder(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed, by the names that are in it."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        return False
    names = {entry.name for entry in entries}
    parts = any(entry.name == "zero" and entry.is_dir(follow_symlinks=False) for entry in entries)
    return parts or any(pattern.fullmatch(name) for name in names for pattern in (_MODEL, _OPTIMIZER))


def open_folder(path: Path, *, verify: bool, share: tuple[int, int] = (0, 1)) -> Folder:
    """All files of a checkpoint, opened; nothing of their tensors is in memory.

    Raises:
        CheckpointError: a file that is damaged, a link, or is no checkpoint's.
    """
    folder = Folder(path, verify, share)
    zero = path / "zero"
    folder.universal = os.path.lexists(zero) and stat.S_ISDIR(os.lstat(zero).st_mode)
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        name = entry.name
        for pattern, kept in (
            (_MODEL, folder.models), (_OPTIMIZER, folder.optimizers), (_LAYER, folder.layers),
            (_EXPERT, folder.experts), (_EXPERT_OPTIMIZER, folder.expert_optimizers),
        ):  # fmt: skip
            match = pattern.fullmatch(name)
            if match:
                key: Any = tuple(int(number or 0) for number in match.groups())
                if key in kept and folder.universal:
                    continue  # the same model for engines of different stages
                if key in kept:
                    raise CheckpointError(f"{str(path)!r} has two files for {name!r}")
                kept[key] = folder.load_dict(path / name)
    if not folder.models and not folder.universal:
        raise CheckpointError(f"{str(path)!r} has no files *_model_states.pt: it is no checkpoint of DeepSpeed")
    return folder


def need_dict(value: Any, what: str) -> dict[Any, Any]:
    """``value`` if it is a dict."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a {type(value).__name__}, not a dict")
    return value


def need_list(value: Any, what: str) -> list[Any]:
    """``value`` if it is a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{what} is a {type(value).__name__}, not a list")
    return list(value)


def need_number(value: Any, what: str) -> int:
    """``value`` if it is a whole number from 0 on that fits memory."""
    if type(value) is not int or not 0 <= value < 2**48:
        raise CheckpointError(f"{what} is {str(value)[:40]!r}, not a number from 0 on")
    return value
