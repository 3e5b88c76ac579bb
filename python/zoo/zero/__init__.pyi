from .forecast.costs import Forecast as Forecast
from .forecast.estimators import estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs
from .forecast.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold,
)
from .forecast.estimators import (
    estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live,
)
from .forecast.estimators import estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs
from .forecast.estimators import (
    estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
)
from .forecast.estimators import (
    estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
)
from .layers import MemoryEfficientLinear as MemoryEfficientLinear
from .layers import SequenceParallelAttention as SequenceParallelAttention
from .layers import TiledLinear as TiledLinear
from .layers import UnitList as UnitList
from .layers import dot_product_attention as dot_product_attention
from .layers import memory_efficient_linear as memory_efficient_linear
from .names import Drive as Drive
from .names import DryRun as DryRun
from .names import GatheredParameters as GatheredParameters
from .names import Init as Init
from .names import InitReport as InitReport
from .names import OffloadError as OffloadError
from .names import OffloadOptimizerConfig as OffloadOptimizerConfig
from .names import OffloadParamConfig as OffloadParamConfig
from .names import PartitionedAccessError as PartitionedAccessError
from .names import Precision as Precision
from .names import ShardedModel as ShardedModel
from .names import Window as Window
from .names import ZeroConfig as ZeroConfig
from .names import register_external_parameter as register_external_parameter
from .names import unregister_external_parameter as unregister_external_parameter
from .optimizer import Stage0Optimizer as Stage0Optimizer
from .optimizer import Stage1Optimizer as Stage1Optimizer
from .optimizer import Stage2Optimizer as Stage2Optimizer
from .optimizer import Stage3Optimizer as Stage3Optimizer
from .optimizer import ZeroOptimizer as ZeroOptimizer
from .state.access import get_full_fp32_params as get_full_fp32_params
from .state.access import get_full_grads as get_full_grads
from .state.access import get_full_optimizer_states as get_full_optimizer_states
from .state.access import safe_get_full_fp32_param as safe_get_full_fp32_param
from .state.access import safe_get_full_grad as safe_get_full_grad
from .state.access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from .state.access import safe_get_local_fp32_param as safe_get_local_fp32_param
from .state.access import safe_get_local_grad as safe_get_local_grad
from .state.access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from .state.access import safe_set_full_fp32_param as safe_set_full_fp32_param
from .state.access import safe_set_full_grad as safe_set_full_grad
from .state.access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from .state.access import safe_set_local_fp32_param as safe_set_local_fp32_param
from .state.access import safe_set_local_grad as safe_set_local_grad
from .state.access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from .state.logical import StateSlice as StateSlice
from .update.clipping import NonFiniteGradientsError as NonFiniteGradientsError
from .update.loss_scale import LossScaler as LossScaler
