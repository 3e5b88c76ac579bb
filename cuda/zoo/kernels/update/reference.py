"""The update in plain torch, operation by operation as ``update.h`` writes it: oracle, and fallback without a compiler.

Arithmetic is fp32, or fp64 where parameters are fp64 (the native kernels have no fp64). Operations round one by one, as
in the header; none uses ``alpha=`` or ``addcmul``, which torch contracts on some machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.kernels.update.algebra import Flag, Rule, Scalars, Settings

Tensor = torch.Tensor


def update_row(
    rule: Rule, flags: Flag, param: Tensor, grad: Tensor, states: Sequence[Tensor], master: Tensor | None, c: Scalars
) -> None:
    """One tensor of :func:`zoo.kernels.update.update_`, in place."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p = (param if master is None else master).to(wide, copy=True)
    s = [state.to(wide, copy=True) for state in states]
    g = grad.to(wide) * c.grad_scale
    if rule is not Rule.LAMB and flags & Flag.COUPLED:
        g = g + p * c.coupled
    d = direction(rule, flags, p, g, s, c)
    p = p * c.decay - d * c.rate
    for state, value in zip(states, s, strict=True):
        state.copy_(value)
    if master is not None:
        master.copy_(p)
    param.copy_(p)


def update_scalars_(
    rule: int, flags: int, values: Sequence[float], steps: Tensor, lr: Tensor | None, grad_scale: Tensor | None,
    loss_scale: Tensor | None, found_inf: Tensor | None,
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.update.update_scalars_`; it reads the numbers on the host, and waits for them there."""
    settings, factor = Settings.of(Rule(rule), Flag(flags), values)
    factor = factor * (1.0 if grad_scale is None else float(grad_scale))
    factor = factor / (1.0 if loss_scale is None else float(loss_scale))
    step = int(steps.view(-1)[0]) + 1
    scalars = settings.at(step, lr=None if lr is None else float(lr), grad_scale=factor)
    skips = found_inf is not None and float(found_inf) != 0
    if not skips:
        steps += 1
    return torch.tensor([*scalars.values(), float(skips)], dtype=torch.float64, device=steps.device)


def root(x: Tensor) -> Tensor:
    """√x, correctly rounded. torch's own in fp32 may be off by one unit in the last place (with MKL one in five is).

    √ of a 24-bit number is at least 2^-50 (relatively) away from the middle of two fp32 numbers; fp64 errs by 2^-52.
    """
    return x.double().sqrt().to(x.dtype)


def direction(rule: Rule, flags: Flag, p: Tensor, g: Tensor, s: list[Tensor], c: Scalars) -> Tensor:
    """D of the rule; replaces the states in the list ``s`` by the new ones."""
    if rule in (Rule.ADAM, Rule.LAMB):
        s[0] = s[0] + (g - s[0]) * c.beta1_rest
        s[1] = s[1] * c.beta2 + (g * c.beta2_rest) * g
        if not flags & Flag.AMSGRAD:
            return moment_direction(rule, flags, p, s[0], s[1], c)
        s[2] = torch.maximum(s[1], s[2])
        return moment_direction(rule, flags, p, s[0], s[2], c)
    if rule is Rule.SGD:
        if not flags & Flag.MOMENTUM:
            return g
        s[0] = s[0] * c.beta1 + g * c.beta1_rest
        return g + s[0] * c.beta1 if flags & Flag.NESTEROV else s[0]
    if rule is Rule.LION:
        u = s[0] * c.beta1 + g * c.beta1_rest
        s[0] = s[0] * c.beta2 + g * c.beta2_rest
        return torch.where(u.isnan(), u, torch.sign(u))
    s[0] = s[0] + g * g
    return g / (root(s[0]) + c.eps)


def moment_direction(rule: Rule, flags: Flag, p: Tensor, m: Tensor, v: Tensor, c: Scalars) -> Tensor:
    """D of ADAM and LAMB from the new states."""
    denominator = root(v * c.correction2 + c.eps) if flags & Flag.EPS_INSIDE else root(v) * c.correction2 + c.eps
    d = m / denominator
    if rule is Rule.LAMB:
        d = d * c.gain
        if flags & Flag.COUPLED:
            d = d + p * c.coupled
    return d


def lamb_direction_row(
    flags: Flag, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, c: Scalars
) -> Tensor:
    """Pass 1 of LAMB on one tensor: updates the states; returns (Σp², Σd²) in fp64, shape (2,)."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p = (param if master is None else master).to(wide)
    s = [exp_avg.to(wide), exp_avg_sq.to(wide)]
    d = direction(Rule.LAMB, flags, p, grad.to(wide) * c.grad_scale, s, c)
    exp_avg.copy_(s[0])
    exp_avg_sq.copy_(s[1])
    return torch.stack([p.double().square().sum(), d.double().square().sum()])


def lamb_apply_row(
    flags: Flag, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, ratio: Tensor, c: Scalars
) -> None:
    """Pass 2 of LAMB on one tensor: p' = δ·p - (η·ratio)·d."""
    wide = torch.promote_types(param.dtype, torch.float32)
    p = (param if master is None else master).to(wide)
    d = moment_direction(Rule.LAMB, flags, p, exp_avg.to(wide), exp_avg_sq.to(wide), c)
    p = p * c.decay - d * (torch.tensor(c.rate, dtype=wide, device=p.device) * ratio.to(wide))
    if master is not None:
        master.copy_(p)
    param.copy_(p)
