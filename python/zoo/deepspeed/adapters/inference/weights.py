"""``checkpoint``, ``base_dir``, ``checkpoint_config``, ``training_mp_size``, ``save_mp_checkpoint_path``.

A checkpoint is a folder or a file that :mod:`zoo.checkpointing` reads (zoo's own, DeepSpeed's, safetensors, files of
torch), or DeepSpeed's description of files as a dict or a JSON file::

    {"type": "ds_model", "checkpoints": [FILE, ...], "version": 1.0, "base_dir": FOLDER,
     "parallelization": "pp" | "tp", "tp_size": N}

"pp": files of whole tensors. "tp": a file for each rank of ``tp_size`` (or ``training_mp_size``), with its part of the
tensors, as zoo's plan of the model cuts them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import CheckpointError, save
from zoo.checkpointing import load as open_own
from zoo.checkpointing.foreign import open_foreign
from zoo.checkpointing.listing import listing
from zoo.comm import Communicator
from zoo.config import ConfigError
from zoo.deepspeed.adapters.configuration.translation import read_document
from zoo.deepspeed.adapters.inference.config import DeepSpeedInferenceConfig
from zoo.layout import Box
from zoo.tensor import Plan, joined, slices
from zoo.tensor import load as fill
from zoo.tensor.loading import Source

_KEYS = ("type", "checkpoints", "version", "base_dir", "parallelization", "tp_size", "mp_size", "dtype")
DESCRIPTION = "ds_inference_config.json"
"""What ``save_mp_checkpoint_path`` gets beside the checkpoint; ``checkpoint=`` takes it, or the folder."""
_TAG = "inference"
_PATH = (str, os.PathLike)


@dataclass(frozen=True)
class Files:
    """Where the weights are.

    Attributes:
        paths: of whole tensors; or, ``in_parts``, one for each tensor-parallel rank.
    """

    paths: tuple[Path, ...]
    in_parts: bool


def files_of(settings: DeepSpeedInferenceConfig) -> Files | None:
    """What the settings name; None for none.

    Raises:
        ConfigError: two that differ, a description that is none, a file that is not there, numbers that do not fit.
    """
    more = settings.checkpoint_config
    given = _one("checkpoint", settings.checkpoint, "checkpoint_config.checkpoint_dir", more.checkpoint_dir)
    base = _one("base_dir", settings.base_dir or None, "checkpoint_config.base_dir", more.base_dir)
    ranks = settings.training_mp_size
    if given is None:
        for name, value in (("base_dir", base), ("training_mp_size", ranks if ranks > 1 else None)):
            if value is not None:
                raise ConfigError(f"{name}={value!r} is of a checkpoint, and none is given; give checkpoint=.")
        return None
    if isinstance(given, str):
        place = _within(base, given)
        if place.suffix != ".json":
            return Files(_shards(_there(place)) or (place,), False)
        return _described(read_document(str(_there(place))), base, ranks, str(place))
    return _described(dict(given), base, ranks, "checkpoint")


def _one(name: str, value: Any, other: str, theirs: Any) -> Any:
    if value is not None and theirs is not None and value != theirs:
        raise ConfigError(f"{name} is {value!r}, and {other} is {theirs!r}; keep one of them.")
    return value if value is not None else theirs


def _within(base: Any, name: str) -> Path:
    return Path(base, name) if base else Path(name)


def _there(place: Path) -> Path:
    if not place.exists():
        raise ConfigError(f"there is no file or folder {str(place)!r}, which checkpoint and base_dir name.")
    return place


def _shards(place: Path) -> tuple[Path, ...]:
    """Files of torch in a folder of Hugging Face without safetensors; none elsewhere."""
    if not place.is_dir() or any(place.glob("*.safetensors")):
        return ()
    return tuple(sorted(place.glob("pytorch_model*.bin")))


def _described(found: dict[str, Any], base: Any, ranks: int, where: str) -> Files:
    unknown, listed = sorted(set(found) - set(_KEYS)), found.get("checkpoints")
    if unknown or not listed:
        raise ConfigError(
            f"{where} has {', '.join(map(repr, unknown)) if unknown else 'no checkpoints'}; a description has the keys "
            f"{', '.join(_KEYS)}."
        )
    base = found.get("base_dir") or base
    if isinstance(listed, Mapping):
        raise ConfigError(
            f"{where} lists files of DeepSpeed's injected layers ({', '.join(listed)}), whose matrices have an order "
            "of their own. Give the checkpoint that they were made of; save_mp_checkpoint_path then writes one for zoo."
        )
    names = [listed] if isinstance(listed, _PATH) else listed
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, _PATH) for name in names):
        raise ConfigError(f"{where}: checkpoints is {listed!r}; it must be a list of names of files.")
    if base is not None and not isinstance(base, _PATH):
        raise ConfigError(f"{where}: base_dir is {base!r}; it must be the name of a folder.")
    for key in ("tp_size", "mp_size"):
        if found.get(key) is not None and (type(found[key]) is not int or found[key] < 1):
            raise ConfigError(f"{where}: {key} is {found[key]!r}; it must be a whole number, at least 1.")
    told = next((found[key] for key in ("tp_size", "mp_size") if found.get(key)), 1)
    kind = found.get("parallelization") or ("tp" if max(told, ranks) > 1 and len(names) > 1 else "pp")
    if kind not in ("tp", "pp"):
        raise ConfigError(f"{where}: parallelization is {kind!r}; it is 'pp' (whole tensors) or 'tp' (parts of them).")
    wrong = [number for number in (told, ranks) if number > 1 and number != len(names)]
    if kind == "tp" and len(names) > 1 and wrong:
        raise ConfigError(
            f"{where} lists {len(names)} files of tensor-parallel ranks, and tp_size, mp_size or training_mp_size says "
            f"{wrong[0]}; there is one for each rank."
        )
    return Files(tuple(_there(_within(base, name)) for name in names), kind == "tp" and len(names) > 1)


class Several:
    """Checkpoints of different tensors as one. A source for :func:`zoo.tensor.load`."""

    def __init__(self, parts: Sequence[tuple[str, Source]], ignored: Sequence[str]) -> None:
        self._of: dict[str, Source] = {}
        for path, part in parts:
            for name in part.shapes:
                if name in self._of:
                    raise ConfigError(f"{name!r} is in {path} and in a file before it; each tensor is in one of them.")
                if not any(re.search(pattern, name) for pattern in ignored):
                    self._of[name] = part
        self.shapes: Mapping[str, tuple[int, ...]] = {name: part.shapes[name] for name, part in self._of.items()}
        self.roles: Mapping[str, Mapping[str, str]] = {name: part.roles[name] for name, part in self._of.items()}

    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor:
        """A box of a whole tensor."""
        return self._of[name].read_box(name, role, box)


@contextmanager
def opened(files: Files, model: nn.Module, plan: Plan | None) -> Iterator[Source]:
    """The source, for the ``with`` block; ``model`` is not split yet.

    Args:
        plan: of files in parts.

    Raises:
        ValueError: (CheckpointError) what is wrong with a file.
    """
    with ExitStack() as stack:
        parts: list[tuple[str, Any]] = []
        for path in files.paths:
            own = path.is_dir() and bool(listing(path))
            source = open_own(str(path), comm=Communicator.alone()) if own else _foreign(path)
            parts.append((path.name, stack.enter_context(source) if own else source))
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        if files.in_parts:
            if plan is None:
                raise ConfigError(
                    "files of tensor-parallel ranks need a plan of the model, which is cut already; give a whole one."
                )
            parts = [("the parts", joined([part for _, part in parts], model, plan))]
        yield Several(parts, ignored)


def _foreign(path: Path) -> Any:
    try:
        return open_foreign(path, optimizer_states=False)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint={str(path)!r} cannot be read: {error}.") from error


def load(model: nn.Module, source: Source, comm: Communicator | None) -> None:
    """Fill the model, split or not. Collective over ``comm``."""
    fill(model, source, comm=comm)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """``set_empty_params``: parameters and buffers on the meta device get memory, whose values nobody has set."""
    done: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, value in kept.items():
                if value is not None and value.is_meta:
                    made = done.get(id(value))
                    if made is None:
                        made = torch.empty_like(value, device=device)
                        if isinstance(value, nn.Parameter):
                            made = nn.Parameter(made, requires_grad=value.requires_grad)
                        made.__dict__.update(value.__dict__)
                        done[id(value)] = made
                    kept[name] = made  # type: ignore[assignment]


def write(model: nn.Module, folder: str, comm: Communicator | None) -> None:
    """Save the weights, each rank its part; any degree loads them. Collective over ``comm``. Of several ranks, or
    groups of them, that have the same model the first saves."""
    ranks = Communicator.alone() if comm is None else comm
    if 0 not in ranks.ranks:
        return
    save(folder, _TAG, slices(model, ranks), comm=ranks)
    if ranks.rank == 0:
        told = {"type": "ds_model", "version": 1.0, "checkpoints": ".", "base_dir": str(Path(folder).absolute())}
        Path(folder, DESCRIPTION).write_text(json.dumps(told, indent=2), encoding="utf-8")
