"""Live state for ``torch.distributed.checkpoint``: each rank offers its own elements, and nothing is gathered.

::

    dcp.save(live(optimizer), checkpoint_id=folder)
    dcp.load(live(optimizer), checkpoint_id=folder)  # at any world size, stage and tier

The keys are those of :func:`~zoo.checkpointing.foreign.save_dcp`: ``model.<name>`` (fp32 values where masters are
kept), ``optimizer.state.<name>.<role>``, ``optimizer.param_groups.<i>.…``; numbers such as "step" are tensors without
dims. What has no place in torch's is ``optimizer.zoo.<key>``. A run of elements is offered as at most 2d - 1 boxes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from zoo.checkpointing.errors import CheckpointError, alike
from zoo.checkpointing.format.names import StateSlice
from zoo.comm import Communicator
from zoo.layout import Box

_OF_RANKS = ("feedback.", "owed", "apart.")


class LiveState(Protocol):
    """What has the state: a ZeRO optimizer of zoo.zero. Every rank calls each of these alike."""

    comm: Communicator
    model: nn.Module
    param_groups: list[dict[str, Any]]

    def live_slices(self, *, owned: bool) -> Sequence[StateSlice]: ...
    def live_scalars(self) -> Mapping[str, float]: ...
    def named_groups(self) -> list[dict[str, Any]]: ...
    def held_slices(self, *, owned: bool) -> Sequence[StateSlice]: ...
    def load_state(self, read: Any, scalars: Mapping[str, float]) -> None: ...


def live(optimizer: Any, *, model: str = "model", states: str = "optimizer") -> dict[str, LiveModel | LiveOptimizer]:
    """The model and the states of a ZeRO optimizer, as ``torch.distributed.checkpoint`` saves and loads them.

    Saving reads each part of the state when it is written, also from NVMe. Loading takes host memory for this rank's
    elements, and while one of the two is taken over for a copy of the other; no parameter and no state has changed
    while DCP reads. One of the two may be loaded alone, and under another key. Where states on NVMe are more than host
    memory holds, ``load_state`` reads them piece by piece from :func:`~zoo.checkpointing.foreign.load_dcp`, which also
    unpickles nothing, as torch's own reader of DCP does.

    Args:
        optimizer: a ZeRO optimizer of zoo.zero.
        model, states: the keys of the two.

    Raises:
        NotImplementedError: errors of reductions that are fed back, which belong to ranks.
    """
    if any(s.role.startswith(_OF_RANKS) for s in optimizer.live_slices(owned=True)) or (
        "zero/feedback_ranks" in optimizer.live_scalars()
    ):
        raise NotImplementedError(
            "live() of an optimizer with errors that are fed back, which belong to ranks "
            "(quantized_gradients_feedback=True, or an optimizer that compresses what ranks tell each other). "
            "Save with save_dcp(folder, optimizer.state_slices(), optimizer.state_scalars())."
        )
    return {model: LiveModel(optimizer), states: LiveOptimizer(optimizer)}


class Shards(torch.Tensor):
    """A tensor of which this rank has some elements. DCP asks it for boxes; it has no values of its own.

    Args:
        shape, dtype: of the whole tensor.
        owned: the elements that this rank writes.
        held: those that it reads.
    """

    owned: list[tuple[Box, StateSlice, int]]
    held: list[StateSlice]
    read: dict[Any, torch.Tensor] | None
    _destinations: dict[tuple[int, ...], torch.Tensor]
    _last: tuple[StateSlice, torch.Tensor] | None

    @staticmethod
    def __new__(
        cls: Any, shape: tuple[int, ...], dtype: torch.dtype, owned: list[StateSlice], held: list[StateSlice]
    ) -> Shards:
        """See the class."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.owned = [part for item in owned for part in _boxes(item)]
        made.held, made.read, made._destinations, made._last = held, None, {}, None
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} of a tensor of live(optimizer), which has elements of this rank only and is for dcp.save and "
            "dcp.load. For dcp.async_save take torch.distributed.checkpoint.state_dict.get_state_dict()."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Shards({tuple(self.shape)}, {self.dtype}, {len(self.owned)} boxes)"

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties(dtype=self.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties, size=size,
                ),
            )
            for number, (box, _, _) in enumerate(self.owned)
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[Any]:
        """DCP loads: from now on it is given memory to write to."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self.read, self._destinations = {}, {}
        for item in self.held:
            flat = self.read[_where(item)] = torch.empty(item.length, dtype=self.dtype)
            for box, _, start in _boxes(item):
                self._destinations[box.offsets] = flat[start : start + box.numel].view(box.sizes)
        shapes = [(offsets, tensor.shape) for offsets, tensor in self._destinations.items()]
        return [ChunkStorageMetadata(torch.Size(offsets), sizes) for offsets, sizes in shapes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        offsets = tuple(index.offset)
        if self.read is not None:
            return self._destinations[offsets]
        box, item, start = next(part for part in self.owned if part[0].offsets == offsets)
        if self._last is None or self._last[0] is not item:  # the boxes of what is on NVMe are read at once
            self._last = (item, item.tensor.detach())
        return self._last[1][start : start + box.numel].clone().view(box.sizes)


def _where(item: StateSlice) -> int | Box:
    """What is asked for when it is loaded."""
    return item.start if item.box is None else item.box


def _boxes(item: StateSlice) -> list[tuple[Box, StateSlice, int]]:
    """The boxes of a slice, and where in it they begin."""
    whole = Box.whole(tuple(item.shape))
    if not item.length:
        return [(whole, item, 0)] if 0 in whole.sizes else []
    where, found, start = _where(item), [], 0
    for box in [where] if isinstance(where, Box) else whole.run(where, where + item.length):
        found.append((box, item, start))
        start += box.numel
    return found


def _shards(source: LiveState, *, parameters: bool) -> dict[tuple[str, str], Shards]:
    """By name and role, of the parameters or of everything else."""
    parts: dict[tuple[str, str], tuple[list[StateSlice], list[StateSlice]]] = {}
    for number, owned in enumerate((True, False)):
        for item in source.live_slices(owned=owned):
            if (item.role == "parameter") is parameters:
                parts.setdefault((item.name, item.role), ([], []))[number].append(item)
    return {key: Shards(tuple(held[0].shape), held[0].dtype, owned, held) for key, (owned, held) in parts.items()}


class _Part:
    """One of the two."""

    def __init__(self, source: LiveState) -> None:
        self._source = source
        self._shards: dict[tuple[str, str], Shards] = {}

    def _load(self, scalars: Mapping[str, float], *, parameters: bool) -> None:
        """Take over what DCP has read; the other part stays as it is."""
        shards = self._shards
        lacking = [key for key, tensor in shards.items() if tensor.read is None]
        if lacking:
            name, role = lacking[0]
            raise CheckpointError(
                f"{role} of {name!r} was not read: load it with a planner that demands all keys, or load a checkpoint "
                "that has it. Nothing was loaded."
            )
        stays = {
            (s.name, s.role, _where(s)): s.tensor.detach().clone()
            for s in self._source.held_slices(owned=False) if (s.role == "parameter") is not parameters
        }  # fmt: skip

        def read(name: str, role: str, start: int | Box, length: int) -> torch.Tensor:
            if (name, role) in shards:
                return (shards[name, role].read or {})[start]
            return stays[name, role, start]  # a KeyError where there is no such state yet

        self._source.load_state(read, scalars)
        self._shards = {}


class LiveModel(_Part):
    """Parameters and persistent buffers, by name; see :func:`live`."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What DCP saves, or reads into. Collective where writes of the user are to be taken over."""
        self._shards = _shards(self._source, parameters=True)
        found: dict[str, torch.Tensor] = {name: tensor for (name, _), tensor in self._shards.items()}
        for path, module in self._source.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{path}.{name}" if path else name] = buffer
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """DCP has read everything; buffers in place. Collective."""
        self._load(self._source.live_scalars(), parameters=True)


