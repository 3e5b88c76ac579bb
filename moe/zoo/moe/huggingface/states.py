"""State dicts of whole models, as transformers loads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from zoo import registry
from zoo.comm import Communicator
from zoo.layout import logical_name, split_of
from zoo.moe.experts.base import AXIS
from zoo.moe.part import layers_of

Tensor = torch.Tensor


def whole_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Tensor]:
    """``model.state_dict()`` with all experts of each layer, in host memory. Collective over all ranks.

    A model before :func:`~zoo.moe.parallelise` loads it, and so does this one, at any ``ep_size``; ``save_pretrained``
    takes it as ``state_dict=``. One tensor after the other is gathered, at any ZeRO stage.

    Args:
        everywhere: every rank gets it; otherwise rank 0 does, and the others get an empty one.

    Raises:
        ValueError: experts are split, and the model was not told of the mesh.
    """
    comms = {id(part): layer.expert_ranks for layer in layers_of(model).values() for part in _tensors(layer)}
    keeps = everywhere or not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        with _gathered(tensor), torch.no_grad():
            parts = _parts(model, name, tensor, comms.get(id(tensor)))
            if keeps:
                found |= {part: value.to("cpu", copy=True) for part, value in parts.items()}
    return found


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def _parts(model: nn.Module, name: str, tensor: Tensor, comm: Communicator | None) -> dict[str, Tensor]:
    """By its names in the whole model: one tensor of all experts, or one of each rank's."""
    split = split_of(tensor)
    if AXIS not in split.axes:
        return {logical_name(model, name): tensor.detach()}
    if comm is None:
        raise ValueError(
            f"{name} is a part of this rank's, and the model does not know the other ranks. Give mesh= to parallelise, "
            "or call zoo.moe.use_mesh(model, mesh)."
        )
    mine = tensor.detach().contiguous()
    every = mine.new_empty(comm.size, *mine.shape)
    comm.all_gather(every.view(-1), mine.view(-1), label=f"experts of {name}").wait()
    if split.shape is not None:
        return {logical_name(model, name): every.flatten(0, 1)}
    return dict(zip(comm.all_gather_object(logical_name(model, name)), every, strict=True))


@contextlib.contextmanager
def _gathered(tensor: Tensor) -> Iterator[None]:
    """Inside, a parameter that somebody shards is whole."""
    with contextlib.ExitStack() as stack:
        if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
            for name in registry.names("parameter_gatherer"):
                stack.enter_context(registry.get("parameter_gatherer", name)([tensor], None))
        yield
