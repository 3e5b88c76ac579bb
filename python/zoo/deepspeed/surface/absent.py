"""What DeepSpeed has and zoo has not, with the reason: a module, a name of a module, or all that is beneath one.

What ``parts_to_come.txt`` lists of it can be imported, and refuses with the reason when it is used. All else is not
there: importing it is an ImportError with the reason, asking for it an AttributeError with the same.
``docs/reference/deepspeed-names.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zoo.deepspeed.modules import Refused

_INFERENCE = (
    "there is no server of ragged batches, nor its kernels; deepspeed.init_inference makes an engine that generates, "
    "and a trained model runs as the torch module that it is."
)
_CODES = "weights in codes are zoo.nn.pack_linears' and zoo.compression's; init_inference packs them with dtype=int8."
_PROFILER = (
    "the profiler replaces no functions of torch; zoo.profiling.register_formula counts an operator of one's own."
)
_TENSOR_PARALLEL = (
    "a model is cut by the section tensor_parallel, or by zoo.tensor; zoo.inject.inject puts fast forwards into layers."
)
_CUT = "the engine does it, from the section tensor_parallel and what tp_model_init was told."
_COMPILER = (
    "its compiler passes are zoo's own: compile.deepcompile with engine.compile() makes one graph, and "
    "zoo.compile.register_compile_pass adds a pass."
)
_SEQUENCES = (
    "models are not rewritten for split sequences; DistributedAttention and UlyssesSPAttentionHF wrap their attention."
)
_SHAPES_OF_FILES = (
    "checkpoints are not reshaped by hand: zoo's are read at any number of ranks, DeepSpeed's by `zoo ckpt`."
)
_INTERNAL = "DeepSpeed keeps its own books with it; nothing of zoo's would use it."
_ZENFLOW = "ZenFlow is not there; zero_optimization.update_in_backward is the nearest."
_LORA = "there are no layers of its own for LoRA; those of peft train at every stage."
_ROLLOUT = (
    "deepspeed.runtime.rollout.HybridEngineRollout draws answers from the engine of initialize; it needs no engine of "
    "another class."
)
_PINNED = "page-locked memory is zoo.io.BufferPool's."
_TRANSFORMER = (
    "no layers for inference are made by hand; deepspeed.init_inference puts fast forwards into those of the model."
)
_EXPERTS_AND_FILES = "experts are a dimension of zoo's tensors in checkpoints, which fit any number of ranks."
_AUTO_EXPERTS = (
    "experts of Hugging Face models are found and shared by the section expert_parallel, which is zoo-moe's; none are "
    "put in by hand."
)
_TRITON = "there are no kernels in Triton; torch's own and those of zoo.kernels compute the same."
_WRITERS = "checkpoints are written by zoo.checkpointing, on all ranks at once."
_AUTOCAST = "section torch_autocast is the engine's own; gradients travel in the dtype of communication_data_type."
_DUALPIPE = 'the schedule is zoo.pipe\'s: PipelineModule(..., schedule="dualpipe_v").'

ABSENT: Mapping[str, str] = {
    "autotuning": "`zoo tune` searches (zoo.tuning); these are pieces of another search.",
    "checkpoint.DeepSpeedCheckpoint": _SHAPES_OF_FILES,
    "checkpoint.ZeROCheckpoint": _SHAPES_OF_FILES,
    "checkpoint.deepspeed_checkpoint": _SHAPES_OF_FILES,
    "checkpoint.reshape_3d_utils": _SHAPES_OF_FILES,
    "checkpoint.reshape_meg_2d": _SHAPES_OF_FILES,
    "checkpoint.universal_checkpoint.load_hp_checkpoint_state": _SHAPES_OF_FILES,
    "checkpoint.zero_checkpoint": _SHAPES_OF_FILES,
    "compile": _COMPILER,
    "compression.basic_layer": "zoo.compression replaces no layers; it attaches transforms to those of the model.",
    "compression.scheduler": "the engine has its own; zoo.compression.CompressionScheduler is for other loops.",
    "datastates": "zoo writes checkpoints in the background itself: checkpoint.asynchronous.",
    "elasticity": "`zoo launch --max-restarts` restarts jobs on the hosts that are left; there is no agent to inherit.",
    "env_report": "Ascend's devices are not among zoo's; the rest of the report is there.",
    "inference": _INFERENCE,
    "inference.quantization": _CODES,
    "linear": _LORA,
    "model_implementations": _INFERENCE,
    "module_inject": _TENSOR_PARALLEL,
    "module_inject.auto_ep": _AUTO_EXPERTS,
    "module_inject.auto_ep_comm": _AUTO_EXPERTS,
    "module_inject.auto_ep_config": _AUTO_EXPERTS,
    "module_inject.auto_ep_folding": _AUTO_EXPERTS,
    "module_inject.auto_ep_layer": _AUTO_EXPERTS,
    "module_inject.auto_ep_preset_adapters": _AUTO_EXPERTS,
    "module_inject.auto_ep_presets": _AUTO_EXPERTS,
    "moe.experts": "the experts of a layer are layer.deepspeed_moe.experts.deepspeed_experts.",
    "moe.sharded_moe.MOELayer": "MoE is one module, which gates, sends and computes; its deepspeed_moe has the parts.",
    "nebula": "Azure's service for checkpoints is not used; they are written in the background by zoo itself.",
    "nvme": "`zoo io bench` measures devices.",
    "ops.adam.ZenFlowSelectiveAdamW": _ZENFLOW,
    "ops.adam.ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    "ops.adam.zenflow_torch_adam": _ZENFLOW,
    "ops.deepspeed4science": "attention with pair biases is torch's flex_attention.",
    "ops.fp_quantizer": "weights of 8 and fewer bits are zoo.compression's, which has no such kernel of its own.",
    "ops.sparse_attention": "sparse attention is torch's flex_attention.",
    "ops.transformer": _TRANSFORMER,
    "ops.transformer.transformer": "the layer and its configuration are there; what theirs are made of is not.",
    "profiling.flops_profiler.profiler.wrapFunc": _PROFILER,
    "runtime.comm.coalesced_collectives.all_to_all_quant_reduce": (
        "quantised reductions are the engine's own: zero_quantized_gradients in the configuration."
    ),
    "runtime.comm.coalesced_collectives.reduce_scatter_coalesced": (
        "deepspeed.comm.reduce_scatter_tensor is there, of one tensor."
    ),
    "runtime.domino": _TENSOR_PARALLEL,
    "runtime.rollout": _ROLLOUT,
    "runtime.superoffload": "SuperOffload is not there; offload_optimizer is.",
    "runtime.swap_tensor": "parameters and states go to NVMe by zoo.shard.offload, in pieces of any size.",
    "runtime.tensor_parallel": _CUT,
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
    "replace_transformer_layer": _TENSOR_PARALLEL,
    "DualPipeVEngine": _DUALPIPE,
    "DualPipeVModule": _DUALPIPE,
    "checkpoint.enable_universal_checkpoint": _SHAPES_OF_FILES,
    "checkpoint.merge_state": _SHAPES_OF_FILES,
    "checkpoint.affine": _SHAPES_OF_FILES,
    "checkpoint.affine_transfer": _SHAPES_OF_FILES,
    "checkpoint.reshape_utils": _SHAPES_OF_FILES,
    "checkpoint.autoep_affine": _EXPERTS_AND_FILES,
    "checkpoint.autoep_universal": _EXPERTS_AND_FILES,
    "checkpoint.autoep_zero3_metadata": _EXPERTS_AND_FILES,
    "checkpoint.universal_checkpoint.enable_universal_checkpoint": _SHAPES_OF_FILES,
    "moe.ep_tp_dispatch": _AUTO_EXPERTS,
    "moe.fused_expert_layout": _AUTO_EXPERTS,
    "ops.random_ltd": "random-LTD is the engine's own: data_efficiency.data_routing.",
    "ops.triton_ops": _TRITON,
    "runtime.chunked_cross_entropy": (
        "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss computes a loss in pieces."
    ),
    "runtime.comm.nccl": "torch.distributed's NCCL is used as it is; optimizers with compression have zoo.comm's.",
    "runtime.hybrid_engine_graph": _ROLLOUT,
    "runtime.keep_in_fp32": "buffers keep their dtype; data_types.buffer_dtype casts them.",
    "runtime.model_checkpointing": _WRITERS,
    "runtime.progressive_layer_drop": (
        "progressive layer drop is the engine's own: progressive_layer_drop in the configuration."
    ),
    "runtime.python_gc": "the engine has its own: disable_python_gc in the configuration.",
    "runtime.sparse_tensor": "sparse gradients are the engine's own: sparse_gradients in the configuration.",
    "runtime.torch_autocast": _AUTOCAST,
    "runtime.weight_quantizer": "weights of 8 and fewer bits are zoo.compression's.",
    "runtime.zero.offload_states.get_state_devices": (
        "engine.offload_states and reload_states move states; they tell where these are."
    ),
    "sequence.linear_cross_entropy": _SEQUENCES,
    "sequence.vocab_parallel_ops": _SEQUENCES,
    "sequence.InternVLFusionAdapter": _SEQUENCES,
    "sequence.LlavaFusionAdapter": _SEQUENCES,
    "sequence.ModalityFusionSPAdapter": _SEQUENCES,
    "sequence.Qwen2VLFusionAdapter": _SEQUENCES,
    "sequence.SPModelInfo": _SEQUENCES,
    "sequence.UlyssesSPViTAttention": _SEQUENCES,
    "sequence.VocabParallelCausalLMLoss": _SEQUENCES,
    "sequence.VocabParallelCrossEntropyLoss": _SEQUENCES,
    "sequence.auto_wrap_model_for_sp": _SEQUENCES,
    "sequence.configure_vocab_parallel_loss": _SEQUENCES,
    "sequence.detect_model_sp_info": _SEQUENCES,
    "sequence.vocab_parallel_cross_entropy": _SEQUENCES,
    "checkpoint.ds_to_universal._aggregate_autoep_zero12_metadata": _INTERNAL,
    "checkpoint.ds_to_universal._autoep_expert_param_names_by_rank": _INTERNAL,
    "checkpoint.ds_to_universal._get_zero3_model_state_files": _INTERNAL,
    "checkpoint.ds_to_universal._group_per_tp_shapes": _INTERNAL,
    "checkpoint.ds_to_universal._uses_zero3_partitioned_autoep_metadata": _INTERNAL,
    "checkpoint.ds_to_universal._validate_autotp_conversion_support": _INTERNAL,
    "checkpoint.ds_to_universal.extract_zero_shards_stage3": _INTERNAL,
    "checkpoint.ds_to_universal.merge_tp_slices": _INTERNAL,
    "checkpoint.universal_checkpoint._get_param_uc_restore_meta": _INTERNAL,
    "checkpoint.universal_checkpoint._narrow_sub_params": _INTERNAL,
    "checkpoint.universal_checkpoint._resolve_autotp_partition": _INTERNAL,
    "moe.ep_experts._run_experts_grouped_mm": _INTERNAL,
    "moe.sharded_moe._route_slots": _INTERNAL,
    "moe.sharded_moe._sparse_decode": _INTERNAL,
    "moe.sharded_moe._sparse_encode": _INTERNAL,
    "runtime.engine._checkpoint_parallel_metadata": _INTERNAL,
    "runtime.engine._eigenvalue_summary_events": _INTERNAL,
    "runtime.pipe.topology._prime_factors": _INTERNAL,
    "runtime.zero.offload_states._make_offload_state_key": _INTERNAL,
    "runtime.zero.partition_parameters._contradicting_single_rank_pg_error": _INTERNAL,
    "runtime.zero.partition_parameters.get_allgather_dtype": _INTERNAL,
    "sequence.layer._SeqAllToAll": _INTERNAL,
    "sequence.layer._rotate_half": _INTERNAL,
    "sequence.layer._torchembed_available": _INTERNAL,
    "utils.pin_memory_tracker._fmt_bytes": _INTERNAL,
    "utils.pin_memory_tracker._tracker": _INTERNAL,
    "utils.zero_to_fp32._raise_if_autoep_zero3_partitioned_checkpoint": _INTERNAL,
    "sequence.fpdt_layer._FPDTGPUOffloadingAttentionImpl_": _INTERNAL,
    "io": _WRITERS,
}  # fmt: skip
"""Path beneath ``deepspeed`` → the reason, one sentence."""

FILE = Path(__file__).with_name("parts_to_come.txt")


def reason(path: str) -> str:
    """Why what is at this path beneath ``deepspeed`` is refused.

    Raises:
        ValueError: ``ABSENT`` has no reason for it.
    """
    above = path
    while above:
        if above in ABSENT:
            return ABSENT[above]
        above = above.rpartition(".")[0]
    raise ValueError(f"{FILE.name} names {path!r}, for which ABSENT has no reason.")


def _read() -> dict[str, dict[str, Refused]]:
    """``parts_to_come.txt`` has a line for each module: its path beneath ``deepspeed`` ("." for the root), its names.
    What begins with a small letter is a function, all else a class."""
    found: dict[str, dict[str, Refused]] = {}
    module = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not line.startswith(" "):
            module = words.pop(0).rstrip(":").removeprefix(".")
        names = found.setdefault(module, {})
        for name in words:
            function = name.lstrip("_")[:1].islower()
            names[name] = Refused(reason(f"{module}.{name}".lstrip(".")), function)
    return found


TABLE = _read()
"""Module → name → the refusal, of what can be imported."""