class LiveOptimizer(_Part):
    """States by parameter, options of the groups and the loss scale; see :func:`live`."""

    def state_dict(self) -> dict[str, Any]:
        """What DCP saves, or reads into."""
        self._shards = _shards(self._source, parameters=False)
        states: dict[str, dict[str, torch.Tensor]] = {}
        for (name, role), tensor in self._shards.items():
            states.setdefault(name, {})[role] = tensor
        found: dict[str, Any] = {"state": states, "param_groups": copy.deepcopy(self._source.named_groups())}
        for key, value in self._source.live_scalars().items():
            role, _, name = key.partition("/")
            if role == "zero":
                found.setdefault("zoo", {})[name] = float(value)
            else:
                states.setdefault(name, {})[role] = torch.tensor(float(value))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """DCP has read everything. Collective.

        Raises:
            CheckpointError: on all ranks: the groups hold other parameters. Nothing was loaded.
        """
        source, groups = self._source, state_dict["param_groups"]
        alike(source.comm, "loading live states", lambda: _check_groups(source, groups))
        scalars = {
            f"{role}/{name}": float(value)
            for name, of in state_dict["state"].items() for role, value in of.items() if not isinstance(value, Shards)
        }  # fmt: skip
        scalars |= {f"zero/{key}": float(value) for key, value in state_dict.get("zoo", {}).items()}
        before = [dict(group) for group in source.param_groups]
        for group, saved in zip(source.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        try:
            self._load(scalars, parameters=False)
        except BaseException:
            for group, old in zip(source.param_groups, before, strict=True):
                group.update(old)
            raise


def _check_groups(source: LiveState, groups: Sequence[Mapping[str, Any]]) -> None:
    here = [group["params"] for group in source.named_groups()]
    saved = [list(group.get("params", ())) for group in groups]
    if here != saved:
        number = next((i for i, (a, b) in enumerate(zip(here, saved, strict=False)) if a != b), len(saved))
        raise CheckpointError(
            f"the checkpoint has other parameters in param_groups[{number}] than this optimizer, or in another order; "
            "it has to have the same groups. Nothing was loaded."
        )
