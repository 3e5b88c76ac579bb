"""What a checkpoint has of a module beside its parameters: buffers, extra state, and which names mean one tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.comm import gather_object
from zoo.engine.checkpoint.contents import BUFFER, PARAMETER, AnyCheckpoint
from zoo.layout import StateSlice, logical_name, split_of

if TYPE_CHECKING:
    from zoo.engine.checkpoint.agreed_reader import Reads
    from zoo.engine.checkpoint.partial_load import Wanted
    from zoo.shard import ShardedModel

BUFFER_OF_RANK = "buffer|"
_log = logging.getLogger("zoo.engine")


def buffer_slices(module: nn.Module, sharded: ShardedModel) -> list[StateSlice]:
    """Rank 0's buffers, those that ``state_dict`` would hold, by their names in the whole model; on another rank those
    that no rank before it has: of other layers, of experts. Collective where there are such."""
    buffers = first_buffers(module, sharded)
    return [
        StateSlice(name, BUFFER, 0, b.numel(), tuple(b.shape), _as_is(b).reshape(-1)) for name, b in buffers.items()
    ]


def first_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """See :func:`buffer_slices`."""
    mine, comm = persistent_buffers(module), sharded.everyone
    if not has_parts(mine, sharded):
        return mine if comm.rank == 0 else {}
    first: dict[str, int] = {}
    for rank, names in enumerate(comm.all_gather_object(sorted(mine))):
        for name in names:
            first.setdefault(name, rank)
    return {name: buffer for name, buffer in mine.items() if first[name] == comm.rank}


def whole_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The buffers of the whole model that ``state_dict`` would have, on every rank: this rank's own, or, where other
    ranks have other ones, the first rank's that has them. Collective where there are such."""
    buffers = persistent_buffers(module)
    if not has_parts(buffers, sharded):
        return buffers
    own = {name: buffer.detach().cpu() for name, buffer in first_buffers(module, sharded).items()}
    return {name: buffer for there in sharded.everyone.all_gather_object(own) for name, buffer in there.items()}


def has_parts(buffers: Mapping[str, torch.Tensor], sharded: ShardedModel) -> bool:
    """Whether other ranks have other ones."""
    return sharded.layers is not None or any(split_of(buffer).axes for buffer in buffers.values())


def load_buffers(module: nn.Module, found: Reads, wanted: Wanted) -> None:
    """Every buffer of the module takes the checkpoint's value."""
    values: dict[str, torch.Tensor] = {}
    for name in persistent_buffers(module):
        if wanted.module_strict or name in found.shapes:
            # Formats of weights alone do not tell buffers from parameters.
            role = BUFFER if BUFFER in found.roles.get(name, {}) else PARAMETER
            values[name] = found.tensor(name, role)
    _fill(module, values)


def _as_is(buffer: torch.Tensor) -> torch.Tensor:
    """On the CPU, with the bytes of its values: of a conjugate view too."""
    return buffer.detach().cpu().resolve_conj().resolve_neg()


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ``state_dict`` has, by their names in the whole model; of several in a module the first."""
    return dict(_persistent(module, once=True))


def every_name_of_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each key of ``state_dict`` that is a buffer's, as a name in the whole model."""
    return _persistent(module, once=False)


def _persistent(module: nn.Module, *, once: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, child in module.named_modules(remove_duplicate=once):
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=once):
            if name not in child._non_persistent_buffers_set:
                yield logical_name(module, f"{path}.{name}" if path else name), buffer


def model_meta(module: nn.Module, sharded: ShardedModel) -> dict[str, Any]:
    """What readers without the model cannot know: names of frozen parameters, and the first name of each other one that
    a parameter has, or a buffer whose module has several. What ``get_extra_state`` of modules returns. Rank 0's is
    kept; of layers and experts that other ranks have it is told. Collective where there are such."""
    frozen = {name for b in sharded.buckets if not b.spec.trainable for name in b.in_model()}
    tied = {**tied_names(module, module.named_parameters(remove_duplicate=False)), **_further_buffers(module)}
    extra = {key: child.get_extra_state() for key, child in with_extra_state(module)}
    mine = sorted(frozen), tied, extra
    parted = sharded.layers is not None or any(b.spec.axes for b in sharded.buckets)
    everywhere = gather_object(sharded.everyone, mine) or [mine] if parted else [mine]
    return {
        "frozen": sorted({name for names, _, _ in everywhere for name in names}),
        "tied": {name: known for _, names, _ in everywhere for name, known in names.items()},
        "extra": {key: value for _, _, states in reversed(everywhere) for key, value in states.items()},
    }


def tied_names(module: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """{further name: first name}, in the whole model, of tensors that ``named`` gives several times."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            found[logical_name(module, name)] = logical_name(module, known)
    return found


def _further_buffers(module: nn.Module) -> dict[str, str]:
    """{further name: the name that :func:`persistent_buffers` has}: those of a module that has several names itself."""
    saved = persistent_buffers(module)
    first = {id(buffer): name for name, buffer in reversed(saved.items())}
    return {name: first[id(buffer)] for name, buffer in every_name_of_buffers(module) if name not in saved}


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have ``get_extra_state``, by the keys that ``state_dict`` has for it in the whole model."""
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield logical_name(module, f"{path}._extra_state" if path else "_extra_state"), child


def load_extra_state(module: nn.Module, found: AnyCheckpoint) -> None:
    """The reverse: ``set_extra_state`` of each of these modules."""
    model = found.meta.get("model")
    saved = model.get("extra", {}) if isinstance(model, dict) else {}
    for key, child in with_extra_state(module):
        if key in saved:
            child.set_extra_state(saved[key])
        else:
            _log.warning("checkpoint %r has no %r, the extra state of a %s.", found.tag, key, type(child).__name__)


def own_buffers(module: nn.Module, sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """The buffers of a rank other than 0, as this rank's own state: each rank's forwards keep theirs."""
    if sharded.everyone.rank == 0:
        return {}
    return {BUFFER_OF_RANK + name: _as_is(b) for name, b in persistent_buffers(module).items()}


def load_own_buffers(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Those buffers that :func:`own_buffers` gave; the others stay as they are."""
    values: dict[str, torch.Tensor] = {}
    for name, buffer in persistent_buffers(module).items():
        found = state.get(BUFFER_OF_RANK + name)
        if found is not None and found.numel() == buffer.numel():  # it was kept flat
            values[name] = found.view(buffer.shape)
    _fill(module, values)


def _fill(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Buffers take values, by their names. What is a view of another buffer has its value then, and stays a view."""
    from zoo.shard.module_buffers import repeats, write_buffer

    buffers = persistent_buffers(module)
    for name in sorted(values, key=lambda name: repeats(buffers[name])):
        write_buffer(module, buffers[name], values[name])
