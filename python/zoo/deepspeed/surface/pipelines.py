"""Pipelines: modules, topologies, schedules."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Refused, Table

_MODULE = "zoo.deepspeed.adapters.pipeline_module"
_SCHEDULE = "zoo.pipe.schedules.instructions"
_FACTORY = "checkpoints of tensor-parallel ranks are not merged by hand: zoo's are whole, DeepSpeed's are `zoo ckpt`'s."

_LAYERS: Names = {
    "PipelineModule": Name(
        f"{_MODULE}:PipelineModule",
        "zoo.pipe.PipelineModule: every stage of ZeRO, more schedules; checkpoints know no stages.",
    ),
    "LayerSpec": "zoo.pipe:LayerSpec",
    "TiedLayerSpec": "zoo.pipe:TiedLayerSpec",
}
_TOPOLOGY: Names = {
    "ProcessTopology": "zoo.pipe:ProcessTopology",
    "PipeDataParallelTopology": "zoo.pipe:PipeDataParallelTopology",
    "PipeModelDataParallelTopology": "zoo.pipe:PipeModelDataParallelTopology",
    "PipelineParallelGrid": "zoo.deepspeed.adapters.pipeline_grid:PipelineParallelGrid",
}
_INSTRUCTIONS = (
    "BackwardPass", "BufferOpInstruction", "ForwardPass", "LoadMicroBatch", "OptimizerStep", "PipeInstruction",
    "RecvActivation", "RecvGrad", "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad",
)  # fmt: skip

TABLE: Table = {
    "pipe": dict(_LAYERS),
    "runtime.pipe": {**_LAYERS, "ProcessTopology": _TOPOLOGY["ProcessTopology"]},
    "runtime.pipe.module": {
        **_LAYERS,
        "PipelineError": Name(f"{_MODULE}:PipelineError", "a RuntimeError."),
        **{name: _TOPOLOGY[name] for name in ("PipeDataParallelTopology", "PipelineParallelGrid")},
    },
    "runtime.pipe.topology": dict(_TOPOLOGY),
    "runtime.pipe.schedule": {
        **{name: f"{_SCHEDULE}:{name}" for name in _INSTRUCTIONS},
        "PipeSchedule": f"{_SCHEDULE}:PipeSchedule",
        "DataParallelSchedule": f"{_SCHEDULE}:DataParallelSchedule",
        "InferenceSchedule": Name(f"{_SCHEDULE}:InferenceSchedule", "a step loads its micro-batch after transfers."),
        "TrainSchedule": f"{_SCHEDULE}:TrainSchedule",
    },
    "runtime.pipe.engine": {
        "PipelineEngine": Name(
            "zoo.deepspeed.adapters.pipeline:PipelineEngine", "module_state_dict is the whole model's, on all ranks."
        ),
        "PipelineError": f"{_MODULE}:PipelineError",
        "DeepSpeedEngine": "zoo.deepspeed.adapters.engine:DeepSpeedEngine",
    },
    "runtime.state_dict_factory": {
        name: Refused(_FACTORY) for name in ("MegatronSDLoader", "SDLoaderBase", "SDLoaderFactory")
    },
}
