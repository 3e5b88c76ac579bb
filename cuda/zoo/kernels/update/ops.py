"""The update as functions of lists of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zoo.kernels import loading
from zoo.kernels.checks import NATIVE, check_flat
from zoo.kernels.operators import Operator
from zoo.kernels.update import reference
from zoo.kernels.update.algebra import ALLOWED, Flag, Rule, Scalars, Settings, num_states

Tensors = Sequence[torch.Tensor]
NUM_SCALARS = 11


@torch.no_grad()
def update_(
    rule: Rule, flags: Flag, params: Tensors, grads: Tensors, states: Sequence[Tensors], masters: Tensors = (), *,
    scalars: Scalars | torch.Tensor,
) -> None:  # fmt: skip
    """One step of an elementwise optimizer on all tensors, in place: p' = δ·p - η·D(S(s, σ·g)), see ``update.h``.

    Args:
        rule: which optimizer; not LAMB, which needs norms (:func:`lamb_`).
        flags: its variant; :data:`~zoo.kernels.update.algebra.ALLOWED` has those that exist.
        params: contiguous tensors of any shapes, all fp32, bf16 or fp16 (fp64 runs in the reference).
        grads: of the same shapes, all fp32, bf16 or fp16.
        states: one list for each state of the rule, fp32 or bf16, zero before the first step.
        masters: fp32 copies of low-precision parameters, which are then what is updated; ``params`` get the rounded
            values in the same pass. Empty for none.
        scalars: see :class:`~zoo.kernels.update.algebra.Settings`; or those that :func:`update_scalars_` has made on
            the device, which may say that the step changes nothing. The reference waits for the device to read them.

    Raises:
        ValueError: lists of unequal length, a dtype, shape, device or layout that cannot be; with the numbers.
    """
    if rule is Rule.LAMB or flags not in ALLOWED[rule]:
        known = ", ".join(f"{r.name} with {[int(f) for f in ALLOWED[r]]}" for r in Rule if r is not Rule.LAMB)
        raise ValueError(f"update_ has no {rule.name} with flags {int(flags)}; there are {known}.")
    if not params:
        check(params, grads, states, masters, num_states(rule, flags))
        return
    if loading.runs("update_", params[0]):
        lists = [*map(list, states), [], [], []][:3]
        _update.native(
            int(rule), int(flags), list(params), list(grads), *lists, list(masters), *_as_arguments(scalars),
            check=lambda: check(params, grads, states, masters, num_states(rule, flags)),
        )  # fmt: skip
        return
    check(params, grads, states, masters, num_states(rule, flags))
    numbers = _read(scalars, params[0])
    if numbers is None:
        return
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        reference.update_row(rule, flags, p, g, [s[i] for s in states], masters[i] if masters else None, numbers)


@torch.no_grad()
def update_scalars_(
    settings: Settings, steps: torch.Tensor, *, lr: torch.Tensor | None = None, grad_scale: float = 1.0,
    device_grad_scale: torch.Tensor | None = None, loss_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The scalars of the step after ``steps``, for ``scalars=`` of the update, of numbers that only the device knows.

    Nothing waits for the device, so a step may be captured in a CUDA graph and replayed. The bits are those of
    ``settings.at(step, lr=..., grad_scale=...)``.

    Args:
        settings: see :func:`~zoo.kernels.update.algebra.adam` and its neighbours.
        steps: fp32, how many steps each parameter has taken: one element or more, all alike. One more afterwards,
            unless ``found_inf`` says that the step changes nothing. Exact up to 2^24.
        lr: in the place of that of the settings; one element of fp32 or fp64, as the others.
        grad_scale, device_grad_scale: gradients count so many times.
        loss_scale: gradients are so many times too large.
        found_inf: where it is not 0 the step changes nothing.

    Returns:
        fp64, shape (12,): the 11 scalars, and 1 where the step changes nothing, else 0.

    Raises:
        ValueError: a dtype, size, device or layout that cannot be; with the numbers.
    """
    numbers = {"lr": lr, "grad_scale": device_grad_scale, "loss_scale": loss_scale, "found_inf": found_inf}

    def check() -> None:
        if not steps.numel():
            raise ValueError("steps has no elements; it has one for each parameter.")
        check_flat(steps, "steps", steps.numel(), (torch.float32,), steps)
        for what, number in numbers.items():
            if number is not None:
                check_flat(number, what, 1, (torch.float32, torch.float64), steps)

    values = settings.values(grad_scale)
    made: torch.Tensor = _scalars(
        int(settings.rule), int(settings.flags), values, steps, *numbers.values(), check=check, of=3
    )
    return made


