"""Compression, and which data a step sees."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Table

_COMPRESSION = "zoo.deepspeed.adapters.compression"

TABLE: Table = {
    "compression": {},
    "compression.compress": {
        "init_compression": Name(f"{_COMPRESSION}:init_compression", "mpu= is refused: the mesh says it."),
        "redundancy_clean": Name(f"{_COMPRESSION}:redundancy_clean", "mpu= is refused: the mesh says it."),
        "student_initialization": f"{_COMPRESSION}:student_initialization",
    },
    "compression.helper": {
        name: f"zoo.deepspeed.adapters.helpers:{name}" for name in ("recursive_getattr", "recursive_setattr")
    },
    "runtime.data_pipeline.curriculum_scheduler": {
        "CurriculumScheduler": Name(
            "zoo.deepspeed.adapters.curriculum:CurriculumScheduler",
            "custom difficulties outside of the limits are refused.",
        )
    },
}
