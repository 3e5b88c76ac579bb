"""Pipeline schedules, one a file: tables of computations by pipeline rank and time slot.

A schedule is a component of the kind "pipe_schedule"; ``build("zb_v", num_ranks, num_micro_batches)`` makes its table.
"""

from zoo.pipe.schedules.builder import ScheduleBuilder, build, names
from zoo.pipe.schedules.csv_table import CsvSchedule, from_csv, to_csv
from zoo.pipe.schedules.data_parallel import DataParallel
from zoo.pipe.schedules.dualpipe_v import DualPipeV
from zoo.pipe.schedules.gpipe import GPipe
from zoo.pipe.schedules.inference import Inference
from zoo.pipe.schedules.interleaved_1f1b import Interleaved1F1B
from zoo.pipe.schedules.one_f_one_b import OneFOneB
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table, looped, v_shaped
from zoo.pipe.schedules.zb_h1 import ZBH1
from zoo.pipe.schedules.zb_v import ZBV

__all__ = [
    "ZBH1",
    "ZBV",
    "Computation",
    "CsvSchedule",
    "DataParallel",
    "DualPipeV",
    "GPipe",
    "Inference",
    "Interleaved1F1B",
    "Kind",
    "OneFOneB",
    "ScheduleBuilder",
    "ScheduleError",
    "Table",
    "build",
    "from_csv",
    "looped",
    "names",
    "to_csv",
    "v_shaped",
]
