from .config import ZeroConfig as ZeroConfig
from .forecast.costs import Forecast as Forecast
from .forecast.dry_run import DryRun as DryRun
from .forecast.estimators import (
    estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs,
)
from .forecast.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
)
from .forecast.estimators import (
    estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
)
from .forecast.estimators import (
    estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs,
)
from .forecast.estimators import (
    estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
)
from .forecast.estimators import (
    estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
)
from .init import (
    Init as Init,
)
from .init import (
    InitReport as InitReport,
)
from .layers import (
    MemoryEfficientLinear as MemoryEfficientLinear,
)
from .layers import (
    SequenceParallelAttention as SequenceParallelAttention,
)
from .layers import (
    TiledLinear as TiledLinear,
)
from .layers import (
    UnitList as UnitList,
)
from .layers import (
    dot_product_attention as dot_product_attention,
)
from .layers import (
    memory_efficient_linear as memory_efficient_linear,
)
from .offload import (
    OffloadError as OffloadError,
)
from .offload import (
    OffloadOptimizerConfig as OffloadOptimizerConfig,
)
from .offload import (
    OffloadParamConfig as OffloadParamConfig,
)
from .optimizer import ZeroOptimizer as ZeroOptimizer
from .runtime.external import (
    register_external_parameter as register_external_parameter,
)
from .runtime.external import (
    unregister_external_parameter as unregister_external_parameter,
)
from .runtime.planning import Drive as Drive
from .runtime.window import Window as Window
from .sharded import ShardedModel as ShardedModel
from .sharding.guard import PartitionedAccessError as PartitionedAccessError
from .stages import (
    Stage0Optimizer as Stage0Optimizer,
)
from .stages import (
    Stage1Optimizer as Stage1Optimizer,
)
from .stages import (
    Stage2Optimizer as Stage2Optimizer,
)
from .stages import (
    Stage3Optimizer as Stage3Optimizer,
)
from .state.access import (
    get_full_fp32_params as get_full_fp32_params,
)
from .state.access import (
    get_full_grads as get_full_grads,
)
from .state.access import (
    get_full_optimizer_states as get_full_optimizer_states,
)
from .state.access import (
    safe_get_full_fp32_param as safe_get_full_fp32_param,
)
from .state.access import (
    safe_get_full_grad as safe_get_full_grad,
)
from .state.access import (
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
)
from .state.access import (
    safe_get_local_fp32_param as safe_get_local_fp32_param,
)
from .state.access import (
    safe_get_local_grad as safe_get_local_grad,
)
from .state.access import (
    safe_get_local_optimizer_state as safe_get_local_optimizer_state,
)
from .state.access import (
    safe_set_full_fp32_param as safe_set_full_fp32_param,
)
from .state.access import (
    safe_set_full_grad as safe_set_full_grad,
)
from .state.access import (
    safe_set_full_optimizer_state as safe_set_full_optimizer_state,
)
from .state.access import (
    safe_set_local_fp32_param as safe_set_local_fp32_param,
)
from .state.access import (
    safe_set_local_grad as safe_set_local_grad,
)
from .state.access import (
    safe_set_local_optimizer_state as safe_set_local_optimizer_state,
)
from .state.gathered import GatheredParameters as GatheredParameters
from .state.logical import StateSlice as StateSlice
from .update.clipping import NonFiniteGradientsError as NonFiniteGradientsError
from .update.loss_scaler import LossScaler as LossScaler
