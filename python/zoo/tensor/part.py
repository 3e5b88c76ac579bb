"""The engine part ``tensor_parallel``: cuts the model before anything of it is sharded."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zoo.comm import Communicator
from zoo.config.mesh import LAYER_AXES
from zoo.parts import Environment
from zoo.tensor.adapters import base_of, with_adapters
from zoo.tensor.agreement import all_or_none
from zoo.tensor.config import TensorParallelConfig
from zoo.tensor.huggingface import plan_of
from zoo.tensor.injection import plan_of_injection_policy
from zoo.tensor.loss import in_parts
from zoo.tensor.patterns import plan_of_partition_config
from zoo.tensor.plans import AXIS, Plan
from zoo.tensor.proof import prove
from zoo.tensor.splitting import split

__all__ = ["TensorParallelPart"]

_log = logging.getLogger("zoo.tensor")


_CARRIED_OUT = "_zoo_tensor_parallel_is_carried_out"


def carried_out(module: nn.Module) -> None:
    """Say that the section was carried out already for all of ``module``: of stages of a pipeline, before they were
    traced."""
    module.__dict__[_CARRIED_OUT] = True


class TensorParallelPart:
    """Carries the section out, in ``prepare``; before the first forward it compares what ranks of the axis got.

    Args:
        section: ``tensor_parallel``.
        environment: of the engine; not looked at.
    """

    def __init__(self, section: TensorParallelConfig, environment: Environment | None = None) -> None:
        self.section = section
        self.plan = None if section.plan is None else Plan.of_data(section.plan)
        self._unseen: tuple[Any, Communicator] | None = None
        """The mesh and the ranks with these layers, until they have compared a batch."""

    before = ("compression_training", "quantize_training", "data_efficiency", "progressive_layer_drop")
    """Parts that give modules another forward, which a split one would not call."""

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Leave this rank's part of ``module``, in place; see :func:`carried_out`. Collective over the axis.

        Raises:
            ValueError: there is no such axis, its size is another one, or the plan does not fit the model.
        """
        degree = self.section.degree
        found = mesh.size(mesh.mesh_dim_names.index(AXIS)) if mesh is not None and AXIS in mesh.mesh_dim_names else 1
        if found != degree:
            raise ValueError(
                f"tensor_parallel asks for {degree} ranks, and the mesh has {found} along {AXIS!r}; leave the axis out "
                "of mesh.axes, or give both one size, and start a job whose ranks they divide."
            )
        if degree == 1:
            return
        if module.__dict__.get(_CARRIED_OUT):
            self._unseen = mesh, _with_these_layers(mesh)
            return
        comm, grain, sequence = Communicator.of_axes(mesh, [AXIS]), self.section.tp.tp_grain_size, self.section.sequence

        def proved() -> Plan:
            _, base = base_of(module)
            plan = self.plan or self._plan_of(base)
            if self.section.prove and hasattr(getattr(base, "config", None), "model_type"):
                prove(base, base.config, plan, degree, grain=grain, sequence=sequence)
            return with_adapters(plan, module)

        self.plan = all_or_none(comm, "finding a tensor-parallel plan", proved)
        split(module, self.plan, mesh, grain=grain, sequence=sequence, overlap=self.section.tp_overlap_comm)
        if self.section.vocab_parallel_lm_head:
            in_parts(module)
        self._unseen = mesh, _with_these_layers(mesh)
        _log.info("cut over %d ranks by %s", degree, self.plan)

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        """The arguments as they are. The first time, a collective of all ranks with these layers: those of a pipeline's
        other stages may see no samples.

        Raises:
            ValueError: ranks of the axis, here or of other samples, have different tensors in them.
        """
        if self._unseen is not None:
            mine = [digest(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            _compare(*self._unseen, mine)
            self.close()
        return args, kwargs

    def close(self) -> None:
        """The group is given back that compares the first batch."""
        if self._unseen is not None:
            self._unseen[1].close()
            self._unseen = None

    def _plan_of(self, module: nn.Module) -> Plan:
        """What the section says of it; else the model itself, its family, or the styles that it ships."""
        section = self.section
        if section.partition_config is not None or section.preset_model is not None:
            return plan_of_partition_config(
                module, section.partition_config, section.degree, preset=section.preset_model
            )
        if section.injection_policy_tuple is not None:
            return plan_of_injection_policy(module, section.injection_policy_tuple)
        own = getattr(module, "tensor_plan", None)
        plan: Plan = own() if callable(own) else plan_of(module)
        return plan


def digest(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and a number that stands for the bits; of a nested tensor those of its parts, and of a sparse one
    those of its indices and values."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return tuple(map(digest, tensor.unbind()))
    if tensor.layout != torch.strided:
        tensor = tensor.to_sparse().coalesce()
        return tuple(tensor.shape), digest(tensor.indices()), digest(tensor.values())
    if tensor.is_meta:
        return tuple(tensor.shape), str(tensor.dtype), 0
    bits = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(bits.numpy().tobytes())


def _with_these_layers(mesh: Any) -> Communicator:
    """Those of this rank's stage. Collective over the mesh."""
    return Communicator.of_axes(mesh, [axis for axis in mesh.mesh_dim_names if axis not in LAYER_AXES])


def _compare(mesh: Any, comm: Communicator, mine: list[tuple[Any, ...]]) -> None:
    theirs = dict(zip(comm.ranks, comm.all_gather_object(mine), strict=True))
    axis = mesh.mesh_dim_names.index(AXIS)
    for ranks in mesh.mesh.movedim(axis, -1).flatten(0, -2).tolist():
        if ranks[0] not in theirs:
            continue
        others = [rank for rank in ranks if theirs[rank] != theirs[ranks[0]]]
        if others:
            same = [rank for rank in ranks if rank not in others]
            raise ValueError(
                f"rank {', '.join(map(str, others))} got other samples than rank {', '.join(map(str, same))}, and they "
                "share one model's layers: give them the same. Deal samples by engine.batch_rank of "
                "engine.batch_ranks, as the engine's own loader does."
            )