@torch.no_grad()
def lamb_direction_(
    flags: Flag, params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors = (), *,
    scalars: Scalars | torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Pass 1 of LAMB: updates the moments; returns (Σp², Σd²) of each tensor, shape (len(params), 2), fp64.

    Between the passes the sums may be added up over ranks that each hold a part of a tensor. Lists as in
    :func:`update_`; the moments must be fp32. The sums of a step that changes nothing are 0.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    _check_lamb(flags, exp_avgs)
    if params and loading.runs("lamb_direction_", params[0]):
        args = (int(flags), *map(list, lists), list(masters), *_as_arguments(scalars))
        found: torch.Tensor = _direction.native(
            *args, check=lambda: check(params, grads, (exp_avgs, exp_avg_sqs), masters, 2)
        )
        return found
    check(params, grads, (exp_avgs, exp_avg_sqs), masters, 2)
    if not params:
        return torch.empty((0, 2), dtype=torch.float64)
    known = _read(scalars, params[0])
    if known is None:
        return params[0].new_zeros((len(params), 2), dtype=torch.float64)
    rows = zip(*lists, _or_none(masters, len(params)), strict=True)
    return torch.stack([reference.lamb_direction_row(flags, *row, known) for row in rows])


@torch.no_grad()
def lamb_apply_(
    flags: Flag, params: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors = (), *,
    ratios: torch.Tensor, scalars: Scalars | torch.Tensor,
) -> None:  # fmt: skip
    """Pass 2 of LAMB: p' = δ·p - η·ratio·d with the direction d of pass 1. ``ratios``: fp32, shape (len(params),)."""
    _check_lamb(flags, exp_avgs)
    if ratios.shape != (len(params),) or ratios.dtype is not torch.float32:
        raise ValueError(
            f"ratios is {ratios.dtype} of shape {tuple(ratios.shape)}; it must be torch.float32 of shape "
            f"({len(params)},), one ratio for each parameter."
        )
    if params and loading.runs("lamb_apply_", params[0]):
        args = (
            int(flags),
            list(params),
            list(exp_avgs),
            list(exp_avg_sqs),
            list(masters),
            ratios,
            *_as_arguments(scalars),
        )
        _apply.native(*args, check=lambda: check(params, params, (exp_avgs, exp_avg_sqs), masters, 2))
        return
    check(params, params, (exp_avgs, exp_avg_sqs), masters, 2)
    known = _read(scalars, params[0]) if params else None
    if known is None:
        return
    rows = zip(params, exp_avgs, exp_avg_sqs, _or_none(masters, len(params)), ratios, strict=True)
    for row in rows:
        reference.lamb_apply_row(flags, *row, known)


def trust_ratios(
    norms: torch.Tensor, *, min_coeff: float | None = None, max_coeff: float | None = None
) -> torch.Tensor:
    """φ = ‖p‖ / ‖d‖ clamped to [min_coeff, max_coeff], 1 where one of them is zero or not finite (You et al. 2020, §3).

    Args:
        norms: (Σp², Σd²) of each tensor, shape (T, 2), fp64.

    Returns:
        fp32, shape (T,).
    """
    roots = norms.sqrt()
    ratio = roots[:, 0] / roots[:, 1]
    usable = (norms > 0).all(1) & ratio.isfinite()
    ratio = ratio.clamp(min_coeff, max_coeff) if min_coeff is not None or max_coeff is not None else ratio
    return torch.where(usable, ratio, torch.ones_like(ratio)).float()


def check(params: Tensors, grads: Tensors, states: Sequence[Tensors], masters: Tensors, wanted: int) -> None:
    """Raise the ValueError that the native operators raise, where the reference runs."""
    if len(states) != wanted:
        raise ValueError(f"states has {len(states)} lists; this rule keeps {wanted} states.")
    named = {"params": params, "grads": grads, **{f"states{k}": s for k, s in enumerate(states)}}
    if masters:
        named["masters"] = masters
    for what, tensors in named.items():
        if len(tensors) != len(params):
            raise ValueError(f"{what} has {len(tensors)} tensors and params has {len(params)}; they must be as many.")
        for i, t in enumerate(tensors):
            _check_tensor(what, i, t, tensors[0], params[i])


def _check_tensor(what: str, i: int, t: torch.Tensor, first: torch.Tensor, param: torch.Tensor) -> None:
    allowed: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16) if what.startswith("states") else NATIVE
    allowed = (torch.float32,) if what == "masters" else allowed
    if param.dtype is torch.float64:
        allowed = (torch.float64,)
    if t.dtype not in allowed:
        raise ValueError(f"{what}[{i}] is {t.dtype}; allowed are {', '.join(map(str, allowed))}.")
    if t.dtype is not first.dtype:
        raise ValueError(
            f"{what}[{i}] is {t.dtype}, unlike {what}[0]; the tensors of one call share a dtype: call once for each."
        )
    if t.device != param.device:
        raise ValueError(f"{what}[{i}] is on {t.device}; params[{i}] is on {param.device}.")
    if t.layout is not torch.strided:
        raise ValueError(f"{what}[{i}] is {t.layout}; it must be dense.")
    if t.numel() != param.numel():
        raise ValueError(
            f"{what}[{i}] has shape {tuple(t.shape)}, {t.numel()} elements; params[{i}] has {param.numel()}."
        )
    ends = (t.storage_offset() + t.numel()) * t.element_size()
    if type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel() and t.untyped_storage().nbytes() < ends:
        raise ValueError(
            f"{what}[{i}] of shape {tuple(t.shape)} ends beyond its memory, at byte {ends} of "
            f"{t.untyped_storage().nbytes()}: its storage was resized. Resize it back, or give another tensor."
        )
    if not t.is_contiguous():
        raise ValueError(
            f"{what}[{i}] of shape {tuple(t.shape)} has strides {t.stride()}; it must be contiguous: "
            "pass .contiguous()."
        )


