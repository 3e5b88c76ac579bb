"""The whole state_dict of a model whose parameters may be split: given to a function, returned, and taken back."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from zoo import checkpointing
from zoo.comm import Communicator
from zoo.layout import logical_name
from zoo.shard import ShardedModel

if TYPE_CHECKING:
    from zoo.checkpointing import foreign
    from zoo.engine.agreed_reader import AnyCheckpoint, Reads
    from zoo.engine.engine import Engine

_log = logging.getLogger("zoo.engine")


class CustomLoad(Protocol):
    """What ``custom_load_fn`` is; the engine calls it on every rank, with whole tensors."""

    def __call__(self, *, src: dict[str, torch.Tensor], dst: nn.Module) -> Any: ...


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
    from zoo.engine.state import BUFFER_OF_RANK
    from zoo.shard import GatheredParameters

    source = {n: reads.tensor(n, r) for n, roles in found.roles.items() for r in roles if r in ("parameter", "buffer")}
    tied: Mapping[str, str] = found.meta.get("model", {}).get("tied", {})
    source |= {name: source[first] for name, first in tied.items() if first in source and name not in source}
    own = {name: mine.get(BUFFER_OF_RANK + name) for name in source}
    source |= {n: b.view(source[n].shape) for n, b in own.items() if b is not None and b.numel() == source[n].numel()}
    reads.agree(comm, what)
    with GatheredParameters(module.parameters(), modifier_rank=0), torch.no_grad():
        load(src=source, dst=module)


class WholeStates:
    """The part of :class:`~zoo.engine.Engine` that gives and takes whole state_dicts."""

    module: nn.Module
    sharded: ShardedModel
    _last_path: str | None

    @property
    def _whole_engine(self) -> Engine:
        return cast("Engine", self)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> OrderedDict[str, torch.Tensor]:
        """The whole model's parameters and persistent buffers, copied to the CPU, on every rank, whatever the stage.
        A collective.

        The keys are those of ``module.state_dict()``, but for what ``get_extra_state`` returns, which is not in it. Of
        a pipeline it is the whole model too, under its names there. Buffers are this rank's own. Parameters have the
        dtype that the model computes with; tied ones share their memory. Every rank holds the whole model for this:
        ``save_16bit_model`` does without, and ``save_checkpoint`` has what training goes on with.

        Args:
            exclude_frozen_parameters: leave out those that were frozen when the optimizer was built.
        """
        from zoo.engine.saving import aliases
        from zoo.engine.state import whole_buffers

        self._whole_engine.read_outcome()
        frozen = not exclude_frozen_parameters
        self.sharded.everyone.agree("module_state_dict with exclude_frozen_parameters", repr(not frozen))
        found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.sharded.whole_model(frozen=frozen)}
        buffers = whole_buffers(self.module, self.sharded)
        found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
        found |= {name: found[first] for name, first in aliases(self.module, self.sharded, found).items()}
        names = _keys(self.module)
        if self.sharded.layers is not None:
            names = [name for there in self.sharded.everyone.all_gather_object(names) for name in there]
        order = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return OrderedDict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any] | str | os.PathLike[str] | None, strict: bool = True,
        custom_load_fn: CustomLoad | None = None, fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Parameters and buffers take these values, in shards and fp32 masters too; everything else stays as it is. A
        collective: every rank gives the same.

        Args:
            checkpoint: a state_dict of whole tensors, as :meth:`module_state_dict` returns, or a dict that has it under
                "module"; or the path of a checkpoint, as :meth:`save_checkpoint` returns; None: of the one that this
                engine has saved or loaded last.
            strict: its names are those of the model. False: names that the model does not have are passed over, and
                parameters and buffers that it does not have stay as they are.
            custom_load_fn: as of :meth:`load_checkpoint`.
            fetch_z3_params: makes no difference: shards are filled without gathering, and for ``custom_load_fn``
                parameters are whole at every stage.

        Masters take values of 16 bits only where these differ from what they round to, so that what came from this
        model changes nothing.

        Raises:
            ValueError: (zoo.checkpointing.CheckpointError, on all ranks) names or shapes that are not the model's,
                parameters that are not the same on all ranks, and whatever :meth:`load_checkpoint` raises of a path.
        """
        from zoo.engine.partial_load import Wanted

        if checkpoint is None or isinstance(checkpoint, (str, os.PathLike)):
            self._whole_engine.wait_for_checkpoint()
            place = checkpoint if checkpoint is not None else self._last_path
            if place is None:
                raise ValueError(
                    "load_module_state_dict(None) of an engine that has neither saved nor loaded a checkpoint; give a "
                    "state_dict, or the path of a checkpoint."
                )
            text = os.fspath(place).rstrip("/")
            directory, _, tag = (text if "://" in text else os.path.abspath(text)).rpartition("/")
            self._whole_engine.load_checkpoint(
                directory or "/", tag, load_module_strict=strict, load_module_only=True, custom_load_fn=custom_load_fn,
            )  # fmt: skip
            return
        self._whole_engine.read_outcome()
        everyone, what = self.sharded.everyone, "load_module_state_dict()"
        everyone.agree(f"{what} with strict, custom_load_fn", repr((strict, custom_load_fn is not None)))
        self._whole_engine.check_custom(custom_load_fn)
        given = checkpointing.alike(everyone, what, lambda: _tensors_of(checkpoint))
        if custom_load_fn is None:  # with it rank 0's values count
            known = checkpointing.together(everyone, what, lambda: (_keys(self.module), _buffers_of(self.module)))
            names = {name for keys, _ in known for name in keys}
            if strict:
                checkpointing.alike(everyone, what, lambda: _check_names(set(given) - names))
            names -= {name for _, buffers in known for name in buffers}
            _check_alike(everyone, what, {name: value for name, value in given.items() if name in names})
        wanted = Wanted(module_strict=strict, module_only=True, custom=custom_load_fn is not None, given=True)
        found = checkpointing.alike(everyone, what, lambda: _opened(given, self.module))
        self._whole_engine.load_opened(found, wanted, custom_load_fn)


def check_place(directory: object, tag: object = None) -> None:
    """Raise CheckpointError unless it is a path that is not empty; and a tag is a name."""
    if not isinstance(directory, (str, os.PathLike)):
        raise checkpointing.CheckpointError(
            f"the directory {directory!r} is a {type(directory).__name__}; it is a path"
        )
    if not os.fspath(directory):
        raise checkpointing.CheckpointError(f"{directory!r} names no folder; '.' is the current one.")
    if tag is not None and not isinstance(tag, str):
        raise checkpointing.CheckpointError(
            f"the tag {tag!r} is a {type(tag).__name__}; it is the name of a checkpoint"
        )


def joined(directory: str | os.PathLike[str], tag: str) -> str:
    """The place of a checkpoint, a URL where the directory is one."""
    text = os.fspath(directory)
    return f"{text.rstrip('/')}/{tag}" if "://" in text else os.path.join(os.path.abspath(text), tag)


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
    from zoo.checkpointing import foreign

    found = foreign.ForeignCheckpoint("state_dict", Path("state_dict"))
    for name, value in given.items():
        found.add_whole(name, "parameter", _InMemory(value))
    first: dict[int, str] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        name = logical_name(module, key)
        known = first.setdefault(id(parameter), name)
        if known not in found.shapes and name in given:  # of a tied parameter one name is enough
            found.add_whole(known, "parameter", _InMemory(given[name]))
    return found
