"""ZeRO: training state split over the data-parallel ranks, in the PyTorch way of training.

``Stage1Optimizer``, ``Stage2Optimizer`` and ``Stage3Optimizer`` are one implementation (:class:`ZeroOptimizer`) with
three placements; stage 0, plain data parallelism, is the fourth.
"""

from zoo.nn import (
    MemoryEfficientLinear,
    SequenceParallelAttention,
    TiledLinear,
    UnitList,
    dot_product_attention,
    memory_efficient_linear,
)
from zoo.zero.config import ZeroConfig
from zoo.zero.forecast.costs import Forecast
from zoo.zero.forecast.dry_run import DryRun
from zoo.zero.forecast.estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zoo.zero.init import Init, InitReport
from zoo.zero.offload import OffloadError, OffloadOptimizerConfig, OffloadParamConfig
from zoo.zero.optimizer import ZeroOptimizer
from zoo.zero.runtime.external import register_external_parameter, unregister_external_parameter
from zoo.zero.runtime.planning import Drive
from zoo.zero.runtime.window import Window
from zoo.zero.sharded import ShardedModel
from zoo.zero.sharding.guard import PartitionedAccessError
from zoo.zero.stages import Stage0Optimizer, Stage1Optimizer, Stage2Optimizer, Stage3Optimizer
from zoo.zero.state.access import (
    get_full_fp32_params,
    get_full_grads,
    get_full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zoo.zero.state.gathered import GatheredParameters
from zoo.zero.state.logical import StateSlice
from zoo.zero.update.clipping import NonFiniteGradientsError
from zoo.zero.update.loss_scaler import LossScaler

__all__ = [
    "Drive",
    "DryRun",
    "Forecast",
    "GatheredParameters",
    "Init",
    "InitReport",
    "LossScaler",
    "MemoryEfficientLinear",
    "NonFiniteGradientsError",
    "OffloadError",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "PartitionedAccessError",
    "SequenceParallelAttention",
    "ShardedModel",
    "Stage0Optimizer",
    "Stage1Optimizer",
    "Stage2Optimizer",
    "Stage3Optimizer",
    "StateSlice",
    "TiledLinear",
    "UnitList",
    "Window",
    "ZeroConfig",
    "ZeroOptimizer",
    "dot_product_attention",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_full_fp32_params",
    "get_full_grads",
    "get_full_optimizer_states",
    "memory_efficient_linear",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "unregister_external_parameter",
]
