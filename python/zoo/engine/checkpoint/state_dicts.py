"""The whole state_dict of a model whose parameters may be split: given to a function, returned, and taken back."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zoo import checkpointing
from zoo.checkpointing import foreign
from zoo.comm import Communicator
from zoo.engine.checkpoint.agreed_reader import Reads
from zoo.engine.checkpoint.contents import BUFFER, PARAMETER, AnyCheckpoint
from zoo.engine.checkpoint.module_state import BUFFER_OF_RANK, whole_buffers
from zoo.engine.checkpoint.saving import aliases
from zoo.layout import logical_name
from zoo.shard import GatheredParameters, ShardedModel

_log = logging.getLogger("zoo.engine")


class CustomLoad(Protocol):
    """What ``custom_load_fn`` is; the engine calls it on every rank, with whole tensors."""

    def __call__(self, *, src: dict[str, torch.Tensor], dst: nn.Module) -> Any: ...


def check_custom(custom_load_fn: Any, sharded: ShardedModel) -> None:
    """Raise ValueError where it cannot be called with the whole model."""
    if not callable(custom_load_fn):
        raise ValueError(
            f"custom_load_fn is a {type(custom_load_fn).__name__}; it is called as "
            "custom_load_fn(src=state_dict, dst=module)."
        )
    axes = sorted({axis for bucket in sharded.buckets for axis in bucket.spec.axes})
    if sharded.layers is not None or axes:
        split = "over the stages of a pipeline" if not axes else f"along the mesh axes {', '.join(axes)}"
        raise ValueError(
            f"custom_load_fn with a model that is split {split}: no rank has all of it to be written to. Leave it "
            "out; load_module_strict=False lets stay what the checkpoint lacks."
        )


def load_custom(
    module: nn.Module, reads: Reads, found: AnyCheckpoint, load: CustomLoad, comm: Communicator, what: str,
    mine: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Let a function of the user write what a checkpoint has into the model. Collective.

    Args:
        mine: this rank's own state there, buffers among it.

    Raises:
        CheckpointError: (on all ranks) the checkpoint is damaged; or whatever the function raises, and on other ranks a
            RankFailedError. Parameters are as they were then.
    """
    source = {n: reads.tensor(n, r) for n, roles in found.roles.items() for r in roles if r in (PARAMETER, BUFFER)}
    tied: Mapping[str, str] = found.meta.get("model", {}).get("tied", {})
    source |= {name: source[first] for name, first in tied.items() if first in source and name not in source}
    own = {name: mine.get(BUFFER_OF_RANK + name) for name in source}
    source |= {n: b.view(source[n].shape) for n, b in own.items() if b is not None and b.numel() == source[n].numel()}
    reads.agree(comm, what)
    with GatheredParameters(module.parameters(), modifier_rank=0), torch.no_grad():
        load(src=source, dst=module)


def whole_state_dict(module: nn.Module, sharded: ShardedModel, *, frozen: bool) -> OrderedDict[str, torch.Tensor]:
    """See :meth:`~zoo.engine.Engine.module_state_dict`; ``frozen``: with what was frozen. A collective."""
    sharded.everyone.agree("module_state_dict with exclude_frozen_parameters", repr(not frozen))
    found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in sharded.whole_model(frozen=frozen)}
    buffers = whole_buffers(module, sharded)
    found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
    found |= {name: found[first] for name, first in aliases(module, sharded, found).items()}
    names = _keys(module)
    if sharded.layers is not None:
        names = [name for there in sharded.everyone.all_gather_object(names) for name in there]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return OrderedDict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def open_state_dict(
    given: Mapping[str, Any], module: nn.Module, sharded: ShardedModel, *, strict: bool, custom: bool
) -> foreign.ForeignCheckpoint:
    """A state_dict of whole tensors, or a dict that has it under "module", to be read like a checkpoint. A collective.

    Args:
        custom: a function will write what it has into the model, and the values of rank 0 count.

    Raises:
        CheckpointError: (on all ranks) it is something else; with ``strict`` it has names that the model has not; or
            its parameters are not the same on all ranks.
    """
    everyone, what = sharded.everyone, "load_module_state_dict()"
    state = checkpointing.alike(everyone, what, lambda: _tensors_of(given))
    if not custom:
        known = checkpointing.together(everyone, what, lambda: (_keys(module), _buffers_of(module)))
        names = {name for keys, _ in known for name in keys}
        if strict:
            checkpointing.alike(everyone, what, lambda: _check_names(set(state) - names))
        names -= {name for _, buffers in known for name in buffers}
        _check_alike(everyone, what, {name: value for name, value in state.items() if name in names})
    return checkpointing.alike(everyone, what, lambda: _opened(state, module))


