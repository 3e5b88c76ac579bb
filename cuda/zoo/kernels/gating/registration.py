"""What torch is told about gating: fake kernels and gradients."""

from __future__ import annotations

from typing import Any

import torch

from zoo.kernels.differentiable import register_fake

Tensor = torch.Tensor


def register() -> None:
    """Called once, after the library is loaded."""
    register_fake("zoo::top_k_gate", _fake_gate)
    register_fake("zoo::top_k_gate_backward", lambda grad, logits, indices, renormalise: torch.empty_like(logits))
    register_fake("zoo::positions_in_expert", _fake_positions)
    register_fake("zoo::permute", lambda x, rows, num_rows: x.new_empty(num_rows, x.shape[1]))
    register_fake("zoo::unpermute", lambda y, rows, weights: y.new_empty(rows.shape[0], y.shape[1]))
    register_fake(
        "zoo::unpermute_backward", lambda grad, y, rows, weights: (torch.empty_like(y), torch.empty_like(weights))
    )
    torch.library.register_autograd("zoo::top_k_gate", gate_backward, setup_context=gate_setup_context)
    torch.library.register_autograd("zoo::permute", permute_backward, setup_context=permute_setup_context)
    torch.library.register_autograd("zoo::unpermute", unpermute_backward, setup_context=unpermute_setup_context)


def _fake_gate(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    indices = logits.new_empty((logits.shape[0], k), dtype=torch.int64)
    return torch.empty_like(indices, dtype=torch.float32), indices


def _fake_positions(
    indices: Tensor, num_experts: int, capacity: int | None, choices_first: bool, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(indices), indices.new_empty(num_experts), indices.new_empty(num_experts)


def gate_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps the logits and the indices, which are without gradient."""
    logits, _, ctx.renormalise = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def gate_backward(ctx: Any, grad_probabilities: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """The gradient of the logits."""
    from zoo.kernels.gating.ops import top_k_gate_backward

    dw = grad_probabilities.contiguous()
    return top_k_gate_backward(dw, *ctx.saved_tensors, renormalise=ctx.renormalise), None, None


def permute_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps the rows."""
    ctx.save_for_backward(inputs[1])


def permute_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of x."""
    from zoo.kernels.gating.ops import unpermute

    return unpermute(grad_y.contiguous(), *ctx.saved_tensors), None, None


def unpermute_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps the rows, and y and the weights where there are some."""
    y, rows, weights = inputs
    ctx.num_rows, ctx.weighted = y.shape[0], weights is not None
    ctx.save_for_backward(*((y, rows, weights) if ctx.weighted else (rows,)))


def unpermute_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of y and the weights."""
    from zoo.kernels.gating import ops

    g = grad_out.contiguous()
    if not ctx.weighted:
        return ops.permute(g, *ctx.saved_tensors, num_rows=ctx.num_rows), None, None
    grad_y, grad_weights = ops.unpermute_backward(g, *ctx.saved_tensors)
    return grad_y, None, grad_weights
