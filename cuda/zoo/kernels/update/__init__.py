"""Elementwise optimizers in one pass over memory, and LAMB in two: ``update.h`` states the algebra they share.

Bytes moved for each parameter by AdamW: 28 in fp32 (read p, g, m, v; write p, m, v), 28 in the mixed step (bf16
gradient in, fp32 master and moments, bf16 parameter out).
"""

from zoo.kernels.update.algebra import (
    ALLOWED,
    Flag,
    Rule,
    Scalars,
    Settings,
    adagrad,
    adam,
    lamb,
    lion,
    num_states,
    sgd,
)
from zoo.kernels.update.ops import lamb_apply_, lamb_direction_, trust_ratios, update_, update_scalars_
from zoo.kernels.update.prepared import UpdatePlan, update_plan

__all__ = [
    "ALLOWED", "Flag", "Rule", "Scalars", "Settings", "UpdatePlan", "adagrad", "adam", "lamb", "lamb_apply_",
    "lamb_direction_", "lion", "num_states", "sgd", "trust_ratios", "update_", "update_plan", "update_scalars_",
]  # fmt: skip
