"""Compression, and which data a step sees."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Refused, Table

_COMPRESSION = "zoo.deepspeed.adapters.compression.compress"
_ROUTING = "zoo.deepspeed.adapters.compression.random_ltd"
_BLOCKS = "the configuration's blocks drop tokens themselves: data_efficiency.data_routing.random_ltd."
_SAMPLING = "zoo.data_efficiency has an analyser, an index and loaders of its own."

TABLE: Table = {
    "compression": {},
    "compression.compress": {
        "init_compression": Name(f"{_COMPRESSION}:init_compression", "mpu= is refused: the mesh says it."),
        "redundancy_clean": Name(f"{_COMPRESSION}:redundancy_clean", "mpu= is refused: the mesh says it."),
        "student_initialization": f"{_COMPRESSION}:student_initialization",
    },
    "compression.helper": {
        name: f"zoo.deepspeed.adapters.utilities.helpers:{name}"
        for name in ("convert_conv1d_to_linear", "recursive_getattr", "recursive_setattr")
    },
    "runtime.data_pipeline.curriculum_scheduler": {
        "CurriculumScheduler": Name(
            "zoo.deepspeed.adapters.compression.curriculum:CurriculumScheduler",
            "custom difficulties outside of the limits are refused.",
        )
    },
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.basic_layer": {"RandomLayerTokenDrop": Refused(_BLOCKS)},
    "runtime.data_pipeline.data_routing.helper": {
        "RandomLayerTokenDrop": Refused(_BLOCKS),
        "convert_to_random_ltd": Name(
            f"{_ROUTING}:convert_to_random_ltd",
            "the blocks of the configuration drop tokens already; it looks at them.",
        ),
        "remove_random_ltd_state_dict": f"{_ROUTING}:remove_random_ltd_state_dict",
        "save_without_random_ltd": f"{_ROUTING}:save_without_random_ltd",
    },
    "runtime.data_pipeline.data_routing.scheduler": {
        name: Refused(_BLOCKS) for name in ("BaseScheduler", "RandomLTDScheduler")
    },
    "runtime.data_pipeline.data_sampling": {},
    "runtime.data_pipeline.data_sampling.data_analyzer": {
        name: Refused(_SAMPLING) for name in ("DataAnalyzer", "DistributedDataAnalyzer")
    },
    "runtime.data_pipeline.data_sampling.data_sampler": {"DeepSpeedDataSampler": Refused(_SAMPLING)},
    "runtime.data_pipeline.data_sampling.indexed_dataset": {
        name: Refused(_SAMPLING) for name in ("MMapIndexedDataset", "MMapIndexedDatasetBuilder")
    },
}