def _check_lamb(flags: Flag, exp_avgs: Tensors) -> None:
    if flags not in ALLOWED[Rule.LAMB]:
        raise ValueError(f"LAMB has no flags {int(flags)}; there are {[int(f) for f in ALLOWED[Rule.LAMB]]}.")
    if exp_avgs and exp_avgs[0].dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"exp_avgs[0] is {exp_avgs[0].dtype}; the moments of LAMB must be torch.float32, so that both passes see "
            "the same direction."
        )


def _as_arguments(scalars: Scalars | torch.Tensor) -> tuple[list[float], torch.Tensor | None]:
    return ([], scalars) if isinstance(scalars, torch.Tensor) else (scalars.values(), None)


def _read(scalars: Scalars | torch.Tensor, like: torch.Tensor) -> Scalars | None:
    """As numbers; None where the step changes nothing."""
    if isinstance(scalars, Scalars):
        return scalars
    check_flat(scalars, "device_scalars", NUM_SCALARS + 1, (torch.float64,), like)
    *numbers, skips = scalars.tolist()
    return None if skips else Scalars.of(numbers)


def _or_none(masters: Tensors, count: int) -> list[torch.Tensor | None]:
    return list(masters) if masters else [None] * count


def _norms(flags: int, params: list[torch.Tensor], *_: Any) -> torch.Tensor:
    return params[0].new_empty((len(params), 2), dtype=torch.float64)


_update = Operator("update_", None)
_direction = Operator("lamb_direction_", None, fake=_norms)
_apply = Operator("lamb_apply_", None)
_scalars = Operator(
    "update_scalars_", reference.update_scalars_,
    fake=lambda rule, flags, settings, steps, *_: steps.new_empty(NUM_SCALARS + 1, dtype=torch.float64),
)  # fmt: skip
