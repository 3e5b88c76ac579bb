"""Weights to begin with, from a safetensors file or a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from zoo.checkpointing import load
from zoo.checkpointing.format.tensors import COMPLEX
from zoo.comm import Communicator
from zoo.train.config import WarmStart

Source = tuple[tuple[int, ...], Callable[[], torch.Tensor]]
"""Shape of a tensor, and what reads it."""


class WarmStartError(ValueError):
    """The weights do not fit; said on all ranks, which see the same file."""

    everywhere = True


@torch.no_grad()
def warm_start(model: nn.Module, section: WarmStart, comm: Communicator) -> list[str]:
    """Give the model's parameters and buffers the values of the file; one tensor at a time is in memory beside it.

    A collective: every rank reads the whole file.

    Returns:
        Sentences for the log.

    Raises:
        WarmStartError: it cannot be read, or does not fit.
    """
    renames = [(_pattern(key, "key_map"), value) for key, value in section.key_map.items()]
    resized = [_pattern(key, "resized") for key in section.resized]
    targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    targets |= model.named_buffers(remove_duplicate=False)
    done: set[int] = set()
    left, cut = [], []
    seen: dict[str, str] = {}
    for name, (shape, read) in _sources(Path(section.path), comm):
        mine = name
        for pattern, replacement in renames:
            try:
                mine = pattern.sub(replacement, mine)
            except re.error as error:
                raise WarmStartError(
                    f"train.warm_start.key_map: {replacement!r} is no replacement for {pattern.pattern!r}: {error}"
                ) from None
        if mine in seen:
            raise WarmStartError(f"train.warm_start.key_map makes {mine!r} of {seen[mine]!r} and of {name!r}.")
        seen[mine] = name
        target = targets.get(mine)
        if target is None:
            left.append(name)
            continue
        if tuple(target.shape) == shape:
            target.copy_(_fitting(read(), target, mine, section.path))
        elif any(p.search(mine) for p in resized) and shape and shape[1:] == tuple(target.shape[1:]) and target.dim():
            rows = min(shape[0], target.shape[0])
            target[:rows].copy_(_fitting(read(), target, mine, section.path)[:rows])
            cut.append(f"{mine} has {target.shape[0]} rows, {shape[0]} in the file")
        else:
            raise WarmStartError(
                f"train.warm_start: {mine!r} has shape {tuple(target.shape)}, and {shape} in {section.path!r}. Rows "
                "may differ where train.warm_start.resized names it."
            )
        done.add(id(target))
    missing = [name for name, p in model.named_parameters() if id(p) not in done]
    if missing and not section.partial:
        raise WarmStartError(
            f"train.warm_start: {section.path!r} has nothing for {_some(missing)} of the model. Map its names with "
            "train.warm_start.key_map, or set train.warm_start.partial."
        )
    said = [f"warm start from {section.path}: {len(done)} of the model's tensors"]
    said += [f"  left as they were: {_some(missing)}"] if missing else []
    said += [f"  not in the model: {_some(left)}"] if left else []
    return said + [f"  {text}" for text in cut]


def _fitting(found: torch.Tensor, target: torch.Tensor, name: str, path: str) -> torch.Tensor:
    """``found``, unless its kind of number is another one: codes of quantised weights, say, are no weights."""
    kinds = [(t.is_complex(), t.is_floating_point()) for t in (found, target)]
    if kinds[0] != kinds[1] and not (found.is_floating_point() and target.is_complex()):
        raise WarmStartError(
            f"train.warm_start: {name!r} is {target.dtype}, and {found.dtype} in {path!r}, which are other kinds of "
            "numbers. Give a file with weights as they are computed with; quantised ones have to be made such first."
        )
    return found


def _sources(path: Path, comm: Communicator) -> Iterator[tuple[str, Source]]:
    if path.is_dir():
        yield from _of_checkpoint(path, comm)
        return
    if path.suffix != ".safetensors" or not path.is_file():
        raise WarmStartError(
            f"train.warm_start.path = {str(path)!r}; it is a .safetensors file or a directory of checkpoints that "
            "exists."
        )
    try:
        with safe_open(path, framework="pt") as file:
            aliases: Mapping[str, str] = file.metadata() or {}
            pairs = _pairs(aliases.get(COMPLEX, "[]"), path)
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shape = tuple(file.get_slice(name).get_shape())
                if name in pairs:
                    yield name, (shape[:-1], lambda name=name: torch.view_as_complex(file.get_tensor(name)))  # type: ignore[misc]
                else:
                    yield name, (shape, lambda name=name: file.get_tensor(name))  # type: ignore[misc]
            names = set(file.keys())
            for alias, name in aliases.items():  # tied tensors, as safetensors.torch.save_model writes them
                if name in names and alias not in names:
                    shape = tuple(file.get_slice(name).get_shape())
                    yield alias, (shape, lambda name=name: file.get_tensor(name))  # type: ignore[misc]
    except SafetensorError as error:
        raise WarmStartError(f"train.warm_start.path = {str(path)!r} cannot be read: {error}") from None


def _pairs(text: str, path: Path) -> set[str]:
    """The names of complex tensors, which are in the file as pairs of real numbers."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WarmStartError(f"train.warm_start.path = {str(path)!r} has {COMPLEX} = {text[:60]!r}, no list of names.")
    return set(names)


def _of_checkpoint(path: Path, comm: Communicator) -> Iterator[tuple[str, Source]]:
    one = (path / "manifest.json").is_file()
    found = load(path.parent, path.name, comm) if one else load(path, None, comm)
    for name, shape in found.shapes.items():
        for role in ("parameter", "buffer"):
            if role in found.roles[name]:
                yield name, (tuple(shape), lambda name=name, role=role: found.tensor(name, role))  # type: ignore[misc]


def _pattern(text: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise WarmStartError(f"train.warm_start.{key}: {text!r} is no regular expression: {error}") from None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
