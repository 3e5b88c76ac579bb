"""The engine part ``tensor_parallel``: cuts the model before anything of it is sharded."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from zoo.comm import Communicator
from zoo.parts import Environment
from zoo.tensor.agreement import all_or_none
from zoo.tensor.config import TensorParallelConfig
from zoo.tensor.huggingface import plan_of
from zoo.tensor.loss import in_parts
from zoo.tensor.plans import AXIS, Plan
from zoo.tensor.proof import prove
from zoo.tensor.splitting import split

__all__ = ["TensorParallelPart"]

_log = logging.getLogger("zoo.tensor")


class TensorParallelPart:
    """Carries the section out, in ``prepare``.

    Args:
        section: ``tensor_parallel``.
        environment: of the engine.
    """

    def __init__(self, section: TensorParallelConfig, environment: Environment) -> None:
        self.section = section
        self.plan = None if section.plan is None else Plan.of_data(section.plan)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Leave this rank's part of ``module``, in place. Collective over the axis.

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
        comm, grain, sequence = Communicator.of_axes(mesh, [AXIS]), self.section.tp.tp_grain_size, self.section.sequence

        def proved() -> Plan:
            own = getattr(module, "tensor_plan", None)
            plan = self.plan or (own() if callable(own) else plan_of(module))
            if self.section.prove and hasattr(getattr(module, "config", None), "model_type"):
                prove(module, module.config, plan, degree, grain=grain, sequence=sequence)
            return plan

        self.plan = all_or_none(comm, "finding a tensor-parallel plan", proved)
        split(module, self.plan, mesh, grain=grain, sequence=sequence)
        if self.section.vocab_parallel_lm_head:
            in_parts(module)
        _log.info("cut over %d ranks by %s", degree, self.plan)
