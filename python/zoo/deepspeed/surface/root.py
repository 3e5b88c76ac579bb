"""The root, the engines of training and of inference, and the ZeRO names that models and optimizers have."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Names, Table

_ENTRY = "zoo.deepspeed.adapters.root.entry"
_ENGINE = "zoo.deepspeed.adapters.root.engine"
_OPTIMIZER = "zoo.deepspeed.adapters.root.optimizer"
_PARAMETERS = "zoo.deepspeed.adapters.zero.parameters"
_INIT = Name("zoo.deepspeed.adapters.zero.zero_init:Init", "parameters are cast, buffers are not.")
_GATHERED = Name(
    "zoo.deepspeed.adapters.zero.parameters:GatheredParameters",
    "what would be lost (a write without modifier_rank) is an error.",
)
_REGISTER = Name(f"{_PARAMETERS}:register_external_parameter")
_UNREGISTER = Name(f"{_PARAMETERS}:unregister_external_parameter")
_ESTIMATORS = {
    f"estimate_zero{stage}_model_states_mem_needs{kind}": f"zoo.zero:estimate_zero{stage}_model_states_mem_needs{kind}"
    for stage in (2, 3)
    for kind in ("", "_all_cold", "_all_live")
}

_ZERO: Names = {
    "Init": _INIT,
    "GatheredParameters": _GATHERED,
    "register_external_parameter": _REGISTER,
    "unregister_external_parameter": _UNREGISTER,
    "ZeroParamStatus": f"{_PARAMETERS}:ZeroParamStatus",
    "ZeroParamType": f"{_PARAMETERS}:ZeroParamType",
}

_INFERENCE = "zoo.deepspeed.adapters.inference"
_GENERATES: Names = {
    "InferenceEngine": Name(
        f"{_INFERENCE}.engine:InferenceEngine",
        "the model is put into eval(); generate refuses more than max_out_tokens, prompt included; beams run.",
    ),
}
_SETTINGS: Names = {
    "DeepSpeedInferenceConfig": Name(
        f"{_INFERENCE}.config:DeepSpeedInferenceConfig",
        "unknown keys are told with those like them; keys of former times are no attributes; quant may be a number of "
        "groups, or a tuple.",
    ),
}

_HYBRID: Names = {
    "DeepSpeedHybridEngine": Name(
        f"{_INFERENCE}.hybrid:DeepSpeedHybridEngine",
        "made by initialize where hybrid_engine.enabled is true; the very parameters generate, or, with "
        "inference_tp_size, parts that ranks share; generate refuses more than max_out_tokens, prompt included.",
    ),
}

TABLE: Table = {
    "runtime.hybrid_engine": _HYBRID,
    "inference": {},
    "inference.engine": _GENERATES,
    "inference.config": {
        **_SETTINGS,
        **{
            name: f"{_INFERENCE}.config:{name}"
            for name in (
                "ActivationQuantConfig", "BaseQuantConfig", "DeepSpeedMoEConfig", "DeepSpeedTPConfig", "DtypeEnum",
                "InferenceCheckpointConfig", "MoETypeEnum", "QKVQuantConfig", "QuantTypeEnum", "WeightQuantConfig",
            )
        },
        "QuantizationConfig": f"{_INFERENCE}.config:InferenceQuantizationConfig",
    },
    "inference.quantization.utils": {
        "Quantizer": Name(f"{_INFERENCE}.quantization:Quantizer", "a group of equal elements has finite codes."),
        "DeQuantizer": f"{_INFERENCE}.quantization:DeQuantizer",
    },
    "inference.quantization.layers": {
        "QuantizedLinear": Name(
            f"{_INFERENCE}.quantization:QuantizedLinear", "a zoo.nn.PackedLinear, which multiplies codes."
        ),
    },
    "inference.quantization.quantization": {
        "_init_group_wise_weight_quantization": Name(
            f"{_INFERENCE}.quantization:init_group_wise_weight_quantization",
            "linear layers alone, of any dtype; they become zoo.nn.PackedLinear.",
        ),
    },
    "": {
        **_GENERATES, **_HYBRID,
        **_SETTINGS,
        "init_inference": Name(
            f"{_INFERENCE}.entry:init_inference",
            "parameters are cast, angles of rotary positions are not; a layer is injected where that is proved; int8 "
            "is codes in groups of 32; CUDA graphs are of forward, not of generate; zero streams from NVMe alone.",
        ),
        "default_inference_config": f"{_INFERENCE}.entry:default_inference_config",
        "initialize": f"{_ENTRY}:initialize",
        "init_distributed": Name(
            f"{_ENTRY}:init_distributed",
            "the default timeout is that of the documentation; nccl without a GPU is gloo, with a warning.",
        ),
        "add_config_arguments": "zoo.deepspeed.adapters.configuration.translation:add_config_arguments",
        "DeepSpeedEngine": f"{_ENGINE}:DeepSpeedEngine",
        "DeepSpeedConfigError": "zoo.config:ConfigError",
        "DeepSpeedOptimizer": f"{_OPTIMIZER}:DeepSpeedOptimizer",
        "PipelineModule": "zoo.deepspeed.adapters.pipelines.pipeline_module:PipelineModule",
        "PipelineEngine": "zoo.deepspeed.adapters.pipelines.pipeline:PipelineEngine",
        "DeepSpeedDataLoader": "zoo.deepspeed.adapters.root.data:DeepSpeedDataLoader",
        "ADAM_OPTIMIZER": "zoo.deepspeed.adapters.configuration.keys:ADAM_OPTIMIZER",
        "LAMB_OPTIMIZER": "zoo.deepspeed.adapters.configuration.keys:LAMB_OPTIMIZER",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "zoo.comm.launch:PORT",
        "dist": "zoo.deepspeed.comm",
    },
    "zero": dict(_ZERO),
    "runtime.zero": dict(_ZERO),
    "runtime.zero.partition_parameters": {
        **_ZERO,
        "zero_wrapper_for_fp_tensor_constructor": Name(
            f"{_PARAMETERS}:zero_wrapper_for_fp_tensor_constructor", "zoo's Init replaces no constructors of tensors."
        ),
    },
    "runtime.engine": {
        "DeepSpeedEngine": f"{_ENGINE}:DeepSpeedEngine",
        "DeepSpeedZeroOptimizer": f"{_OPTIMIZER}:DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3": f"{_OPTIMIZER}:DeepSpeedZeroOptimizer_Stage3",
        "DeepSpeedZeRoOffload": f"{_OPTIMIZER}:DeepSpeedZeRoOffload",
        "FP16_Optimizer": f"{_OPTIMIZER}:FP16_Optimizer",
        "FP16_UnfusedOptimizer": f"{_OPTIMIZER}:FP16_UnfusedOptimizer",
        "BF16_Optimizer": f"{_OPTIMIZER}:BF16_Optimizer",
        "ZeROOptimizer": f"{_OPTIMIZER}:ZeROOptimizer",
        "ZeroParamStatus": f"{_PARAMETERS}:ZeroParamStatus",
        "logger": "zoo.deepspeed.adapters.utilities.logs:logger",
        "dist": "zoo.deepspeed.comm",
        "groups": "zoo.deepspeed.utils.groups",
    },
    "runtime.base_optimizer": {
        "DeepSpeedOptimizer": f"{_OPTIMIZER}:DeepSpeedOptimizer",
        "ZeROOptimizer": f"{_OPTIMIZER}:ZeROOptimizer",
    },
    "runtime.bf16_optimizer": {"BF16_Optimizer": f"{_OPTIMIZER}:BF16_Optimizer"},
    "runtime.fp16.fused_optimizer": {"FP16_Optimizer": f"{_OPTIMIZER}:FP16_Optimizer"},
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": f"{_OPTIMIZER}:FP16_UnfusedOptimizer"},
    "runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": f"{_OPTIMIZER}:DeepSpeedZeroOptimizer",
        "estimate_zero2_model_states_mem_needs_all_live": _ESTIMATORS["estimate_zero2_model_states_mem_needs_all_live"],
        "estimate_zero2_model_states_mem_needs_all_cold": _ESTIMATORS["estimate_zero2_model_states_mem_needs_all_cold"],
        "dist": "zoo.deepspeed.comm",
    },
    "runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": f"{_OPTIMIZER}:DeepSpeedZeroOptimizer_Stage3",
        "DeepSpeedZeRoOffload": f"{_OPTIMIZER}:DeepSpeedZeRoOffload",
        **_ZERO,
        "estimate_zero3_model_states_mem_needs_all_live": _ESTIMATORS["estimate_zero3_model_states_mem_needs_all_live"],
        "estimate_zero3_model_states_mem_needs_all_cold": _ESTIMATORS["estimate_zero3_model_states_mem_needs_all_cold"],
        "dist": "zoo.deepspeed.comm",
    },
    "runtime.zero.utils": {"ZeRORuntimeException": f"{_PARAMETERS}:ZeRORuntimeException"},
}  # fmt: skip
