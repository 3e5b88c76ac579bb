"""The core's own components: one line each, and nothing is imported until a name is asked for.

A subpackage of the core adds its lines here. A package outside the core declares the same thing as entry points of the
group ``zoo.components`` (see README.md).
"""

from __future__ import annotations

__all__ = ["CORE"]

CORE: dict[str, dict[str, str]] = {
    "activation_checkpoint": {
        "non_reentrant": "zoo.activation_checkpointing.api:non_reentrant_checkpoint",
        "zoo": "zoo.activation_checkpointing.api:checkpoint",
    },
    "compressor": {
        "blockwise": "zoo.comm.compression:Blockwise",
        "fp8": "zoo.comm.compression:Fp8",
        "onebit": "zoo.comm.compression:OneBit",
        "power_sgd": "zoo.comm.compression:PowerSGD",
        "random_k": "zoo.comm.compression:RandomK",
        "top_k": "zoo.comm.compression:TopK",
    },
    "config_root": dict.fromkeys(
        [
            "communication_data_type",
            "disable_allgather",
            "fp32_allreduce",
            "gradient_allreduce_op",
            "gradient_predivide_factor",
            "prescale_gradients",
            "seq_parallel_communication_data_type",
            "sparse_gradients",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ],
        "zoo.zero.options.root:ZeroRoot",
    ),
    "config_section": {
        "activation_checkpointing": "zoo.activation_checkpointing.config:ActivationCheckpointingConfig",
        "aio": "zoo.io.config:AioConfig",
        "checkpoint": "zoo.checkpointing.config:CheckpointConfig",
        "comet": "zoo.monitor.comet:CometSection",
        "csv_monitor": "zoo.monitor.csv_monitor:CsvSection",
        "curriculum_learning": "zoo.data_efficiency.config:CurriculumConfig",
        "data_efficiency": "zoo.data_efficiency.config:DataEfficiencyConfig",
        "jsonl_monitor": "zoo.monitor.jsonl_monitor:JsonlSection",
        "pipeline": "zoo.pipe.config:PipelineConfig",
        "progressive_layer_drop": "zoo.data_efficiency.config:LayerDropConfig",
        "tensorboard": "zoo.monitor.tensorboard:TensorBoardSection",
        "train": "zoo.train.config:TrainConfig",
        "wandb": "zoo.monitor.wandb:WandbSection",
        "zero_optimization": "zoo.shard.config:ZeroConfig",
    },
    "engine": {
        "pipeline": "zoo.engine.pipeline:PipelineEngine",
        "plain": "zoo.engine.engine:Engine",
    },
    "engine_part": {
        "activation_checkpointing": "zoo.activation_checkpointing.part:ActivationCheckpointingPart",
        "curriculum_learning": "zoo.data_efficiency.curriculum:CurriculumLearning",
        "data_efficiency": "zoo.data_efficiency.part:DataEfficiency",
        "progressive_layer_drop": "zoo.data_efficiency.layer_drop:ProgressiveLayerDrop",
    },
    "lr_schedule": {
        "LRRangeTest": "zoo.lr_schedules:LRRangeTest",
        "OneCycle": "zoo.lr_schedules:OneCycle",
        "WarmupCosineLR": "zoo.lr_schedules:WarmupCosineLR",
        "WarmupDecayLR": "zoo.lr_schedules:WarmupDecayLR",
        "WarmupLR": "zoo.lr_schedules:WarmupLR",
    },
    "optimizer": {
        "ASGD": "torch.optim:ASGD",
        "Adadelta": "torch.optim:Adadelta",
        "Adagrad": "zoo.optim.by_name:Adagrad",
        "Adam": "zoo.optim.by_name:Adam",
        "AdamW": "zoo.optim.by_name:AdamW",
        "Adamax": "torch.optim:Adamax",
        "DiLoCo": "zoo.optim:DiLoCo",
        "Lamb": "zoo.optim.by_name:Lamb",
        "Lion": "zoo.optim.by_name:Lion",
        "LocalSGD": "zoo.optim:LocalSGD",
        "Muon": "zoo.optim:Muon",
        "NAdam": "torch.optim:NAdam",
        "OneBitAdam": "zoo.optim.by_name:OneBitAdam",
        "OneBitLamb": "zoo.optim.by_name:OneBitLamb",
        "RAdam": "torch.optim:RAdam",
        "RMSprop": "torch.optim:RMSprop",
        "Rprop": "torch.optim:Rprop",
        "SGD": "zoo.optim:SGD",
        "ZeroOneAdam": "zoo.optim.by_name:ZeroOneAdam",
    },
    "parameter_gatherer": {
        "zero": "zoo.shard.values.gathered:GatheredParameters",
    },
    "pipe_schedule": {
        "1f1b": "zoo.pipe.schedules.one_f_one_b:OneFOneB",
        "auto": "zoo.pipe.schedules.auto:AutoSchedule",
        "csv": "zoo.pipe.schedules.csv_table:CsvSchedule",
        "data_parallel": "zoo.pipe.schedules.data_parallel:DataParallel",
        "dualpipe_v": "zoo.pipe.schedules.dualpipe_v:DualPipeV",
        "gpipe": "zoo.pipe.schedules.gpipe:GPipe",
        "inference": "zoo.pipe.schedules.inference:Inference",
        "interleaved_1f1b": "zoo.pipe.schedules.interleaved_1f1b:Interleaved1F1B",
        "zb_h1": "zoo.pipe.schedules.zb_h1:ZBH1",
        "zb_v": "zoo.pipe.schedules.zb_v:ZBV",
    },
    "runner": {
        "pipeline": "zoo.pipe.runtime.runner:PipelineRunner",
        "plain": "zoo.engine.plain:PlainRunner",
    },
    "sink": {
        "comet": "zoo.monitor.comet:CometMonitor",
        "csv_monitor": "zoo.monitor.csv_monitor:CsvMonitor",
        "jsonl_monitor": "zoo.monitor.jsonl_monitor:JsonlMonitor",
        "tensorboard": "zoo.monitor.tensorboard:TensorBoardMonitor",
        "wandb": "zoo.monitor.wandb:WandbMonitor",
    },
    "task": {
        "byte_lm": "zoo.examples.byte_lm:ByteTask",
        "smollm2": "zoo.examples.smollm2:SmolLM2Task",
    },
}
"""kind → name → ``"module:attribute"``."""
