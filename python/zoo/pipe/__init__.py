"""Pipeline parallelism: layers in stages on several ranks, schedules as data, and what trains by them.

* :class:`PipelineModule` of layers or :class:`LayerSpec`, :class:`TiedLayerSpec`; :func:`attach_loss` for losses of
  middle layers. ``zoo.engine.initialize`` makes an engine of it. :func:`split` makes one of any model, by tracing its
  forward; :func:`measure`: what each layer costs, by which they are spread over stages.
* :class:`Table`, :func:`build`, :func:`lower`, :func:`check`: schedules, their programs, and whether they are right.
* :class:`ProcessTopology` and its kinds: which rank is where; :class:`PipelineParallelGrid`: their process groups.

What needs torch is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo.pipe.lowering import Program, Step, Transfer, lower
from zoo.pipe.schedules import Computation, Kind, ScheduleError, Table, build
from zoo.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zoo.pipe.validate import check

if TYPE_CHECKING:
    from zoo.pipe.grid import PipelineParallelGrid
    from zoo.pipe.measuring import measure
    from zoo.pipe.module import PipelineModule
    from zoo.pipe.runtime.losses import attach_loss
    from zoo.pipe.specs import LayerSpec, TiedLayerSpec
    from zoo.pipe.tracing import split

_HOMES = {
    "LayerSpec": "specs",
    "PipelineModule": "module",
    "PipelineParallelGrid": "grid",
    "TiedLayerSpec": "specs",
    "attach_loss": "runtime.losses",
    "measure": "measuring",
    "split": "tracing",
}

__all__ = [
    "Computation",
    "Kind",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "Program",
    "ScheduleError",
    "Step",
    "Table",
    "TiedLayerSpec",
    "Transfer",
    "attach_loss",
    "build",
    "check",
    "lower",
    "measure",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
