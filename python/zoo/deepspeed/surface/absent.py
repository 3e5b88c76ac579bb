"""What DeepSpeed has and zoo has not, with the reason: a module, a name of a module, or all that is beneath one.

Importing it is an ImportError with the reason, asking for it an AttributeError with the same; programs that probe for
features see that it is not there. ``docs/migration.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

_INFERENCE = "there is no inference engine yet; a trained model runs as the torch module that it is."
_PROFILER = (
    "there is no profiler of operations yet; torch.utils.flop_counter counts them, and wall_clock_breakdown times."
)
_TENSOR_PARALLEL = (
    "layers are not split over ranks by injection yet; torch.distributed.tensor.parallel splits them, and zoo takes a "
    "mesh with an axis for it."
)
_COMPILER = "there are no compiler passes of its own yet; engine.compile() is torch.compile."
_SHAPES_OF_FILES = (
    "checkpoints are not reshaped by hand: zoo's are read at any number of ranks, DeepSpeed's by `zoo ckpt`."
)
_INTERNAL = "DeepSpeed keeps its own books with it; nothing of zoo's would use it."
_ZENFLOW = "ZenFlow is not there; zero_optimization.update_in_backward is the nearest."
_LORA = "there are no layers of its own for LoRA; those of peft train at every stage."
_ROLLOUT = "generation during training goes through unwrap_model_for_generation; there is no engine of rollouts yet."
_PINNED = "page-locked memory is zoo.io.BufferPool's."
_TRANSFORMER = "there are no fused transformer layers yet; torch.nn.functional.scaled_dot_product_attention is fused."

ABSENT: Mapping[str, str] = {
    "autotuning": "there is no autotuner yet; `zoo forecast` tells what a configuration needs before it runs.",
    "checkpoint.DeepSpeedCheckpoint": _SHAPES_OF_FILES,
    "checkpoint.ZeROCheckpoint": _SHAPES_OF_FILES,
    "checkpoint.deepspeed_checkpoint": _SHAPES_OF_FILES,
    "checkpoint.get_model_3d_descriptor": _SHAPES_OF_FILES,
    "checkpoint.model_3d_desc": _SHAPES_OF_FILES,
    "checkpoint.reshape_3d_utils": _SHAPES_OF_FILES,
    "checkpoint.reshape_meg_2d": _SHAPES_OF_FILES,
    "checkpoint.universal_checkpoint.load_hp_checkpoint_state": _SHAPES_OF_FILES,
    "checkpoint.zero_checkpoint": _SHAPES_OF_FILES,
    "compile": _COMPILER,
    "compression.basic_layer": "zoo.compression replaces no layers; it attaches transforms to those of the model.",
    "compression.scheduler": "the engine has its own; zoo.compression.CompressionScheduler is for other loops.",
    "datastates": "zoo writes checkpoints in the background itself: checkpoint.asynchronous.",
    "elasticity": "there is no elastic training yet; torchrun restarts jobs, and checkpoints fit any number of ranks.",
    "env_report": "there is no report of the environment yet; `zoo build` and `zoo io verify` say what works here.",
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "linear": _LORA,
    "model_implementations": _INFERENCE,
    "module_inject": _TENSOR_PARALLEL,
    "moe.experts": "the experts of a layer are layer.deepspeed_moe.experts.deepspeed_experts.",
    "moe.sharded_moe.MOELayer": "MoE is one module, which gates, sends and computes; its deepspeed_moe has the parts.",
    "nebula": "Azure's service for checkpoints is not used; they are written in the background by zoo itself.",
    "nvme": "`zoo io bench` measures devices.",
    "ops.adam.ZenFlowSelectiveAdamW": _ZENFLOW,
    "ops.adam.ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    "ops.adam.zenflow_torch_adam": _ZENFLOW,
    "ops.compile": _COMPILER,
    "ops.deepspeed4science": "attention with pair biases is torch's flex_attention.",
    "ops.fp_quantizer": "weights of 8 and fewer bits are zoo.compression's, which has no such kernel of its own.",
    "ops.op_builder.PinMemoryBuilder": _PINNED,
    "ops.op_builder.QuantizerBuilder": "the kernels that quantise are called by zoo.comm and zoo.compression only.",
    "ops.sparse_attention": "sparse attention is torch's flex_attention.",
    "ops.transformer": _TRANSFORMER,
    "profiling": _PROFILER,
    "runtime.comm.coalesced_collectives.all_to_all_quant_reduce": (
        "quantised reductions are the engine's own: zero_quantized_gradients in the configuration."
    ),
    "runtime.comm.coalesced_collectives.reduce_scatter_coalesced": (
        "deepspeed.comm.reduce_scatter_tensor is there, of one tensor."
    ),
    "runtime.domino": _TENSOR_PARALLEL,
    "runtime.hybrid_engine": _ROLLOUT,
    "runtime.rollout": _ROLLOUT,
    "runtime.superoffload": "SuperOffload is not there; offload_optimizer is.",
    "runtime.swap_tensor": "parameters and states go to NVMe by zoo.zero.offload, in pieces of any size.",
    "runtime.tensor_parallel": _TENSOR_PARALLEL,
    "runtime.zenflow": _ZENFLOW,
    "runtime.zero.parameter_offload": _INTERNAL,
    "runtime.zero.partition_parameters.CUDAQuantizer": (
        "weights are quantised for the wire by zoo.comm: zero_quantized_weights in the configuration."
    ),
    "runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": (
        "Init leaves torch.nn.functional.linear alone, and puts back the rest when its context ends."
    ),
    "runtime.zero.partition_parameters.MultipleAllGatherHandles": _INTERNAL,
    "runtime.zero.partition_parameters.partitioned_param_data_shape": (
        "partitioned parameters keep their whole shape; ds_status says whether their values are there."
    ),
    "runtime.zero.stage_1_and_2.IPGBucket": _INTERNAL,
    "tp_model_init": _TENSOR_PARALLEL,
}  # fmt: skip
"""Path beneath ``deepspeed`` → the reason, one sentence."""
