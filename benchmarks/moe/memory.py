"""New memory of one forward and backward: the growth of the resident set of a fresh process, at its peak."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.moe.contenders import CONTENDERS, NotMeasuredError
from benchmarks.moe.shapes import Shape, Weights, gradient, tokens
from benchmarks.moe.speed import step_of
from benchmarks.process import reset_peak, status_bytes

FEW = 64
"""Tokens of the steps before, in which libraries allocate what they keep."""


def measure(shape: Shape, routing: str, name: str) -> dict[str, Any]:
    """``peak`` bytes, of which the gradients of the experts' weights are ``gradients``."""
    if why := CONTENDERS[name].refuse(shape, routing):
        return {"left_out": why}
    weights, few = Weights.of(shape), dataclasses.replace(shape, tokens=FEW)
    try:
        layer, parameters = CONTENDERS[name].build(shape, weights)
    except NotMeasuredError as error:
        return {"left_out": str(error)}
    for _ in range(2):
        step_of(layer, parameters, tokens(few, routing).requires_grad_(), gradient(few))()
    step = step_of(layer, parameters, tokens(shape, routing).requires_grad_(), gradient(shape))
    before = reset_peak()
    step()
    return {"peak": status_bytes("VmHWM") - before, "gradients": shape.weight_bytes}
