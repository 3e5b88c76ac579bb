"""Pipeline parallelism: topologies, schedules as data, what checks, simulates and draws them."""

from zoo.pipe.lowering import Program, Step, Transfer, lower
from zoo.pipe.schedules import Computation, Kind, ScheduleError, Table, build
from zoo.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zoo.pipe.validate import check

__all__ = [
    "Computation",
    "Kind",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "Program",
    "ScheduleError",
    "Step",
    "Table",
    "Transfer",
    "build",
    "check",
    "lower",
]
