"""Pipelines: modules, topologies, schedules; and long sequences."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Refused, Table

_MODULE = "zoo.deepspeed.adapters.pipelines.pipeline_module"
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
    "PipelineParallelGrid": "zoo.deepspeed.adapters.pipelines.pipeline_grid:PipelineParallelGrid",
}
_INSTRUCTIONS = (
    "BackwardPass", "BufferOpInstruction", "ForwardPass", "LoadMicroBatch", "OptimizerStep", "PipeInstruction",
    "RecvActivation", "RecvGrad", "ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad",
)  # fmt: skip

_TILED = "zoo.deepspeed.adapters.sequences.tiled_compute"
_SHARED = "zoo.deepspeed.adapters.sequences.sequence_parallel"
_REWRITTEN = (
    "models are not rewritten for split sequences; DistributedAttention and UlyssesSPAttentionHF wrap their attention."
)
_VOCABULARY = "no vocabulary is split over ranks yet; torch.nn.functional.cross_entropy takes a rank's own tokens."
_CHUNKS = "no chunks of sequences go to the host; what activation checkpointing keeps can."

TABLE: Table = {
    "runtime.sequence_parallel.ulysses_sp": {
        **{
            name: Name(f"{_TILED}:{name}", "compute_params makes no difference: all that needs a gradient gets it.")
            for name in ("SequenceTiledCompute", "TiledMLP", "sequence_tiled_compute")
        },
        "UlyssesSPAttentionHF": Name(f"{_SHARED}:UlyssesSPAttentionHF", "flex_attention is refused."),
        "UlyssesSPDataLoaderAdapter": f"{_SHARED}:UlyssesSPDataLoaderAdapter",
        "TiledFusedLogitsLoss": Name(
            f"{_TILED}:TiledFusedLogitsLoss",
            "backward computes the logits again; what the loss is multiplied by reaches parameters too.",
        ),
    },
    "runtime.sequence_parallel.parallel_state_sp": "zoo.deepspeed.adapters.sequences.sequence_ranks",
    "sequence.auto_sp": {"auto_wrap_model_for_sp": Refused(_REWRITTEN, function=True)},
    "sequence.autosp_detector": {
        "SPModelInfo": Refused(_REWRITTEN),
        "detect_model_sp_info": Refused(_REWRITTEN, function=True),
    },
    "sequence.autosp_fusion": {
        name: Refused(_REWRITTEN)
        for name in (
            "InternVLFusionAdapter",
            "LlavaFusionAdapter",
            "ModalityFusionSPAdapter",
            "Qwen2VLFusionAdapter",
        )
    },
    "sequence.autosp_vit": {"UlyssesSPViTAttention": Refused(_REWRITTEN)},
    "sequence.cross_entropy": {
        **{
            name: Refused(_VOCABULARY, function=True)
            for name in (
                "configure_vocab_parallel_loss",
                "vocab_parallel_cross_entropy",
                "vocab_sequence_parallel_cross_entropy",
            )
        },
        "VocabParallelCausalLMLoss": Refused(_VOCABULARY),
        "VocabParallelCrossEntropyLoss": Refused(_VOCABULARY),
    },
    "sequence.fpdt_layer": {
        name: Refused(_CHUNKS) for name in ("FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss")
    },
    "sequence.layer": {
        "apply_rotary_pos_emb": f"{_TILED}:apply_rotary_pos_emb",
        "DistributedAttention": Name(f"{_SHARED}:DistributedAttention", "P divides the number of heads."),
    },
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
            "zoo.deepspeed.adapters.pipelines.pipeline:PipelineEngine",
            "module_state_dict is the whole model's, on all ranks.",
        ),
        "PipelineError": f"{_MODULE}:PipelineError",
        "DeepSpeedEngine": "zoo.deepspeed.adapters.root.engine:DeepSpeedEngine",
    },
    "runtime.state_dict_factory": {
        name: Refused(_FACTORY) for name in ("MegatronSDLoader", "SDLoaderBase", "SDLoaderFactory")
    },
}
