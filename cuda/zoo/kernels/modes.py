"""Who else has a hand in what is computed now, beside the operations themselves."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def has_tangents() -> bool:
    """Whether derivatives are computed forwards: a kernel would lose them."""
    return forward_ad._current_level >= 0


def computes_alone() -> bool:
    """Whether values are computed and nothing else: no gradient, cast, batch of calls, trace or compiler."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or has_tangents()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
    )
