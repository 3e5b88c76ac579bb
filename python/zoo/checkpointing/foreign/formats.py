"""Which format a checkpoint is in, by what is in its folder or at the beginning of its file; and opening it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.dcp import METADATA, load_dcp
from zoo.checkpointing.foreign.deepspeed import load_deepspeed
from zoo.checkpointing.foreign.deepspeed_files import is_folder
from zoo.checkpointing.foreign.gguf import load_gguf
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.regions import Region, StoredTensor
from zoo.checkpointing.foreign.safetensors_folder import load_safetensors
from zoo.checkpointing.foreign.torch_files import load_torch
from zoo.checkpointing.format.disk import LOCAL
from zoo.checkpointing.format.names import MANIFEST, tags_of
from zoo.comm import Communicator

FORMATS = ("deepspeed", "dcp", "safetensors", "gguf", "torch")
"""What :func:`open_foreign` opens."""
_WHERE = {
    "deepspeed": "a folder that DeepSpeed's save_checkpoint was given, or one of its tags",
    "dcp": "a folder of torch.distributed.checkpoint, which has a file .metadata",
    "safetensors": "a .safetensors file, or a folder of them",
    "gguf": "a GGUF file",
    "torch": "a file of torch.save",
}
_WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
"""Under which keys files of ``torch.save`` hold a model's state beside other things."""


def deepspeed_tags(directory: Path) -> list[str]:
    """The checkpoints of DeepSpeed in a directory."""
    if not directory.is_dir():
        return []
    folders = [e.name for e in os.scandir(directory) if e.is_dir(follow_symlinks=False)]
    return sorted(name for name in folders if is_folder(directory / name))


def recognise(source: str | os.PathLike[str]) -> str:
    """The format of a file or folder: one of :data:`FORMATS`.

    Raises:
        CheckpointError: it is in none of them, in several, or a checkpoint of zoo.
    """
    place = Path(source)
    if not place.exists():
        raise CheckpointError(f"there is no file or folder {str(source)!r}")
    if place.is_file():
        return _of_file(place)
    if (place / MANIFEST).exists() or tags_of(LOCAL, Path(os.path.abspath(place))):
        raise CheckpointError(
            f"{str(source)!r} has checkpoints of zoo already, which need no import; where another one is meant, name "
            "its format"
        )
    found = []
    if is_folder(place) or deepspeed_tags(place):
        found.append("deepspeed")
    if (place / METADATA).exists():
        found.append("dcp")
    if any(place.glob("*.safetensors")):
        found.append("safetensors")
    if len(found) != 1:
        what = f"could be in the formats {' and '.join(found)}" if found else "is in no format that is known"
        raise CheckpointError(f"the folder {str(source)!r} {what}; {_described()}")
    return found[0]


def _of_file(place: Path) -> str:
    region = Region.open(place, follow_links=True)
    begin = region.bytes(0, min(region.size, 16))
    if begin.startswith(b"GGUF"):
        return "gguf"
    if begin.startswith((b"PK\x03\x04", b"\x80")):  # an archive, or a pickle of torch before 1.6
        return "torch"
    if len(begin) > 8 and begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= region.size:
        return "safetensors"
    raise CheckpointError(f"the file {str(place)!r} is in no format that is known; {_described()}")


def _described() -> str:
    return "formats are " + "; ".join(f"{name}, {where}" for name, where in _WHERE.items())


def open_foreign(
    source: str | os.PathLike[str], kind: str | None = None, tag: str | None = None, *,
    groups: Sequence[Sequence[str]] | None = None, optimizer_states: bool = True, key: str | None = None,
) -> ForeignCheckpoint:  # fmt: skip
    """Open a checkpoint of another system, whichever it is; on one rank.

    Args:
        source: a file or a folder.
        kind: one of :data:`FORMATS`; what it looks like if not given.
        tag: of DeepSpeed's: which checkpoint in the folder.
        groups, optimizer_states: as for :func:`~zoo.checkpointing.foreign.load_deepspeed`; without
            ``optimizer_states`` parameters and buffers alone are there, whatever the format.
        key: of a file of ``torch.save`` that holds more than a model's state: under which key that is, with dots
            between the keys of dicts.

    Raises:
        CheckpointError: what is wrong with it.
        ValueError: an argument that is not for this format.
    """
    if kind is not None and kind not in FORMATS:
        raise ValueError(f"format {kind!r}; it is one of {', '.join(FORMATS)}")
    kind = kind if kind is not None else recognise(source)
    for name, given, home in (("tag", tag, "deepspeed"), ("groups", groups, "deepspeed"), ("key", key, "torch")):
        if given is not None and kind != home:
            raise ValueError(f"{name} is for the format {home}, and {str(source)!r} is taken for {kind}")
    place, alone = Path(source), Communicator.alone()
    if kind == "deepspeed":
        if tag is None and is_folder(place):
            place = Path(os.path.abspath(place))
            place, tag = place.parent, place.name
        return load_deepspeed(place, tag, alone, groups=groups, optimizer_states=optimizer_states)
    if kind == "torch":
        return _of_torch(place, key)
    found = load_dcp(place, alone) if kind == "dcp" else load_gguf(place) if kind == "gguf" else load_safetensors(place)
    return found if optimizer_states else found.weights()


def _of_torch(place: Path, key: str | None) -> ForeignCheckpoint:
    read = load_torch(place)
    state, what = read.value, f"the file {place.name}"
    for part in key.split(".") if key else ():
        if not isinstance(state, dict) or part not in state:
            raise CheckpointError(f"{what} has no {key!r}; at {part!r} it has {_keys(state)}")
        state = state[part]
    if key is None and isinstance(state, dict) and not _is_state(state):
        inside = [name for name in _WRAPPERS if _is_state(state.get(name))]
        if len(inside) != 1:
            raise CheckpointError(f"{what} holds no state_dict of tensors, but {_keys(state)}; give the key of one")
        state = state[inside[0]]
    if not _is_state(state):
        raise CheckpointError(f"{what} holds {_keys(state)} where a state_dict of tensors must be")
    found = ForeignCheckpoint(place.name, place)
    found.unknown = [(place.name, unknown) for unknown in read.unknown]
    first: dict[Any, str] = {}
    for name, value in state.items():
        if not isinstance(value, StoredTensor):
            found.meta.setdefault("left_out", []).append(str(name))
            continue
        known = first.setdefault((value.place, value.numel or name), name)
        if known != name:  # one storage under two names
            found.meta.setdefault("tied", {})[name] = known
        else:
            found.add_whole(name, "parameter", value)
    return found


def _is_state(value: Any) -> bool:
    """Whether it is a state_dict: tensors by name; beside them there may be extra state of modules."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return False
    others = [name for name, item in value.items() if not isinstance(item, StoredTensor)]
    return len(others) < len(value) and all(name.endswith("_extra_state") for name in others)


def _keys(value: Any) -> str:
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    shown = [str(key)[:40] for key in list(value)[:6]]
    return f"the keys {', '.join(shown)}" + (", …" if len(value) > len(shown) else "") if shown else "an empty dict"