@dataclass(frozen=True)
class _InMemory:
    """A tensor of a state_dict, read like one in a file."""

    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def numel(self) -> int:
        return self.values.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of its row-major order."""
        flat = self.values.detach().reshape(-1)
        return flat[start : flat.numel() if length is None else start + length].cpu()


def _keys(module: nn.Module) -> list[str]:
    """The names of parameters and buffers in the whole model, in the order of ``state_dict``, tied ones included."""
    found: list[str] = []
    for path, child in module.named_modules(remove_duplicate=False):
        names = [name for name, item in child._parameters.items() if item is not None]
        names += [n for n, b in child._buffers.items() if b is not None and n not in child._non_persistent_buffers_set]
        found += [logical_name(module, f"{path}.{name}" if path else name) for name in names]
    return found


def _tensors_of(checkpoint: Any) -> dict[str, torch.Tensor]:
    inner = checkpoint.get("module") if isinstance(checkpoint, Mapping) else None
    state = inner if isinstance(inner, Mapping) else checkpoint
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise checkpointing.CheckpointError(
            f"it got a {type(checkpoint).__name__}; it takes a state_dict, the path of a checkpoint, or None"
        )
    extra = [name for name in state if name.endswith("_extra_state")]
    if extra:
        _log.warning("load_module_state_dict() leaves the extra state of modules alone: %s.", ", ".join(extra[:5]))
    found = {name: value for name, value in state.items() if name not in extra}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise checkpointing.CheckpointError(
                f"its state_dict has a {type(value).__name__} under {name!r}, where a tensor must be"
            )
    return found


def _buffers_of(module: nn.Module) -> list[str]:
    """The names of buffers in the whole model, which each rank may have others of."""
    return [logical_name(module, name) for name, _ in module.named_buffers(remove_duplicate=False)]


def _check_alike(everyone: Communicator, what: str, given: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError, on all ranks, unless all of them give the same parameters. A collective.

    Of stage 1 on each rank takes its own part of the values; at stage 0 models that differ would go on so.
    """
    if everyone.size == 1:
        return

    def sums() -> dict[str, str]:
        return {name: _digest(value) for name, value in given.items()}

    mine = checkpointing.alike(everyone, what, sums)
    digests = everyone.all_gather_object(hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=8).digest())
    if len(set(digests)) == 1:
        return
    every = everyone.all_gather_object(mine)
    other = [rank for rank, sums_there in enumerate(every) if sums_there != every[0]]
    first = every[other[0]]
    names = sorted(name for name in every[0].keys() | first.keys() if every[0].get(name) != first.get(name))
    raise checkpointing.CheckpointError(
        f"{what} failed: rank{'s' * (len(other) > 1)} {', '.join(map(str, other[:8]))} gave other values than rank 0, "
        f"of {len(names)} parameters, such as {names[0]!r}. Every rank gives the same state_dict: load one file on all "
        "of them, or broadcast it from one.",
        everywhere=True,
    )


def _digest(value: torch.Tensor) -> str:
    """Of type, shape and bytes."""
    from zoo.io import crc32c

    flat = value.detach().reshape(-1).cpu().contiguous()
    return f"{value.dtype} {tuple(value.shape)} {crc32c(flat) if flat.numel() else 0:08x}"


def _check_names(surplus: set[str]) -> None:
    if surplus:
        shown = ", ".join(sorted(surplus)[:5])
        raise checkpointing.CheckpointError(
            f"the state_dict has {shown}{', …' if len(surplus) > 5 else ''}, which the model lacks; strict=False "
            "passes over such names"
        )


def _opened(given: Mapping[str, torch.Tensor], module: nn.Module) -> foreign.ForeignCheckpoint:
    found = foreign.ForeignCheckpoint("state_dict", Path("state_dict"))
    for name, value in given.items():
        found.add_whole(name, PARAMETER, _InMemory(value))
    first: dict[int, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        name = logical_name(module, key)
        known = first.setdefault(id(parameter), name)
        if known not in found.shapes and name in given:  # of a tied parameter one name is enough
            found.add_whole(known, PARAMETER, _InMemory(given[name]))
    return found
